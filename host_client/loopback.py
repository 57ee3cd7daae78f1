"""Listening on this machine's loopback, and nowhere else."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager

import anyio
import anyio.abc

from host_client.errors import PodpipeError, PortTaken
from in_pod_server.splice import End, accepted

ADDRESSES = ("127.0.0.1", "::1")
"""A name such as localhost may mean either, so both are to be ours."""

BACKLOG = 128
MAX_OPEN = 1000
"""Connections at once; others wait to be accepted. A sandbox's gateway takes no more either."""
RESERVED_FILES = 128
"""Descriptors that no connection takes from pipes and from what is started."""

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

    places = anyio.Semaphore(_places())

    async def handled(client: End) -> None:
        try:
            await handle(client)
        finally:
            client.close()
            places.release()

    async def accept(listener: socket.socket) -> None:
        while True:
            client = await accepted(listener)
            try:
                await places.acquire()
            except anyio.get_cancelled_exc_class():
                client.close()
                raise
            tasks.start_soon(handled, client)

    with ExitStack() as listeners:
        try:
            bound = [listeners.enter_context(each) for at in ADDRESSES for each in _bound(at, port)]
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"port {port} of this machine is taken by another program; choose another"
                ) from error
            raise PodpipeError(
                f"port {port} of this machine cannot be listened on: {error.strerror}"
            ) from error
        async with anyio.create_task_group() as accepting:
            for listener in bound:
                accepting.start_soon(accept, listener)
            yield
            accepting.cancel_scope.cancel()


def _places() -> int:
    """How many connections may be open, after we took the descriptors for them: each has two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_OPEN + RESERVED_FILES
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(1, (files - RESERVED_FILES) // 2)


def _bound(address: str, port: int) -> list[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if address != ADDRESSES[0] and error.errno in _NO_SUCH_ADDRESS:
            return []
        raise
    listener.setblocking(False)
    return [listener]
