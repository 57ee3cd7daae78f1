"""Search: ripgrep's answers, nothing of the caller's as an option, bounded in time and size."""

# ruff: noqa: ASYNC240 - the tests look at files
from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from in_pod_server import ripgrep, search
from tests.in_pod_server.support import Daemon, Sandbox, Wire, data_of, text_of


def test_ripgrep_is_here() -> None:
    """The image has it; where the tests run it has to be installed."""
    assert subprocess.run(["rg", "--version"], capture_output=True, check=False).returncode == 0


def fill(home: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def places(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(row["path"], row["line"]) for row in found["results"] if row["is_match"]]


async def test_matches_come_with_path_line_and_text(sandbox: Sandbox) -> None:
    fill(sandbox.home, {"b.py": "x\nfoo(1)\n", "a/c.txt": "foo\n\nbar foo\n", "z": "nothing\n"})
    result = await sandbox.client.call_tool("search_files", {"pattern": "foo"})
    assert text_of(result) == "a/c.txt\n1:foo\n3:bar foo\n\nb.py\n2:foo(1)"
    assert data_of(result) == {
        "results": [
            {"path": "a/c.txt", "line": 1, "text": "foo", "is_match": True},
            {"path": "a/c.txt", "line": 3, "text": "bar foo", "is_match": True},
            {"path": "b.py", "line": 2, "text": "foo(1)", "is_match": True},
        ],
        "total": 3,
        "files": 2,
        "total_is_complete": True,
        "truncated": False,
    }
    below = await sandbox.call("search_files", pattern="FOO", path="a", ignore_case=True)
    assert places(below) == [("a/c.txt", 1), ("a/c.txt", 3)]
    one = await sandbox.call("search_files", pattern="foo", path="/workspace/b.py")
    assert places(one) == [("b.py", 2)]
    none = await sandbox.client.call_tool("search_files", {"pattern": "absent"})
    assert text_of(none) == "nothing was found"
    assert data_of(none)["total"] == 0


async def test_context_lines_are_shown_and_not_counted(sandbox: Sandbox) -> None:
    fill(sandbox.home, {"f": "1\n2\nhit\n4\n5\n"})
    result = await sandbox.client.call_tool("search_files", {"pattern": "hit", "context_lines": 1})
    assert text_of(result) == "f\n2-2\n3:hit\n4-4"
    assert data_of(result)["total"] == 1


async def test_too_many_matches_are_counted_and_cut(sandbox: Sandbox) -> None:
    fill(sandbox.home, {f"{n:02}": "hit\n" * 100 for n in range(20)})
    result = await sandbox.client.call_tool("search_files", {"pattern": "hit", "max_results": 150})
    found = data_of(result)
    assert (len(found["results"]), found["total"], found["files"]) == (150, 2000, 20)
    assert (found["truncated"], found["total_is_complete"]) == (True, True)
    assert "[150 of 2000 matches in 20 files; narrow" in text_of(result)


async def test_a_search_that_finds_without_end_is_ended(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "COUNT_LIMIT", 1000)
    fill(sandbox.home, {f"{n:03}": "hit\n" * 1000 for n in range(200)})
    found = await sandbox.call("search_files", pattern="hit")
    assert found["total"] >= 1000
    assert (found["total_is_complete"], found["truncated"]) == (False, True)


async def test_a_search_whose_time_is_over_gives_what_it_has(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SEARCH_SECONDS", 0)
    fill(sandbox.home, {"f": "hit\n"})
    for kind in ("content", "name"):
        result = await sandbox.client.call_tool("search_files", {"pattern": "hit", "kind": kind})
        assert data_of(result)["total_is_complete"] is False
        assert "was ended before it had seen everything" in text_of(result)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for child in children:
        assert Path(f"/proc/{child}/comm").read_text() != "rg\n"


async def test_names_are_searched_as_paths(sandbox: Sandbox) -> None:
    fill(sandbox.home, {"src/app.py": "", "src/app.js": "", "doc/app.md": "", ".git/app.py": ""})
    (sandbox.home / os.fsdecode(b"app\xff .py")).touch()
    result = await sandbox.client.call_tool(
        "search_files", {"pattern": r"app.*\.py$", "kind": "name"}
    )
    assert text_of(result) == "app\\xff .py\nsrc/app.py"
    assert data_of(result)["results"] == [{"path": "app\\xff .py"}, {"path": "src/app.py"}]
    below = await sandbox.call("search_files", pattern="^app", kind="name", path="src", glob="*.js")
    assert below["results"] == [{"path": "src/app.js"}]
    capped = await sandbox.call("search_files", pattern="app", kind="name", max_results=1)
    assert (len(capped["results"]), capped["total"], capped["truncated"]) == (1, 4, True)
    said = await sandbox.refused("search_files", pattern="x", kind="name", path="src/app.py")
    assert "give a folder" in said


async def test_names_beyond_what_is_looked_through_are_said(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "NAMES_BYTES", 1000)
    fill(sandbox.home, {f"file{n:03}": "" for n in range(200)})
    found = await sandbox.call("search_files", pattern="file", kind="name", max_results=500)
    assert 0 < found["total"] <= 200
    assert (found["total_is_complete"], found["truncated"]) == (False, True)


async def test_hidden_ignored_and_binary_files_are_left_out(sandbox: Sandbox) -> None:
    fill(
        sandbox.home,
        {
            ".hidden": "hit",
            ".ignore": "build\n",
            "build/x": "hit",
            "binary": b"hit\n" * 10 + b"\0" * 10 + b"hit\n",
            "late": b"hit\n" + b"x\n" * 100_000 + b"\0",
            "plain": "hit",
        },
    )
    assert places(await sandbox.call("search_files", pattern="hit")) == [("plain", 1)]
    everything = await sandbox.call("search_files", pattern="hit", all_files=True)
    assert [path for path, _ in places(everything)] == [".hidden", "build/x", "plain"]
    for binary in ("binary", "late"):
        assert (await sandbox.call("search_files", pattern="hit", path=binary))["total"] == 0


async def test_globs_choose_files(sandbox: Sandbox) -> None:
    fill(sandbox.home, {"a.py": "hit", "a.js": "hit", "src/b.py": "hit", "node/c.py": "hit"})
    for glob, paths in (
        ("*.py", ["a.py", "node/c.py", "src/b.py"]),
        ("*.{py,js}", ["a.js", "a.py", "node/c.py", "src/b.py"]),
        ("src/**", ["src/b.py"]),
        ("!node/", ["a.js", "a.py", "src/b.py"]),
    ):
        found = await sandbox.call("search_files", pattern="hit", glob=glob)
        assert [path for path, _ in places(found)] == paths


@pytest.mark.parametrize(
    "text",
    [
        "-e x",
        "--files",
        "--pre=touch pwned",
        "-",
        "--",
        "'; touch pwned; '",
        "$(touch pwned)",
        "a\\b",
    ],
)
async def test_no_pattern_becomes_an_option_or_a_command(sandbox: Sandbox, text: str) -> None:
    fill(sandbox.home, {"f": f"other\n{text}\n"})
    found = await sandbox.call("search_files", pattern=text, literal=True)
    assert places(found) == [("f", 2)]
    await sandbox.client.call_tool("search_files", {"pattern": "x", "glob": text})
    await sandbox.client.call_tool("search_files", {"pattern": text, "kind": "name"})
    await sandbox.client.call_tool("search_files", {"pattern": "x", "path": text})
    assert sorted(p.name for p in sandbox.home.iterdir()) == ["f"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pattern": "("}, "the pattern cannot be used: unclosed group (a backslash"),
        ({"pattern": "a{2,1}"}, "the pattern cannot be used: invalid repetition"),
        ({"pattern": "(?=a)"}, "look-around, including look-ahead and look-behind, is not"),
        ({"pattern": "x", "glob": "["}, "the glob cannot be used: error parsing glob '['"),
        ({"pattern": "a\0b"}, "NUL"),
        ({"pattern": "x", "path": "../"}, "outside the home"),
        ({"pattern": "x", "path": "/etc"}, "outside the home"),
        ({"pattern": "x", "path": "out"}, "outside the home"),
        ({"pattern": "x", "path": "out_file"}, "outside the home"),
        ({"pattern": "x", "path": "nope"}, "no such file"),
        ({"pattern": "x", "path": "fifo"}, "is a fifo"),
    ],
)
async def test_what_cannot_be_searched_is_said(
    sandbox: Sandbox, arguments: dict[str, Any], said: str
) -> None:
    (sandbox.home / "out").symlink_to("/etc")
    (sandbox.home / "out_file").symlink_to("/etc/passwd")
    os.mkfifo(sandbox.home / "fifo")
    text = await sandbox.refused("search_files", **arguments)
    assert said in text
    assert "\n" not in text
    if "path" not in arguments:
        assert said in await sandbox.refused("search_files", kind="name", **arguments)


async def test_links_are_not_followed(sandbox: Sandbox) -> None:
    (sandbox.home.parent / "secret").write_text("hit")
    (sandbox.home / "file").symlink_to("../secret")
    (sandbox.home / "folder").symlink_to("..")
    os.mkfifo(sandbox.home / "fifo")
    for all_files in (False, True):
        found = await sandbox.call("search_files", pattern="hit", all_files=all_files)
        assert found["total"] == 0


async def test_odd_names_lines_and_encodings_are_shown_reversibly(sandbox: Sandbox) -> None:
    odd = os.fsdecode(b"\xff 'a\nb")
    fill(
        sandbox.home,
        {odd: b"caf\xe9 hit\r\n", "long": "hit" + "x" * 200_000, "wide": "hit " + "é" * 2000},
    )
    found = await sandbox.call("search_files", pattern="hit")
    rows = {row["path"]: row["text"] for row in found["results"]}
    assert rows["\\xff 'a\nb"] == "caf\\xe9 hit\r"
    assert rows["long"] == "[a line of more than 64 KiB, not shown]"
    assert rows["wide"].endswith("é...")
    assert len(rows["wide"]) == search.SHOWN_LINE_CHARS + 3
    assert (await sandbox.call("read_file", path="\\xff 'a\nb", encoding="base64"))["size"] == 10


@pytest.mark.parametrize("kind", ["content", "name"])
async def test_a_name_with_a_newline_is_not_taken_for_a_line_of_the_result(
    sandbox: Sandbox, kind: str
) -> None:
    fill(sandbox.home, {"hit\n1:forged": "hit\n"})
    call = {"pattern": "hit", "kind": kind}
    found = await sandbox.client.call_tool("search_files", call)
    assert text_of(found).split("\n")[0] == "hit\\n1:forged"
    assert data_of(found)["results"][0]["path"] == "hit\n1:forged"


async def test_a_pattern_over_lines_is_found(sandbox: Sandbox) -> None:
    fill(sandbox.home, {"f": "a\nb\nc\n"})
    for arguments in ({"pattern": "a\nb", "literal": True}, {"pattern": r"a\nb"}):
        found = await sandbox.call("search_files", **arguments)
        assert [(row["line"], row["text"]) for row in found["results"]] == [(1, "a\nb")]


async def test_a_reply_fits_a_message(sandbox: Sandbox) -> None:
    fill(sandbox.home, {f"{n:04}{'é' * 100}": '"\\' * 240 for n in range(2000)})
    for kind, pattern in (("content", '"'), ("name", "é")):
        result = await sandbox.client.call_tool(
            "search_files", {"pattern": pattern, "kind": kind, "max_results": 2000}
        )
        assert len(result.model_dump_json(by_alias=True).encode()) < 1_000_000
        found = data_of(result)
        assert found["total"] == 2000
        assert found["truncated"] == (len(found["results"]) < 2000)


async def test_a_pattern_that_would_take_other_engines_for_ever_takes_no_time(
    sandbox: Sandbox,
) -> None:
    fill(sandbox.home, {"f": "a" * 5000 + "!"})
    begun = time.monotonic()
    assert (await sandbox.call("search_files", pattern="^(a+)+$"))["total"] == 0
    assert time.monotonic() - begun < 5


async def test_no_file_of_the_home_changes_what_a_search_does(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(sandbox.home, {"f": "hit\n", ".ripgreprc": "--replace=pwned\n--invert-match\n"})
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(sandbox.home / ".ripgreprc"))
    monkeypatch.setenv("HOME", str(sandbox.home))
    assert places(await sandbox.call("search_files", pattern="hit")) == [("f", 1)]


async def test_a_missing_ripgrep_is_said(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ripgrep, "RG", "no-such-rg")
    assert "use grep or find in run_command" in await sandbox.refused("search_files", pattern="x")


def test_the_daemon_itself_can_search(daemon: Daemon, wire: Wire) -> None:
    """It is undumpable, and that changes who may use its /proc/self/fd."""
    (daemon.home / "f").write_text("needle\n")
    found = wire.call(1, "search_files", pattern="needle")["structuredContent"]
    assert places(found) == [("f", 1)]
