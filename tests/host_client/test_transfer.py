"""Transfers over the stub kubectl: whole trees, cut channels, the command line, the tools."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client

from host_client.config import Settings
from host_client.ends import places
from host_client.errors import TransferFailed, UsageError
from host_client.host import Host
from host_client.line import POD_ARGV
from host_client.outcome import Meter, Outcome, shown
from host_client.paths import allowed, in_home
from host_client.server import build_server
from in_pod_server.contract import HOME, WORKSPACE
from tests.host_client.conftest import StubCluster

ROOT = Path(__file__).resolve().parents[2]
BOUND = 60
ODD_NAMES = [
    b"with space", b"new\nline", b"-leading", b"--delete", b"n" * 255, b"\xff\xfe invalid", "ünïcode".encode(),
    b"back\\slash", b"quote'\"$(touch x)`", b".hidden", b"*?[a]", b"~", b"-", b"\x01\x1b[31m",
]  # fmt: skip


def make_tree(root: Path) -> None:
    """Everything that has to arrive."""
    (root / "deep/er/still").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "nothing").write_bytes(b"")
    (root / "large").write_bytes(os.urandom(3_000_000))
    with (root / "sparse").open("wb") as file:
        file.truncate(20_000_000)
        file.seek(10_000_000)
        file.write(b"middle")
    for number, name in enumerate(ODD_NAMES):
        Path(os.fsdecode(os.fsencode(root / "deep") + b"/" + name)).write_bytes(b"%d" % number)
    (root / "deep/er/link").symlink_to("../-leading")
    (root / "broken").symlink_to("nowhere")
    script = root / "deep/er/script"
    script.write_bytes(b"#!/bin/sh\n")
    script.chmod(0o750)
    (root / "secret").write_bytes(b"s")
    (root / "secret").chmod(0o400)
    os.utime(script, ns=(1, 1_234_567_890_123_456_789))
    (root / "deep/er").chmod(0o500)
    os.utime(root / "deep/er", (0, 1_000_000_000))


def tree(root: Path) -> dict[str, Any]:
    """All that is to be the same on both sides."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content: Any = None
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (
            stat.S_IFMT(status.st_mode),
            0 if path.is_symlink() else stat.S_IMODE(status.st_mode),
            status.st_mtime_ns if not path.is_dir() or path.name == "er" else 0,
            content,
        )
    return found


def home(stub: StubCluster) -> Path:
    (found,) = (stub.folder / "homes").iterdir()
    return found


def parts(folder: Path) -> list[Path]:
    return list(folder.rglob(f"{places.PART_PREFIX}*"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "here" / "src"
    root.mkdir(parents=True)
    make_tree(root)
    return root


async def test_a_tree_arrives_both_ways_as_it_was(stub: StubCluster, source: Path) -> None:
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            up = await host.transfers.put("work", [str(source)], "in/")
            down = await host.transfers.get("work", "in/src", str(source.parent / "back"))
            again = await host.transfers.put("work", [str(source)], f"{WORKSPACE}/in")
    wanted = tree(source)
    assert tree(home(stub) / "in/src") == wanted
    assert tree(source.parent / "back") == wanted
    files = sum(content[0] == stat.S_IFREG for content in wanted.values())
    assert (up.files, down.files, again.files) == (files, files, files)
    assert again.unchanged >= files - 1  # what is empty is just written again
    assert up.refused == down.refused == ()
    assert (home(stub) / "in/src/sparse").stat().st_blocks * 512 < 2_000_000
    assert not parts(stub.folder)


async def test_hundreds_of_the_longest_paths_arrive_both_ways(
    stub: StubCluster, tmp_path: Path
) -> None:
    """Their list is longer than a frame of the channel, which broke, again with each try."""
    source = tmp_path / "here" / "src"
    folder = source / "/".join(["\x01" * 250] * 10)
    folder.mkdir(parents=True)
    for number in range(500):
        (folder / f"{number}").write_bytes(b"x")
        (folder / f"out{number}").symlink_to("/" + "\x01" * 250)
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            up = await host.transfers.put("work", [str(source)], "in/")
            down = await host.transfers.get("work", "in/src", str(tmp_path / "back"))
    assert (up.files, up.tries, len(up.refused)) == (500, 1, 500)
    assert (down.files, down.tries) == (500, 1)


async def test_special_files_and_links_that_lead_out_are_listed(
    stub: StubCluster, tmp_path: Path
) -> None:
    async with Host(stub.settings()) as host:
        await host.launcher.create(name="work")
        await host.sessions.open("work")
        folder = home(stub) / "trap"
        folder.mkdir()
        os.mkfifo(folder / "fifo")
        (folder / "out").symlink_to("../../../..")
        (folder / "abs").symlink_to("/etc/passwd")
        (folder / "suid").write_bytes(b"x")
        (folder / "suid").chmod(0o4755)
        got = await host.transfers.get("work", "trap", f"{tmp_path}/target/")
    assert sorted(path for path, _ in got.refused) == [
        "trap/abs", "trap/fifo", "trap/out", "trap/suid",
    ]  # fmt: skip
    (only,) = (tmp_path / "target/trap").iterdir()
    assert stat.S_IMODE(only.stat().st_mode) == 0o755


async def test_a_channel_that_is_cut_is_gone_on_with(stub: StubCluster, source: Path) -> None:
    """kubectl ends with 0 each time, as it does when a connection is lost."""
    (source / "large").write_bytes(os.urandom(9_000_000))
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            stub.faults(cut={"after": 4_000_000, "times": 3})
            up = await host.transfers.put("work", [str(source / "large")])
            stub.faults(cut={"after": 4_000_000, "times": 3})
            down = await host.transfers.get("work", "large", f"{source.parent}/")
    assert (up.tries, down.tries) == (3, 3)
    data = (source / "large").read_bytes()
    assert data == (home(stub) / "large").read_bytes() == (source.parent / "large").read_bytes()
    assert not parts(stub.folder)


async def test_where_spdy_does_not_get_through_websockets_carry_a_transfer(
    stub: StubCluster, source: Path
) -> None:
    stub.faults(spdy={"stderr": "error: unable to upgrade connection"})
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            up = await host.transfers.put("work", [str(source)])
            down = await host.transfers.get("work", "src", f"{source.parent}/back/")
    assert (up.tries, down.tries) == (2, 1), "what was learned is kept"
    assert tree(source.parent / "back" / "src") == tree(source)


@pytest.mark.parametrize("websockets", ["true", "false"])
async def test_a_carrier_that_the_user_has_chosen_is_kept(
    stub: StubCluster, source: Path, monkeypatch: pytest.MonkeyPatch, websockets: str
) -> None:
    monkeypatch.setattr("host_client.transfer.RETRY_SECONDS", 0.01)
    async with Host(stub.settings(KUBECTL_REMOTE_COMMAND_WEBSOCKETS=websockets)) as host:
        await host.launcher.create(name="work")
        await host.sessions.open("work")
        stub.faults(spdy={"stderr": "error: unable to upgrade connection"})
        if websockets == "true":
            assert (await host.transfers.put("work", [str(source)])).tries == 1
        else:
            with pytest.raises(TransferFailed, match="unable to upgrade connection"):
                await host.transfers.put("work", [str(source)])


async def test_a_channel_that_always_breaks_is_an_error_that_says_what_is_left(
    stub: StubCluster, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host_client.transfer.RETRY_SECONDS", 0.01)
    async with Host(stub.settings()) as host:
        await host.launcher.create(name="work")
        (source / "large").write_bytes(os.urandom(9_000_000))
        await host.transfers.put("work", [str(source / "large")])
        stub.faults(cut={"after": 1_500_000})
        with pytest.raises(TransferFailed, match=r"broke 5 times.*Unfinished.*podpipe-part"):
            await host.transfers.get("work", "large", str(source.parent / "large"))
        stub.faults()
        await host.transfers.get("work", "large", str(source.parent / "large"))
    assert (source.parent / "large").read_bytes() == (source / "large").read_bytes()
    assert not parts(source.parent)


async def test_where_things_go(stub: StubCluster, tmp_path: Path) -> None:
    """As cp -r has it."""
    file, folder = tmp_path / "f", tmp_path / "d"
    file.write_text("f", encoding="utf-8")
    folder.mkdir()
    (folder / "x").write_text("x", encoding="utf-8")
    async with Host(stub.settings()) as host:
        await host.launcher.create(name="work")
        for local, remote in (
            ([file], ""),
            ([file], "g"),
            ([file], "new/deep/name"),
            ([file], "into/"),
            ([folder], "copy"),
            ([folder], "copy"),
            ([folder, file], "both"),
            ([file], f"{HOME}/abs"),
        ):
            await host.transfers.put("work", [str(path) for path in local], remote)
        root = home(stub)
        files = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
        assert files >= {
            "f", "g", "new/deep/name", "into/f", "copy/x", "copy/d/x", "both/d/x", "both/f", "abs",
        }  # fmt: skip
        await host.transfers.get("work", ".", str(tmp_path / "all"))
        assert {str(p.relative_to(tmp_path / "all")) for p in (tmp_path / "all").rglob("*") if p.is_file()} == files  # fmt: skip
        for bad, what in (
            (["missing"], "there is no"),
            (["/"], "has no name"),
            ([f"{tmp_path}/f", f"{tmp_path}/d/../f"], "same name"),
        ):
            with pytest.raises(UsageError, match=what):
                await host.transfers.put("work", bad)
        with pytest.raises(TransferFailed, match="there is no nowhere"):
            await host.transfers.get("work", "nowhere", str(tmp_path))
        (root / "away").symlink_to("/etc")
        for path in ("away/passwd", "away"):
            with pytest.raises(TransferFailed, match="leads out of the home"):
                await host.transfers.get("work", path, str(tmp_path))
        with pytest.raises(TransferFailed, match="leads out of the home"):
            await host.transfers.put("work", [str(file)], "away/x")


async def test_sync_makes_one_folder_like_the_other(stub: StubCluster, source: Path) -> None:
    back = source.parent / "back"
    async with Host(stub.settings()) as host:
        await host.launcher.create(name="work")
        await host.transfers.sync("work", str(source), "copy")
        (home(stub) / "copy/extra/deep").mkdir(parents=True)
        (source / "large").write_bytes(b"changed")
        (source / "empty").rmdir()
        kept = await host.transfers.sync("work", str(source), "copy")
        assert (kept.removed, (home(stub) / "copy/empty").exists()) == (0, True)
        done = await host.transfers.sync("work", str(source), "copy", delete=True)
        assert done.removed == 3
        assert tree(home(stub) / "copy") == tree(source)
        (back / "old").mkdir(parents=True)
        await host.transfers.sync("work", str(back), "copy", delete=True, from_sandbox=True)
        assert tree(back) == tree(source)
        with pytest.raises(TransferFailed, match="no_such"):
            await host.transfers.sync("work", str(back), "no_such", delete=True, from_sandbox=True)
        assert tree(back) == tree(source)
        with pytest.raises(UsageError, match="no folder"):
            await host.transfers.sync("work", str(source / "large"), "copy")


async def test_another_program_in_the_pods_place_writes_nothing(
    stub: StubCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod can run anything, also instead of our end."""
    monkeypatch.setattr("host_client.transfer.RETRY_SECONDS", 0.01)
    for program, what in (
        (["cat"], "broke 5 times|not podpipe's end"),
        (["false"], "broke 5 times"),
        (["sh", "-c", "head -c 3000000 /dev/zero"], "not podpipe's end"),
        (["no-such-python"], "kubectl said"),
    ):
        monkeypatch.setattr("host_client.transfer.POD_ARGV", program)
        async with Host(stub.settings()) as host:
            if not stub.names("Pod"):
                await host.launcher.create(name="work")
            with pytest.raises(TransferFailed, match=what):
                await host.transfers.get("work", "x", str(tmp_path / "target"))
    assert not (tmp_path / "target").exists()


async def test_the_pods_end_is_compiled_once_and_anew_where_what_was_kept_is_spoilt(
    stub: StubCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setattr("host_client.line.RUN_DIR", str(kept))
    source = tmp_path / "source"
    source.write_text("text", encoding="utf-8")
    states: list[dict[str, tuple[int, int]]] = []

    async def put() -> None:
        done = await host.transfers.put("work", [str(source)], f"copy{len(states)}")
        assert (done.files, done.tries) == (1, 1)
        found = kept.iterdir() if kept.exists() else ()
        states.append({each.name: each.stat()[1::5] for each in found})  # inode and size

    async with Host(stub.settings()) as host:
        await host.launcher.create(name="work")
        await put()  # there is no such folder
        kept.mkdir()
        await put()
        await put()
        (name,) = states[1]
        for spoilt in (b"", b"\xff" * 40, b"i\x01\x00\x00\x00"):
            (kept / name).write_bytes(spoilt)
            await put()
    assert states[0] == {}
    assert states[1] == states[2]
    assert name.startswith("transfer-receive-")
    assert [(set(each), each[name][1]) for each in states[3:]] == [({name}, states[1][name][1])] * 3


def running(argv_part: str, root: Path) -> list[int]:
    """Processes of ours that were started with this, somewhere below this folder."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            line = (proc / "cmdline").read_bytes().decode("utf-8", "replace")
            if argv_part in line and (proc / "cwd").readlink().is_relative_to(root):
                found.append(int(proc.name))
        except OSError:
            continue
    return found


class Cli:
    def __init__(self, stub: StubCluster) -> None:
        self.environment = stub.environment | {"PYTHONPATH": str(ROOT)}

    def start(self, *argv: str | bytes) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "host_client", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
        )

    def __call__(self, *argv: str | bytes) -> tuple[int, str, str]:
        process = self.start(*argv)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.decode(), err.decode()


def test_the_commands(stub: StubCluster, source: Path, tmp_path: Path) -> None:
    podpipe = Cli(stub)
    podpipe("create", "--name", "work")
    code, out, err = podpipe("put", "work", str(source), f"{source}/large", "in/", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["verified"] is True
    assert facts["files"] == len([p for p in source.rglob("*") if p.is_file() and not p.is_symlink()]) + 1  # fmt: skip
    assert {"bytes", "seconds", "refused"} <= set(facts)
    (home(stub) / "in/src/abs").symlink_to("/etc/passwd")
    code, out, err = podpipe("get", "work", "in/src", str(tmp_path / "back"))
    assert (code, "verified by SHA-256" in out) == (0, True)
    assert "left out: src/abs: a link to the absolute path" in err
    assert tree(tmp_path / "back") == tree(source)
    code, out, err = podpipe("sync", "work", str(source), "in/src", "--delete", "--json")
    assert (code, json.loads(out)["removed"]) == (0, 1)
    code, out, err = podpipe("get", "work", "../up")
    assert (code, "not in the sandbox's home" in err) == (2, True)
    code, out, err = podpipe("get", "work", "missing", str(tmp_path / "x"))
    assert (code, "there is no missing" in err) == (1, True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_both_ends_and_says_what_is_left(
    stub: StubCluster, tmp_path: Path, how: signal.Signals
) -> None:
    podpipe = Cli(stub)
    podpipe("create", "--name", "work")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(40 << 30)  # holes: much to sum, nothing on the disk
    process = podpipe.start("put", "work", str(tmp_path / "huge"))
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size > 2 << 20 for path in parts(stub.folder)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    assert running("take(int(take(8)))", stub.folder)
    process.send_signal(how)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"goes on from there" in err
    while running("take(int(take(8)))", stub.folder):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_takes_long_is_told_in_plain_lines(
    stub: StubCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podpipe = Cli(stub)
    podpipe("create", "--name", "work")
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(9 << 30)
    process = podpipe.start("put", "work", str(tmp_path / "holes"))
    assert process.stderr
    lines = iter(process.stderr.readline, b"")
    assert any(b"copying 1 file:" in line and b"/s" in line for line in lines)
    process.kill()
    process.communicate()


def test_on_a_terminal_a_bar_tells_how_far_it_is_and_goes_away(
    stub: StubCluster, tmp_path: Path
) -> None:
    Cli(stub)("create", "--name", "work")
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 30)
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "host_client", "put", "work", str(tmp_path / "holes")],
        env=Cli(stub).environment | {"TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # how a terminal says that nobody writes to it any more
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.startswith(b"1 file, 1.0 GiB")) == (0, True)
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    assert re.search(r"copying 1 file .*/1\.1 GB .*B/s", plain), plain[-2000:]
    # The last thing is that the line is cleared and the cursor shown again.
    assert b"\x1b[2K" in shown.split(b"copying")[-1]
    assert b"\x1b[?25h" in shown.split(b"copying")[-1]


async def test_the_tools_touch_only_what_is_allowed(stub: StubCluster, tmp_path: Path) -> None:
    yes, no = tmp_path / "yes", tmp_path / "no"
    for folder in (yes, no):
        folder.mkdir()
        (folder / "f").write_text(folder.name, encoding="utf-8")
    (yes / "link").symlink_to(no)
    (yes / "file").symlink_to(no / "f")

    async def call(client: Client, tool: str, **arguments: str) -> Any:
        return await client.call_tool(tool, {"sandbox_id": "work", **arguments})

    async with Host(stub.settings()) as host, Client(build_server(host)) as client:
        await host.launcher.create(name="work")
        for tool in ("upload_file", "download_file"):
            refused = await call(client, tool, host_path=str(yes / "f"), path="f")
            assert refused.is_error
            assert "PODPIPE_ALLOWED_DIRS" in refused.content[0].text
    settings = stub.settings(PODPIPE_ALLOWED_DIRS=f"{tmp_path}/other:{yes}")
    async with Host(settings) as host, Client(build_server(host)) as client:
        for path in (no / "f", yes / "link/f", yes / "file", yes / "../no/f", Path("yes/f")):
            refused = await call(client, "upload_file", host_path=str(path), path="x")
            assert refused.is_error, path
        for path in (no / "new", yes / "link/new", yes / "link", yes / "../no/new", yes / "file"):
            refused = await call(client, "download_file", host_path=str(path), path="f")
            assert refused.is_error, path
        up = await call(client, "upload_file", host_path=str(yes / "f"), path="in/")
        assert not up.is_error, up
        assert up.structured_content["verified"]
        assert "verified by SHA-256" in up.content[0].text
        down = await call(client, "download_file", host_path=f"{yes}/new/", path="in")
        assert not down.is_error, down
    assert (yes / "new/in/f").read_text(encoding="utf-8") == "yes"
    assert sorted(p.name for p in no.iterdir()) == ["f"]


async def test_a_tool_that_takes_too_long_says_so_and_is_joined_by_the_next_call(
    stub: StubCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(4 << 30)
    monkeypatch.setattr("host_client.tools.transfers.CALL_LIMIT_SECONDS", 1.0)
    arguments = {"sandbox_id": "work", "host_path": f"{tmp_path}/holes", "path": "h"}
    settings = stub.settings(PODPIPE_ALLOWED_DIRS=str(tmp_path))
    with anyio.fail_after(BOUND):
        async with Host(settings) as host, Client(build_server(host)) as client:
            await host.launcher.create(name="work")
            calls = 0
            while True:
                calls += 1
                result = await client.call_tool("upload_file", arguments)
                assert not result.is_error, result
                assert result.structured_content
                if result.structured_content["done"]:
                    break
                assert "call again with the same arguments" in result.content[0].text  # type: ignore[union-attr]  # text it is
            assert calls > 1
            assert result.structured_content["bytes"] == 4 << 30
            assert result.structured_content["tries"] == 1


async def test_a_call_that_is_cancelled_does_not_end_what_another_waits_for(
    stub: StubCluster,
) -> None:
    let_go = anyio.Event()
    began: list[Meter] = []
    ended: list[Outcome] = []

    async def begin(meter: Meter) -> Outcome:
        began.append(meter)
        await let_go.wait()
        return Outcome(1, 2, 0, 0.1, (), 0, 0, 1)

    async with Host(stub.settings()) as host, anyio.create_task_group() as tasks:

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                ended.append(await host.transfers.within(60, ("put", "work"), begin))

        gives_up, stays = anyio.CancelScope(), anyio.CancelScope()
        tasks.start_soon(wait, gives_up)
        tasks.start_soon(wait, stays)
        await anyio.wait_all_tasks_blocked()
        gives_up.cancel()
        await anyio.wait_all_tasks_blocked()
        let_go.set()
    assert len(began) == len(ended) == 1


async def test_the_last_call_that_is_cancelled_ends_the_transfer(stub: StubCluster) -> None:
    cancelled = anyio.Event()

    async def begin(_: Meter) -> Outcome:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError("sleeps for ever")

    async with Host(stub.settings()) as host:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(host.transfers.within, 60, ("put", "work"), begin)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(BOUND):
            await cancelled.wait()


def test_paths_in_the_sandbox() -> None:
    good = {
        "": ".", ".": ".", HOME: ".", WORKSPACE: ".", f"{WORKSPACE}/a": "a", f"{HOME}//a/./b/": "a/b",
        "a/../b": "b", "-x": "-x", "a b\n": "a b\n",
    }  # fmt: skip
    assert {path: in_home(path) for path in good} == good
    for bad in ("/", "/etc", "..", "a/../..", f"{HOME}/../x", f"{HOME}x", "/workspacex/y", "a\0"):
        with pytest.raises(UsageError):
            in_home(bad)


@given(
    st.lists(st.sampled_from(["..", ".", "a", "", "home", "sandbox", "workspace"])).map("/".join)
)
def test_no_path_in_the_sandbox_leads_out(path: str) -> None:
    try:
        plain = in_home(path)
    except UsageError:
        return
    assert os.path.normpath(f"{HOME}/{plain}").startswith(HOME)


def test_allowed_folders() -> None:
    assert allowed("/usr/bin/../lib/x", ["/opt", "/usr"]) == os.path.realpath("/usr/lib/x")
    assert allowed("/x/y", ["/"]) == "/x/y"
    for path in ("/usrx", "usr/x", "~/x", "/usr\0"):
        with pytest.raises(UsageError):
            allowed(path, ["/usr"])
    with pytest.raises(UsageError, match="PODPIPE_ALLOWED_DIRS"):
        Settings.from_env({"PODPIPE_ALLOWED_DIRS": "relative"}, cwd=Path("/"))


def test_text_from_a_pod_cannot_steer_a_terminal() -> None:
    assert shown("a\x1b[2J\udcff ü\n") == "a\\x1b[2J\\xff ü\\n"


def test_what_is_sent_to_the_pod_needs_only_the_standard_library() -> None:
    for path in (ROOT / "host_client/ends").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module)]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert name.split(".")[0] in sys.stdlib_module_names or name.startswith(
                    "host_client.ends"
                ), (path, name)
    assert all("'" not in word for word in POD_ARGV)


def test_one_file_is_told_as_one() -> None:
    one = Outcome(
        files=1, bytes=5, unchanged=1, seconds=1, refused=(), unlisted=0, removed=1, tries=1
    ).text()
    assert one.startswith("1 file, 5 B in")
    assert one.endswith("; 1 of them was there already; 1 entry removed")
    more = Outcome(
        files=2, bytes=5, unchanged=2, seconds=1, refused=(), unlisted=0, removed=2, tries=1
    ).text()
    assert more.startswith("2 files, 5 B in")
    assert more.endswith("; 2 of them were there already; 2 entries removed")
    assert Meter(files=1, verb="copying").text().startswith("copying 1 file: 0 B of 0 B")
