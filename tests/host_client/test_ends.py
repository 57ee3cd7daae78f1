"""The ends of a transfer, each against one that is hostile or a tree that changes under it."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from host_client.ends import arrivals, places, wire
from host_client.ends.receiver import Receiver
from host_client.ends.sender import Sender, Source
from host_client.ends.target import Target

BOUND = 30
FILE, FOLDER, LINK = "f", "d", "l"
SECRET = "not yours"


class Pair:
    """Two channels that talk to each other."""

    def __init__(self) -> None:
        down, up = os.pipe(), os.pipe()
        self.fds = {*down, *up}
        self.far = wire.Channel(up[0], down[1], lambda: None)
        self.near = wire.Channel(down[0], up[1], lambda: None)
        self._heard = down[0]

    def stop_listening(self) -> None:
        """The near end has gone: the far end's writes fail instead of waiting."""
        self.fds.discard(self._heard)
        os.close(self._heard)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.close()


def nothing(*_: Any) -> None:
    """Nobody watches."""


def entry(path: str, kind: str = FILE, *, mode: int = 0o644, size: int = 1, link: str = "") -> Any:
    return [path, kind, mode, 1_000_000_000, size, link]


class Place:
    """A target folder, and beside it what must stay as it is."""

    def __init__(self, root: Path) -> None:
        self.target = root / "outside" / "target"
        self.target.mkdir(parents=True)
        self.outside = root / "outside"
        (self.outside / "secret").write_text(SECRET, encoding="utf-8")
        (self.outside / "folder").mkdir()
        self.before = self.snapshot()

    def snapshot(self) -> dict[str, Any]:
        found = {}
        for folder, folders, files in os.walk(self.outside):
            if Path(folder) == self.outside:
                folders.remove("target")
            for name in folders + files:
                path = Path(folder, name)
                found[str(path)] = (path.lstat().st_mode, path.is_dir() or path.read_bytes())
        return found

    def unfinished(self) -> list[Path]:
        return list(self.target.rglob(f"{places.PART_PREFIX}*"))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.target.iterdir())

    def receive(
        self, pair: Pair, entries: list[Any], *frames: tuple[bytes, Any], **target: bool
    ) -> Receiver:
        """Receive from an end that says just this, whatever is asked of it."""
        options = {"contents": True, "into": True, "delete": False} | target
        end = Receiver(pair.near, Target(str(self.target), **options), nothing, nothing)

        def say() -> None:
            with suppress(wire.Lost):
                pair.far.tell(wire.ENTRIES, entries)
                pair.far.send(wire.ENTRIES_END)
                for kind, value in frames:
                    if isinstance(value, bytes):
                        pair.far.send(kind, value)
                    else:
                        pair.far.tell(kind, value)
                pair.far.send(wire.DATA_END)
                pair.far.flush()

        speaker = threading.Thread(target=say)
        speaker.start()
        try:
            end.run()
        finally:
            pair.stop_listening()
            speaker.join()
            assert self.snapshot() == self.before
            assert not self.unfinished()
        return end


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def small(number: int, data: bytes, *, digest: bytes = b"", mode: int = 0o644) -> Any:
    digest = digest or hashlib.sha256(data).digest()
    head = wire.SMALL_HEAD.pack(number, mode, len(data), 1_000_000_000, digest)
    return wire.SMALL, head + data


@pytest.mark.parametrize(
    "name",
    [
        "..", ".", "", "../x", "a/../../x", "/etc/x", "//x", "x/..", "a//b", "nul\0", "n" * 256, "\ud800",
        f"{places.PART_PREFIX}0123", "/".join("d" * 101),
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(pair: Pair, place: Place, name: str) -> None:
    end = place.receive(pair, [entry(name), entry("ok")], small(1, b"fine"))
    assert [path for path, _ in end.refused] == [name]
    assert place.names() == ["ok"]


@pytest.mark.parametrize(
    "link",
    [
        "/etc/passwd",
        "..",
        "../secret",
        "d/../../secret",
        "d/..",
        "./../secret",
        "",
        "x/" * 3000,
        "\0",
    ],
)
def test_links_that_may_lead_out_are_refused(pair: Pair, place: Place, link: str) -> None:
    end = place.receive(pair, [entry("l", LINK, link=link)])
    assert [path for path, _ in end.refused] == ["l"]
    assert place.names() == []


def test_links_that_stay_inside_are_made(pair: Pair, place: Place) -> None:
    inside = {"d/up": "../f", "d/beside": "x/y", "top": "d"}
    place.receive(
        pair, [entry("d", FOLDER, mode=0o755), *(entry(k, LINK, link=v) for k, v in inside.items())]
    )
    assert {k: str((place.target / k).readlink()) for k in inside} == inside


def test_a_link_of_a_copied_folder_stays_within_that_folder(pair: Pair, place: Place) -> None:
    """Not only within the folder that it is copied into, where other things lie."""
    end = place.receive(
        pair, [entry("d", FOLDER), entry("d/l", LINK, link="../neighbour")], contents=False
    )
    assert [path for path, _ in end.refused] == ["d/l"]


def test_nothing_is_written_through_a_link_that_came_along(pair: Pair, place: Place) -> None:
    with pytest.raises(wire.Broken, match="not asked for"):
        place.receive(pair, [entry("k", LINK, link="k2"), entry("k/x")], small(0, b"x"))


@pytest.mark.parametrize("kind", [FOLDER, FILE])
def test_links_that_the_target_has_already_are_not_followed(
    pair: Pair, place: Place, kind: str
) -> None:
    (place.target / "l").symlink_to("../folder")
    if kind == FOLDER:
        end = place.receive(pair, [entry("l", FOLDER), entry("l/x")])
        assert [path for path, _ in end.refused] == ["l"]
        assert (place.target / "l").is_symlink()
    else:
        place.receive(pair, [entry("l")], small(0, b"x"))
        assert (place.target / "l").read_bytes() == b"x"


def test_special_files_and_bits_are_listed_and_not_made(pair: Pair, place: Place) -> None:
    end = place.receive(
        pair,
        [entry("fifo", "FIFO"), entry("dev", "device"), entry("s", mode=0o4755), entry("twice"),
         entry("twice")],
        small(0, b"x", mode=0o6755), small(1, b"y"),
    )  # fmt: skip
    assert place.names() == ["s", "twice"]
    assert stat.S_IMODE((place.target / "s").stat().st_mode) == 0o755
    assert [path for path, _ in end.refused] == ["fifo", "dev", "s", "twice"]


def test_a_sum_that_differs_leaves_the_old_file_and_names_it(pair: Pair, place: Place) -> None:
    (place.target / "f").write_bytes(b"old!")
    end = place.receive(pair, [entry("f", size=3)], small(0, b"new", digest=b"0" * 32))
    assert [path for path, _ in end.failed] == ["f"]
    assert "SHA-256" in end.failed[0][1]
    assert (place.target / "f").read_bytes() == b"old!"


def test_a_folder_or_file_in_the_way_fails_that_entry_alone(pair: Pair, place: Place) -> None:
    (place.target / "f").mkdir()
    (place.target / "d").write_bytes(b"")
    end = place.receive(pair, [entry("d", FOLDER), entry("f"), entry("g")], small(1, b"x"))
    assert [path for path, _ in end.failed] == ["f"]
    assert [path for path, _ in end.refused] == ["d"]
    assert (place.target / "g").exists()


BEGIN = (wire.BEGIN, [0, 0, 4, 0o644, 0])


@pytest.mark.parametrize(
    "frames",
    [
        [(wire.DATA, b"x")],
        [small(1, b"x")],
        [small(0, b"x"), small(0, b"x")],
        [BEGIN, (wire.DATA, b"12345")],
        [BEGIN, BEGIN],
        [(wire.BEGIN, [0, 2, 4, 0o644, 0])],
        [(wire.BEGIN, [0, -1, 4, 0o644, 0])],
        [(wire.BEGIN, [0, 0, 1 << 80, 0o644, 0])],
        [(wire.BEGIN, [0, 0, 4, 0o644, 1 << 80])],
        [(wire.BEGIN, [[], 0, 4, 0o644, 0])],
        [(wire.BEGIN, {"a": 1})],
        [BEGIN, (wire.FINISH, [1, "", False])],
        [(wire.BEGIN, [0, 0, 1 << 50, 0o644, 0]), (wire.ZEROS, b"\0\0\xff\0\0\0\0")],
        [(wire.SMALL, b"short")],
        [(b"?", b"")],
        [(wire.ENTRIES, [["x"]])],
        [(wire.DATA, b"x" * (wire.MAX_PAYLOAD + 1))],
    ],
)
def test_what_is_no_transfer_is_given_up(pair: Pair, place: Place, frames: list[Any]) -> None:
    with pytest.raises(wire.Broken):
        place.receive(pair, [entry("f", size=4)], *frames)
    assert all(path.read_bytes() == b"x" for path in place.target.iterdir())


@pytest.mark.parametrize(
    "bad",
    [["x"], "x", entry("x", size=-1), entry("x", size=1 << 70), ["x", "f", "7", 0, 0, ""],
     ["x", "f", 0, 1 << 70, 0, ""], [1, "f", 0, 0, 0, ""]],
)  # fmt: skip
def test_entries_that_are_none_are_given_up(pair: Pair, place: Place, bad: Any) -> None:
    with pytest.raises(wire.Broken):
        place.receive(pair, [bad])


def test_more_than_the_disk_holds_is_refused_before_anything_is_sent(
    pair: Pair, place: Place
) -> None:
    with pytest.raises(wire.Refused, match="are free"):
        place.receive(pair, [entry("f", size=1 << 60)])


def test_a_large_unfinished_file_is_kept_for_the_next_try_and_a_small_one_is_not(
    pair: Pair, place: Place
) -> None:
    for size, kept in ((2 << 20, 1), (2 << 10, 0)):
        pair.far.tell(wire.ENTRIES, [entry(f"f{size}", size=size)])
        pair.far.send(wire.ENTRIES_END)
        pair.far.tell(wire.BEGIN, [0, 0, size, 0o644, 0])
        end = Receiver(
            pair.near,
            Target(str(place.target), contents=True, into=True, delete=False),
            nothing,
            nothing,
        )
        runs = threading.Thread(target=_lost, args=(end,))
        runs.start()
        for _ in range(7):
            pair.far.send(wire.DATA, b"x" * (size // 8))
        pair.far.flush()
        pair.far.tell(wire.FINISH, "no list")
        pair.far.flush()
        runs.join()
        assert len(end.kept) == kept
        assert len(list(place.target.iterdir())) == kept
        for path in place.target.iterdir():
            path.unlink()


def test_two_transfers_of_one_file_at_once_place_no_half_of_it(place: Place) -> None:
    """The first to end gave the other's unfinished file its name, and called it verified."""
    pairs = Pair(), Pair()
    mine, other = b"first" * 1000, b"other" * 1000
    ends: list[Receiver] = []
    threads: list[threading.Thread] = []
    for pair, data in zip(pairs, (mine, other), strict=True):
        arrived = threading.Event()

        def heard(count: int, arrived: threading.Event = arrived) -> None:
            if count:
                arrived.set()

        target = Target(str(place.target), contents=True, into=True, delete=False)
        ends.append(Receiver(pair.near, target, heard, nothing))
        threads.append(threading.Thread(target=ends[-1].run, daemon=True))
        threads[-1].start()
        pair.far.tell(wire.ENTRIES, [entry("f", size=len(data))])
        pair.far.send(wire.ENTRIES_END)
        pair.far.tell(wire.BEGIN, [0, 0, len(data), 0o644, 0])
        pair.far.send(wire.DATA, data[:2000])
        pair.far.flush()
        assert arrived.wait(BOUND)
    for pair, data, thread in zip(pairs, (mine, other), threads, strict=True):
        pair.far.send(wire.DATA, data[2000:])
        pair.far.tell(wire.FINISH, [0, hashlib.sha256(data).hexdigest(), False])
        pair.far.send(wire.DATA_END)
        pair.far.flush()
        thread.join(BOUND)
        # Whoever is done first: what has the name is whole.
        for path in place.target.glob("f"):
            assert path.read_bytes() in (mine, other)
    first, second = ends
    assert first.failed == [("f", "another transfer of it began meanwhile")]
    assert (second.failed, len(second.sums)) == ([], 1)
    assert (place.target / "f").read_bytes() == other
    assert not place.unfinished()
    for pair in pairs:
        pair.close()


def _lost(end: Receiver) -> None:
    with suppress(wire.Lost, wire.Broken):
        end.run()


def test_delete_takes_what_was_not_offered_and_follows_no_link(pair: Pair, place: Place) -> None:
    deep = place.target / "old" / "deep"
    deep.mkdir(parents=True)
    (deep / "out").symlink_to(place.outside / "folder")
    (place.target / "link").symlink_to("../folder")
    (place.target / "fifo").write_bytes(b"refused names are not removed")
    end = place.receive(pair, [entry("f"), entry("fifo", "FIFO")], small(0, b"x"), delete=True)
    assert place.names() == ["f", "fifo"]
    assert end.removed == 4


def test_delete_removes_nothing_when_anything_failed(pair: Pair, place: Place) -> None:
    (place.target / "old").write_bytes(b"")
    end = place.receive(pair, [entry("f")], (wire.UNREADABLE, [0, "no"]), delete=True)
    assert [path for path, _ in end.failed] == ["f"]
    assert place.names() == ["old"]


NAMES = st.sampled_from(
    ["a", "b", "..", ".", "", "secret", "folder", "a/b", "../a", "/", "l", "\0"]
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
ENTRIES = st.lists(
    st.tuples(
        PATHS,
        st.sampled_from([FILE, FOLDER, LINK, "FIFO", "?"]),
        st.integers(0, 0o7777),
        st.integers(-(10**18), 10**18),
        st.integers(0, 9),
        st.one_of(PATHS, st.sampled_from(["../secret", "../folder", "a/..", "/etc"])),
    ).map(list),
    max_size=12,
)


@given(first=ENTRIES, second=ENTRIES, delete=st.booleans())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_tree_gets_out_of_its_target(first: Any, second: Any, delete: bool) -> None:
    """Two trees after one another: what the first left may be a trap of the second."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        for entries in (first, second):
            pair = Pair()
            try:
                files = [number for number, e in enumerate(x for x in entries if x[1] == FILE)]
                with suppress(wire.Broken):
                    place.receive(
                        pair, entries, *(small(number, b"x") for number in files), delete=delete
                    )
            finally:
                pair.close()
            for path in place.target.rglob("*"):
                if path.is_symlink():
                    # Not resolve(): a link to itself is no way out, but an error to it.
                    real = Path(os.path.realpath(path))
                    assert real.is_relative_to(os.path.realpath(place.target))
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o755)


def test_a_folder_that_is_swapped_for_a_link_leads_nowhere(tmp_path: Path) -> None:
    """Somebody renames below the target while it is written to."""
    place = Place(tmp_path)
    place.unfinished = list  # type: ignore[method-assign]  # nobody can look while it is swapped
    stop = threading.Event()

    def swap() -> None:
        real, aside = place.target / "d", place.target / "aside"
        while not stop.is_set():
            with suppress(OSError):
                real.rename(aside)
                real.symlink_to(place.outside / "folder")
                real.unlink()
                aside.rename(real)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(30):
            pair = Pair()
            names = [f"d/{number}" for number in range(20)]
            with suppress(wire.Broken, AssertionError):
                place.receive(
                    pair, [entry("d", FOLDER, mode=0o755), *map(entry, names)],
                    *(small(number, b"x") for number in range(20)),
                )  # fmt: skip
            pair.close()
            assert place.snapshot() == place.before
    finally:
        stop.set()
        swapper.join()


# --- the sender --------------------------------------------------------------------------------


@contextmanager
def asked(
    pair: Pair, sources: list[Source], between: Callable[[], None], on_bytes: Any = nothing
) -> Iterator[list[tuple[bytes, bytes]]]:
    """What a sender sends of all files, when something happens after it has listed them."""
    end = Sender(pair.near, on_bytes, nothing, nothing)
    runs = threading.Thread(target=_suppressed, args=(end, sources))
    runs.start()
    frames: list[tuple[bytes, bytes]] = []
    offered: list[Any] = []
    while (frame := pair.far.receive())[0] != wire.ENTRIES_END:
        offered += wire.parsed(frame[1], list)
    between()
    files = [e for e in offered if e[1] == FILE]
    pair.far.tell(wire.WANTS, [[number, 0, ""] for number in range(len(files))])
    pair.far.tell(wire.WANTS_END, 0)
    pair.far.flush()
    while (frame := pair.far.receive())[0] != wire.DATA_END:
        frames.append(frame)
    pair.far.send(wire.RESULTS_END)
    pair.far.flush()
    runs.join()
    yield frames


def _suppressed(end: Sender, sources: list[Source]) -> None:
    with suppress(wire.Lost, wire.Broken):
        end.run(sources)


@pytest.mark.parametrize("trap", ["link", "fifo", "folder", "gone", "parent"])
def test_a_file_that_is_swapped_is_not_sent_and_nothing_hangs(
    pair: Pair, tmp_path: Path, trap: str
) -> None:
    (tmp_path / "secret").write_text(SECRET, encoding="utf-8")
    folder = tmp_path / "src" / "d"
    folder.mkdir(parents=True)
    path = folder / "f"
    path.write_bytes(b"x")

    def swap() -> None:
        path.unlink()
        if trap == "link":
            path.symlink_to(tmp_path / "secret")
        elif trap == "fifo":
            os.mkfifo(path)
        elif trap == "folder":
            path.mkdir()
        elif trap == "parent":
            folder.rename(tmp_path / "aside")
            (tmp_path / "elsewhere").mkdir()
            (tmp_path / "elsewhere" / "f").write_text(SECRET, encoding="utf-8")
            folder.symlink_to(tmp_path / "elsewhere")

    with asked(pair, [Source("", str(tmp_path / "src"))], swap) as frames:
        assert [kind for kind, _ in frames] == [wire.UNREADABLE]


def test_a_file_that_changes_while_it_is_read_is_said_to_have(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * (wire.CHUNK * 3))

    def grow(count: int) -> None:
        if count:
            with path.open("ab") as file:
                file.write(b"more")

    with asked(pair, [Source("f", str(path))], nothing, grow) as frames:
        kind, payload = frames[-1]
        assert kind == wire.FINISH
        assert wire.parsed(payload, list)[2] is True


@pytest.mark.parametrize(
    ("singly", "expected"),
    [
        (2, ["rename", "fsync", "fsync", "rename", "fsync"]),
        (0, ["rename", "fsync", "rename", "settle"]),
    ],
    ids=["few", "many"],
)
def test_what_is_said_to_have_arrived_is_stored(
    pair: Pair, place: Place, monkeypatch: pytest.MonkeyPatch, singly: int, expected: list[str]
) -> None:
    """What replaces another file before that is gone, everything before it is reported.

    Few files are stored one by one, and their folder after them; many at once.
    """
    monkeypatch.setattr(arrivals, "STORED_SINGLY", singly)
    (place.target / "old").write_bytes(b"old")
    done: list[str] = []
    for owner, name in ((os, "fsync"), (os, "rename"), (places, "settle")):
        real = getattr(owner, name)

        def told(
            *args: Any, _name: str = name, _real: Callable[..., None] = real, **options: Any
        ) -> None:
            done.append(_name)
            _real(*args, **options)

        monkeypatch.setattr(owner, name, told)
    end = place.receive(
        pair, [entry("new"), entry("old")], small(0, b"n"), (wire.BEGIN, [1, 0, 1, 0o644, 1]),
        (wire.DATA, b"o"), (wire.FINISH, [1, hashlib.sha256(b"o").hexdigest(), False]),
    )  # fmt: skip
    assert (len(end.sums), end.failed) == (2, [])
    assert done == expected


def test_a_disk_that_does_not_store_is_told(
    pair: Pair, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(arrivals, "STORED_SINGLY", 0)
    monkeypatch.setattr(places, "settle", failing)
    end = place.receive(pair, [entry("new")], small(0, b"n"))
    assert [(path, "may not last" in why) for path, why in end.failed] == [
        (str(place.target), True)
    ]
