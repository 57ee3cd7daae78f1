r"""One exact replacement in a file's bytes, and why there is none. Pure: nothing is read or written.

Where every line of a file ends in CRLF, `\n` of the given texts stands for that: an editor's view of
the file has no other line ends, and a caller who never saw them cannot write them.
"""

from __future__ import annotations

import difflib
import itertools
import re
from dataclasses import dataclass
from typing import Final

from in_pod_server.errors import ArgumentError, FileFailedError
from in_pod_server.text import decode

LINES_NAMED: Final = 20
CONTEXT_LINES: Final = 3
SNIPPET_LINES: Final = 40
SHOWN_LINE_CHARS: Final = 200
SHOWN_LINES: Final = 10
COMPARED_LINES: Final = 4000
"""Lines among which the closest is looked for: comparing is slow, and a hint is only a hint."""
_CLOSE_ENOUGH: Final = 0.6


@dataclass(frozen=True, slots=True)
class Edit:
    """The new content, how often and in which of its lines it was changed, and how that reads."""

    data: bytes
    count: int
    lines: list[int]
    snippet: str


def replace_text(data: bytes, old_text: str, new_text: str, *, replace_all: bool) -> Edit:
    """Replace the one place where `old_text` is, or all of them.

    Raises:
        ArgumentError: The texts cannot be used.
        FileFailedError: It is nowhere, or in several places; the message helps to find it.
    """
    if not old_text:
        raise ArgumentError(
            "old_text is empty: give the text to replace (write_file makes a file or adds to one)"
        )
    if old_text == new_text:
        raise ArgumentError("old_text and new_text are the same: nothing would change")
    crlf = _all_crlf(data)
    old, new = _as_bytes(old_text, crlf=crlf), _as_bytes(new_text, crlf=crlf)
    first = data.find(old)
    if first < 0:
        raise FileFailedError(_why_not_found(data, old, new))
    if not replace_all and data.find(old, first + 1) >= 0:
        raise FileFailedError(_ambiguous(data, old))
    places, made = _replace(data, old, new, every=replace_all)
    lines = _line_numbers(made, places)
    return Edit(made, len(places), lines[:LINES_NAMED], _snippet(made, places[0], len(new)))


def _all_crlf(data: bytes) -> bool:
    breaks = data.count(b"\n")
    return breaks > 0 and breaks == data.count(b"\r\n")


def _as_bytes(text: str, *, crlf: bool) -> bytes:
    raw = text.encode()
    return raw.replace(b"\n", b"\r\n") if crlf and b"\r" not in raw else raw


def _replace(data: bytes, old: bytes, new: bytes, *, every: bool) -> tuple[list[int], bytes]:
    """Return where `new` begins in the new content, each time, and that content."""
    parts = data.split(old) if every else data.split(old, 1)
    places: list[int] = []
    position = 0
    for part in parts[:-1]:
        places.append(position + len(part))
        position += len(part) + len(new)
    return places, new.join(parts)


def _line_numbers(data: bytes, places: list[int]) -> list[int]:
    numbers: list[int] = []
    line, seen = 1, 0
    for place in places:
        line += data.count(b"\n", seen, place)
        seen = place
        if not numbers or numbers[-1] != line:
            numbers.append(line)
    return numbers


def _snippet(data: bytes, place: int, length: int) -> str:
    """Return the changed lines with their neighbours, numbered, as they now are."""
    start = place
    for _ in range(CONTEXT_LINES + 1):
        start = data.rfind(b"\n", 0, max(start, 0))
    start += 1
    end = place + length
    for _ in range(CONTEXT_LINES + 1):
        found = data.find(b"\n", end)
        end = len(data) if found < 0 else found + 1
    # A file may be one long line: no more is looked at than can be shown.
    start = max(start, place - SNIPPET_LINES * SHOWN_LINE_CHARS)
    end = min(end, start + 2 * SNIPPET_LINES * SHOWN_LINE_CHARS)
    number = data.count(b"\n", 0, start) + 1
    shown = decode(data[start:end], final=True).text.removesuffix("\n").split("\n")
    cut = ["..."] if len(shown) > SNIPPET_LINES else []
    rows = enumerate(shown[:SNIPPET_LINES], number)
    return "\n".join([f"{n:>6}\t{_short_line(line)}" for n, line in rows] + cut)


def _short_line(line: str) -> str:
    line = line.removesuffix("\r")
    return line if len(line) <= SHOWN_LINE_CHARS else f"{line[:SHOWN_LINE_CHARS]}..."


def _ambiguous(data: bytes, old: bytes) -> str:
    places: list[int] = []
    place = data.find(old)
    while place >= 0 and len(places) <= LINES_NAMED:
        places.append(place)
        place = data.find(old, place + 1)
    numbers = _line_numbers(data, places[:LINES_NAMED])
    # Places may overlap; then there are more of them than can be replaced.
    count = max(data.count(old), min(len(places), LINES_NAMED))
    return (
        f"old_text is in {count} places (line {_listed(numbers)}): add the lines around it "
        "until only one is meant, or replace all with replace_all=true; nothing was changed"
    )


def _listed(numbers: list[int]) -> str:
    more = ", ..." if len(numbers) == LINES_NAMED else ""
    return ", ".join(map(str, numbers)) + more


def _why_not_found(data: bytes, old: bytes, new: bytes) -> str:
    said = "old_text is not in the file"
    hint = (
        _only_whitespace_differs(data, old)
        or _there_already(data, new)
        or _closest(data, old)
        or "read_file shows what it holds"
    )
    return (
        f"{said}: {hint.rstrip()}\nnothing was changed"
        if "\n" in hint
        else f"{said}: {hint}; nothing was changed"
    )


def _only_whitespace_differs(data: bytes, old: bytes) -> str:
    place = b" ".join(data.split()).find(b" ".join(old.split())) if old.strip() else -1
    if place < 0:
        return ""
    word = b" ".join(data.split()).count(b" ", 0, place)
    found = next(itertools.islice(re.finditer(rb"\S+", data), word, None))
    number = data.count(b"\n", 0, found.start()) + 1
    lines = data[data.rfind(b"\n", 0, found.start()) + 1 :].split(b"\n", SHOWN_LINES)
    shown = [repr(decode(line[:SHOWN_LINE_CHARS], final=True).text)[1:-1] for line in lines]
    text = "\n".join(shown[: min(SHOWN_LINES, old.strip().count(b"\n") + 1)])
    return (
        f"only its spaces, tabs or line ends differ from line {number} on, which reads "
        f"(\\t is a tab, \\r a carriage return):\n{text}\n"
    )


def _there_already(data: bytes, new: bytes) -> str:
    place = data.find(new) if new.strip() else -1
    if place < 0:
        return ""
    number = data.count(b"\n", 0, place) + 1
    return f"new_text is there already (line {number}), so the edit may have been made before"


def _closest(data: bytes, old: bytes) -> str:
    wanted = next((line for line in old.split(b"\n") if line.strip()), b"")[: SHOWN_LINE_CHARS * 2]
    sought = decode(wanted, final=True).text.strip()
    best, best_ratio, best_number = "", _CLOSE_ENOUGH, 0
    compared = difflib.SequenceMatcher(autojunk=False)
    compared.set_seq2(sought)
    for number, raw in enumerate(data.split(b"\n", COMPARED_LINES)[:COMPARED_LINES], 1):
        line = decode(raw[: SHOWN_LINE_CHARS * 2], final=True).text
        compared.set_seq1(line.strip())
        if compared.real_quick_ratio() <= best_ratio or compared.quick_ratio() <= best_ratio:
            continue
        if (ratio := compared.ratio()) > best_ratio:
            best, best_ratio, best_number = line, ratio, number
    if not best_number:
        return ""
    return f"the closest line is {best_number}:\n{_short_line(best)}\n"
