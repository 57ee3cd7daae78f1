"""Files: confined to the home, written wholly or not at all, whatever their names."""

# ruff: noqa: PTH115, PTH208 - descriptors and bytes are what is tested here
from __future__ import annotations

import base64
import errno
import hashlib
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from in_pod_server import atomic, confine, files, listing
from in_pod_server.confine import Opener, best_opener, open_beneath, walk_beneath
from in_pod_server.errors import FileFailedError, PathRefusedError
from in_pod_server.files import Home
from in_pod_server.text import name_to_text
from tests.in_pod_server.support import PATIENCE, Sandbox, data_of, open_sandbox, text_of

ODD_NAMES = [
    b"a b",
    b"a:b",
    b"it's",
    b'"q"',
    b"new\nline",
    b"-rf",
    b"--help",
    "é€𝄞".encode(),
    b"\\x41",
    b"a\\b",
    b"\xff\xfe bad",
    b"\\xff",
    b"$(touch pwned)",
    b"a'; touch pwned; '",
    b"~",
    b"...",
    b"\x01\x7f",
    b"n" * 255,
    ("é" * 127).encode() + b"e",
]


@pytest.fixture(params=[open_beneath, walk_beneath])
def opener(request: pytest.FixtureRequest) -> Opener:
    chosen: Opener = request.param
    return chosen


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir()
    (tmp_path / "secret").write_text("SECRET")
    return made


@pytest.fixture
def home(root: Path, opener: Opener) -> Iterator[Home]:
    with Home([root, Path("/workspace")], opener=opener) as opened:
        yield opened


def write(home: Home, path: str, data: bytes, **options: Any) -> files.Written:
    return home.write(path, data, **{"mode": None, "create_only": False, **options})


# --- confinement -------------------------------------------------------------------------------------


def test_this_kernel_has_openat2(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_PATH)
    assert best_opener(fd) is open_beneath
    os.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_the_walk_takes_over_where_openat2_is_missing_or_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def missing(root: int, path: bytes, flags: int, mode: int = 0) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(confine, "open_beneath", missing)
    fd = os.open(tmp_path, os.O_PATH)
    assert best_opener(fd) is walk_beneath
    os.close(fd)


@pytest.fixture
def traps(root: Path) -> Path:
    (root / "d" / "e").mkdir(parents=True)
    (root / "f").write_text("inside")
    for name, target in {
        "abs": "/etc/passwd",
        "abs_dir": "/etc",
        "rel": "../secret",
        "up": "..",
        "d/up2": "../..",
        "proc": "/proc/self/root",
        "cwd": "/proc/self/cwd",
        "loop": "loop",
        "a1": "a2",
        "a2": "a1",
        "good": "f",
        "d/e/back": "../../f",
        "dirlink": "d",
        "dangling": "d/new",
        "out_and_in": "../home/f",
    }.items():
        (root / name).symlink_to(target)
    return root


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "d/../../secret",
        "rel",
        "abs",
        "abs_dir/passwd",
        "up/secret",
        "d/up2/secret",
        "proc/etc/passwd",
        "cwd/x",
        "out_and_in",
        "..",
        "d/../..",
        "/etc/passwd",
        "/",
        "/workspaces/f",
        "/proc/self/root/etc/passwd",
    ],
)
def test_nothing_outside_is_read_written_listed_or_deleted(
    home: Home, traps: Path, path: str
) -> None:
    before = sorted(p.name for p in traps.parent.iterdir())
    links = sorted(p.name for p in traps.rglob("*"))
    attempts: tuple[Callable[[], object], ...] = (
        lambda: home.read(path, 0, 100),
        lambda: write(home, path + "/x", b"evil"),
        lambda: home.append(path + "/x", b"evil", mode=None),
        lambda: home.open_log(path + "/x"),
        lambda: home.delete(path + "/x", recursive=True),
        lambda: home.edit(path, "S", "X", replace_all=True, max_bytes=100),
        lambda: home.move(path + "/x", "f2", overwrite=True),
        lambda: home.move("f", path + "/x", overwrite=True),
        lambda: home.info(path + "/x", sha256=True),
        lambda: home.read_tail(path, 1, 100),
    )
    for attempt in attempts:
        with pytest.raises((PathRefusedError, FileFailedError)):
            attempt()
    if path not in ("abs", "rel", "out_and_in"):
        with pytest.raises((PathRefusedError, FileFailedError)):
            home.entries(path, recursive=True, max_entries=10)
    assert sorted(p.name for p in traps.parent.iterdir()) == before
    assert sorted(p.name for p in traps.rglob("*")) == links
    assert (traps.parent / "secret").read_text() == "SECRET"


@pytest.mark.parametrize("path", ["rel", "abs", "dangling_out"])
def test_a_write_through_a_link_that_leaves_is_refused(home: Home, traps: Path, path: str) -> None:
    (traps / "dangling_out").symlink_to("../made")
    with pytest.raises(PathRefusedError, match="outside the home"):
        write(home, path, b"evil")
    with pytest.raises(PathRefusedError, match="outside the home"):
        home.append(path, b"evil", mode=None)
    assert (traps / path).is_symlink()
    assert (traps.parent / "secret").read_text() == "SECRET"
    assert not (traps.parent / "made").exists()


@pytest.mark.parametrize(
    "path", ["f", "./f", "d/../f", "good", "d/e/back", "dirlink/../f", "~/f", "/workspace/f", "//f"]
)
def test_every_way_that_stays_inside_works(home: Home, traps: Path, path: str) -> None:
    path = str(traps) + path[1:] if path.startswith("//") else path
    assert home.read(path, 0, 100) == (b"inside", 6)


def test_a_write_through_an_inner_link_changes_what_it_points_to(home: Home, traps: Path) -> None:
    write(home, "good", b"new")
    write(home, "dirlink/x", b"in d")
    write(home, "dangling", b"made")
    assert (traps / "good").is_symlink()
    assert (traps / "f").read_bytes() == b"new"
    assert (traps / "d" / "x").read_bytes() == b"in d"
    assert (traps / "d" / "new").read_bytes() == b"made"
    for loop in ("loop", "a1"):
        with pytest.raises(FileFailedError, match="too many links"):
            write(home, loop, b"x")
        with pytest.raises(FileFailedError, match="too many links"):
            home.read(loop, 0, 1)


def test_a_hard_link_to_the_outside_is_never_written_through(home: Home, root: Path) -> None:
    os.link(root.parent / "secret", root / "hard")
    write(home, "hard", b"mine")
    assert (root.parent / "secret").read_text() == "SECRET"
    assert (root / "hard").read_text() == "mine"


names = st.sampled_from(["a", "b", "c", "..", ".", "", "link1", "link2", "link3"])
paths = st.lists(names, min_size=1, max_size=6).map("/".join)


@given(targets=st.lists(paths, min_size=3, max_size=3), path=paths, absolute=st.booleans())
@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
def test_in_any_tree_both_openers_agree_and_stay_inside(
    tmp_path_factory: pytest.TempPathFactory, targets: list[str], path: str, absolute: bool
) -> None:
    base = tmp_path_factory.mktemp("tree")
    inside = base / "home"
    (inside / "a" / "b").mkdir(parents=True)
    (inside / "a" / "c").write_text("in")
    (base / "b").mkdir()
    for outer in ("a", "c", "b/c"):
        (base / outer).write_text("OUT")
    for name, target in zip(("link1", "a/link2", "a/b/link3"), targets, strict=True):
        (inside / name).symlink_to(("/" if absolute else "") + (target or "x"))
    root = os.open(inside, os.O_PATH)
    found = []
    for opened in (open_beneath, walk_beneath):
        try:
            fd = opened(root, path.encode() or b".", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as exc:
            found.append(("error", errno.errorcode[exc.errno or 0]))
            continue
        where = os.readlink(f"/proc/self/fd/{fd}")
        os.close(fd)
        assert where == str(inside) or where.startswith(f"{inside}/"), "it escaped"
        found.append(("open", where))
    os.close(root)
    assert found[0] == found[1] or "ELOOP" in {code for _, code in found}


SWAPPER = """
import ctypes, sys
libc = ctypes.CDLL(None)
names = [name.encode() for name in sys.argv[1:]]
while True:
    for one in names[1:]:  # 2 is RENAME_EXCHANGE
        libc.renameat2(-100, names[0], -100, one, 2)
"""


TRIES = 100_000


@pytest.fixture
def swapped(root: Path) -> Iterator[Path]:
    """A folder that is now itself, now a link out of the home, now a link to another; all the time."""
    for folder in ("swap", "in"):
        (root / folder).mkdir()
        (root / folder / "secret").write_text("inside")
    for number, target in enumerate(("..", "in", "../..", "/", "swap/..")):
        (root / f"link{number}").symlink_to(target)
    names = ["swap", *sorted(p.name for p in root.iterdir() if p.is_symlink())]
    argv = [sys.executable, "-I", "-S", "-c", SWAPPER, *names]
    swapper = subprocess.Popen(argv, cwd=root)
    yield root
    assert swapper.poll() is None
    swapper.kill()
    swapper.wait(PATIENCE)


def test_in_100_000_tries_a_swapped_link_never_lets_us_out(swapped: Path, opener: Opener) -> None:
    folder = os.open(swapped, os.O_PATH)
    seen: dict[object, int] = {}
    until = time.monotonic() + 60
    for count in range(TRIES):
        try:
            fd = opener(folder, b"swap/secret", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as exc:
            what: object = exc.errno
        else:
            what = os.pread(fd, 10, 0)
            os.close(fd)
        seen[what] = seen.get(what, 0) + 1
        assert time.monotonic() < until, f"only {count} tries"
    os.close(folder)
    escapes = sum(n for what, n in seen.items() if isinstance(what, bytes) and what != b"inside")
    assert (sum(seen.values()), escapes) == (TRIES, 0)
    assert seen[b"inside"] > 1000
    assert seen[errno.EXDEV] > 1000, "the swapper was not in the way"


def test_no_operation_gets_out_by_a_swapped_link(swapped: Path, home: Home) -> None:
    outside = sorted(p.name for p in swapped.parent.iterdir())
    steps: tuple[Callable[[], object], ...] = (
        lambda: home.read("swap/secret", 0, 10),
        lambda: write(home, "swap/new/made", b"mine"),
        lambda: home.append("swap/new2", b"mine", mode=None),
        lambda: home.edit("swap/secret", "SECRET", "x", replace_all=True, max_bytes=100),
        lambda: home.info("swap/secret", sha256=True),
        lambda: home.entries("swap", recursive=True, max_entries=100),
        lambda: home.move("swap/new2", "swap/moved", overwrite=True),
        lambda: home.delete("swap/new", recursive=True),
    )
    secret = hashlib.sha256(b"SECRET").hexdigest()
    for count in range(20_000):
        try:
            got = steps[count % len(steps)]()
        except (PathRefusedError, FileFailedError):
            continue
        assert not (isinstance(got, files.Info) and got.sha256 == secret)
        if isinstance(got, tuple):
            assert got[0] != b"SECRET"
    assert (swapped.parent / "secret").read_text() == "SECRET"
    assert sorted(p.name for p in swapped.parent.iterdir()) == outside


# --- odd files and names ---------------------------------------------------------------------------------


def test_what_is_no_regular_file_neither_hangs_nor_is_used(home: Home, root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "dir").mkdir()
    with socket.socket(socket.AF_UNIX) as unix:
        here = Path.cwd()
        os.chdir(root)
        unix.bind("sock")
        os.chdir(here)
    for name, said in (("fifo", "is a fifo"), ("dir", "is a directory"), ("sock", "is a socket")):
        with pytest.raises(FileFailedError, match=said):
            home.read(name, 0, 1)
        with pytest.raises(FileFailedError, match=said):
            write(home, name, b"x")
        with pytest.raises(FileFailedError, match=said):
            home.append(name, b"x", mode=None)
    kinds = {e.path: e.type for e in home.entries("", recursive=False, max_entries=9).entries}
    assert kinds == {"fifo": "fifo", "dir": "directory", "sock": "socket"}
    for name in kinds:
        home.delete(name, recursive=False)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_round_trip(home: Home, root: Path, name: bytes) -> None:
    """L24"""
    shown = name_to_text(name)
    asked = "./" + shown if name == b"~" else shown
    written = write(home, asked, name)
    assert os.listdir(os.fsencode(root)) == [name]
    assert written.path == f"{root}/{shown}"
    (entry,) = home.entries("", recursive=True, max_entries=9).entries
    assert entry.path == shown
    assert home.read(written.path, 0, 1000) == (name, len(name))
    assert home.info(asked, sha256=True).sha256 == hashlib.sha256(name).hexdigest()
    assert home.move(asked, "plain", overwrite=False)[2] == "file"
    assert home.move("plain", asked, overwrite=False)[1] == f"{root}/{shown}"
    assert home.delete(asked, recursive=False) == "file"
    write(home, f"{asked}/{asked}", name) if len(name) < 255 else None


def test_names_that_no_file_can_have_are_clear_errors(home: Home) -> None:
    with pytest.raises(PathRefusedError, match="NUL"):
        home.read("a\0b", 0, 1)
    with pytest.raises(FileFailedError, match="255 bytes at most"):
        write(home, "x" * 256, b"")
    with pytest.raises(FileFailedError, match="255 bytes at most"):
        home.read("d/" * 3000, 0, 1)
    with pytest.raises(FileFailedError) as refused:
        home.read("d/" * 300, 0, 1)
    assert len(str(refused.value)) < 500
    with pytest.raises(PathRefusedError, match="not Unicode"):
        home.read("\ud800", 0, 1)
    for nameless in ("", ".", "..", "d/..", "~"):
        with pytest.raises((PathRefusedError, FileFailedError)):
            write(home, nameless, b"x")


# --- writing ---------------------------------------------------------------------------------------------


def test_a_write_makes_parents_and_keeps_the_mode(home: Home, root: Path) -> None:
    assert write(home, "a/b/c.txt", b"1").created is True
    assert stat.S_IMODE((root / "a/b/c.txt").stat().st_mode) == 0o644
    (root / "a/b/c.txt").chmod(0o750)
    assert write(home, "a/b/c.txt", b"2").created is False
    assert stat.S_IMODE((root / "a/b/c.txt").stat().st_mode) == 0o750
    write(home, "a/b/c.txt", b"3", mode=0o600)
    assert stat.S_IMODE((root / "a/b/c.txt").stat().st_mode) == 0o600
    with pytest.raises(FileFailedError, match="not a directory"):
        write(home, "a/b/c.txt/d", b"")


def test_create_only_never_replaces(home: Home, root: Path) -> None:
    write(home, "f", b"old", create_only=True)
    (root / "dangling").symlink_to("nowhere")
    for name in ("f", "dangling"):
        with pytest.raises(FileFailedError, match="exists already"):
            write(home, name, b"new", create_only=True)
    assert (root / "f").read_bytes() == b"old"
    assert sorted(p.name for p in root.iterdir()) == ["dangling", "f"]


def test_of_many_who_create_the_same_file_one_wins(home: Home, root: Path) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        try:
            write(home, "new/f", str(number).encode(), create_only=True)
        except FileFailedError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (root / "new" / "f").read_text() == str(won[0])


@pytest.mark.parametrize("failing", ["write", "fsync", "rename", "fchmod"])
@pytest.mark.parametrize("before", [b"old content", None])
def test_a_write_that_fails_leaves_the_old_content_and_no_other_file(
    home: Home, root: Path, monkeypatch: pytest.MonkeyPatch, failing: str, before: bytes | None
) -> None:
    if before is not None:
        (root / "f").write_bytes(before)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, full)
        with pytest.raises(FileFailedError, match="no space is left"):
            write(home, "f", b"new")
    assert [p.name for p in root.iterdir()] == (["f"] if before is not None else [])
    if before is not None:
        assert (root / "f").read_bytes() == before


def test_a_file_system_that_takes_only_a_part_loses_nothing(home: Home, root: Path) -> None:
    """The kernel itself refuses in the middle of the write (a size limit stands for a full disk)."""
    (root / "f").write_bytes(b"o" * 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(FileFailedError, match="cannot write f"):
            write(home, "f", b"n" * 200_000)
        with pytest.raises(FileFailedError, match="cannot append to f"):
            home.append("f", b"n" * 200_000, mode=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (root / "f").read_bytes() == b"o" * 1000
    assert [p.name for p in root.iterdir()] == ["f"]


def test_append_adds_and_a_failed_one_takes_back_only_its_own(
    home: Home, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L26"""
    assert home.append("new/f", b"a", mode=0o600).created is True
    written = home.append("new/f", b"b", mode=None)
    assert (written.size, written.created) == (2, False)
    assert (root / "new/f").read_bytes() == b"ab"
    assert stat.S_IMODE((root / "new/f").stat().st_mode) == 0o600

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(FileFailedError, match="cannot append"):
            home.append("new/f", b"lost", mode=None)
    assert (root / "new/f").read_bytes() == b"ab"


def test_an_append_to_what_may_not_be_opened_changes_nothing(
    home: Home, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L26: the report's case; nothing is read first, so nothing can be taken for empty."""
    (root / "f").write_bytes(b"old")
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if path == b"f" and flags & os.O_APPEND:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(FileFailedError, match="Permission denied"):
            home.append("f", b"new", mode=None)
    assert (root / "f").read_bytes() == b"old"


def test_parallel_writes_into_one_new_folder_all_succeed_and_are_seen(home: Home) -> None:
    """L22"""
    failures: list[Exception] = []

    def one(number: int) -> None:
        try:
            path, data = f"a/b/c/{number}", str(number).encode()
            write(home, path, data)
            assert home.read(path, 0, 10) == (data, len(data))
        except Exception as exc:  # it is asserted on below
            failures.append(exc)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert home.entries("a/b/c", recursive=False, max_entries=99).total == 20


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=50)), max_size=8))
@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
def test_any_writes_and_appends_give_what_they_say(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, bytes]]
) -> None:
    root = tmp_path_factory.mktemp("writes")
    expected = b""
    with Home([root]) as home:
        for append, data in steps:
            expected = expected + data if append else data
            written = home.append("f", data, mode=None) if append else write(home, "f", data)
            assert written.size == len(expected)
            assert home.read("f", 0, 1000) == (expected, len(expected))


# --- listing and deleting ----------------------------------------------------------------------------------


def test_a_listing_is_ordered_counted_and_cut(home: Home, root: Path) -> None:
    (root / "d" / "sub").mkdir(parents=True)
    (root / "d" / "sub" / "x").write_text("12")
    (root / "b").symlink_to("d")
    (root / "a").write_text("1")
    flat = home.entries("", recursive=False, max_entries=10)
    assert [(e.path, e.type) for e in flat.entries] == [
        ("a", "file"),
        ("b", "symlink"),
        ("d", "directory"),
    ]
    deep = home.entries("", recursive=True, max_entries=4)
    assert [e.path for e in deep.entries] == ["a", "b", "d", "d/sub"]
    assert (deep.total, deep.complete) == (5, True)
    below = home.entries("/workspace/d", recursive=True, max_entries=10)
    assert [e.path for e in below.entries] == ["d/sub", "d/sub/x"]
    assert [e.size for e in home.entries("d/sub/x", recursive=False, max_entries=1).entries] == [2]
    with pytest.raises(FileFailedError, match="no such file"):
        home.entries("nope", recursive=False, max_entries=1)


def test_a_huge_tree_is_counted_up_to_a_limit(
    home: Home, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "LIST_SCAN_LIMIT", 10)
    for number in range(30):
        (root / f"{number:02}").mkdir()
    found = home.entries("", recursive=True, max_entries=5)
    assert (len(found.entries), found.complete) == (5, False)
    assert found.total >= 10


def test_deleting_takes_what_was_asked_and_nothing_more(home: Home, root: Path) -> None:
    (root / "d" / "sub").mkdir(parents=True)
    (root / "d" / "out").symlink_to("../..")
    (root / "d" / "sub" / "abs").symlink_to("/")
    (root / "link").symlink_to("d")
    with pytest.raises(FileFailedError, match="recursive=true"):
        home.delete("d", recursive=False)
    assert home.delete("link", recursive=True) == "symlink"
    assert (root / "d" / "sub").is_dir()
    assert home.delete("d", recursive=True) == "directory"
    assert list(root.iterdir()) == []
    assert (root.parent / "secret").exists()
    with pytest.raises(FileFailedError, match="no such file"):
        home.delete("d", recursive=True)


@pytest.mark.parametrize("path", [".", "", "/workspace", "/workspace/", "~", "~/", "./.", "d/.."])
def test_the_home_itself_is_never_deleted(home: Home, root: Path, path: str) -> None:
    (root / "d").mkdir()
    with pytest.raises(PathRefusedError):
        home.delete(path, recursive=True)
    assert (root / "d").is_dir()


def test_a_tree_too_deep_for_the_tool_is_said(home: Home, root: Path) -> None:
    fd = os.open(root, os.O_PATH)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_PATH, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    if sys.version_info < (3, 13):  # from then on rmtree needs no recursion
        with pytest.raises(FileFailedError, match="rm -rf in run_command"):
            home.delete("d", recursive=True)
        subprocess.run(["rm", "-rf", root / "d"], check=True)
    else:
        home.delete("d", recursive=True)
    assert home.entries("", recursive=True, max_entries=1).total == 0


# --- looking at and moving -----------------------------------------------------------------------------------


def test_an_entry_is_told_without_following_it(home: Home, traps: Path) -> None:
    (traps / "f").chmod(0o640)
    info = home.info("f", sha256=True)
    assert (info.type, info.size, info.mode) == ("file", 6, 0o640)
    assert info.sha256 == hashlib.sha256(b"inside").hexdigest()
    assert home.info("f", sha256=False).sha256 is None
    for name, target in (("abs", "/etc/passwd"), ("rel", "../secret"), ("dangling", "d/new")):
        link = home.info(name, sha256=True)
        assert (link.type, link.link_target, link.sha256) == ("symlink", target, None)
    assert home.info("", sha256=True).type == "directory"
    with pytest.raises(FileFailedError, match="no such file"):
        home.info("nope", sha256=False)


def test_a_sum_that_takes_too_long_is_refused(
    home: Home, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "f").write_bytes(b"x")
    monkeypatch.setattr(files, "HASH_SECONDS", -1)
    with pytest.raises(FileFailedError, match="sha256sum in run_command"):
        home.info("f", sha256=True)


@pytest.mark.parametrize(
    ("data", "lines", "limit", "tail"),
    [
        (b"a\nb\nc\n", 1, 99, b"c\n"),
        (b"a\nb\nc", 2, 99, b"b\nc"),
        (b"a\nb\nc\n", 3, 99, b"a\nb\nc\n"),
        (b"a\nb\nc\n", 9, 99, b"a\nb\nc\n"),
        (b"a\n\n\n", 2, 99, b"\n\n"),
        (b"\n", 1, 99, b"\n"),
        (b"", 5, 99, b""),
        (b"a\nlong line\n", 1, 5, b"line\n"),
    ],
)
def test_the_last_lines_are_found_from_the_end(
    home: Home, root: Path, data: bytes, lines: int, limit: int, tail: bytes
) -> None:
    (root / "f").write_bytes(data)
    assert home.read_tail("f", lines, limit) == (tail, len(data))


@pytest.fixture(params=["flag", "by hand"])
def no_replace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to move without replacing: the kernel's, and where a file system has none."""
    if request.param == "by hand":

        def unknown(*_: object) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(atomic, "_rename_noreplace", unknown)


@pytest.mark.usefixtures("no_replace")
def test_a_move_takes_files_folders_and_links_and_makes_parents(home: Home, root: Path) -> None:
    (root / "d" / "sub").mkdir(parents=True)
    (root / "d" / "sub" / "x").write_text("x")
    (root / "link").symlink_to("/etc")
    assert home.move("d/sub/x", "new/er/y", overwrite=False) == (
        f"{root}/d/sub/x",
        f"{root}/new/er/y",
        "file",
    )
    assert home.move("/workspace/d", "e", overwrite=False)[2] == "directory"
    assert home.move("link", "e/link", overwrite=False)[2] == "symlink"
    assert os.readlink(root / "e" / "link") == "/etc"
    assert sorted(str(p.relative_to(root)) for p in root.rglob("*")) == [
        "e",
        "e/link",
        "e/sub",
        "new",
        "new/er",
        "new/er/y",
    ]


@pytest.mark.usefixtures("no_replace")
@pytest.mark.parametrize("there", ["file", "folder", "dangling"])
@pytest.mark.parametrize("moved", ["f", "d"])
def test_a_move_never_replaces_unless_told(home: Home, root: Path, there: str, moved: str) -> None:
    (root / "f").write_text("moved")
    (root / "d").mkdir()
    (root / "file").write_text("precious")
    (root / "folder" / "in").mkdir(parents=True)
    (root / "dangling").symlink_to("nowhere")
    before = sorted(root.rglob("*"))
    with pytest.raises(FileFailedError, match="something is there already"):
        home.move(moved, there, overwrite=False)
    assert sorted(root.rglob("*")) == before
    assert (root / "file").read_text() == "precious"
    if moved == "f" and there != "folder":
        home.move(moved, there, overwrite=True)
        assert (root / there).read_text() == "moved"
        assert not (root / "nowhere").exists()
    else:
        with pytest.raises(FileFailedError, match=r"a (file|folder) is there"):
            home.move(moved, "file" if moved == "d" else there, overwrite=True)
        assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("twin", ["b", "d/a", "d/b"])
def test_a_move_onto_another_name_of_the_same_file_leaves_the_new_name_alone(
    home: Home, root: Path, twin: str
) -> None:
    """rename(2) does nothing there, and says that all is well: the old name stayed."""
    (root / "d").mkdir()
    (root / "a").write_text("one")
    (root / twin).hardlink_to(root / "a")
    home.move("a", twin, overwrite=True)
    assert not (root / "a").exists()
    for itself in (twin, f"./{twin}", f"/workspace/{twin}"):
        home.move(twin, itself, overwrite=True)
    assert (root / twin).read_text() == "one"


@pytest.mark.usefixtures("no_replace")
def test_a_move_that_cannot_be_leaves_everything(home: Home, root: Path) -> None:
    (root / "d" / "sub").mkdir(parents=True)
    before = sorted(root.parent.rglob("*"))
    with pytest.raises(FileFailedError, match="into itself"):
        home.move("d", "d/sub/d", overwrite=False)
    with pytest.raises(FileFailedError, match="no such file"):
        home.move("nope", "new/x", overwrite=False)
    for path, new_path in (
        ("d", "../d"),
        ("../secret", "s"),
        ("~", "x"),
        ("d", "."),
        ("d", "/etc/d"),
    ):
        with pytest.raises(PathRefusedError):
            home.move(path, new_path, overwrite=True)
    assert sorted(root.parent.rglob("*")) == before


# --- the tools ---------------------------------------------------------------------------------------------


async def test_a_file_is_written_and_read_by_the_tools(sandbox: Sandbox) -> None:
    made = await sandbox.client.call_tool(
        "write_file", {"path": "d/f", "content": "é\n", "mode": "755"}
    )
    assert text_of(made) == f"wrote 3 bytes to {sandbox.home}/d/f (a new file)"
    assert data_of(made) == {
        "path": f"{sandbox.home}/d/f",
        "bytes_written": 3,
        "size": 3,
        "created": True,
    }
    assert stat.S_IMODE((sandbox.home / "d/f").stat().st_mode) == 0o755
    read = await sandbox.client.call_tool("read_file", {"path": "d/f"})
    assert text_of(read) == "é\n", "a whole text file is given as it is"
    assert data_of(read) == {
        "path": f"{sandbox.home}/d/f",
        "content": "é\n",
        "encoding": "utf-8",
        "size": 3,
        "offset": 0,
        "bytes_read": 3,
        "truncated": False,
        "next_offset": 3,
    }
    appended = await sandbox.call("write_file", path="d/f", content="x", append=True)
    assert (appended["size"], appended["bytes_written"]) == (4, 1)
    listed = await sandbox.call("list_files", recursive=True)
    assert [(e["path"], e["type"], e["size"]) for e in listed["entries"]] == [
        ("d", "directory", listed["entries"][0]["size"]),
        ("d/f", "file", 4),
    ]
    assert (listed["total"], listed["truncated"]) == (2, False)
    deleted = await sandbox.client.call_tool("delete_file", {"path": "d/f"})
    assert data_of(deleted) == {"path": f"{sandbox.home}/d/f", "type": "file"}
    assert "no such file" in await sandbox.refused("read_file", path="d/f")


@pytest.mark.parametrize("content", ['{"a": 1}', "123", "null", "true", "[1]", '"x"', "", "\n"])
async def test_text_that_looks_like_json_stays_text(sandbox: Sandbox, content: str) -> None:
    await sandbox.call("write_file", path="f", content=content)
    assert (sandbox.home / "f").read_text() == content
    result = await sandbox.client.call_tool("read_file", {"path": "f"})
    assert data_of(result)["content"] == content
    assert text_of(result) == (content or "[empty]")


async def test_base64_in_lines_is_base64(sandbox: Sandbox) -> None:
    content = base64.encodebytes(bytes(range(256))).decode().replace("\n", "\r\n")
    await sandbox.call("write_file", path="b", content=content, encoding="base64")
    assert (sandbox.home / "b").read_bytes() == bytes(range(256))
    for broken in ("YQ", "YQ==YQ==", "Y!Q=", "four more", "\tYQ=="):
        said = await sandbox.refused("write_file", path="b", content=broken, encoding="base64")
        assert "content is not base64" in said


async def test_binary_files_survive_a_round_trip(sandbox: Sandbox) -> None:
    """L25"""
    archive = sandbox.home.parent / "a.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("x", os.urandom(5000))
    png = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    for name, data in (("a.zip", archive.read_bytes()), ("a.png", png), ("empty", b"")):
        encoded = base64.b64encode(data).decode()
        await sandbox.call("write_file", path=name, content=encoded, encoding="base64")
        assert (sandbox.home / name).read_bytes() == data
        back = await sandbox.call("read_file", path=name, encoding="base64")
        assert base64.b64decode(back["content"]) == data
    shown = await sandbox.client.call_tool("read_file", {"path": "a.png"})
    assert "encoding=base64 is exact" in text_of(shown)
    assert data_of(shown)["encoding"] == "utf-8, escaped"
    assert "not base64" in await sandbox.refused(
        "write_file", path="x", content="é!", encoding="base64"
    )


@pytest.mark.parametrize("encoding", ["text", "base64"])
@pytest.mark.parametrize("unit", ["€", "\x00", "x", '"\\'])
async def test_a_large_file_is_read_in_parts_that_fit_a_message(
    sandbox: Sandbox, encoding: str, unit: str
) -> None:
    whole = (unit * (3_000_000 // len(unit.encode()))).encode()
    (sandbox.home / "big").write_bytes(whole)
    data, offset = b"", 0
    while True:
        result = await sandbox.client.call_tool(
            "read_file",
            {"path": "big", "offset": offset, "encoding": encoding, "max_bytes": 1_000_003},
        )
        assert len(result.model_dump_json(by_alias=True).encode()) < 1_000_000
        part = data_of(result)
        content = part["content"]
        data += base64.b64decode(content) if encoding == "base64" else content.encode()
        offset = part["next_offset"]
        assert offset == len(data)
        if not part["truncated"]:
            break
        assert f"go on with offset={offset}" in text_of(result)
    assert hashlib.sha256(data).digest() == hashlib.sha256(whole).digest()


async def test_reading_beyond_the_end_is_said(sandbox: Sandbox) -> None:
    (sandbox.home / "f").write_text("abc")
    result = await sandbox.client.call_tool("read_file", {"path": "f", "offset": 10})
    assert text_of(result) == "[nothing at offset 10 of 3]"
    assert data_of(result)["truncated"] is False


async def test_the_limit_of_the_content_tools_holds(tmp_path: Path) -> None:
    async with open_sandbox(tmp_path, max_file_bytes=100) as sandbox:
        said = await sandbox.refused("write_file", path="f", content="x" * 101)
        assert "the limit is 100" in said
        await sandbox.call("write_file", path="f", content="x" * 100)
        await sandbox.call("write_file", path="f", content="y" * 100, append=True)
        read = await sandbox.call("read_file", path="f", max_bytes=1000)
        assert (read["bytes_read"], read["truncated"], read["next_offset"]) == (100, True, 100)


async def test_a_listing_fits_a_message(sandbox: Sandbox) -> None:
    for number in range(4000):
        (sandbox.home / f"{number}{'é' * 120}").touch()
    result = await sandbox.client.call_tool("list_files", {"max_entries": 10000})
    assert len(result.model_dump_json(by_alias=True).encode()) < 1_000_000
    listed = data_of(result)
    assert listed["total"] == 4000
    assert listed["truncated"] is True
    assert f"[{len(listed['entries'])} of 4000 entries" in text_of(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"path": "/etc/x", "content": ""}, "/etc/x is outside the home"),
        ({"path": "", "content": ""}, "path: string should have at least 1 character"),
        ({"path": "f", "content": "", "mode": "9"}, "mode: string should match pattern"),
        ({"path": "f", "content": "", "append": True, "create_only": True}, "exclude each other"),
        ({"path": "f"}, "content: field required"),
        ({"path": "f", "content": 7}, "content: input should be a valid string"),
        ({"path": "f", "content": "", "encoding": "hex"}, "encoding: input should be 'text' or"),
        ({"path": "f", "content": "", "Mode": "644"}, "takes no argument 'Mode'; it takes: path, "),
    ],
)
async def test_wrong_arguments_are_told_in_one_readable_line(
    sandbox: Sandbox, arguments: dict[str, Any], said: str
) -> None:
    text = await sandbox.refused("write_file", **arguments)
    assert said in text
    assert "pydantic" not in text
    assert "Error executing" not in text
    assert "\n" not in text
    assert list(sandbox.home.iterdir()) == []


async def test_the_tools_share_one_new_folder(sandbox: Sandbox) -> None:
    """L22, through the server."""
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                call = {"path": f"a/b/c/{number}", "content": str(number)}
                tasks.start_soon(sandbox.client.call_tool, "write_file", call)
    ran = await sandbox.call("run_command", command="cd a/b/c && cat $(seq 0 19) && ls | wc -l")
    assert ran["stdout"] == "".join(map(str, range(20))) + "20\n"


async def test_the_last_lines_of_a_log_are_read_and_followed(sandbox: Sandbox) -> None:
    (sandbox.home / "log").write_text("".join(f"line {n} é\n" for n in range(100_000)))
    result = await sandbox.client.call_tool("read_file", {"path": "log", "tail_lines": 2})
    tail = data_of(result)
    assert tail["content"] == "line 99998 é\nline 99999 é\n"
    assert tail["offset"] == tail["size"] - tail["bytes_read"] > 0
    assert text_of(result).endswith(f"[bytes {tail['offset']} to {tail['size']} of {tail['size']}]")
    await sandbox.call("write_file", path="log", content="more", append=True)
    more = await sandbox.call("read_file", path="log", offset=tail["next_offset"])
    assert more["content"] == "more"
    cut = await sandbox.client.call_tool(
        "read_file", {"path": "log", "tail_lines": 90_000, "max_bytes": 5_000_000}
    )
    assert len(cut.model_dump_json(by_alias=True).encode()) < 1_000_000
    assert data_of(cut)["content"].endswith("more")
    assert "not all of 90000 lines" in text_of(cut)
    exact = await sandbox.call("read_file", path="log", tail_lines=1, encoding="base64")
    assert base64.b64decode(exact["content"]) == b"more"
    (sandbox.home / "empty").touch()
    empty = await sandbox.client.call_tool("read_file", {"path": "empty", "tail_lines": 3})
    assert text_of(empty) == "[empty]"
    said = await sandbox.refused("read_file", path="log", tail_lines=1, offset=1)
    assert "exclude each other" in said


@pytest.mark.parametrize("unit", [b"\xe2\x82\xac", b"\x00", b"\xff", b'"'])
async def test_a_tail_of_one_endless_line_fits_a_message(sandbox: Sandbox, unit: bytes) -> None:
    (sandbox.home / "f").write_bytes(unit * (1_000_000 // len(unit)))
    result = await sandbox.client.call_tool(
        "read_file", {"path": "f", "tail_lines": 1, "max_bytes": 999_999}
    )
    assert len(result.model_dump_json(by_alias=True).encode()) < 1_000_000
    tail = data_of(result)
    assert tail["bytes_read"] > 50_000
    assert tail["offset"] + tail["bytes_read"] == tail["size"]
    assert "not all of 1 lines" in text_of(result)


async def test_a_glob_chooses_what_is_listed(sandbox: Sandbox) -> None:
    for name in ("a.py", "b.txt", "src/c.py", "src/deep/d.py", "src/deep/e.js"):
        path = sandbox.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    async def listed(**arguments: Any) -> list[str]:
        found = await sandbox.call("list_files", **arguments)
        assert found["total"] == len(found["entries"])
        return [entry["path"] for entry in found["entries"]]

    assert await listed(glob="*.py") == ["a.py"]
    assert await listed(glob="*.py", recursive=True) == ["a.py", "src/c.py", "src/deep/d.py"]
    assert await listed(glob="**/*.py") == ["a.py", "src/c.py", "src/deep/d.py"]
    assert await listed(glob="src/*") == ["src/c.py", "src/deep"]
    assert await listed(path="src", glob="deep/*.{js,ts}") == ["src/deep/e.js"]
    nothing = await sandbox.client.call_tool("list_files", {"glob": "*.rs"})
    assert text_of(nothing) == "nothing matches *.rs"
    assert "not closed" in await sandbox.refused("list_files", glob="{a")


async def test_entries_are_looked_at_and_moved_by_the_tools(sandbox: Sandbox) -> None:
    (sandbox.home / "f").write_text("x")
    (sandbox.home / "f").chmod(0o600)
    (sandbox.home / "link").symlink_to("f")
    looked = await sandbox.client.call_tool("file_info", {"path": "f", "sha256": True})
    info = data_of(looked)
    assert text_of(looked).startswith(f"file {sandbox.home}/f, 1 bytes, mode 600, ")
    assert text_of(looked).endswith(f"sha256 {hashlib.sha256(b'x').hexdigest()}")
    assert info.pop("mtime") > 0
    assert info == {
        "path": f"{sandbox.home}/f",
        "type": "file",
        "size": 1,
        "mode": "600",
        "link_target": None,
        "sha256": hashlib.sha256(b"x").hexdigest(),
    }
    link = await sandbox.client.call_tool("file_info", {"path": "link"})
    assert f"symlink {sandbox.home}/link -> f, " in text_of(link)
    moved = await sandbox.client.call_tool("move_file", {"path": "f", "new_path": "d/g"})
    assert text_of(moved) == f"moved file {sandbox.home}/f to {sandbox.home}/d/g"
    assert data_of(moved) == {
        "path": f"{sandbox.home}/d/g",
        "old_path": f"{sandbox.home}/f",
        "type": "file",
    }


async def test_the_tail_of_a_large_output_is_not_lost(sandbox: Sandbox) -> None:
    """L11: as a file every byte, as output what was left out is said, and the end is there."""
    command = "seq 1 2000000 > f; sha256sum < f; seq 1 2000000 >&2"
    ran = await sandbox.call("run_command", command=command)
    size = (sandbox.home / "f").stat().st_size
    assert (ran["stderr_truncated"], ran["stderr_bytes"]) == (True, size)
    assert ran["stderr"].endswith("\n1999999\n2000000\n")
    digest, offset = hashlib.sha256(), 0
    while True:
        part = await sandbox.call("read_file", path="f", offset=offset, max_bytes=5_000_000)
        digest.update(part["content"].encode())
        offset = part["next_offset"]
        if not part["truncated"]:
            break
    assert offset == size
    assert ran["stdout"].startswith(digest.hexdigest())
