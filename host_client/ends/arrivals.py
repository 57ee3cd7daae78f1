"""Files that arrive: written beside their places, read back and summed, and renamed into place.

Until a file is complete and has the sum that it had at its source, what was in its place stands there.
What is new may have its name before it is stored, and its folder's names are stored after that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat

from host_client.ends import places, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Parts = tuple[str, ...]

STORED_SINGLY = 32
"""So many files are stored one by one. More wait for the whole file system once, which costs what
anybody has written to it."""
KEEP_BYTES = 1024 * 1024
"""An unfinished file of at least so many bytes is kept for the next try."""
_BEHIND = 8 * 1024 * 1024
"""Bytes after which the disk is set to work: the rest of them is not one long wait at the end."""
_READ_BACK = 256 * 1024
KEPT_BITS = 0o777
"""Never setuid, setgid or sticky."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class File:
    """A file that is offered, and what is known of it.

    Args:
        parts: its path below the target.
        size: in bytes, when it was listed.
    """

    __slots__ = ("have", "part", "parts", "same", "size", "summed")

    def __init__(self, parts: Parts, size: int) -> None:
        self.parts = parts
        self.part = part_of(parts[-1])
        self.size = size
        self.have = 0
        """Bytes of it that are here already."""
        self.same = False
        """Whether what we have is the file in its place, not an unfinished one."""
        self.summed: Any = None


class _Writing:
    """The file that is under way."""

    def __init__(self, file: File, offset: int, size: int, mode: int, mtime: int) -> None:
        self.file = file
        self.offset = offset
        self.size = size
        self.mode = mode & KEPT_BITS
        self.mtime = mtime
        self.fd = -1
        self.error = ""
        self.summed = file.summed if offset else hashlib.sha256()
        self._behind = offset

    def add(self, data: bytes | None, count: int, back: bytearray) -> None:
        """Write the next stretch, or leave a hole, and read it back."""
        end = self.offset + count
        if data is None:
            os.ftruncate(self.fd, end)
        else:
            rest = memoryview(data)
            at = self.offset
            while rest:
                done = os.pwrite(self.fd, rest, at)
                at += done
                rest = rest[done:]
        view = memoryview(back)
        while self.offset < end:
            got = os.preadv(self.fd, [view[: end - self.offset]], self.offset)
            if not got:
                raise OSError(errno.EIO, "what was written is not there")
            self.summed.update(view[:got])
            self.offset += got
        if self.offset - self._behind >= _BEHIND:
            _begin_to_store(self.fd, self._behind, self.offset - self._behind)
            self._behind = self.offset


class Arrivals:
    """The files of one transfer.

    Args:
        tree: below which their places are.
    """

    def __init__(self, tree: places.Tree) -> None:
        self._tree = tree
        self._writing: _Writing | None = None
        self._placed = 0
        self._back = bytearray(_READ_BACK)
        self.touched: set[Parts] = set()
        """Folders with new names in them."""
        self.unchanged = 0
        """Files that were in their places already."""
        self.kept: list[str] = []
        """Unfinished files that were left for the next try."""

    def look(self, file: File, channel: wire.Channel) -> None:
        """Find out what of a file is here already, in its place or unfinished.

        Raises:
            OSError: a folder is in its place, or nothing can be looked at.
            wire.Lost: the channel was stopped meanwhile.
        """
        folder = self._tree.folder(file.parts[:-1])
        for name, same in ((file.part, False), (file.parts[-1], True)):
            try:
                fd = os.open(name, _READ, dir_fd=folder)
            except OSError:
                continue  # nothing, a link, nothing that may be read: it is written anew
            try:
                status = os.fstat(fd)
                if same and stat.S_ISDIR(status.st_mode):
                    raise OSError(errno.EISDIR, "a folder is in its place")
                enough = status.st_size == file.size if same else status.st_size <= file.size
                if not stat.S_ISREG(status.st_mode) or not status.st_size or not enough:
                    continue
                file.summed = hashlib.sha256()
                file.have = wire.add_to_sum(fd, status.st_size, file.summed, channel)
                file.same = same
                return
            finally:
                os.close(fd)

    def whole(self, file: File, data: memoryview, mode: int, mtime: int, digest: bytes) -> bytes:
        """Write a small file, read it back, and place it if it has the sum that it should.

        Returns:
            Its sum; it is in its place if that is `digest`.

        Raises:
            OSError: it cannot be written or placed.
        """
        folder = self._tree.folder(file.parts[:-1])
        fd = _create(folder, file.part)
        placed = False
        try:
            rest = data
            while rest:
                rest = rest[os.write(fd, rest) :]
            mine = hashlib.sha256(os.pread(fd, len(data) + 1, 0)).digest()
            if mine == digest:
                os.fchmod(fd, mode & KEPT_BITS)
                os.utime(fd, ns=(mtime, mtime))
                self._store(fd, folder, file)
                placed = True
        finally:
            if not placed:
                with contextlib.suppress(OSError):
                    _unlink_own(fd, folder, file.part)
            os.close(fd)
        return mine

    # --- a file in stretches ---------------------------------------------------------------

    def begin(self, file: File, offset: int, size: int, mode: int, mtime: int) -> None:
        """Begin a file, or go on with what is here of it; `finish` tells what went wrong."""
        assert not self._writing
        writing = self._writing = _Writing(file, offset, size, mode, mtime)
        if offset and file.same:
            if size != offset:
                writing.error = "it changed while it was being read"
            return
        try:
            folder = self._tree.folder(file.parts[:-1])
            if not offset:
                writing.fd = _create(folder, file.part)
            else:
                writing.fd = os.open(file.part, _WRITE, dir_fd=folder)
                status = os.fstat(writing.fd)
                if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                    raise OSError(errno.EBUSY, "its unfinished copy was tampered with")
        except OSError as error:
            writing.error = error.strerror or str(error)

    def add(self, data: bytes | None, count: int) -> None:
        """Add the next bytes, or a hole of so many.

        Raises:
            wire.Broken: the sender has announced fewer, or none at all.
        """
        writing = self._writing
        if writing is None:
            raise wire.Broken("bytes of no file came")
        if writing.offset + count > writing.size or count > wire.MAX_PAYLOAD:
            raise wire.Broken("a file has more bytes than were announced")
        if writing.error:
            return
        if writing.fd < 0:
            raise wire.Broken("bytes came of a file that needs none")
        try:
            writing.add(data, count, self._back)
        except OSError as error:
            writing.error = error.strerror or str(error)

    def finish(self, digest: str, *, changed: bool) -> tuple[str, str]:
        """Place the file that is under way if it is complete and as it was at its source.

        Returns:
            Its sum, and what went wrong; nothing of it is left then.
        """
        writing = self._writing
        assert writing
        mine = str(writing.summed.hexdigest())
        if changed:
            writing.error = writing.error or "it changed while it was being read"
        elif not writing.error and (writing.offset != writing.size or mine != digest):
            writing.error = differs(mine, digest[:64])
        if not writing.error:
            try:
                self._place(writing)
            except OSError as error:
                writing.error = error.strerror or str(error)
        if writing.error:
            self.drop()
            return mine, writing.error
        if writing.fd >= 0:
            os.close(writing.fd)
        self._writing = None
        return mine, ""

    def drop(self) -> None:
        """Leave nothing of the file that is under way."""
        writing, self._writing = self._writing, None
        if writing and writing.fd >= 0:
            with contextlib.suppress(OSError):
                folder = self._tree.folder(writing.file.parts[:-1])
                _unlink_own(writing.fd, folder, writing.file.part)
            os.close(writing.fd)

    def abandon(self) -> None:
        """Keep a large unfinished file for the next try; what is small is soon sent again."""
        writing = self._writing
        if writing and writing.fd >= 0 and not writing.error and writing.offset >= KEEP_BYTES:
            os.close(writing.fd)
            self._writing = None
            self.kept.append("/".join((*writing.file.parts[:-1], writing.file.part)))
        self.drop()

    # --- its place -------------------------------------------------------------------------

    def _place(self, writing: _Writing) -> None:
        """Give a complete file its bits, its time and its name."""
        *above, name = writing.file.parts
        folder = self._tree.folder(above)
        if writing.fd >= 0:
            os.fchmod(writing.fd, writing.mode)
            os.utime(writing.fd, ns=(writing.mtime, writing.mtime))
            self._store(writing.fd, folder, writing.file)
            return
        self.unchanged += 1
        fd = os.open(name, _READ, dir_fd=folder)
        try:
            status = os.fstat(fd)
            if (status.st_mode & KEPT_BITS) != writing.mode:
                os.fchmod(fd, writing.mode)
            if status.st_mtime_ns != writing.mtime:
                os.utime(fd, ns=(writing.mtime, writing.mtime))
        finally:
            os.close(fd)

    def _store(self, fd: int, folder: int, file: File) -> None:
        """Put a file in its place; what stands there goes only for what is stored already."""
        *above, name = file.parts
        self._placed += 1
        replaces = tuple(above) not in self._tree.made and _exists(folder, name)
        if replaces:
            os.fsync(fd)
        if not _is_own(fd, folder, file.part):
            # What has that name now is another's, and not complete.
            raise OSError(errno.EBUSY, "another transfer of it began meanwhile")
        os.rename(file.part, name, src_dir_fd=folder, dst_dir_fd=folder)
        self.touched.add(tuple(above))
        if not replaces and self._placed <= STORED_SINGLY:
            # Under its new name: one turn of the disk's journal stores both.
            try:
                os.fsync(fd)
            except OSError:
                _unlink_own(fd, folder, name)
                raise

    def settle(self) -> None:
        """Store all that was placed: nothing may be said to have arrived that a crash could undo.

        Raises:
            OSError: the disk did not take it.
        """
        if self._placed > STORED_SINGLY:
            places.settle(self._tree.root)
        else:
            for parts in sorted(self.touched):
                os.fsync(self._tree.folder(parts))


def part_of(name: str) -> str:
    """Where a file is received until it is complete; the same at every try."""
    return places.PART_PREFIX + hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def differs(here: str, there: str) -> str:
    """Why a file is not what it was at its source."""
    return f"its SHA-256 is {here} here and {there} at the source"


def _begin_to_store(fd: int, offset: int, size: int) -> None:
    """Let the disk begin with what is complete; on Linux this writes, and then lets go of it."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_own(fd: int, folder: int, part: str) -> bool:
    """Whether an unfinished file is still the one that we write to."""
    try:
        found = os.stat(part, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def _unlink_own(fd: int, folder: int, part: str) -> None:
    if _is_own(fd, folder, part):
        os.unlink(part, dir_fd=folder)


def _create(folder: int, name: str) -> int:
    """A new file; what an earlier try left of it goes."""
    try:
        return os.open(name, _WRITE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    except FileExistsError:
        os.unlink(name, dir_fd=folder)
        return os.open(name, _WRITE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
