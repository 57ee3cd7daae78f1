"""Edits: exact, all or nothing, and helpful where nothing can be done."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from in_pod_server.edits import Edit, replace_text
from in_pod_server.errors import ArgumentError, FileFailedError
from in_pod_server.files import Home
from tests.in_pod_server.support import Sandbox, data_of, text_of


def edit(data: bytes, old: str, new: str, *, replace_all: bool = False) -> Edit:
    return replace_text(data, old, new, replace_all=replace_all)


def refused(data: bytes, old: str, new: str = "new") -> str:
    with pytest.raises(FileFailedError) as said:
        edit(data, old, new)
    assert str(said.value).endswith("nothing was changed")
    return str(said.value)


@given(st.text(), st.text(min_size=1), st.text(), st.booleans())
def test_a_replacement_is_what_python_s_own_would_be(
    around: str, old: str, new: str, every: bool
) -> None:
    content = f"{around}{old}{around}"
    if "\r" in content + old + new or old == new:
        return
    data = content.encode()
    if every:
        made = edit(data, old, new, replace_all=True)
        assert made.data.decode() == content.replace(old, new)
        assert made.count == content.count(old)
    elif content.find(old) == content.rfind(old):
        made = edit(data, old, new)
        assert made.data.decode() == content.replace(old, new, 1)
        assert made.count == 1
        assert made.lines == [content[: content.find(old)].count("\n") + 1]
    else:
        assert "places" in refused(data, old, new)


def test_only_what_was_asked_changes_whatever_the_other_bytes() -> None:
    data = b"\xff\xfe\x00bin\nold\n\x80end"
    assert edit(data, "old", "né").data == b"\xff\xfe\x00bin\nn\xc3\xa9\n\x80end"
    assert edit(b"a\nb", "b", "").data == b"a\n"


@pytest.mark.parametrize(
    ("data", "old", "new", "made"),
    [
        (b"a\r\nb\r\nc\r\n", "a\nb", "x\ny\nz", b"x\r\ny\r\nz\r\nc\r\n"),
        (b"a\r\nb\r\n", "b", "b\nc", b"a\r\nb\r\nc\r\n"),
        (b"a\r\nb\r\n", "a\r\nb", "x\r\ny", b"x\r\ny\r\n"),
        (b"a\nb\n", "a\nb", "x\ny", b"x\ny\n"),
        (b"a\r\nb\nc", "b\nc", "x\ny", b"a\r\nx\ny"),
        (b"no break", "no", "a\nb", b"a\nb break"),
    ],
)
def test_line_ends_stay_what_they_are(data: bytes, old: str, new: str, made: bytes) -> None:
    assert edit(data, old, new).data == made


def test_a_text_that_is_there_more_than_once_is_refused_with_its_lines() -> None:
    said = refused(b"one\ntwo\none\nthree one\n", "one")
    assert "in 3 places (line 1, 3, 4)" in said
    assert "replace_all=true" in said
    assert "in 2 places (line 1)" in refused(b"aaa", "aa"), "places that overlap are two as well"
    assert ", ...)" in refused(b"x\n" * 1000, "x")


@pytest.mark.parametrize(
    ("data", "old", "hint"),
    [
        (b"def f():\n\treturn 1\n", "def f():\n    return 1", "from line 1 on, which reads"),
        (b"def f():\n\treturn 1\n", "def f():\n    return 1", "\n\\treturn 1\n"),
        (b"a\nif x:  \n  y\n", "if x:\n  y", "from line 2 on"),
        (b"a\r\nb\nc\r\n", "b\nc\nd", "closest line is 2"),
        (b"alpha\nthe quick brown fox\nomega\n", "the quick brown fix", "closest line is 2:\n"),
        (b"a\nnew\n", "old", "new_text is there already (line 2)"),
        (b"", "old", "read_file shows"),
        (b"\xff\xff", "old", "read_file shows"),
    ],
)
def test_a_text_that_is_not_there_is_refused_with_what_comes_closest(
    data: bytes, old: str, hint: str
) -> None:
    assert hint in refused(data, old)


def test_texts_that_change_nothing_are_refused() -> None:
    with pytest.raises(ArgumentError, match="the same"):
        edit(b"a", "a", "a")
    with pytest.raises(ArgumentError, match="empty"):
        edit(b"a", "", "b")


@pytest.mark.parametrize("data", [b"x" * 5_000_000, b"abc def\n" * 600_000, b"\t \n" * 1_000_000])
@pytest.mark.parametrize("old", ["xyz def", "x" * 3000 + "y", "a b c d e f g", "x"])
def test_no_file_makes_an_edit_slow(data: bytes, old: str) -> None:
    begun = time.perf_counter()
    with contextlib.suppress(FileFailedError):
        edit(data, old, "new", replace_all=True)
    assert time.perf_counter() - begun < 5


def test_the_snippet_shows_the_changed_lines_with_their_neighbours() -> None:
    data = "".join(f"line {n}\n" for n in range(1, 21)).encode()
    made = edit(data, "line 10\n", "a\nb\n")
    assert (
        made.snippet.split("\n")
        == [
            "     7\tline 7",
            "     8\tline 8",
            "     9\tline 9",
            "    10\ta",
            "    11\tb",
            "    12\tline 11",
            "    13\tline 12",
            "    14\tline 13",
            "    15\tline 14",
        ][: len(made.snippet.split("\n"))]
    )
    assert len(edit(b"x" * 1_000_000 + b"y", "y", "z").snippet) < 20_000


# --- in the home ------------------------------------------------------------------------------------------


async def test_an_edit_keeps_the_mode_and_tells_what_it_did(sandbox: Sandbox) -> None:
    (sandbox.home / "d").mkdir()
    path = sandbox.home / "d" / "f"
    path.write_bytes(b"one\r\ntwo\r\n")
    path.chmod(0o755)
    (sandbox.home / "link").symlink_to("d/f")
    result = await sandbox.client.call_tool(
        "edit_file", {"path": "link", "old_text": "two", "new_text": "2"}
    )
    assert data_of(result) == {
        "path": str(path),
        "replacements": 1,
        "lines": [2],
        "size": 8,
        "snippet": "     1\tone\n     2\t2",
    }
    assert text_of(result) == (
        f"replaced in 1 place of {path} (line 2), 8 bytes now:\n     1\tone\n     2\t2"
    )
    assert path.read_bytes() == b"one\r\n2\r\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert (sandbox.home / "link").is_symlink()
    assert sorted(p.name for p in path.parent.iterdir()) == ["f"]
    assert "is a directory" in await sandbox.refused(
        "edit_file", path="d", old_text="a", new_text="b"
    )
    assert "no such file" in await sandbox.refused(
        "edit_file", path="nope", old_text="a", new_text="b"
    )
    assert "is outside the home" in await sandbox.refused(
        "edit_file", path="/etc/passwd", old_text="root", new_text="b"
    )
    os.mkfifo(sandbox.home / "fifo")
    assert "is a fifo" in await sandbox.refused(
        "edit_file", path="fifo", old_text="a", new_text="b"
    )


async def test_edits_of_one_file_at_once_lose_none(sandbox: Sandbox) -> None:
    (sandbox.home / "f").write_text("".join(f"<{n}>\n" for n in range(40)))
    async with anyio.create_task_group() as tasks:
        for n in range(40):
            call = {"path": "f", "old_text": f"<{n}>", "new_text": f"done {n}"}
            tasks.start_soon(sandbox.client.call_tool, "edit_file", call)
    assert (sandbox.home / "f").read_text() == "".join(f"done {n}\n" for n in range(40))


def test_a_file_that_changes_under_an_edit_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("0\nold\n")

    def append() -> None:
        with path.open("a") as file:
            file.write("x\n")

    times = 0

    def changed_meanwhile(data: bytes, old: str, new: str, *, replace_all: bool) -> Edit:
        nonlocal times
        times += 1
        if times == 1:
            append()
        return replace_text(data, old, new, replace_all=replace_all)

    with Home([tmp_path]) as home, pytest.MonkeyPatch.context() as patched:
        patched.setattr("in_pod_server.files.replace_text", changed_meanwhile)
        home.edit("f", "old", "new", replace_all=False, max_bytes=100)
    assert times == 2
    assert path.read_text() == "0\nnew\nx\n"


def test_what_is_written_while_the_new_content_is_stored_is_not_lost(tmp_path: Path) -> None:
    """The last look at the file is after the slow part, the write to the disk."""
    path = tmp_path / "f"
    path.write_text("0\nold\n")
    store = os.fsync
    writes = iter(["x\n", "y\n"])

    def written_meanwhile(fd: int) -> None:
        store(fd)
        with path.open("a") as file:
            file.write(next(writes, ""))

    with Home([tmp_path]) as home, pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", written_meanwhile)
        home.edit("f", "old", "new", replace_all=False, max_bytes=100)
    assert path.read_text() == "0\nnew\nx\ny\n"
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_a_file_that_never_stands_still_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old\n")
    store = os.fsync

    def written_meanwhile(fd: int) -> None:
        store(fd)
        with path.open("a") as file:
            file.write("x")

    with Home([tmp_path]) as home, pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", written_meanwhile)
        with pytest.raises(FileFailedError, match="being changed by somebody else"):
            home.edit("f", "old", "new", replace_all=False, max_bytes=100)
    assert path.read_text().startswith("old\nx")
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_a_file_beyond_the_limit_is_not_edited(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x" * 101)
    (tmp_path / "g").write_text("x")
    with Home([tmp_path]) as home:
        for name, old, new in (("f", "x", "y"), ("g", "x", "y" * 101)):
            with pytest.raises(FileFailedError, match="101 bytes, the limit is 100"):
                home.edit(name, old, new, replace_all=True, max_bytes=100)
    assert (tmp_path / "g").read_text() == "x"
