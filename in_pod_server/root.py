"""Paths of the home to descriptors, never outside it, and failures on the way to words.

Paths are relative to the home, or absolute under one of its names; `text` tells how odd names are
written. What is done with the descriptors is `files`', `listing`'s and `search`'s business.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from in_pod_server.confine import Opener, best_opener
from in_pod_server.errors import FileFailedError, PathRefusedError, short
from in_pod_server.text import name_to_bytes, name_to_text

NEW_FOLDER_MODE: Final = 0o755
_MAX_LINKS: Final = 40


class Root:
    """One folder under the names it is known by. A context manager: it holds the folder open."""

    def __init__(self, names: Sequence[Path], *, opener: Opener | None = None) -> None:
        self._names = [os.fsencode(name) for name in names]
        self._given_opener = opener
        self._root = -1

    def __enter__(self) -> Self:
        self._root = os.open(self._names[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open_beneath = self._given_opener or best_opener(self._root)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._root)

    def relative(self, path: str) -> bytes:
        """Return `path` relative to the home, `.` for the home itself. No file is looked at.

        Raises:
            PathRefusedError: It is absolute and not under a name of the home, or holds a NUL.
        """
        if "\0" in path:
            raise PathRefusedError("the path holds a NUL character, which no file name can")
        try:
            raw = name_to_bytes(path)
        except UnicodeEncodeError:
            raise PathRefusedError("the path is not Unicode: give odd bytes as \\xNN") from None
        if raw == b"~" or raw.startswith(b"~/"):
            raw = raw[2:]
        elif raw.startswith(b"/"):
            raw = self._beneath_a_name(raw)
        return clean(raw)

    def _beneath_a_name(self, raw: bytes) -> bytes:
        plain = b"/" + b"/".join(part for part in raw.split(b"/") if part not in (b"", b"."))
        for name in self._names:
            if plain == name or plain.startswith(name + b"/"):
                return plain[len(name) + 1 :]
        known = " or ".join(name_to_text(name) for name in self._names)
        raise PathRefusedError(
            f"{short(name_to_text(raw))} is outside the home: give a path relative to it or under {known} "
            "(run_command can read what lies elsewhere)"
        )

    def shown(self, relative: bytes) -> str:
        """Return how a path is shown: absolute, under the home's first name."""
        return name_to_text(self._names[0] + (b"" if relative == b"." else b"/" + relative))

    def open(self, relative: bytes, flags: int, mode: int = 0) -> int:
        """Open what lies beneath; raises OSError, EXDEV where the path escapes."""
        return self._open_beneath(self._root, relative, flags, mode)

    @contextlib.contextmanager
    def fd(self, relative: bytes, flags: int) -> Iterator[int]:
        """Hold what lies beneath open."""
        fd = self.open(relative, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def parent(self, relative: bytes, *, make: bool = False) -> Iterator[tuple[int, bytes]]:
        """Hold the folder of an entry open, and give the entry's name in it."""
        folder, _, name = relative.rpartition(b"/")
        if name in (b".", b".."):
            raise PathRefusedError(f"{short(name_to_text(relative))} names no entry of the home")
        if make and folder:
            self._make_folders(folder)
        with self.fd(folder or b".", os.O_PATH | os.O_DIRECTORY) as fd:
            yield fd, name

    def _make_folders(self, folder: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.close(self.open(folder, os.O_PATH | os.O_DIRECTORY))
            return
        parts = folder.split(b"/")
        for count, name in enumerate(parts):
            above = b"/".join(parts[:count]) or b"."
            if name == b"..":
                continue
            flags = os.O_PATH | os.O_DIRECTORY
            with self.fd(above, flags) as fd, contextlib.suppress(FileExistsError):
                os.mkdir(name, NEW_FOLDER_MODE, dir_fd=fd)

    def through_links(self, relative: bytes) -> bytes:
        """Return where a write to `relative` goes: links are followed, as a shell's `>` does."""
        for _ in range(_MAX_LINKS):
            try:
                with self.parent(relative) as (fd, name):
                    target = os.readlink(name, dir_fd=fd)
            except OSError as exc:
                if exc.errno in (errno.EINVAL, errno.ENOENT):
                    return relative
                raise
            if target.startswith(b"/"):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            folder = relative.rpartition(b"/")[0]
            relative = clean(folder + b"/" + target)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def clean(raw: bytes) -> bytes:
    """Return a relative path without empty parts and dots, `.` if nothing else is left."""
    return b"/".join(part for part in raw.split(b"/") if part not in (b"", b".")) or b"."


@contextlib.contextmanager
def explained(verb: str, path: str) -> Iterator[None]:
    """Turn an OSError into words that say what to do next."""
    try:
        yield
    except OSError as exc:
        shown = short(path) or "the home"
        if exc.errno == errno.EXDEV:
            raise PathRefusedError(
                f"cannot {verb} {shown}: it leads outside the home, by `..` or a link "
                "(absolute links are not followed)"
            ) from exc
        reason = _REASONS.get(exc.errno or 0) or exc.strerror or str(exc)
        raise FileFailedError(f"cannot {verb} {shown}: {reason}") from exc


_REASONS: Final = {
    errno.ENOENT: "no such file or directory (list_files shows what there is)",
    errno.EEXIST: "it exists already (create_only was set)",
    errno.ENOTEMPTY: "the directory is not empty (recursive=true deletes what is in it too)",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.ENOSPC: "no space is left in the home; the old content is unchanged",
    errno.EDQUOT: "the home's quota is used up; the old content is unchanged",
    errno.ENAMETOOLONG: "a name in the path is too long (255 bytes at most, 4095 in all)",
    errno.ELOOP: "too many links on the way",
    errno.ENXIO: "it is a fifo or a device, not a regular file",
}
