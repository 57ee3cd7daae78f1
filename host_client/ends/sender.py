"""The sending end: lists what there is, then sends each file that is wanted, from where it is wanted.

Links are sent as links and never followed, special files are only named. A file is opened through
no link, read once, and summed as it is sent; one that changed meanwhile is said to have.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from queue import SimpleQueue

from host_client.ends import places, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Hash = Any
    Frame = tuple[bytes, bytes]

"""Entries in one frame: the receiver looks at them while the rest is listed."""
_HOLE = 64 * wire.CHUNK
"""Nothing but zeros is a few bytes on the wire: so often they are sent all the same."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Source:
    """Something to send.

    Args:
        name: what it is called at the other end; empty for the contents of a folder.
        path: absolute, as realpath gives it.
    """

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path


class Sender:
    """One transfer, as its sending end sees it.

    Args:
        channel: to the receiver.
        on_bytes: told of every stretch of a file that was sent, or need not be.
        on_total: told how many files and bytes that will be.
        on_lost: called at once, from another thread, when the receiver is gone: writing to nobody
            may block for ever.
        eager: the receiver has nothing yet: small files are sent as soon as they are listed.
    """

    def __init__(
        self,
        channel: wire.Channel,
        on_bytes: Callable[[int], None],
        on_total: Callable[[int, int], None],
        on_lost: Callable[[], None],
        *,
        eager: bool = False,
    ) -> None:
        self._channel = channel
        self._on_bytes = on_bytes
        self._on_total = on_total
        self._on_lost = on_lost
        self._eager = eager
        self._early: list[int] = []
        self._files: list[tuple[places.Tree, tuple[str, ...]]] = []
        self.paths: list[str] = []
        """By file number, as the receiver knows it."""
        self.sums: dict[int, str] = {}
        """SHA-256 of each file that was sent, or found to be there already."""
        self.sizes: dict[int, int] = {}
        self.unchanged = 0
        """Files of which the other end had every byte."""
        self._frames: SimpleQueue[Frame | Exception] = SimpleQueue()
        self._batch: list[list[Any]] = []
        self._count = 0

    def run(self, sources: Sequence[Source]) -> list[list[Any]]:
        """Send; the receiver's results.

        Raises:
            wire.Lost: the channel broke.
            wire.Refused: either end cannot do the job at all.
            OSError: a source cannot be opened.
        """
        # Always read: the receiver never waits for us to, so we may wait for it.
        threading.Thread(target=self._listen, name="frames", daemon=True).start()
        trees: list[places.Tree] = []
        try:
            for source in sources:
                trees.append(self._list(source))  # noqa: PERF401 - each is closed, come what may
            self._flush_batch()
            self._channel.send(wire.ENTRIES_END)
            self._channel.flush()
            self._send_all(self._wants())
            self._channel.send(wire.DATA_END)
            self._channel.flush()
            return self._results()
        finally:
            for tree in trees:
                tree.close()

    def _listen(self) -> None:
        try:
            while True:
                frame = self._channel.receive()
                self._frames.put(frame)
                if frame[0] == wire.RESULTS_END:
                    return
        except (wire.Lost, wire.Broken, wire.Refused) as error:
            self._frames.put(error)
            self._channel.stop(str(error))
            if isinstance(error, wire.Lost):
                self._on_lost()

    def _next(self) -> Frame:
        frame = self._frames.get()
        if isinstance(frame, Exception):
            raise frame
        return frame

    # --- what there is ---------------------------------------------------------------------

    def _list(self, source: Source) -> places.Tree:
        if not source.name:
            tree = places.Tree(places.open_folder(source.path))
            self._walk(tree, (), ())
            return tree
        tree = places.Tree(places.open_folder(os.path.dirname(source.path)))
        base = os.path.basename(source.path)
        status = os.stat(base, dir_fd=tree.root, follow_symlinks=False)
        self._entry(tree, (base,), (source.name,), status)
        return tree

    def _walk(self, tree: places.Tree, here: tuple[str, ...], there: tuple[str, ...]) -> None:
        listed = []
        with os.scandir(tree.folder(here)) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    listed.append((entry.name, entry.stat(follow_symlinks=False)))
        for name, status in sorted(listed):
            if not name.startswith(places.PART_PREFIX):
                self._entry(tree, (*here, name), (*there, name), status)

    def _entry(
        self,
        tree: places.Tree,
        here: tuple[str, ...],
        there: tuple[str, ...],
        status: os.stat_result,
    ) -> None:
        kind = places.kind_of(status.st_mode)
        path = "/".join(there)
        link = ""
        size = 0
        if kind == "l":
            try:
                link = os.readlink(here[-1], dir_fd=tree.folder(here[:-1]))
            except OSError:
                kind = "link that was swapped for something else"
        elif kind == "f":
            size = status.st_size
            if self._eager and size <= wire.SMALL_BYTES:
                self._early.append(len(self._files))
            self._files.append((tree, here))
            self.paths.append(path)
        if kind == "d" and len(there) >= places.MAX_DEPTH:
            kind = f"folder deeper than {places.MAX_DEPTH} others"
        self._count += 1
        if self._count > wire.MAX_ENTRIES:
            raise wire.Refused(
                f"more than {wire.MAX_ENTRIES} entries; transfer parts of the folder"
            )
        self._batch.append(
            [path, kind, stat.S_IMODE(status.st_mode), status.st_mtime_ns, size, link]
        )
        if len(self._batch) >= wire.ROWS:
            self._flush_batch()
        if kind == "d":
            try:
                self._walk(tree, here, there)
            except OSError as error:
                self._batch.append([path, wire.UNLISTED, 0, 0, 0, error.strerror or str(error)])

    def _flush_batch(self) -> None:
        if self._batch:
            self._channel.tell_rows(wire.ENTRIES, self._batch)
            self._batch = []
        for number in self._early:
            # What cannot be sent now will be wanted, and then it is said why.
            with contextlib.suppress(OSError):
                fd = self._open(number)
                try:
                    before = os.fstat(fd)
                    if stat.S_ISREG(before.st_mode) and before.st_size <= wire.SMALL_BYTES:
                        self._send_small(number, fd, before)
                finally:
                    os.close(fd)
        self._early = []

    # --- what is wanted --------------------------------------------------------------------

    def _wants(self) -> list[tuple[int, int, str]]:
        wants: list[tuple[int, int, str]] = []
        while True:
            kind, payload = self._next()
            if kind == wire.WANTS_END:
                total = wire.parsed(payload, int)
                self._on_total(len(wants), total)
                return wants
            if kind != wire.WANTS:
                raise wire.Broken(f"{kind!r} came while it was said what is wanted")
            for want in wire.parsed(payload, list):
                number, have, digest = want
                if type(number) is not int or not 0 <= number < len(self._files):
                    raise wire.Broken("a file is wanted that was not offered")
                if type(have) is not int or have < 0:
                    raise wire.Broken("less than nothing is there already")
                wants.append((number, have, digest))

    def _send_all(self, wants: Sequence[tuple[int, int, str]]) -> None:
        for number, have, digest in wants:
            self._channel.check()
            try:
                fd = self._open(number)
            except OSError as error:
                self._channel.tell(wire.UNREADABLE, [number, error.strerror or str(error)])
                continue
            try:
                self._send(number, fd, have, digest)
            finally:
                os.close(fd)

    def _open(self, number: int) -> int:
        tree, parts = self._files[number]
        return os.open(parts[-1], _READ, dir_fd=tree.folder(parts[:-1]))

    def _send(self, number: int, fd: int, have: int, digest: str) -> None:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            self._channel.tell(wire.UNREADABLE, [number, "it is no regular file any more"])
            return
        summed: Hash = hashlib.sha256()
        offset = 0
        if have:
            if have <= before.st_size and self._sum_of(fd, have, summed) == digest:
                offset = have
            else:
                summed = hashlib.sha256()
                os.lseek(fd, 0, os.SEEK_SET)
        size = before.st_size
        if not offset and size <= wire.SMALL_BYTES and self._send_small(number, fd, before):
            return
        self._channel.tell(
            wire.BEGIN,
            [number, offset, size, stat.S_IMODE(before.st_mode), before.st_mtime_ns],
        )
        self._on_bytes(offset)
        self.unchanged += bool(have) and offset == size
        try:
            while offset < size:
                chunk = os.read(fd, min(wire.CHUNK, size - offset))
                if not chunk:
                    break
                summed.update(chunk)
                offset += len(chunk)
                if len(chunk) >= 4096 and chunk == _NOTHING[: len(chunk)]:
                    self._channel.send(wire.ZEROS, len(chunk).to_bytes(4, "big"))
                    if not offset % _HOLE:
                        self._channel.flush()
                        self._channel.check()
                else:
                    self._channel.send(wire.DATA, chunk)
                self._on_bytes(len(chunk))
        except OSError as error:
            self._channel.tell(wire.UNREADABLE, [number, error.strerror or str(error)])
            return
        after = os.fstat(fd)
        changed = offset != size or (after.st_size, after.st_mtime_ns) != (size, before.st_mtime_ns)
        self.sums[number] = summed.hexdigest()
        self.sizes[number] = offset
        self._channel.tell(wire.FINISH, [number, summed.hexdigest(), changed])

    def _sum_of(self, fd: int, size: int, summed: Hash) -> str:
        """Add the first `size` bytes of a file to a sum; what it comes to."""
        wire.add_to_sum(fd, size, summed, self._channel)
        return str(summed.hexdigest())

    def _send_small(self, number: int, fd: int, before: os.stat_result) -> bool:
        """Send a whole file as one frame, unless it changed meanwhile."""
        data = os.read(fd, before.st_size + 1)
        after = os.fstat(fd)
        if (len(data), after.st_size, after.st_mtime_ns) != (
            before.st_size, before.st_size, before.st_mtime_ns,
        ):  # fmt: skip
            os.lseek(fd, 0, os.SEEK_SET)
            return False
        summed = hashlib.sha256(data)
        head = wire.SMALL_HEAD.pack(
            number, before.st_mode & 0o7777, len(data), before.st_mtime_ns, summed.digest()
        )
        self._channel.send(wire.SMALL, head + data)
        self._on_bytes(len(data))
        self.sums[number] = summed.hexdigest()
        self.sizes[number] = len(data)
        return True

    def _results(self) -> list[list[Any]]:
        results: list[list[Any]] = []
        while True:
            kind, payload = self._next()
            if kind not in (wire.RESULTS, wire.RESULTS_END):
                raise wire.Broken(f"{kind!r} came among the results")
            if kind == wire.RESULTS_END:
                return results
            results += wire.parsed(payload, list)
            if len(results) > 2 * wire.MAX_ENTRIES:
                raise wire.Broken("more results than there were files")


_NOTHING = bytes(wire.CHUNK)
