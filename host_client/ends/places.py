"""Names and folders: which names are harmless, and how to get to a folder through no link at all.

A folder is held as a descriptor and its descendants are opened one component at a time, never
through a symbolic link, so nothing that is renamed or swapped meanwhile leads elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DEPTH = 100
"""Folders within folders; each is an open descriptor, of which macOS gives 256."""
MAX_NAME = 255
MAX_LINK = 4095
PART_PREFIX = ".podpipe-part-"
"""Files that are being received. Never sent, never accepted from the other end."""

# To pass through a folder takes no right to list it.
_PASS = getattr(os, "O_PATH", getattr(os, "O_SEARCH", os.O_RDONLY))
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def bad_name(name: str) -> str:
    """Why a name may not be used for an entry of a folder; empty if it may."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return "its name would lead elsewhere"
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError:
        return "its name is no name"
    if size > MAX_NAME:
        return f"its name has {size} bytes, more than {MAX_NAME}"
    if name.startswith(PART_PREFIX):
        return "such names are for unfinished transfers"
    return ""


def bad_path(parts: Sequence[str]) -> str:
    """Why a path below the target may not be used; empty if it may."""
    if not 0 < len(parts) <= MAX_DEPTH:
        return f"it lies deeper than {MAX_DEPTH} folders"
    for part in parts:
        if why := bad_name(part):
            return why
    return ""


def bad_link(target: str, depth: int) -> str:
    """Why a link may not be made that lies `depth` folders below the top; empty if it may.

    At a depth below 0 only a link could be the top itself, and it may not.

    `..` is allowed only in front: there it leads from a real folder to a real folder, while after
    a name it could lead through another link.
    """
    if not target or "\0" in target:
        return "a link to nothing"
    try:
        if len(os.fsencode(target)) > MAX_LINK:
            return "a link that is too long"
    except UnicodeEncodeError:
        return "a link whose target is no name"
    if target.startswith("/"):
        return f"a link to the absolute path {target!r}"
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    if ups > depth or ".." in parts[ups:]:
        return f"a link to {target!r}, which may leave the folder"
    return ""


def kind_of(mode: int) -> str:
    """What sort of entry a mode tells of: d, f, l, or a word for what is not transferred."""
    if stat.S_ISREG(mode):
        return "f"
    if stat.S_ISDIR(mode):
        return "d"
    if stat.S_ISLNK(mode):
        return "l"
    for test, word in (
        (stat.S_ISFIFO, "FIFO"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "device"),
    ):
        if test(mode):
            return word
    return "special file"


def settle(folder: int) -> None:
    """Wait until all that was written to the file system of a folder (a descriptor) is stored.

    One wait for all files: to wait for each of thousands takes minutes on some disks.

    Raises:
        OSError: the disk did not take it.
    """
    try:
        import ctypes

        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except (ImportError, AttributeError, OSError):
        os.sync()  # macOS has nothing narrower
        return
    if syncfs(ctypes.c_int(folder)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def open_folder(path: str, *, create: bool = False) -> int:
    """Open an absolute path that was resolved already; a link on the way is refused.

    Args:
        path: as realpath gives it.
        create: make the folders that are missing.

    Raises:
        OSError: ENOTDIR or ELOOP where something was swapped for a link meanwhile.
    """
    parts = [part for part in path.split("/") if part]
    fd = os.open("/", _PASS | _FOLDER)
    try:
        for part in parts:
            fd = _step(fd, part, _PASS, create=create)
        return _reopened(fd)
    finally:
        os.close(fd)


def _reopened(fd: int) -> int:
    return os.open(".", os.O_RDONLY | _FOLDER, dir_fd=fd)


def _step(fd: int, part: str, access: int, *, create: bool) -> int:
    """The child folder, in exchange for `fd`, which is closed if all went well."""
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, dir_fd=fd)
    child = os.open(part, access | _FOLDER, dir_fd=fd)
    os.close(fd)
    return child


class Tree:
    """The folders below one folder, opened as they are needed; the way to the last one stays open.

    Args:
        root: descriptor, which the tree owns.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self.made: set[tuple[str, ...]] = set()
        """Folders that were not there before."""
        self._way: list[tuple[str, int]] = []

    def close(self) -> None:
        """Close all descriptors."""
        for _, fd in self._way:
            os.close(fd)
        self._way = []
        os.close(self.root)

    def folder(self, parts: Sequence[str]) -> int:
        """A descriptor of a folder, good until the next call.

        Raises:
            OSError: it is not there, or not a folder.
        """
        same = 0
        while same < min(len(parts), len(self._way)) and self._way[same][0] == parts[same]:
            same += 1
        while len(self._way) > same:
            os.close(self._way.pop()[1])
        fd = self._way[-1][1] if self._way else self.root
        for part in parts[same:]:
            fd = os.open(part, os.O_RDONLY | _FOLDER, dir_fd=fd)
            self._way.append((part, fd))
        return fd

    def make(self, parts: Sequence[str]) -> bool:
        """Make a folder unless it is there; its parent has to be.

        Returns:
            Whether it is new.

        Raises:
            OSError: something else is there, a link for one.
        """
        parent = self.folder(parts[:-1])
        try:
            # Its own bits come last: a folder may be one that nobody may write to.
            os.mkdir(parts[-1], 0o700, dir_fd=parent)
        except FileExistsError:
            self.folder(parts)
            return False
        self.made.add(tuple(parts))
        return True

    def remove(self, parts: Sequence[str]) -> int:
        """Remove an entry and what is below it; follows no link.

        Returns:
            How many entries that were.
        """
        parent = self.folder(parts[:-1])
        return _remove(parent, parts[-1], len(parts))


def _remove(parent: int, name: str, depth: int) -> int:
    try:
        os.unlink(name, dir_fd=parent)
        return 1
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
    if depth > MAX_DEPTH:
        raise OSError(errno.ELOOP, f"deeper than {MAX_DEPTH} folders", name)
    fd = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=parent)
    try:
        with os.scandir(fd) as found:
            names = [entry.name for entry in found]
        count = sum(_remove(fd, child, depth + 1) for child in names)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
    return count + 1
