"""Cut a byte stream into lines: linear in time, bounded in memory, however long a line is.

Imports nothing of the SDK: the host's side of the pipe, and a search in the pod, need no more.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

KEPT_OF_OVERLONG = 4096
"""How much of either end of an over-long line is kept, to find the request's id in it."""

_ID = rb'"id"\s*:\s*(-?[0-9]{1,18}|"[^"\\]{1,256}")'
_ID_FIRST = re.compile(
    rb'\s*\{\s*(?:"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*,\s*)*' + _ID + rb"\s*[,}]"
)
_ID_LAST = re.compile(
    rb',\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?'
    + _ID
    + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z'
)


@dataclass(frozen=True, slots=True)
class Overlong:
    """A line that was longer than allowed: how long, and its two ends."""

    size: int
    head: bytes
    tail: bytes

    @property
    def id(self) -> int | str | None:
        """The JSON-RPC id in it, where one of its ends shows it."""
        found = _ID_FIRST.match(self.head) or _ID_LAST.search(self.tail)
        known: int | str | None = json.loads(found[1].decode("utf-8", "replace")) if found else None
        return known


class LineBuffer:
    """Cut a byte stream into lines of at most `limit` bytes, whatever the chunks."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line = bytearray()
        self._tail = bytearray()
        self._size = 0

    def feed(self, data: bytes) -> list[bytes | Overlong]:
        """Take the next bytes; return the lines that they complete, without newlines."""
        lines: list[bytes | Overlong] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._push(data[start:end])
            lines.append(self._take())
            start = end + 1
        self._push(data[start:])
        return lines

    def _push(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= self._limit:
            self._line += piece
            return
        if not self._tail:
            self._tail += self._line[-KEPT_OF_OVERLONG:]
            self._line += piece[:KEPT_OF_OVERLONG]
            del self._line[KEPT_OF_OVERLONG:]
        self._tail += piece[-KEPT_OF_OVERLONG:]
        del self._tail[:-KEPT_OF_OVERLONG]

    def _take(self) -> bytes | Overlong:
        line: bytes | Overlong
        if self._size <= self._limit:
            line = bytes(self._line)
        else:
            line = Overlong(self._size, bytes(self._line), bytes(self._tail))
        self._line.clear()
        self._tail.clear()
        self._size = 0
        return line
