"""The receiving end: nothing that the sender says can make it write outside its target.

Only plain files, folders and links that stay inside are made, each below folders that were made or
opened without following a link. A file is written beside its place, read back, compared by SHA-256
with what the sender read, and renamed into place; until then the old one stands. What is reported is
stored.
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
    from collections.abc import Callable
    from typing import Any

    Parts = tuple[str, ...]

STORED_SINGLY = 32
"""So many files are stored one by one. More wait for the whole file system once, which costs what
anybody has written to it."""
KEEP_BYTES = 1024 * 1024
"""An unfinished file of at least so many bytes is kept for the next try."""
MAX_LISTED = 1000
"""Refusals and failures that are listed one by one."""
_LISTING_BYTES = 4096
_MOST = 1 << 62
"""Sizes, and nanoseconds since 1970."""
_KEPT_BITS = 0o777
"""Never setuid, setgid or sticky."""


_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Target:
    """Where to receive.

    Args:
        path: absolute, as realpath gives it.
        contents: what arrives is the contents of this folder, made if need be.
        into: it is a folder, made if need be, that what arrives goes into.
        delete: remove what did not arrive (with `contents` only).
    """

    def __init__(self, path: str, *, contents: bool, into: bool, delete: bool) -> None:
        self.path = path
        self.contents = contents
        self.into = into
        self.delete = delete

    def lacks(self, name: str) -> bool:
        """Whether nothing is there yet of something that is called so by the sender."""
        try:
            if self.contents:
                return not os.listdir(self.path)
            if self.into or os.path.isdir(self.path):
                return not os.path.lexists(os.path.join(self.path, name))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return not os.path.lexists(self.path)

    def open(self) -> tuple[places.Tree, str]:
        """The tree to write below, and the name that the one thing that arrives gets, if another.

        Raises:
            OSError: it is no folder, or cannot be made.
        """
        if self.contents or self.into or os.path.isdir(self.path):
            return places.Tree(places.open_folder(self.path, create=True)), ""
        parent, name = os.path.split(self.path)
        return places.Tree(places.open_folder(parent, create=True)), name


class _File:
    """A file that is offered, and what is known of it."""

    __slots__ = ("have", "part", "parts", "same", "size", "summed")

    def __init__(self, parts: Parts, size: int) -> None:
        self.parts = parts
        self.part = _part(parts[-1])
        self.size = size
        self.have = 0
        self.same = False
        """Whether what we have is the file in its place, not an unfinished one."""
        self.summed: Any = None


class _Writing:
    """The file that is under way."""

    def __init__(self, number: int, file: _File, offset: int, size: int, mode: int, mtime: int):
        self.number = number
        self.file = file
        self.offset = offset
        self.size = size
        self.mode = mode & _KEPT_BITS
        self.mtime = mtime
        self.fd = -1
        self.error = ""
        self.summed = file.summed if offset else hashlib.sha256()

    def add(self, data: bytes | None, count: int) -> None:
        """Write the next stretch, or leave a hole, and read it back."""
        end = self.offset + count
        if end > self.size or count > wire.MAX_PAYLOAD:
            raise wire.Broken("a file has more bytes than were announced")
        if data is None:
            os.ftruncate(self.fd, end)
        else:
            rest = memoryview(data)
            at = self.offset
            while rest:
                done = os.pwrite(self.fd, rest, at)
                at += done
                rest = rest[done:]
        while self.offset < end:
            back = os.pread(self.fd, end - self.offset, self.offset)
            if not back:
                raise OSError(errno.EIO, "what was written is not there")
            self.summed.update(back)
            self.offset += len(back)


class Receiver:
    """One transfer, as its receiving end sees it.

    Args:
        channel: to the sender.
        target: where to.
        on_bytes: told of every stretch that has arrived, or need not.
        on_total: told how many files and bytes that will be.
    """

    def __init__(
        self,
        channel: wire.Channel,
        target: Target,
        on_bytes: Callable[[int], None],
        on_total: Callable[[int, int], None],
    ) -> None:
        self._channel = channel
        self._target = target
        self._on_bytes = on_bytes
        self._on_total = on_total
        self._tree: places.Tree = None  # type: ignore[assignment]  # opened by `run`
        self._rename = ""
        self._seen: set[Parts] = set()
        self._folders: dict[Parts, tuple[int, int]] = {}
        self._new: set[Parts] = set()
        self._files: list[_File | None] = []
        self._links: list[tuple[Parts, str, int]] = []
        self._pending: dict[int, _File] = {}
        self._writing: _Writing | None = None
        self._placed = 0
        self._touched: set[Parts] = set()
        """Folders with new names in them."""
        self.sums: dict[int, str] = {}
        """SHA-256 of each file that is in its place, as read back."""
        self.bytes = 0
        self.unchanged = 0
        self.removed = 0
        self.refused: list[tuple[str, str]] = []
        self.failed: list[tuple[str, str]] = []
        self.unlisted = 0
        """How many more were refused or failed than are listed."""
        self.kept: list[str] = []
        """Unfinished files that were left for the next try."""

    def run(self) -> None:
        """Receive everything.

        Raises:
            wire.Lost: the channel broke; `kept` says what is left of it.
            wire.Broken: the sender does not keep to the protocol.
            wire.Refused: either end cannot do the job at all.
        """
        kind, payload = self._channel.receive()  # the sender may have nothing
        try:
            self._tree, self._rename = self._target.open()
        except OSError as error:
            raise wire.Refused(f"{self._target.path}: {error.strerror}") from error
        try:
            while kind != wire.ENTRIES_END:
                if kind == wire.SMALL:
                    self._take_early(payload)
                elif kind == wire.ENTRIES:
                    for entry in wire.parsed(payload, list):
                        self._offer(entry)
                else:
                    raise wire.Broken(f"{kind!r} came among the entries")
                kind, payload = self._channel.receive()
            self._want()
            self._take()
            self._link()
            if self._target.delete and self._target.contents:
                self._remove()
            self._finish_folders()
            self._settle()
        finally:
            self._abandon()
            self._tree.close()

    def report(self) -> None:
        """Tell the sender what became of everything."""
        results: list[list[Any]] = [
            ["file", number, digest] for number, digest in self.sums.items()
        ]
        results += [["refused", *pair] for pair in self.refused]
        results += [["failed", *pair] for pair in self.failed]
        results += [["count", "unlisted", self.unlisted], ["count", "removed", self.removed]]
        self._channel.tell_rows(wire.RESULTS, results)
        self._channel.send(wire.RESULTS_END)
        self._channel.flush()

    # --- what is offered -------------------------------------------------------------------

    def _refuse(self, path: str, why: str) -> None:
        self._list(self.refused, path, why)

    def _fail(self, parts: Parts, error: OSError | str) -> None:
        why = error if isinstance(error, str) else error.strerror or str(error)
        self._list(self.failed, "/".join(parts), why)

    def _list(self, into: list[tuple[str, str]], path: str, why: str) -> None:
        if len(into) < MAX_LISTED:
            into.append((path[:_LISTING_BYTES], why[:_LISTING_BYTES]))
        else:
            self.unlisted += 1

    def _offer(self, entry: Any) -> None:
        if type(entry) is not list or [type(value) for value in entry] != [
            str, str, int, int, int, str,
        ]:  # fmt: skip
            raise wire.Broken("an entry is none")
        path, kind, mode, mtime, size, link = entry
        if not 0 <= size <= _MOST or not -_MOST <= mtime <= _MOST:
            raise wire.Broken("an entry has numbers that no file has")
        parts = tuple(path.split("/"))
        if kind == wire.UNLISTED:
            self._fail(parts, f"its contents cannot be listed: {link}")
            return
        if self._rename:
            parts = (self._rename, *parts[1:])
        # Files are known by their number at both ends, so one that is refused has one, too.
        if kind == "f":
            self._files.append(None)
        why = places.bad_path(parts)
        if not why and parts in self._seen:
            why = "it is there twice"
        if not why and len(self._seen) >= wire.MAX_ENTRIES:
            raise wire.Broken("there is no end to the entries")
        if why:
            self._refuse(path, why)
            return
        self._seen.add(parts)
        if len(parts) > 1 and parts[:-1] not in self._folders:
            # Its folder was refused, or never offered: one line for the folder is enough.
            if parts[:-1] not in self._seen:
                self._refuse(path, "its folder was not offered")
            return
        if kind == "f":
            self._files[-1] = _File(parts, size)
        elif kind == "d":
            self._make_folder(parts, mode, mtime)
        elif kind == "l":
            # Within what was asked for, not only within the folder that it goes into.
            why = places.bad_link(link, len(parts) - (1 if self._target.contents else 2))
            if why:
                self._refuse(path, why)
            else:
                self._links.append((parts, link, mtime))
            return
        else:
            self._refuse(path, f"a {kind[:60]}")
            return
        if mode & ~_KEPT_BITS and mode & (stat.S_ISUID | stat.S_ISGID) and kind == "f":
            self._refuse(path, "its setuid and setgid bits; the file itself is kept")

    def _make_folder(self, parts: Parts, mode: int, mtime: int) -> None:
        try:
            if self._tree.make(parts):
                self._new.add(parts)
                self._touched.add(parts[:-1])
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                self._refuse("/".join(parts), "a folder where a file or a link is already")
            else:
                self._fail(parts, error)
            return
        self._folders[parts] = (mode & _KEPT_BITS, mtime)

    # --- what is wanted --------------------------------------------------------------------

    def _want(self) -> None:
        batch: list[list[Any]] = []
        total = need = 0
        for number, file in enumerate(self._files):
            if file is None:
                continue
            if file.parts[:-1] not in self._new:
                try:
                    self._look(file)
                except OSError as error:
                    self._fail(file.parts, error)
                    continue
            self._pending[number] = file
            total += file.size
            need += 0 if file.same else file.size - file.have
            batch.append(
                [number, file.have, file.summed.hexdigest() if file.summed is not None else ""]
            )
            if len(batch) >= wire.ROWS:
                self._channel.tell(wire.WANTS, batch)
                batch = []
        space = os.fstatvfs(self._tree.root)
        free = space.f_bavail * space.f_frsize
        if need > free:
            raise wire.Refused(f"{self._target.path}: {need} bytes are needed, {free} are free")
        self._on_total(len(self._pending), total)
        if batch:
            self._channel.tell(wire.WANTS, batch)
        self._channel.tell(wire.WANTS_END, total)
        self._channel.flush()

    def _look(self, file: _File) -> None:
        """Find out what of a file is here already, in its place or unfinished."""
        folder = self._tree.folder(file.parts[:-1])
        for name, same in ((file.part, False), (file.parts[-1], True)):
            try:
                fd = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
                )
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
                file.have = wire.add_to_sum(fd, status.st_size, file.summed, self._channel)
                file.same = same
                return
            finally:
                os.close(fd)

    # --- what arrives ----------------------------------------------------------------------

    def _take(self) -> None:
        while True:
            kind, payload = self._channel.receive()
            if kind == wire.SMALL:
                self._take_small(payload)
            elif kind == wire.DATA:
                self._add(payload, len(payload))
            elif kind == wire.BEGIN:
                self._begin(wire.parsed(payload, list))
            elif kind == wire.FINISH:
                self._finish(wire.parsed(payload, list))
            elif kind == wire.ZEROS:
                self._add(None, int.from_bytes(payload, "big"))
            elif kind == wire.UNREADABLE:
                number, why = wire.parsed(payload, list)
                if self._writing and self._writing.number == number:
                    file = self._writing.file
                    self._drop()
                else:
                    file = self._wanted(number)
                self._fail(file.parts, str(why))
            elif kind == wire.DATA_END:
                break
            else:
                raise wire.Broken(f"{kind!r} came among the files")
        for file in self._pending.values():
            self._fail(file.parts, "it was not sent")

    def _take_early(self, payload: bytes) -> None:
        """Take a small file that an eager sender sends before it was asked to."""
        number = int.from_bytes(payload[:4], "big")
        if number >= len(self._files):
            raise wire.Broken("a file came that was not offered")
        file = self._files[number]
        if file is not None:
            self._files[number] = None
            self._pending[number] = file
            self._take_small(payload)

    def _take_small(self, payload: bytes) -> None:
        head = wire.SMALL_HEAD
        if len(payload) < head.size:
            raise wire.Broken("a small file is none")
        number, mode, size, mtime, digest = head.unpack_from(payload)
        file = self._wanted(number)
        if size != len(payload) - head.size or abs(mtime) > _MOST:
            raise wire.Broken("a small file has numbers that no file has")
        self._on_bytes(size)
        try:
            mine = self._place_small(file, payload[head.size :], mode & _KEPT_BITS, mtime, digest)
        except OSError as error:
            self._fail(file.parts, error)
            return
        if mine != digest:
            self._fail(file.parts, _differs(mine.hex(), digest.hex()))
            return
        self.sums[number] = mine.hex()
        self.bytes += size

    def _place_small(self, file: _File, data: bytes, mode: int, mtime: int, digest: bytes) -> bytes:
        """Write, read back, and rename into place if the sum is right; the sum."""
        folder = self._tree.folder(file.parts[:-1])
        fd = _create(folder, file.part)
        placed = False
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            mine = hashlib.sha256(os.pread(fd, len(data) + 1, 0)).digest()
            if mine == digest:
                os.fchmod(fd, mode)
                os.utime(fd, ns=(mtime, mtime))
                self._store(fd, folder, file)
                placed = True
        finally:
            if not placed:
                with contextlib.suppress(OSError):
                    _unlink_own(fd, folder, file.part)
            os.close(fd)
        return mine

    def _wanted(self, number: Any) -> _File:
        if type(number) is not int or number not in self._pending:
            raise wire.Broken("a file came that was not asked for")
        return self._pending.pop(number)

    def _begin(self, facts: list[Any]) -> None:
        if self._writing or [type(fact) for fact in facts] != [int] * 5:
            raise wire.Broken("a file began within another")
        number, offset, size, mode, mtime = facts
        file = self._wanted(number)
        if offset not in (0, file.have) or not offset <= size <= _MOST or abs(mtime) > _MOST:
            raise wire.Broken("a file began with numbers that no file has")
        writing = self._writing = _Writing(number, file, offset, size, mode, mtime)
        self._on_bytes(offset)
        if offset and file.same:
            if size != offset:
                writing.error = "it changed while it was being read"
            return
        part = file.part
        try:
            folder = self._tree.folder(file.parts[:-1])
            if not offset:
                writing.fd = _create(folder, part)
            else:
                writing.fd = os.open(part, _WRITE, dir_fd=folder)
                status = os.fstat(writing.fd)
                if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                    raise OSError(errno.EBUSY, "its unfinished copy was tampered with")
        except OSError as error:
            writing.error = error.strerror or str(error)

    def _add(self, data: bytes | None, count: int) -> None:
        writing = self._writing
        if writing is None:
            raise wire.Broken("bytes of no file came")
        self._on_bytes(count)
        if writing.error:
            return
        if writing.fd < 0:
            raise wire.Broken("bytes came of a file that needs none")
        try:
            writing.add(data, count)
        except OSError as error:
            writing.error = error.strerror or str(error)

    def _finish(self, facts: list[Any]) -> None:
        writing = self._writing
        if writing is None or [type(fact) for fact in facts] != [int, str, bool]:
            raise wire.Broken("a file ended that had not begun")
        number, digest, changed = facts
        if number != writing.number:
            raise wire.Broken("another file ended than had begun")
        mine = writing.summed.hexdigest()
        if changed:
            writing.error = writing.error or "it changed while it was being read"
        elif not writing.error and (writing.offset != writing.size or mine != digest):
            writing.error = _differs(mine, digest[:64])
        if not writing.error:
            try:
                self._place(writing)
            except OSError as error:
                writing.error = error.strerror or str(error)
        if writing.error:
            self._drop()
            self._fail(writing.file.parts, writing.error)
            return
        if writing.fd >= 0:
            os.close(writing.fd)
        self._writing = None
        self.sums[number] = mine
        self.bytes += writing.size

    def _place(self, writing: _Writing) -> None:
        """Give a complete file its bits, its time and its name."""
        *above, name = writing.file.parts
        folder = self._tree.folder(above)
        if writing.fd < 0:
            self.unchanged += 1
            fd = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
            )
            try:
                status = os.fstat(fd)
                if (status.st_mode & _KEPT_BITS) != writing.mode:
                    os.fchmod(fd, writing.mode)
                if status.st_mtime_ns != writing.mtime:
                    os.utime(fd, ns=(writing.mtime, writing.mtime))
            finally:
                os.close(fd)
            return
        os.fchmod(writing.fd, writing.mode)
        os.utime(writing.fd, ns=(writing.mtime, writing.mtime))
        self._store(writing.fd, folder, writing.file)

    def _drop(self) -> None:
        """Leave nothing of the file that is under way."""
        writing, self._writing = self._writing, None
        if writing and writing.fd >= 0:
            with contextlib.suppress(OSError):
                folder = self._tree.folder(writing.file.parts[:-1])
                _unlink_own(writing.fd, folder, writing.file.part)
            os.close(writing.fd)

    def _abandon(self) -> None:
        """Keep a large unfinished file for the next try; what is small is soon sent again."""
        writing = self._writing
        if writing and writing.fd >= 0 and not writing.error and writing.offset >= KEEP_BYTES:
            os.close(writing.fd)
            self._writing = None
            self.kept.append("/".join((*writing.file.parts[:-1], writing.file.part)))
        self._drop()

    # --- the rest --------------------------------------------------------------------------

    def _link(self) -> None:
        for parts, target, mtime in self._links:
            part = _part(parts[-1])
            try:
                folder = self._tree.folder(parts[:-1])
                try:
                    if os.readlink(parts[-1], dir_fd=folder) == target:
                        continue
                except OSError:
                    pass
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folder)
                os.symlink(target, part, dir_fd=folder)
                try:
                    os.utime(part, ns=(mtime, mtime), dir_fd=folder, follow_symlinks=False)
                    os.rename(part, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    os.unlink(part, dir_fd=folder)
                    raise
            except OSError as error:
                self._fail(parts, error)

    def _remove(self) -> None:
        """Remove what was not offered; never when anything went wrong, as rsync has it."""
        if self.failed:
            return
        for parts in ((), *self._folders):
            with os.scandir(self._tree.folder(parts)) as found:
                names = [entry.name for entry in found]
            for name in names:
                if (*parts, name) not in self._seen:
                    try:
                        self.removed += self._tree.remove((*parts, name))
                    except OSError as error:
                        self._fail((*parts, name), error)

    def _store(self, fd: int, folder: int, file: _File) -> None:
        """Put a file in its place; what stands there goes only for what is stored already."""
        *above, name = file.parts
        self._placed += 1
        if self._placed <= STORED_SINGLY or _exists(folder, name):
            os.fsync(fd)
        if not _is_own(fd, folder, file.part):
            # What has that name now is another's, and not complete.
            raise OSError(errno.EBUSY, "another transfer of it began meanwhile")
        os.rename(file.part, name, src_dir_fd=folder, dst_dir_fd=folder)
        self._touched.add(tuple(above))

    def _settle(self) -> None:
        """Nothing is said to have arrived that a crash could take away again."""
        try:
            if self._placed > STORED_SINGLY:
                places.settle(self._tree.root)
            else:
                for parts in sorted(self._touched):
                    os.fsync(self._tree.folder(parts))
        except OSError as error:
            why = f"what arrived may not last: the disk did not store it ({error.strerror})"
            self._list(self.failed, self._target.path, why)

    def _finish_folders(self) -> None:
        for parts, (mode, mtime) in reversed(self._folders.items()):
            try:
                folder = self._tree.folder(parts)
                os.fchmod(folder, mode)
                os.utime(folder, ns=(mtime, mtime))
            except OSError as error:
                self._fail(parts, error)


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


def _part(name: str) -> str:
    """Where a file is received until it is complete; the same at every try."""
    return places.PART_PREFIX + hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _create(folder: int, name: str) -> int:
    """A new file; what an earlier try left of it goes."""
    try:
        return os.open(name, _WRITE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    except FileExistsError:
        os.unlink(name, dir_fd=folder)
        return os.open(name, _WRITE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)


def _differs(here: str, there: str) -> str:
    return f"its SHA-256 is {here} here and {there} at the source"
