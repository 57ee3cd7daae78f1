r"""Bytes of the sandbox as text of a message: exact where it is UTF-8, escaped and said where not.

Names of files have a reversible form: a byte that is not UTF-8 is written `\xNN`, and a backslash
that would then read as such an escape is written `\x5c`. All other names stay as they are.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import Any

_Utf8 = codecs.getincrementaldecoder("utf-8")
_ESCAPE = re.compile(rb"\\x(5c|[89a-f][0-9a-f])")
_BACKSLASH = re.compile(rb"\\(?=x(?:5c|[89a-f][0-9a-f]))")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Text, how many bytes it stands for, and whether nothing had to be escaped."""

    text: str
    used: int
    exact: bool


def decode(data: bytes, *, final: bool) -> Decoded:
    """Decode UTF-8; a character cut off at the end is left for the next piece unless `final`."""
    used = len(data) if final else len(data) - _incomplete(data)
    try:
        return Decoded(data[:used].decode(), used, exact=True)
    except UnicodeDecodeError:
        return Decoded(data[:used].decode("utf-8", "backslashreplace"), used, exact=False)


def decode_within(data: bytes, limit: int, *, final: bool) -> Decoded:
    """Decode as much from the start of `data` as takes at most `limit` bytes in a message."""
    decoded = decode(data, final=final)
    while (size := json_size(decoded.text)) > limit:
        # Shrinks by the overshoot, and always by something, so it ends after a few rounds.
        data = data[: min(len(data) * limit // size, len(data) - 1)]
        decoded = decode(data, final=False)
    return decoded


def decode_end_within(data: bytes, limit: int) -> Decoded:
    """Decode as much from the end of `data` as takes at most `limit` bytes in a message."""
    data = _from_a_character_on(data)
    decoded = decode(data, final=True)
    while (size := json_size(decoded.text)) > limit:
        data = _from_a_character_on(data[-min(len(data) * limit // size, len(data) - 1) :])
        decoded = decode(data, final=True)
    return decoded


def _from_a_character_on(data: bytes) -> bytes:
    """Leave out the rest of a character that was cut off at the start."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:] if start < len(data) else data


def _incomplete(data: bytes) -> int:
    decoder = _Utf8("backslashreplace")
    decoder.decode(data[-4:])
    return len(decoder.getstate()[0])


def name_to_text(name: bytes) -> str:
    """Write a file name reversibly, as described above."""
    return _BACKSLASH.sub(rb"\\x5c", name).decode("utf-8", "backslashreplace")


def name_to_bytes(text: str) -> bytes:
    """Read a file name that `name_to_text` wrote, or that a person typed."""
    return _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), text.encode())


def on_one_line(name: str) -> str:
    """Return a name as a line of text shows it: it may hold a newline, and would be taken for two."""
    return name.replace("\n", "\\n").replace("\r", "\\r")


def json_size(value: Any) -> int:
    """Return the bytes that a text, or what a tool returns as data, takes inside a message."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode("utf-8", "backslashreplace"))
