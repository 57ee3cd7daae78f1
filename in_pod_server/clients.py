"""Who connects to the daemon's socket: a client that speaks there, or `dial`, which hands over its own.

`dial` passes the stdin and stdout that `kubectl exec` gave it, so that no byte of a call has to go
through another process: on an idle machine waking it costs a tenth of a call, each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio

from in_pod_server.dial import HANDOVER
from in_pod_server.streams import Streams

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

RETRY_SECONDS = 1.0
"""Pause where the system has no descriptor for another client."""

logger = logging.getLogger(__name__)


async def accept(
    listener: socket.socket,
    tasks: TaskGroup,
    handle: Callable[[socket.socket], Coroutine[Any, Any, None]],
) -> None:
    """Handle each client in a task of its own, until cancelled.

    Args:
        listener: which they connect to; not blocking.
        tasks: where the tasks run.
        handle: what they run; has to close the socket.
    """
    while True:
        await anyio.wait_readable(listener)
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            continue
        except OSError as error:
            logger.warning("no client can be accepted for now: %s", error)
            await anyio.sleep(RETRY_SECONDS)
            continue
        client.setblocking(False)
        tasks.start_soon(handle, client)


@contextlib.asynccontextmanager
async def speaking(client: socket.socket) -> AsyncIterator[Streams]:
    """What a client writes and reads, until left; closes the socket.

    A `dial` ends when its socket is closed, which is after the last byte was taken. If it ends
    first, nobody is there any more.

    Raises:
        ValueError: it handed over what the loop cannot wait for.
    """
    with client:
        await anyio.wait_readable(client)
        handed = client.recv(len(HANDOVER), socket.MSG_PEEK) == HANDOVER
        if handed:
            _, fds, _, _ = socket.recv_fds(client, len(HANDOVER), 2)
        else:
            fds = [os.dup(client.fileno()) for _ in range(2)]
        source, sink = fds
        streams = await Streams.opened(os.fdopen(source, "rb", 0), os.fdopen(sink, "wb", 0))
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(client)
            streams.abort()

        if handed:
            loop.add_reader(client, gone)
        try:
            yield streams
        finally:
            try:
                await streams.aclose()
            finally:
                loop.remove_reader(client)
