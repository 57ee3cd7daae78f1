"""How far a transfer is, and what came of it, for a person or a model and for a program."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Meter:
    """How far a transfer is; written by its thread, read by whoever shows it."""

    files: int = 0
    total: int = 0
    done: int = 0
    verb: str = "looking at what is there"
    began: float = field(default_factory=time.monotonic)
    kept: list[str] = field(default_factory=list)
    """Unfinished files that an interrupted transfer left for the next one."""

    def expect(self, files: int, total: int) -> None:
        """The plan is known."""
        self.files, self.total, self.done = files, total, 0
        self.verb = "copying"

    def add(self, count: int) -> None:
        """Some bytes are through."""
        self.done += count

    def text(self) -> str:
        """One line for a person."""
        if not self.files:
            return self.verb
        rate = self.done / max(0.001, time.monotonic() - self.began)
        return (
            f"{self.verb} {files_text(self.files)}: {size_text(self.done)} of {size_text(self.total)}, "
            f"{size_text(rate)}/s"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A transfer that is done and verified.

    Args:
        files: how many are in place, their sums compared.
        bytes: how large they are together.
        unchanged: how many of the files were there already.
        seconds: from the first attempt to the last answer.
        refused: path and reason of what was left out on purpose.
        unlisted: how many more were, beyond those that are listed.
        removed: entries that `delete` removed.
        tries: channels that it took.
    """

    files: int
    bytes: int
    unchanged: int
    seconds: float
    refused: tuple[tuple[str, str], ...]
    unlisted: int
    removed: int
    tries: int

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "files": self.files,
            "bytes": self.bytes,
            "unchanged": self.unchanged,
            "seconds": round(self.seconds, 3),
            "refused": [{"path": shown(path), "reason": shown(why)} for path, why in self.refused],
            "refused_unlisted": self.unlisted,
            "removed": self.removed,
            "tries": self.tries,
            "verified": True,
        }

    def text(self) -> str:
        """For a person or a model."""
        rate = size_text(self.bytes / max(0.001, self.seconds))
        text = (
            f"{files_text(self.files)}, {size_text(self.bytes)} in {self.seconds:.1f} s ({rate}/s), "
            "each verified by SHA-256"
        )
        if self.unchanged:
            were = "was" if self.unchanged == 1 else "were"
            text += f"; {self.unchanged} of them {were} there already"
        if self.removed:
            text += f"; {counted(self.removed, 'entry', 'entries')} removed"
        return text


def counted(count: int, one: str, more: str) -> str:
    """A number of things as a person says it."""
    return f"{count} {one if count == 1 else more}"


def files_text(count: int) -> str:
    """A number of files."""
    return counted(count, "file", "files")


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def shown(text: str) -> str:
    """Text from a pod, without anything that a terminal obeys or that is not UTF-8."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode("ascii")
        for c in text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    )


def kept_text(meter: Meter) -> str:
    """What an interrupted transfer left here; empty if nothing."""
    if not meter.kept:
        return ""
    return f". Unfinished, for the next try: {', '.join(map(shown, meter.kept))}"
