"""The receiving end: nothing that the sender says can make it write outside its target.

Only plain files, folders and links that stay inside are made, each below folders that were made or
opened without following a link. How a file gets to its place is `arrivals`' business. What is
reported is stored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from host_client.ends import arrivals, places, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from host_client.ends.target import Target

    Parts = tuple[str, ...]

MAX_LISTED = 1000
"""Refusals and failures that are listed one by one."""
_LISTING_BYTES = 4096
_ENTRY = (str, str, int, int, int, str)
"""What an entry is made of: path, kind, mode, time, size, where a link leads."""
_MOST = 1 << 62
"""Sizes, and nanoseconds since 1970."""


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
        self._arrivals: arrivals.Arrivals = None  # type: ignore[assignment]  # likewise
        self._rename = ""
        self._seen: set[Parts] = set()
        self._folders: dict[Parts, tuple[int, int]] = {}
        self._files: list[arrivals.File | None] = []
        self._links: list[tuple[Parts, str, int]] = []
        self._pending: dict[int, arrivals.File] = {}
        self._under_way: tuple[int, arrivals.File, int] | None = None
        """Number and size of the file that has begun."""
        self.sums: dict[int, str] = {}
        """SHA-256 of each file that is in its place, as read back."""
        self.bytes = 0
        self.removed = 0
        self.refused: list[tuple[str, str]] = []
        self.failed: list[tuple[str, str]] = []
        self.unlisted = 0
        """How many more were refused or failed than are listed."""
        self.unchanged = 0
        """Files that were in their places already."""
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
        self._arrivals = arrivals.Arrivals(self._tree)
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
            self._arrivals.abandon()
            self.unchanged, self.kept = self._arrivals.unchanged, self._arrivals.kept
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
        if type(entry) is not list or tuple(map(type, entry)) != _ENTRY:
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
        above = parts[:-1]
        # What a folder is called was looked at when it was offered.
        good = above in self._folders and len(parts) <= places.MAX_DEPTH
        why = places.bad_name(parts[-1]) if good else places.bad_path(parts)
        if not why and parts in self._seen:
            why = "it is there twice"
        if not why and len(self._seen) >= wire.MAX_ENTRIES:
            raise wire.Broken("there is no end to the entries")
        if why:
            self._refuse(path, why)
            return
        self._seen.add(parts)
        if above and above not in self._folders:
            # Its folder was refused, or never offered: one line for the folder is enough.
            if above not in self._seen:
                self._refuse(path, "its folder was not offered")
            return
        if kind == "f":
            self._files[-1] = arrivals.File(parts, size)
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
        if mode & ~arrivals.KEPT_BITS and mode & (stat.S_ISUID | stat.S_ISGID) and kind == "f":
            self._refuse(path, "its setuid and setgid bits; the file itself is kept")

    def _make_folder(self, parts: Parts, mode: int, mtime: int) -> None:
        try:
            if self._tree.make(parts):
                self._arrivals.touched.add(parts[:-1])
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                self._refuse("/".join(parts), "a folder where a file or a link is already")
            else:
                self._fail(parts, error)
            return
        self._folders[parts] = (mode & arrivals.KEPT_BITS, mtime)

    # --- what is wanted --------------------------------------------------------------------

    def _want(self) -> None:
        batch: list[list[Any]] = []
        total = need = 0
        for number, file in enumerate(self._files):
            if file is None:
                continue
            if file.parts[:-1] not in self._tree.made:
                try:
                    self._arrivals.look(file, self._channel)
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
                if self._under_way and self._under_way[0] == number:
                    file = self._under_way[1]
                    self._under_way = None
                    self._arrivals.drop()
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
        data = memoryview(payload)[head.size :]
        try:
            mine = self._arrivals.whole(file, data, mode, mtime, digest)
        except OSError as error:
            self._fail(file.parts, error)
            return
        if mine != digest:
            self._fail(file.parts, arrivals.differs(mine.hex(), digest.hex()))
            return
        self.sums[number] = mine.hex()
        self.bytes += size

    def _wanted(self, number: Any) -> arrivals.File:
        if type(number) is not int or number not in self._pending:
            raise wire.Broken("a file came that was not asked for")
        return self._pending.pop(number)

    def _begin(self, facts: list[Any]) -> None:
        if self._under_way or [type(fact) for fact in facts] != [int] * 5:
            raise wire.Broken("a file began within another")
        number, offset, size, mode, mtime = facts
        file = self._wanted(number)
        if offset not in (0, file.have) or not offset <= size <= _MOST or abs(mtime) > _MOST:
            raise wire.Broken("a file began with numbers that no file has")
        self._under_way = (number, file, size)
        self._on_bytes(offset)
        self._arrivals.begin(file, offset, size, mode, mtime)

    def _add(self, data: bytes | None, count: int) -> None:
        self._on_bytes(count)
        self._arrivals.add(data, count)

    def _finish(self, facts: list[Any]) -> None:
        if not self._under_way or [type(fact) for fact in facts] != [int, str, bool]:
            raise wire.Broken("a file ended that had not begun")
        number, file, size = self._under_way
        if facts[0] != number:
            raise wire.Broken("another file ended than had begun")
        self._under_way = None
        mine, error = self._arrivals.finish(facts[1], changed=facts[2])
        if error:
            self._fail(file.parts, error)
            return
        self.sums[number] = mine
        self.bytes += size

    # --- the rest --------------------------------------------------------------------------

    def _link(self) -> None:
        for parts, target, mtime in self._links:
            part = arrivals.part_of(parts[-1])
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

    def _settle(self) -> None:
        try:
            self._arrivals.settle()
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
