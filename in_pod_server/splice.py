"""Passing bytes between two connections with nothing in between, as fast as an event loop can.

Below anyio on purpose: a chunk is written to the one side in the very callback that read it from the
other, where a task for each direction would be woken for it. That is a fifth of what a small request
through a sandbox takes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from contextlib import suppress
from typing import cast

import anyio

EARLY_BYTES = 64 * 1024
"""What is held of one who speaks before it is known where that goes."""
LINGER_SECONDS = 1.0
RETRY_SECONDS = 1.0
"""Pause where there is no descriptor for another connection."""

logger = logging.getLogger(__name__)


class End(asyncio.Protocol):
    """One connection, first to read from, then joined to another."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        """Set when the connection is no more."""
        self._ended = False
        self._early = bytearray()
        self._changed = asyncio.Event()
        self._other: End | None = None
        self._heard = False
        self.unanswered = False
        """Whether the one that it was joined to ended without a word, while this one waited for one."""
        self._silent = b""
        self._full = False

    async def receive(self) -> bytes:
        """What has come since, of one that is not joined yet; nothing at its end."""
        while not self._early and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        data = bytes(self._early)
        self._early.clear()
        self.transport.resume_reading()
        return data

    async def tell(self, data: bytes) -> None:
        """Say a last word, and give the other side a moment to read it before all is closed."""
        self._write(data)
        self._say_end()
        with anyio.move_on_after(LINGER_SECONDS):
            while await self.receive():
                pass

    async def join(self, other: End, first: bytes = b"", *, silent: bytes = b"") -> None:
        """Pass on what either says to the other until both have ended, or one is lost.

        Args:
            other: where this one leads.
            first: what this one has said already.
            silent: what this one is told where the other ends without a word.
        """
        self._other, other._other, self._silent = other, self, silent
        other._write(first)
        for one, two in ((self, other), (other, self)):
            if one._early:
                two._write(bytes(one._early))
                one._early.clear()
            if not two._full:
                one.transport.resume_reading()
            if one._ended:
                two._other_ended()
            if one.lost.is_set():
                two.close()
        await self.lost.wait()
        await other.lost.wait()

    def close(self) -> None:
        """Close it once what was written has left."""
        self.transport.close()

    def reset(self) -> None:
        """Cut it off at once, so that it does not look like what has ended; what has not left is lost."""
        if self.lost.is_set():
            return
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        self.transport.abort()

    # --- called by the event loop ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass it on, or keep it until it is known where to."""
        self._heard = True
        if self._other:
            self._other._write(data)
            return
        self._early += data
        if len(self._early) >= EARLY_BYTES:
            self.transport.pause_reading()
        self._changed.set()

    def eof_received(self) -> bool:
        """It says no more, and may still listen."""
        self._end()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """It is no more, and so is the other once it has been told all."""
        other = self._other
        if (
            exc
            and other
            and (self._heard or not other._silent)
            and not other.transport.is_closing()
        ):
            other.reset()  # what was cut off is not to look like what has ended
        self._end()
        self.lost.set()
        if self._other:
            self._other.close()

    def pause_writing(self) -> None:
        """It reads slowly: let the other speak no faster."""
        self._full = True
        if self._other:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._full = False
        if self._other:
            self._other.transport.resume_reading()

    # --- within ------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def _say_end(self) -> None:
        if not self.transport.is_closing():
            with suppress(OSError):  # it is gone, of which the loop tells next
                self.transport.write_eof()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._changed.set()
            if self._other:
                self._other._other_ended()

    def _other_ended(self) -> None:
        assert self._other
        self.unanswered = not self._other._heard and (self._heard or not self._ended)
        if self._silent and not self._other._heard:
            self._write(self._silent)
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self.close)
        self._say_end()
        if self._ended:
            self.close()
            self._other.close()


async def accepted(listener: socket.socket) -> End:
    """The next connection; waits where there is no descriptor for one.

    Not by asyncio's own server: that tries again a hundred times for each try before, until this process
    does nothing else.

    Args:
        listener: which it connects to; not blocking.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
            return (await loop.connect_accepted_socket(End, client))[1]
        except ConnectionError:
            continue  # it has gone already
        except OSError as error:
            logger.warning("no connection can be accepted for now: %s", error.strerror)
            await anyio.sleep(RETRY_SECONDS)
