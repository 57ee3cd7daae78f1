"""What a command wrote: kept within bounds, counted without, readable by byte cursor.

A stream keeps its first bytes and its last; what lies between is counted as dropped. Reading never
changes anything, so several readers, at any cursors, see the same bytes.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Final, Protocol

HEAD_BYTES: Final = 256 * 1024
TAIL_BYTES: Final = 1024 * 1024
LOG_BYTES: Final = 64 * 1024 * 1024
"""How long a background command's log may grow before its middle is dropped."""
LOG_HEAD_BYTES: Final = 1024 * 1024
LOG_TAIL_BYTES: Final = 16 * 1024 * 1024
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_TRIM_SLACK: Final = 128 * 1024
"""The tail is cut when it is this much too long, so that cutting stays linear in all."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes from `start` on; `dropped` of the bytes before, counted from the cursor, are lost."""

    data: bytes
    start: int
    dropped: int

    @property
    def end(self) -> int:
        """The cursor to go on with."""
        return self.start + len(self.data)


class Output(Protocol):
    """One stream of one command."""

    @property
    def total(self) -> int:
        """All bytes that were ever written."""
        ...

    @property
    def dropped(self) -> int:
        """Those of them that are no longer kept."""
        ...

    def read(self, cursor: int, max_bytes: int) -> Slice:
        """Return up to `max_bytes` from `cursor`, or from the first kept byte after it."""
        ...


class OutputBuffer:
    """The first `head_bytes` and the last `tail_bytes` of a stream, in memory."""

    def __init__(self, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> None:
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        self.kept = 0
        """The bytes held in memory."""

    @property
    def total(self) -> int:
        """All bytes that were ever written."""
        return self._total

    @property
    def dropped(self) -> int:
        """The bytes that are no longer kept."""
        return self._total - self.kept

    def append(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._total += len(data)
        room = self._head_bytes - len(self._head)
        # Once a byte went to the tail, or was let go, the head is closed.
        if room > 0 and self._total - len(data) == len(self._head):
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._tail_bytes + min(_TRIM_SLACK, self._tail_bytes):
            del self._tail[: len(self._tail) - self._tail_bytes]
        self.kept = len(self._head) + len(self._tail)

    def release(self) -> None:
        """Let go of all bytes; the counts stay."""
        self._head = bytearray()
        self._tail = bytearray()
        self.kept = 0

    def read(self, cursor: int, max_bytes: int) -> Slice:
        """Return up to `max_bytes` from `cursor`, or from the first kept byte after it."""
        cursor = min(max(cursor, 0), self._total)
        tail_start = self._total - len(self._tail)
        if cursor < len(self._head):
            data = self._head[cursor : cursor + max_bytes]
            if tail_start == len(self._head):
                data += self._tail[: max_bytes - len(data)]
            return Slice(bytes(data), cursor, 0)
        start = max(cursor, tail_start)
        offset = start - tail_start
        return Slice(bytes(self._tail[offset : offset + max_bytes]), start, start - cursor)


class OutputFile:
    """A log file that the command itself writes.

    A command may write for weeks. `trim` gives the disk blocks of the middle back and leaves all
    positions as they are, so that cursors and the writer go on undisturbed.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = os.fstat(fd).st_size
        self._hole_end = self._start + LOG_HEAD_BYTES
        self.dropped = 0

    @property
    def total(self) -> int:
        """All bytes that the command wrote; what the file held before does not count."""
        return max(os.fstat(self._fd).st_size - self._start, 0)

    def read(self, cursor: int, max_bytes: int) -> Slice:
        """Return up to `max_bytes` from `cursor`."""
        cursor = min(max(cursor, 0), self.total)
        if not self.dropped or cursor < LOG_HEAD_BYTES:
            if self.dropped:
                max_bytes = min(max_bytes, LOG_HEAD_BYTES - cursor)
            return Slice(os.pread(self._fd, max_bytes, self._start + cursor), cursor, 0)
        start = max(cursor, self._hole_end - self._start)
        return Slice(os.pread(self._fd, max_bytes, self._start + start), start, start - cursor)

    def trim(self) -> None:
        """Drop the middle of a log that has grown beyond LOG_BYTES.

        Raises:
            OSError: The file system cannot do that.
        """
        end = self._start + self.total
        if end - self._hole_end <= LOG_BYTES:
            return
        begin, until = self._hole_end, end - LOG_TAIL_BYTES
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(
            ctypes.c_int(self._fd),
            ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE),
            ctypes.c_int64(begin),
            ctypes.c_int64(until - begin),
        ):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._hole_end = until
        self.dropped += until - begin

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
