"""Who connects to the daemon's socket: a client that speaks there, or `dial`, which hands over its own.

`dial` passes the stdin and stdout that `kubectl exec` gave it, so that no byte of a call has to go
through another process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import anyio

from in_pod_server.dial import HANDOVER, can_be_waited_for
from in_pod_server.memory import give_back
from in_pod_server.streams import Streams

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

RETRY_SECONDS: Final = 1.0
"""Pause where the system has no descriptor for another client."""
MOST: Final = 256
"""Clients at once; others wait to be accepted. A command can open sockets by the ten thousand."""
FIRST_WORD_SECONDS: Final = 10.0
"""For a client to say anything at all: what only holds its place has none."""
GIVE_BACK_SECONDS: Final = 1.0
"""From a client's end to looking for what it left: many often end at once."""

Handle = Callable[[Streams], Coroutine[Any, Any, None]]

logger = logging.getLogger(__name__)


async def accept(listener: socket.socket, tasks: TaskGroup, handle: Handle) -> None:
    """Handle each client in a task of its own, until cancelled.

    Args:
        listener: which they connect to; not blocking.
        tasks: where the tasks run.
        handle: what they run with what the client writes and reads, closed after it.
    """
    places = anyio.Semaphore(MOST)
    left = asyncio.Event()
    tasks.start_soon(_give_back, left)

    async def attend(client: socket.socket) -> None:
        try:
            with client:
                await _attend(client, handle)
        except Exception:
            # The boundary: one client's session may fail, the others go on.
            logger.exception("a connection failed")
        finally:
            places.release()
            left.set()

    while True:
        await places.acquire()
        while (client := await _accepted(listener)) is None:
            pass
        tasks.start_soon(attend, client)


async def _give_back(left: asyncio.Event) -> None:
    """After clients have left, give the system the memory of what they never read.

    What their cut calls held refers to itself, and a few large objects are not what makes Python look
    for such by itself: 24 clients that were killed left 240 MiB, and the next as many again 40 more.
    """
    while True:
        await left.wait()
        await anyio.sleep(GIVE_BACK_SECONDS)
        left.clear()
        give_back()


async def _accepted(listener: socket.socket) -> socket.socket | None:
    await anyio.wait_readable(listener)
    try:
        client, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    except OSError as error:
        logger.warning("no client can be accepted for now: %s", error)
        await anyio.sleep(RETRY_SECONDS)
        return None
    client.setblocking(False)
    return client


async def _attend(client: socket.socket, handle: Handle) -> None:
    """Find out what a client writes and reads, and handle it.

    A `dial` ends when its socket is closed, which is after the last byte was taken. If it ends
    first, nobody is there any more.
    """
    with anyio.move_on_after(FIRST_WORD_SECONDS) as patience:
        await anyio.wait_readable(client)
    if patience.cancelled_caught:
        return
    try:
        first = client.recv(len(HANDOVER), socket.MSG_PEEK)
    except OSError:
        first = b""
    if not first:
        return
    handed = first == HANDOVER
    fds = _handed(client) if handed else [os.dup(client.fileno()) for _ in range(2)]
    if fds is None:
        return
    source, sink = fds
    streams = await Streams.opened(os.fdopen(source, "rb", 0), os.fdopen(sink, "wb", 0))
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(client)
        streams.abort()

    if handed:
        loop.add_reader(client, gone)
    try:
        await handle(streams)
    finally:
        try:
            await streams.aclose()
        finally:
            loop.remove_reader(client)


def _handed(client: socket.socket) -> list[int] | None:
    """The two descriptors that a dial sent; None, and all closed, where it is none of ours."""
    _, fds, flags, _ = socket.recv_fds(client, len(HANDOVER), 2)
    whole = len(fds) == 2 and not flags & socket.MSG_CTRUNC
    if whole and all(can_be_waited_for(fd) for fd in fds):
        return fds
    for fd in fds:
        os.close(fd)
    logger.warning("a client handed over what is no stdin and stdout")
    return None
