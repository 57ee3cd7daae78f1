"""Search by ripgrep, run as a program of its own: its patterns take linear time, whoever wrote them.

Nothing of a caller's text can become an option or lead out of the home: the folder is opened beneath
the home and entered by its descriptor, links are not followed, and a run ends after a bounded time.
(Below that folder ripgrep opens by path. Who swaps a folder for a link at that moment is a command,
and gains nothing: it has the same rights.)
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import anyio
from anyio.abc import Process

from in_pod_server.errors import ArgumentError, FileFailedError, short
from in_pod_server.framing import LineBuffer, Overlong
from in_pod_server.launch import memory_file
from in_pod_server.text import decode, name_to_text

RG: Final = "rg"
SEARCH_SECONDS: Final = 30.0
"""A call must answer within CALL_LIMIT_SECONDS."""
_FAILED: Final = 2
LINE_BYTES: Final = 64 * 1024
"""A longer line of ripgrep's output is a longer line of a file: only its place is told."""
SHOWN_LINE_CHARS: Final = 500
STDERR_BYTES: Final = 4096
COUNT_LIMIT: Final = 200_000
"""Matches after which no more are counted: the total is then said to be at least so many."""
_ENV: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
"""Neither HOME nor RIPGREP_CONFIG_PATH: no file of the home changes what a search does."""


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
    argv = [RG, "--json", *options, "--", "./" if file is None else "-"]
    reader = _Reader(max_results)
    async with _run(argv, folder, stdin=file) as running:
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
    listing = [RG, "--files", "--null", *file_options(query), "--", "./"]
    async with _run(listing, folder) as names:
        data = b"".join([piece async for piece in names.pieces()])
        complete = await names.complete()
    chosen = [RG, "--null-data", "--text", *pattern_options(query), "--", "-"]
    # The names as they are shown, so that a pattern sees what the caller will.
    shown = b"".join(
        name_to_text(name.removeprefix(b"./")).encode() + b"\0"
        for name in data.split(b"\0")
        if name
    )
    async with _run(chosen, folder, stdin=shown) as matching:
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
    # As bytes, whatever they look like: a terminal's lines end in CRLF, and logs hold NULs.
    as_bytes = ["--text", "--encoding=none", "--crlf", "--multiline", "--max-count=1"]
    options = [*as_bytes, *pattern_options(query)]
    argv = [RG, "--json", *options, "--", "-"]
    folder = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        async with _run(argv, folder, stdin=data) as running:
            out = b"".join([piece async for piece in running.pieces()])
            await running.complete()
    finally:
        os.close(folder)
    for raw in out.split(b"\n"):
        if raw.startswith(b'{"type":"match"'):
            match = json.loads(raw)["data"]
            hits = match["submatches"]
            return int(match["absolute_offset"] + (hits[0]["end"] if hits else 0))
    return None


class _Reader:
    """Reads ripgrep's JSON lines. A file's lines count once its end shows that it was no binary."""

    def __init__(self, max_results: int) -> None:
        self._max = max_results
        self._pending: list[Line] = []
        self._count = 0
        self._kept = 0
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
        return self._max - self._kept

    def _add(self, path: str, data: dict[str, Any], *, is_match: bool) -> None:
        text = decode(_bytes(data["lines"]).removesuffix(b"\n"), final=True).text
        cut = text if len(text) <= SHOWN_LINE_CHARS else f"{text[:SHOWN_LINE_CHARS]}..."
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


class _Running:
    """One ripgrep, until it ends or its time is over."""

    def __init__(self, process: Process, stderr: BinaryIO) -> None:
        self._process = process
        self._stderr = stderr
        self._until = anyio.current_time() + SEARCH_SECONDS
        self._at_end = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """Give its output until it ends or its time is over."""
        assert self._process.stdout is not None
        while True:
            piece = b""
            with anyio.move_on_at(self._until) as limit:
                try:
                    piece = await self._process.stdout.receive()
                except anyio.EndOfStream:
                    self._at_end = True
            if self._at_end or limit.cancelled_caught:
                return
            yield piece

    async def complete(self) -> bool:
        """Say whether it gave all there is.

        Raises:
            ArgumentError: It did not understand what it was given.
        """
        if not self._at_end:
            return False
        with anyio.move_on_at(self._until):
            await self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read(STDERR_BYTES).decode("utf-8", "replace").strip()
        if self._process.returncode == _FAILED and said:
            raise ArgumentError(_refused(said))
        return True


def _refused(said: str) -> str:
    reason = said.partition("error: ")[2] or said.splitlines()[-1].removeprefix("rg: ")
    reason = short(" ".join(reason.split()).partition(" Consider enabling PCRE2")[0])
    if "glob" in said and "regex" not in said:
        return f"the glob cannot be used: {reason}"
    return (
        f"the pattern cannot be used: {reason} (a backslash before ( [ {{ * + ? . | takes each as it "
        "is, literal=true takes all of them so)"
    )


@contextlib.asynccontextmanager
async def _run(
    argv: Sequence[str], folder: int, *, stdin: bytes | int | None = None
) -> AsyncIterator[_Running]:
    with contextlib.ExitStack() as files:
        stderr = files.enter_context(memory_file(b""))
        if isinstance(stdin, bytes):
            stdin = files.enter_context(memory_file(stdin)).fileno()
        try:
            process = await anyio.open_process(
                argv,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                # The child's own copy of the descriptor: nobody can put another folder in its place.
                cwd=f"/proc/self/fd/{folder}",
                env=_ENV,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise FileFailedError(
                "ripgrep (rg) is missing in this sandbox's image: use grep or find in run_command"
            ) from None
        except OSError as exc:
            raise FileFailedError(f"ripgrep cannot be started: {exc.strerror}") from exc
        try:
            yield _Running(process, stderr)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()
