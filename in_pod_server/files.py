"""The home's files: read, written, edited, moved and deleted, never anything outside.

A write happens wholly or not at all. All functions block, so they are called on threads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from in_pod_server.atomic import ChangedMeanwhileError, extend, move, replace
from in_pod_server.confine import Opener
from in_pod_server.edits import Edit, replace_text
from in_pod_server.errors import FileFailedError, PathRefusedError, short
from in_pod_server.kinds import Kind, expect_file, expect_kind, kind_of, status_of
from in_pod_server.listing import Listing, list_entries
from in_pod_server.root import Root, explained
from in_pod_server.text import name_to_text

NEW_FILE_MODE: Final = 0o644
EDIT_TRIES: Final = 5
"""So often an edit begins anew because somebody else changed the file meanwhile."""
READ_BYTES: Final = 1024 * 1024
HASH_SECONDS: Final = 30.0
"""How long a sum may take: a call must answer within CALL_LIMIT_SECONDS."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did."""

    path: str
    bytes_written: int
    size: int
    created: bool


@dataclass(frozen=True, slots=True)
class Info:
    """What is known of one entry; a link is not followed."""

    path: str
    type: Kind
    size: int
    mtime: float
    mode: int
    link_target: str | None
    sha256: str | None


class Home:
    """One folder under the names it is known by. A context manager: it holds the folder open."""

    def __init__(self, names: Sequence[Path], *, opener: Opener | None = None) -> None:
        self.root = Root(names, opener=opener)
        self._editing = threading.Lock()

    def __enter__(self) -> Self:
        self.root.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.root.__exit__(kind, exc, traceback)

    def relative(self, path: str) -> bytes:
        """Return `path` relative to the home, `.` for the home itself. No file is looked at.

        Raises:
            PathRefusedError: It is absolute and not under a name of the home, or holds a NUL.
        """
        return self.root.relative(path)

    def shown(self, relative: bytes) -> str:
        """Return how a path is shown: absolute, under the home's first name."""
        return self.root.shown(relative)

    # --- reading ---------------------------------------------------------------------------------

    def read(self, path: str, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return up to `max_bytes` of a file from `offset`, and the file's size.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: It is no regular file, or cannot be read.
        """
        relative = self.relative(path)
        with explained("read", path):
            with self.root.fd(relative, os.O_PATH) as fd:
                expect_file(fd, path)
            # Non-blocking: whatever was put there between the two opens must not hang us.
            with self.root.fd(relative, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY) as fd:
                size = expect_file(fd, path).st_size
                data = bytearray()
                while len(data) < max_bytes:
                    piece = os.pread(fd, max_bytes - len(data), offset + len(data))
                    if not piece:
                        break
                    data += piece
                return bytes(data), max(size, offset + len(data) if data else 0)

    def read_tail(self, path: str, lines: int, max_bytes: int) -> tuple[bytes, int]:
        """Return a file's last lines, `max_bytes` of them at most, and the file's size.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: It is no regular file, or cannot be read.
        """
        size = self.info(path, sha256=False, follow=True).size
        data, grown = self.read(path, max(size - max_bytes, 0), max_bytes)
        start = len(data)
        if data.endswith(b"\n"):
            start -= 1
        for _ in range(lines):
            start = data.rfind(b"\n", 0, max(start, 0))
            if start < 0:
                return data, grown
        return data[start + 1 :], grown

    def info(self, path: str, *, sha256: bool, follow: bool = False) -> Info:
        """Return what is known of an entry, with a file's sum if asked.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: There is no such entry, or it takes too long to read.
        """
        relative = self.relative(path)
        with explained("look at", path):
            with self.root.fd(relative, os.O_PATH | (0 if follow else os.O_NOFOLLOW)) as fd:
                status = os.fstat(fd)
                kind = kind_of(status.st_mode)
                target = name_to_text(os.readlink(b"", dir_fd=fd)) if kind == "symlink" else None
            digest = self._sum(relative, path) if sha256 and kind == "file" else None
        mode = stat.S_IMODE(status.st_mode)
        mtime = round(status.st_mtime, 3)
        return Info(self.shown(relative), kind, status.st_size, mtime, mode, target, digest)

    def _sum(self, relative: bytes, path: str) -> str:
        digest = hashlib.sha256()
        until = time.monotonic() + HASH_SECONDS
        with self.root.fd(relative, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY) as fd:
            expect_file(fd, path)
            while piece := os.read(fd, READ_BYTES):
                digest.update(piece)
                if time.monotonic() > until:
                    raise FileFailedError(
                        f"{short(path)} is too large to sum in one call: use sha256sum in run_command"
                    )
        return digest.hexdigest()

    def entries(
        self,
        path: str,
        *,
        recursive: bool,
        max_entries: int,
        wanted: Callable[[str], bool] | None = None,
    ) -> Listing:
        """Return a folder's entries in the order of their names, or a single file's own entry.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: There is no such folder, or it cannot be read.
        """
        relative = self.relative(path)
        with explained("list", path):
            return list_entries(
                self.root, relative, recursive=recursive, max_entries=max_entries, wanted=wanted
            )

    # --- writing ---------------------------------------------------------------------------------

    def write(self, path: str, data: bytes, *, mode: int | None, create_only: bool) -> Written:
        """Replace a file's content, or make the file and its folders. All or nothing.

        Raises:
            PathRefusedError: The path leads outside the home.
            FileFailedError: It is no regular file, exists already (`create_only`), or the write
                failed; then the old content is still there.
        """
        relative = self.relative(path)
        with explained("write", path):
            if not create_only:
                relative = self.root.through_links(relative)
            with self.root.parent(relative, make=True) as (folder, name):
                before = status_of(name, folder)
                if before is not None:
                    if create_only:
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                    expect_kind(before, path)
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
        with explained("append to", path):
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
        with explained("append to", path):
            return self.shown(relative), self._open_to_append(relative, path)[0]

    def _open_to_append(self, relative: bytes, path: str) -> tuple[int, bool]:
        relative = self.root.through_links(relative)
        flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with self.root.parent(relative, make=True) as (folder, name):
            before = status_of(name, folder)
            if before is not None:
                expect_kind(before, path)
            flags |= os.O_CREAT | os.O_NOFOLLOW
            fd = os.open(name, flags, NEW_FILE_MODE, dir_fd=folder)
        try:
            expect_file(fd, path)
        except BaseException:
            os.close(fd)
            raise
        os.set_blocking(fd, True)
        return fd, before is None

    def edit(
        self, path: str, old_text: str, new_text: str, *, replace_all: bool, max_bytes: int
    ) -> tuple[str, Edit]:
        """Replace text in a file; return the file's path and what was done. All or nothing.

        Raises:
            ArgumentError: The texts cannot be used.
            PathRefusedError: The path leads outside the home.
            FileFailedError: The text is not there once, the file is none or too large, or the write
                failed; then the old content is still there.
        """
        relative = self.relative(path)
        # Two edits of one file at once must not lose the first.
        with explained("edit", path), self._editing:
            relative = self.root.through_links(relative)
            with self.root.parent(relative) as (folder, name):
                for _ in range(EDIT_TRIES):
                    before = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    expect_kind(before, path)
                    if before.st_size > max_bytes:
                        raise FileFailedError(_too_large(path, before.st_size, max_bytes))
                    data, _ = self.read(self.shown(relative), 0, max_bytes)
                    made = replace_text(data, old_text, new_text, replace_all=replace_all)
                    if len(made.data) > max_bytes:
                        raise FileFailedError(_too_large(path, len(made.data), max_bytes))
                    with contextlib.suppress(ChangedMeanwhileError):
                        replace(
                            folder,
                            name,
                            made.data,
                            stat.S_IMODE(before.st_mode),
                            unchanged=partial(_still, before, name, folder),
                        )
                        return self.shown(relative), made
        raise FileFailedError(
            f"{short(path)} is being changed by somebody else all the time; nothing was changed"
        )

    def move(self, path: str, new_path: str, *, overwrite: bool) -> tuple[str, str, Kind]:
        """Give an entry another path, folders made; return both paths and what it is.

        Raises:
            PathRefusedError: A path leads outside the home, or is the home itself.
            FileFailedError: There is no such entry, or something is in the way.
        """
        source, target = self.relative(path), self.relative(new_path)
        if b"." in (source, target):
            raise PathRefusedError(
                "the home itself cannot be moved or replaced: move what is in it"
            )
        with explained("move", path), self.root.parent(source) as (folder, name):
            kind = kind_of(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
            with (
                explained("move to", new_path),
                self.root.parent(target, make=True) as (other, new_name),
            ):
                try:
                    move(folder, name, other, new_name, overwrite=overwrite)
                except OSError as exc:
                    if reason := _MOVE_REASONS.get(exc.errno or 0):
                        raise FileFailedError(
                            f"cannot move {short(path)} to {short(new_path)}: {reason}"
                        ) from exc
                    raise
        return self.shown(source), self.shown(target), kind

    def delete(self, path: str, *, recursive: bool) -> Kind:
        """Delete a file, a link (not what it points to), or a folder; return what it was.

        Raises:
            PathRefusedError: The path leads outside the home, or is the home itself.
            FileFailedError: There is no such entry, or the folder is not empty.
        """
        relative = self.relative(path)
        if relative == b".":
            raise PathRefusedError("the home itself cannot be deleted: delete what is in it")
        with explained("delete", path), self.root.parent(relative) as (folder, name):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=folder)
            elif recursive:
                try:
                    shutil.rmtree(name, dir_fd=folder)
                except RecursionError:
                    raise FileFailedError(
                        f"{short(path)} is nested too deep for this tool: use rm -rf in run_command"
                    ) from None
            else:
                os.rmdir(name, dir_fd=folder)
            return kind_of(status.st_mode)


def _still(before: os.stat_result, name: bytes, folder: int) -> bool:
    """Whether a file in a folder (a descriptor) is as it was."""
    now = status_of(name, folder)
    return now is not None and (before.st_ino, before.st_size, before.st_mtime_ns) == (
        now.st_ino,
        now.st_size,
        now.st_mtime_ns,
    )


def _too_large(path: str, size: int, limit: int) -> str:
    return (
        f"{short(path)} has {size} bytes, the limit is {limit} (MAX_FILE_BYTES): "
        "edit it with sed or a script in run_command"
    )


_MOVE_REASONS: Final = {
    errno.EEXIST: (
        "something is there already, and it was left alone; new_path is the whole new path, "
        "also when it is to be in a folder that exists (overwrite=true replaces a file)"
    ),
    errno.ENOTEMPTY: "a folder is there that is not empty: delete_file it first, or use another path",
    errno.EISDIR: "a folder is there: new_path is the whole new path, such as folder/name",
    errno.ENOTDIR: "a file is there, and a folder cannot replace it: delete_file it first",
    errno.EINVAL: "a folder cannot be moved into itself",
    errno.EXDEV: "it is on another file system: use mv in run_command",
}
