"""Descriptors as streams of the event loop: a client's stdin and stdout, or one socket for both."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from typing import BinaryIO

import anyio

from in_pod_server.dial import can_be_waited_for

__all__ = ["Streams", "Together", "can_be_waited_for"]

STALL_SECONDS = 60.0
"""How long a reader of our last words may take nothing before it is given up: it may be frozen, or a
person's who has stopped to read."""
PIECE_BYTES = 32 * 1024
"""What is together so much goes out: kubectl reads no more at once."""
LOOK_SECONDS = 0.5
FLUSH_SECONDS = 1.0
"""The same where we are in a hurry."""


class Together:
    """Writes that follow each other in one turn of the loop go out in one piece, the first at once.

    Through Kubernetes each piece is a frame that five processes take in hand, one after the other:
    of many calls at once that is the larger part.

    Args:
        write: takes a piece.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._waiting: list[bytes] = []
        self._size = 0
        self._due = False

    def write(self, data: bytes) -> None:
        """Write `data` now, or with what else is written in this turn."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)
            self._write(data)
            return
        self._waiting.append(data)
        self._size += len(data)
        if self._size >= PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._size = 0
            self._write(data)

    def _turn(self) -> None:
        self._due = bool(self._waiting)
        if self._due:
            asyncio.get_running_loop().call_soon(self._turn)
            self.flush()


class Streams:
    """What a client writes and reads, and when it is gone. Made by `opened`; close it with `aclose`."""

    def __init__(
        self, reader: asyncio.StreamReader, transport: asyncio.WriteTransport, end: _End
    ) -> None:
        self.reader = reader
        self.writer = asyncio.StreamWriter(transport, end, None, asyncio.get_running_loop())
        self.together = Together(self.writer.write)
        self._transport = transport
        self._lost = end.lost

    @classmethod
    async def opened(cls, source: BinaryIO, sink: BinaryIO) -> Streams:
        """Take over two files that `dial.can_be_waited_for`; both are closed with the streams.

        Raises:
            ValueError: the loop cannot wait for one of them.
        """
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        if _are_one_socket(source.fileno(), sink.fileno()):
            # As two pipes, what arrives on the one would be taken for the end of the other.
            with source, sink:
                one = socket.socket(fileno=os.dup(source.fileno()))
            return cls(reader, *await loop.create_connection(lambda: _End(reader), sock=one))
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), source
        )
        writing = await loop.connect_write_pipe(
            lambda: _End(asyncio.StreamReader(), reading.close), sink
        )
        return cls(reader, *writing)

    def abort(self) -> None:
        """Let go of both ends at once, whatever was not read or written yet."""
        if not self._lost.is_set():
            self._transport.abort()

    async def aclose(self, stall: float = STALL_SECONDS) -> None:
        """Close both ends when the last of what was written is taken, or its reader has stalled.

        A cancelled one hurries.

        Args:
            stall: seconds in which a reader has to take something.
        """
        self.together.flush()
        self.writer.close()
        try:
            await self.taken(stall)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(FLUSH_SECONDS, shield=True):
                await self._lost.wait()
            raise
        finally:
            self.abort()

    async def taken(self, stall: float) -> None:
        """Wait until the other end is lost, or has taken nothing of what waits for so long.

        Args:
            stall: seconds.
        """
        since, left = anyio.current_time(), -1
        while not self._lost.is_set():
            with anyio.move_on_after(min(stall, LOOK_SECONDS)):
                await self._lost.wait()
            now = self._transport.get_write_buffer_size()
            if not now or now != left:
                since, left = anyio.current_time(), now
            elif anyio.current_time() - since >= stall:
                return


class _End(asyncio.StreamReaderProtocol):
    """The end that a client reads from. What it says of a client holds of the other end too.

    One that does not listen any more is gone, though it may seem to be still writing: whatever a
    kubectl was killed beside can hold that end of its pipe open.
    """

    def __init__(
        self, reader: asyncio.StreamReader, close_other: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(reader)
        self.lost = anyio.Event()
        self._close_other = close_other

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits for it, and close the other end."""
        super().connection_lost(exc)
        self.lost.set()
        self._close_other()


def _are_one_socket(source: int, sink: int) -> bool:
    """Whether both ends are the same socket, as inetd, socat and ssh start a server."""
    one, other = os.fstat(source), os.fstat(sink)
    return stat.S_ISSOCK(one.st_mode) and os.path.samestat(one, other)
