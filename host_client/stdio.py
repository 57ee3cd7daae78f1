"""MCP on stdin and stdout, read and written by the event loop itself.

The SDK's own stdio server hands every line to a thread and back, which is a third of what a call
costs here; it drops what it cannot parse, and dies of text that is no Unicode. The daemon's
connection has none of that and is used at this end too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from mcp.server import MCPServer

from in_pod_server.connection import Connection
from in_pod_server.contract import MAX_STAGED_BYTES
from in_pod_server.streams import Streams, can_be_waited_for

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Results are bounded where they are made; this is only against running away."""
MAX_CALL_BYTES = 2 * MAX_STAGED_BYTES
"""What a sandbox takes of one call, with the escapes that JSON may need."""
LINGER_SECONDS = 1.0
"""For replies in work when stdin ends: clients kill a server that stays for two seconds."""
STALL_SECONDS = 0.3
"""For a client that has gone and may still read; likewise."""


async def serve(server: MCPServer[Any], source: int, sink: int) -> None:
    """Serve one client until its stdin ends.

    Args:
        server: what answers.
        source: the descriptor that requests come by.
        sink: the one that answers go to.
    """
    streams = await Streams.opened(_waitable(source, "rb"), _waitable(sink, "wb"))
    connection = Connection(
        streams,
        max_message_bytes=MAX_ANSWER_BYTES,
        max_request_bytes=MAX_CALL_BYTES,
        linger_seconds=LINGER_SECONDS,
    )
    try:
        await connection.serve(server, experimental={})
    finally:
        await streams.aclose(STALL_SECONDS)


@contextlib.contextmanager
def claimed() -> Iterator[tuple[int, int]]:
    """The two ends of the wire, on descriptors that no child inherits.

    Meanwhile fd 0 is /dev/null and fd 1 is stderr, so no child and no stray print can tear a line.
    """
    sys.stdout.flush()
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    try:
        yield source, sink
    finally:
        # fd 1 stays stderr: what a library prints at exit is no protocol.
        os.close(source)
        os.close(sink)


def _waitable(fd: int, mode: Literal["rb", "wb"]) -> BinaryIO:
    """`fd` as what the loop can wait for: a file or /dev/null goes through a pipe and a thread."""
    if can_be_waited_for(fd):
        return os.fdopen(os.dup(fd), mode, 0)
    out, into = os.pipe()
    ends = (os.dup(fd), into) if mode == "rb" else (out, os.dup(fd))

    def pump() -> None:
        with (
            contextlib.suppress(BrokenPipeError),
            os.fdopen(ends[0], "rb") as source,
            os.fdopen(ends[1], "wb") as sink,
        ):
            shutil.copyfileobj(source, sink)

    threading.Thread(target=pump).start()
    return os.fdopen(out if mode == "rb" else into, mode, 0)
