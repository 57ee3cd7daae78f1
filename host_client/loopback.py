"""Listening on this machine's loopback, and nowhere else."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
from anyio.streams.stapled import MultiListener

from host_client.errors import PodpipeError, PortTaken

ADDRESSES = ("127.0.0.1", "::1")
"""A name such as localhost may mean either, so both are to be ours."""

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@asynccontextmanager
async def bound(port: int) -> AsyncIterator[anyio.abc.Listener[anyio.abc.SocketStream]]:
    """Listen on a port of the loopback, by IPv4 and, where the machine has it, IPv6.

    Raises:
        PortTaken: another listens there, on either.
        PodpipeError: it may not be had.
    """
    listeners: list[anyio.abc.Listener[anyio.abc.SocketStream]] = []
    try:
        try:
            for address in ADDRESSES:
                listeners += await _bound_to(address, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"port {port} of this machine is taken by another program; choose another"
                ) from error
            raise PodpipeError(
                f"port {port} of this machine cannot be listened on: {error.strerror}"
            ) from error
        yield MultiListener(listeners)
    finally:
        with anyio.CancelScope(shield=True):
            for listener in listeners:
                await listener.aclose()


async def _bound_to(address: str, port: int) -> list[anyio.abc.Listener[anyio.abc.SocketStream]]:
    try:
        made = await anyio.create_tcp_listener(local_host=address, local_port=port)
    except OSError as error:
        if address != ADDRESSES[0] and error.errno in _NO_SUCH_ADDRESS:
            return []
        raise
    return list(made.listeners)
