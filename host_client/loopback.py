"""Listening on this machine's loopback, and nowhere else."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from host_client.errors import PodpipeError, PortTaken
from in_pod_server.splice import End

ADDRESSES = ("127.0.0.1", "::1")
"""A name such as localhost may mean either, so both are to be ours."""

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@asynccontextmanager
async def listening(
    port: int, handle: Callable[[End], Awaitable[None]], tasks: anyio.abc.TaskGroup
) -> AsyncIterator[None]:
    """Listen on a port of the loopback, by IPv4 and, where the machine has it, IPv6.

    Args:
        port: which.
        handle: what is done with each connection, which is closed after it.
        tasks: where that runs.

    Raises:
        PortTaken: another listens there, on either.
        PodpipeError: it may not be had.
    """

    async def handled(client: End) -> None:
        try:
            await handle(client)
        finally:
            client.close()

    class Client(End):
        """One that has come."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            tasks.start_soon(handled, self)

    servers: list[asyncio.Server] = []
    try:
        try:
            for address in ADDRESSES:
                servers += await _bound(address, port, Client)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"port {port} of this machine is taken by another program; choose another"
                ) from error
            raise PodpipeError(
                f"port {port} of this machine cannot be listened on: {error.strerror}"
            ) from error
        yield
    finally:
        for server in servers:
            server.close()


async def _bound(address: str, port: int, client: Callable[[], End]) -> list[asyncio.Server]:
    try:
        return [await asyncio.get_running_loop().create_server(client, address, port)]
    except OSError as error:
        if address != ADDRESSES[0] and error.errno in _NO_SUCH_ADDRESS:
            return []
        raise
