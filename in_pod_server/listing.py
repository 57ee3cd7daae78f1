"""What lies in a folder of the home: entries in the order of their names, counted in all."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from in_pod_server.kinds import Kind, kind_of
from in_pod_server.root import Root
from in_pod_server.text import name_to_text

LIST_SCAN_LIMIT: Final = 200_000
"""Entries looked at by one listing; a larger tree is said to have at least so many."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a listing."""

    path: str
    type: Kind
    size: int
    mtime: float


@dataclass(frozen=True, slots=True)
class Listing:
    """Some entries, and how many there are in all (`complete`: surely no more)."""

    entries: list[Entry]
    total: int
    complete: bool


def list_entries(
    root: Root,
    relative: bytes,
    *,
    recursive: bool,
    max_entries: int,
    wanted: Callable[[str], bool] | None = None,
) -> Listing:
    """Return a folder's entries, or a single file's own; `wanted` is asked about the path below.

    Raises:
        OSError: There is no such folder, or it cannot be read.
    """
    with root.fd(relative, os.O_PATH) as fd:
        status = os.fstat(fd)
    if not stat.S_ISDIR(status.st_mode):
        return Listing([_entry(relative, status)], 1, complete=True)
    entries: list[Entry] = []
    total = seen = 0
    below = 0 if relative == b"." else len(relative) + 1
    todo = [relative]
    while todo:
        folder = todo.pop()
        try:
            found = _entries(root, folder)
        except OSError:
            if folder == relative:
                raise
            continue  # gone, or not ours to read: it is listed itself, its content is not
        for name, status in found:
            seen += 1
            if wanted is not None and not wanted(os.fsdecode(name[below:])):
                continue
            total += 1
            if len(entries) < max_entries:
                entries.append(_entry(name, status))
        if recursive:
            todo += [n for n, s in reversed(found) if stat.S_ISDIR(s.st_mode)]
        if seen >= LIST_SCAN_LIMIT:
            return Listing(entries, total, complete=False)
    return Listing(entries, total, complete=True)


def _entries(root: Root, folder: bytes) -> list[tuple[bytes, os.stat_result]]:
    prefix = b"" if folder == b"." else folder + b"/"
    found = []
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
    with root.fd(folder, flags) as fd, os.scandir(fd) as scan:
        for entry in scan:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.append((prefix + os.fsencode(entry.name), status))
    return sorted(found, key=lambda pair: pair[0])


def _entry(relative: bytes, status: os.stat_result) -> Entry:
    return Entry(
        name_to_text(relative), kind_of(status.st_mode), status.st_size, round(status.st_mtime, 3)
    )
