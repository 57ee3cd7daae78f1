"""The home's files: read, written, listed and deleted, never anything outside.

Paths are relative to the home, or absolute under one of its names; `text` tells how odd names are
written. A write happens wholly or not at all. All functions block, so they are called on threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from in_pod_server.atomic import extend, replace
from in_pod_server.confine import Opener, best_opener
from in_pod_server.errors import FileFailedError, PathRefusedError
from in_pod_server.text import name_to_bytes, name_to_text

Kind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]

NEW_FILE_MODE: Final = 0o644
NEW_FOLDER_MODE: Final = 0o755
LIST_SCAN_LIMIT: Final = 200_000
"""Entries looked at by one listing; a larger tree is said to have at least so many."""
SHOWN_CHARS: Final = 300
"""How much of a path an error repeats."""
_MAX_LINKS: Final = 40


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


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did."""

    path: str
    bytes_written: int
    size: int
    created: bool


class Home:
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

    # --- paths -----------------------------------------------------------------------------------

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
        parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
        return b"/".join(parts) or b"."

    def _beneath_a_name(self, raw: bytes) -> bytes:
        clean = b"/" + b"/".join(part for part in raw.split(b"/") if part not in (b"", b"."))
        for name in self._names:
            if clean == name or clean.startswith(name + b"/"):
                return clean[len(name) + 1 :]
        known = " or ".join(name_to_text(name) for name in self._names)
        raise PathRefusedError(
            f"{_short(name_to_text(raw))} is outside the home: give a path relative to it or under {known} "
            "(run_command can read what lies elsewhere)"
        )

    def _open(self, relative: bytes, flags: int, mode: int = 0) -> int:
        return self._open_beneath(self._root, relative, flags, mode)

    @contextlib.contextmanager
    def _fd(self, relative: bytes, flags: int) -> Iterator[int]:
        fd = self._open(relative, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _parent(self, relative: bytes, *, make: bool = False) -> Iterator[tuple[int, bytes]]:
        folder, _, name = relative.rpartition(b"/")
        if name in (b".", b".."):
            raise PathRefusedError(f"{_short(name_to_text(relative))} names no entry of the home")
        if make and folder:
            self._make_folders(folder)
        with self._fd(folder or b".", os.O_PATH | os.O_DIRECTORY) as fd:
            yield fd, name

    def _make_folders(self, folder: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.close(self._open(folder, os.O_PATH | os.O_DIRECTORY))
            return
        parts = folder.split(b"/")
        for count, name in enumerate(parts):
            above = b"/".join(parts[:count]) or b"."
            if name == b"..":
                continue
            flags = os.O_PATH | os.O_DIRECTORY
            with self._fd(above, flags) as fd, contextlib.suppress(FileExistsError):
                os.mkdir(name, NEW_FOLDER_MODE, dir_fd=fd)

    def _through_links(self, relative: bytes) -> bytes:
        """Return where a write to `relative` goes: links are followed, as a shell's `>` does."""
        for _ in range(_MAX_LINKS):
            try:
                with self._parent(relative) as (fd, name):
                    target = os.readlink(name, dir_fd=fd)
            except OSError as exc:
                if exc.errno in (errno.EINVAL, errno.ENOENT):
                    return relative
                raise
            if target.startswith(b"/"):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            folder = relative.rpartition(b"/")[0]
            relative = self._clean(folder + b"/" + target)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    @staticmethod
    def _clean(raw: bytes) -> bytes:
        return b"/".join(part for part in raw.split(b"/") if part not in (b"", b".")) or b"."

    # --- reading ---------------------------------------------------------------------------------

    def read(self, path: str, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return up to `max_bytes` of a file from `offset`, and the file's size.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: It is no regular file, or cannot be read.
        """
        relative = self.relative(path)
        with _explained("read", path):
            with self._fd(relative, os.O_PATH) as fd:
                _expect_file(fd, path)
            # Non-blocking: whatever was put there between the two opens must not hang us.
            with self._fd(relative, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY) as fd:
                size = _expect_file(fd, path).st_size
                data = bytearray()
                while len(data) < max_bytes:
                    piece = os.pread(fd, max_bytes - len(data), offset + len(data))
                    if not piece:
                        break
                    data += piece
                return bytes(data), max(size, offset + len(data) if data else 0)

    def entries(self, path: str, *, recursive: bool, max_entries: int) -> Listing:
        """Return a folder's entries in the order of their names, or a single file's own entry.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: There is no such folder, or it cannot be read.
        """
        relative = self.relative(path)
        with _explained("list", path):
            with self._fd(relative, os.O_PATH) as fd:
                status = os.fstat(fd)
            if not stat.S_ISDIR(status.st_mode):
                return Listing([_entry(relative, status)], 1, complete=True)
            entries: list[Entry] = []
            total = 0
            todo = [relative]
            while todo:
                folder = todo.pop()
                try:
                    found = self._entries(folder)
                except OSError:
                    if folder == relative:
                        raise
                    continue  # gone, or not ours to read: it is listed itself, its content is not
                for name, status in found:
                    total += 1
                    if len(entries) < max_entries:
                        entries.append(_entry(name, status))
                if recursive:
                    todo += [n for n, s in reversed(found) if stat.S_ISDIR(s.st_mode)]
                if total >= LIST_SCAN_LIMIT:
                    return Listing(entries, total, complete=False)
            return Listing(entries, total, complete=True)

    def _entries(self, folder: bytes) -> list[tuple[bytes, os.stat_result]]:
        prefix = b"" if folder == b"." else folder + b"/"
        found = []
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
        with self._fd(folder, flags) as fd, os.scandir(fd) as scan:
            for entry in scan:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((prefix + os.fsencode(entry.name), status))
        return sorted(found, key=lambda pair: pair[0])

    # --- writing ---------------------------------------------------------------------------------

    def write(self, path: str, data: bytes, *, mode: int | None, create_only: bool) -> Written:
        """Replace a file's content, or make the file and its folders. All or nothing.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: It is no regular file, exists already (`create_only`), or the write
                failed; then the old content is still there.
        """
        relative = self.relative(path)
        with _explained("write", path):
            if not create_only:
                relative = self._through_links(relative)
            with self._parent(relative, make=True) as (folder, name):
                before = _status(name, folder)
                if before is not None:
                    if create_only:
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                    _expect_kind(before, path)
                if mode is None:
                    mode = stat.S_IMODE(before.st_mode) if before else NEW_FILE_MODE
                replace(folder, name, data, mode, create_only=create_only)
        return Written(self.shown(relative), len(data), len(data), created=before is None)

    def append(self, path: str, data: bytes, *, mode: int | None) -> Written:
        """Add to the end of a file, or make it. What was there is never touched.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: It is no regular file, or the write failed and was taken back.
        """
        relative = self.relative(path)
        with _explained("append to", path):
            fd, created = self._open_to_append(relative, path)
            try:
                extend(fd, data)
                if mode is not None:
                    os.fchmod(fd, mode)
                size = os.fstat(fd).st_size
            finally:
                os.close(fd)
        return Written(self.shown(relative), len(data), size, created=created)

    def open_log(self, path: str) -> tuple[str, int]:
        """Open a file to which a command will append; return its path and a descriptor.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: It is no regular file, or cannot be written.
        """
        relative = self.relative(path)
        with _explained("append to", path):
            return self.shown(relative), self._open_to_append(relative, path)[0]

    def _open_to_append(self, relative: bytes, path: str) -> tuple[int, bool]:
        relative = self._through_links(relative)
        flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with self._parent(relative, make=True) as (folder, name):
            before = _status(name, folder)
            if before is not None:
                _expect_kind(before, path)
            flags |= os.O_CREAT | os.O_NOFOLLOW
            fd = os.open(name, flags, NEW_FILE_MODE, dir_fd=folder)
        try:
            _expect_file(fd, path)
        except BaseException:
            os.close(fd)
            raise
        os.set_blocking(fd, True)
        return fd, before is None

    def delete(self, path: str, *, recursive: bool) -> Kind:
        """Delete a file, a link (not what it points to), or a folder; return what it was.

        Raises:
            PathRefusedError: The path leads outside the home, or is the home itself.
            FileFailedError: There is no such entry, or the folder is not empty.
        """
        relative = self.relative(path)
        if relative == b".":
            raise PathRefusedError("the home itself cannot be deleted: delete what is in it")
        with _explained("delete", path), self._parent(relative) as (folder, name):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=folder)
            elif recursive:
                try:
                    shutil.rmtree(name, dir_fd=folder)
                except RecursionError:
                    raise FileFailedError(
                        f"{_short(path)} is nested too deep for this tool: use rm -rf in run_command"
                    ) from None
            else:
                os.rmdir(name, dir_fd=folder)
            return _kind(status.st_mode)

    def shown(self, relative: bytes) -> str:
        """Return how a path is shown: absolute, under the home's first name."""
        return name_to_text(self._names[0] + (b"" if relative == b"." else b"/" + relative))


def _status(name: bytes, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _kind(mode: int) -> Kind:
    kinds: dict[int, Kind] = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
        stat.S_IFIFO: "fifo",
        stat.S_IFSOCK: "socket",
    }
    return kinds.get(stat.S_IFMT(mode), "device")


def _entry(relative: bytes, status: os.stat_result) -> Entry:
    return Entry(
        name_to_text(relative), _kind(status.st_mode), status.st_size, round(status.st_mtime, 3)
    )


def _expect_file(fd: int, path: str) -> os.stat_result:
    status = os.fstat(fd)
    _expect_kind(status, path)
    return status


def _expect_kind(status: os.stat_result, path: str) -> None:
    kind = _kind(status.st_mode)
    if kind == "directory":
        raise FileFailedError(
            f"{_short(path)} is a directory, not a file: list_files shows what is in it"
        )
    if kind != "file":
        raise FileFailedError(f"{_short(path)} is a {kind}, not a regular file")


def _short(path: str) -> str:
    """Return a path as an error shows it."""
    return path if len(path) <= SHOWN_CHARS else f"{path[:SHOWN_CHARS]}..."


@contextlib.contextmanager
def _explained(verb: str, path: str) -> Iterator[None]:
    """Turn an OSError into words that say what to do next."""
    try:
        yield
    except OSError as exc:
        shown = _short(path) or "the home"
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
