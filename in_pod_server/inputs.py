"""A command's standard input that stays open: a pipe, or the keyboard side of a pseudo-terminal."""

from __future__ import annotations

import os
import termios
from typing import Final

import anyio

from in_pod_server.errors import InputRefusedError

END_OF_INPUT: Final = b"\x04"
"""What ctrl-D types: a terminal has no other end of input."""


class Input:
    """Gives bytes to one command, each sender's wholly before the next one's."""

    def __init__(self, fd: int, *, terminal: bool) -> None:
        self._fd = fd
        self._terminal = terminal
        self._lock = anyio.Lock()
        os.set_blocking(fd, False)

    @property
    def terminal(self) -> bool:
        """Whether it is a terminal, which echoes, and can be resized."""
        return self._terminal

    async def write(self, data: bytes, seconds: float) -> int:
        """Return how many of the bytes were taken: fewer if the command did not read in time.

        Raises:
            InputRefusedError: The command reads no more.
        """
        taken = 0
        with anyio.move_on_after(seconds):
            async with self._lock:
                while taken < len(data):
                    try:
                        taken += os.write(self._open(), memoryview(data)[taken:])
                    except BlockingIOError:
                        await self._room()
                    except OSError as exc:
                        raise InputRefusedError(
                            f"it reads no more input: it closed it or has ended ({taken} of "
                            f"{len(data)} bytes were taken); read_output shows what it wrote"
                        ) from exc
        return taken

    async def _room(self) -> None:
        try:
            await anyio.wait_writable(self._fd)
        except anyio.ClosedResourceError:
            return  # closed meanwhile: the next write says so

    def _open(self) -> int:
        if self._fd < 0:
            raise InputRefusedError(
                "its input was closed, so nothing more can be sent: start it anew"
            )
        return self._fd

    async def end(self, seconds: float) -> None:
        """Let the command find the end of its input."""
        if self._terminal:
            await self.write(END_OF_INPUT, seconds)
        else:
            self.close()

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size, 0 for what it has; programs in it are told.

        Raises:
            InputRefusedError: It is no terminal, or was closed.
        """
        if not self._terminal:
            raise InputRefusedError("it has no terminal: start it with terminal=true")
        old_rows, old_columns = termios.tcgetwinsize(self._open())
        termios.tcsetwinsize(self._open(), (rows or old_rows, columns or old_columns))

    def close(self) -> None:
        """Close it; a pipe's reader then finds the end."""
        if self._fd >= 0:
            anyio.notify_closing(self._fd)
            os.close(self._fd)
            self._fd = -1
