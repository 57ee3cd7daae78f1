"""Search by ripgrep, run as a program of its own: its patterns take linear time, whoever wrote them.

Nothing of a caller's text can become an option or lead out of the home: the folder is opened beneath
the home and entered by its descriptor, links are not followed, and a run ends after a bounded time.
(Below that folder ripgrep opens by path. Who swaps a folder for a link at that moment is a command,
and gains nothing: it has the same rights.)
"""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import dataclass, field
from typing import Any, Final

from in_pod_server.errors import ArgumentError
from in_pod_server.lines import LineBuffer, Overlong
from in_pod_server.ripgrep import ripgrep
from in_pod_server.text import decode, name_to_text

SEARCH_SECONDS: Final = 20.0
"""For one run; a call makes two at most, and must answer within CALL_LIMIT_SECONDS."""
LINE_BYTES: Final = 64 * 1024
"""A longer line of ripgrep's output is a longer line of a file: only its place is told."""
SHOWN_LINE_CHARS: Final = 500
COUNT_LIMIT: Final = 200_000
"""Matches after which no more are counted: the total is then said to be at least so many."""
NAMES_BYTES: Final = 16 * 1024 * 1024
"""Names looked through at most; a larger tree is searched folder by folder."""
KEPT_CHARS: Final = 1_000_000
"""Text of matches kept at most: a reply holds less."""
MATCH_SECONDS: Final = 5.0
_ODD: Final = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True, slots=True)
class Query:
    """What is searched for, and in which files."""

    pattern: str
    literal: bool = False
    ignore_case: bool = False
    glob: str = ""
    all_files: bool = False
    context_lines: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file: a match, or one beside it."""

    path: str
    number: int
    text: str
    is_match: bool


@dataclass(slots=True)
class Found:
    """What a search found; `complete`: nothing was left out of `total`."""

    lines: list[Line] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    total: int = 0
    files: int = 0
    complete: bool = True


def pattern_options(query: Query) -> list[str]:
    """Return ripgrep's options for a pattern.

    Raises:
        ArgumentError: No program can be given such a pattern.
    """
    if "\0" in query.pattern or "\0" in query.glob:
        raise ArgumentError("pattern and glob cannot hold a NUL character")
    options = ["--no-config", "--color=never"]
    options += ["--fixed-strings"] if query.literal else []
    options += ["--ignore-case"] if query.ignore_case else []
    if "\n" in query.pattern or (not query.literal and "\\n" in query.pattern):
        options.append("--multiline")
    return [*options, f"--regexp={query.pattern}"]


def file_options(query: Query) -> list[str]:
    """Return ripgrep's options for the choice of files."""
    options = ["--no-config", "--no-messages", "--sort=path"]
    options += ["--hidden", "--no-ignore"] if query.all_files else []
    return [*options, f"--glob={query.glob}"] if query.glob else options


async def search_content(
    folder: int, query: Query, max_results: int, *, file: int | None = None
) -> Found:
    """Search the files below a folder, or one open file (both are descriptors).

    Paths are relative to the folder; that of the open file is empty.

    Raises:
        ArgumentError: The pattern or the glob is none.
        FileFailedError: ripgrep is missing or failed.
    """
    context = [f"--context={query.context_lines}"] if query.context_lines else []
    options = [*context, *file_options(query), *pattern_options(query)]
    where = "./" if file is None else "-"
    reader = _Reader(max_results)
    async with ripgrep(
        "--json", *options, "--", where, folder=folder, seconds=SEARCH_SECONDS, stdin=file
    ) as running:
        lines = LineBuffer(LINE_BYTES)
        async for piece in running.pieces():
            for line in lines.feed(piece):
                reader.take(line)
            if reader.found.total >= COUNT_LIMIT:
                break
        reader.found.complete = await running.complete()
    return reader.found


async def search_names(folder: int, query: Query, max_results: int) -> Found:
    """Search the paths of the files below a folder (a descriptor), relative to it.

    Raises:
        ArgumentError: The pattern or the glob is none.
        FileFailedError: ripgrep is missing or failed.
    """
    found = Found()
    listing = ["--files", "--null", *file_options(query), "--", "./"]
    data = bytearray()
    async with ripgrep(*listing, folder=folder, seconds=SEARCH_SECONDS) as names:
        async for piece in names.pieces():
            data += piece
            if len(data) > NAMES_BYTES:
                del data[data.rindex(b"\0") + 1 :]
                break
        complete = await names.complete()
    chosen = ["--null-data", "--text", *pattern_options(query), "--", "-"]
    # The names as they are shown, so that a pattern sees what the caller will.
    shown = b"".join(
        name_to_text(name.removeprefix(b"./")).encode() + b"\0"
        for name in bytes(data).split(b"\0")
        if name
    )
    async with ripgrep(*chosen, folder=folder, seconds=SEARCH_SECONDS, stdin=shown) as matching:
        rest = b""
        async for piece in matching.pieces():
            *whole, rest = (rest + piece).split(b"\0")
            for name in whole:
                found.total += 1
                if len(found.paths) < max_results:
                    found.paths.append(name.decode())
        found.complete = await matching.complete() and complete
    found.files = found.total
    return found


async def matches(data: bytes, pattern: str) -> int | None:
    """Return where in `data` the first match ends; None if there is none.

    Raises:
        ArgumentError: The pattern is none.
        FileFailedError: ripgrep is missing or failed.
    """
    query = Query(pattern)
    # What is no UTF-8 counts as a character, so that `.` takes it; ripgrep's would end there.
    text = data.decode("utf-8", "surrogateescape")
    looked = _ODD.sub("\ufffd", text).encode()
    # As bytes, whatever they look like: a terminal's lines end in CRLF, and logs hold NULs.
    as_bytes = ["--text", "--encoding=none", "--crlf", "--multiline", "--max-count=1"]
    options = [*as_bytes, *pattern_options(query)]
    folder = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        async with ripgrep(
            "--json", *options, "--", "-", folder=folder, seconds=MATCH_SECONDS, stdin=looked
        ) as running:
            out = b"".join([piece async for piece in running.pieces()])
            await running.complete()
    finally:
        os.close(folder)
    for raw in out.split(b"\n"):
        if raw.startswith(b'{"type":"match"'):
            match = json.loads(raw)["data"]
            hits = match["submatches"]
            end = match["absolute_offset"] + (hits[0]["end"] if hits else 0)
            before = text[: len(looked[:end].decode())]
            return len(before.encode("utf-8", "surrogateescape"))
    return None


class _Reader:
    """Reads ripgrep's JSON lines. A file's lines count once its end shows that it was no binary."""

    def __init__(self, max_results: int) -> None:
        self._max = max_results
        self._pending: list[Line] = []
        self._count = 0
        self._kept = 0
        self._chars = 0
        self.found = Found()

    def take(self, line: bytes | Overlong) -> None:
        if isinstance(line, Overlong):
            self._take_long(line)
            return
        if self._count >= self._room and line.startswith(
            (b'{"type":"match"', b'{"type":"context"')
        ):
            self._count += line.startswith(b'{"type":"match"')
            return
        message: dict[str, Any] = json.loads(line)
        data = message["data"]
        match message["type"]:
            case "begin":
                self._pending, self._count = [], 0
            case "match" | "context":
                is_match = message["type"] == "match"
                self._count += is_match
                self._add(_path(data["path"]), data, is_match=is_match)
            case "end":
                self._end(binary=data["binary_offset"] is not None)

    @property
    def _room(self) -> int:
        return self._max - self._kept if self._chars < KEPT_CHARS else 0

    def _add(self, path: str, data: dict[str, Any], *, is_match: bool) -> None:
        text = decode(_bytes(data["lines"]).removesuffix(b"\n"), final=True).text
        cut = text if len(text) <= SHOWN_LINE_CHARS else f"{text[:SHOWN_LINE_CHARS]}..."
        self._chars += len(cut)
        self._pending.append(Line(path, data["line_number"] or 0, cut, is_match))

    def _take_long(self, line: Overlong) -> None:
        is_match = line.head.startswith(b'{"type":"match"')
        self._count += is_match
        path = re.search(rb'"path":(\{"(?:text|bytes)":"(?:[^"\\]|\\.)*"\})', line.head)
        number = re.search(rb'"line_number":([0-9]+)', line.tail)
        if is_match and path and self._count <= self._room:
            name = _path(json.loads(path[1]))
            said = "[a line of more than 64 KiB, not shown]"
            self._pending.append(Line(name, int(number[1]) if number else 0, said, is_match=True))

    def _end(self, *, binary: bool) -> None:
        if not binary and self._count:
            self.found.lines += self._pending
            self._kept += sum(line.is_match for line in self._pending)
            self.found.total += self._count
            self.found.files += 1
        self._pending, self._count = [], 0


def _path(value: dict[str, str]) -> str:
    raw = _bytes(value)
    return "" if raw == b"<stdin>" else name_to_text(raw.removeprefix(b"./"))


def _bytes(value: dict[str, str]) -> bytes:
    return value["text"].encode() if "text" in value else base64.b64decode(value["bytes"])
