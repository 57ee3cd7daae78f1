"""Bombs, hogs, floods and full disks hurt the command that made them, and nobody else."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from in_pod_server import contract
from tests.in_pod_server.support import Daemon, Wire, eventually, marked, start_daemon
from tests.turns import SOON_SECONDS

NOBODY = 64321
"""A user that nobody else is: then the limit counts the daemon and its commands only."""
PROCESSES = 150


TINI = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
child = os.fork() or os.execvp(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
while (ended := os.wait())[0] != child:
    pass
sys.exit(os.waitstatus_to_exitcode(ended[1]))
"""
"""What is process 1 of a pod: it takes away the dead at once, and a dead process counts until then."""


def few_processes() -> list[str]:
    """Return what starts the daemon under a limit of processes, as a pod has one."""
    return [sys.executable, "-c", TINI, *_limited()]


def _limited() -> list[str]:
    if os.getuid():
        mine = sum(
            len(list((entry / "task").iterdir()))
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and entry.stat().st_uid == os.getuid()
        )
        return ["prlimit", f"--nproc={mine + PROCESSES}"]
    # Root has no such limit. What is run lies where only root may read, so that is kept.
    reading = "-all,+dac_read_search"
    who = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    caps = [f"--inh-caps={reading}", f"--ambient-caps={reading}"]
    return ["setpriv", *who, *caps, "prlimit", f"--nproc={PROCESSES}"]


@pytest.fixture
def crowded(short_path: Path) -> Iterator[Daemon]:
    """A daemon in a sandbox that has room for few processes."""
    if os.getuid() == 0:
        for name in ("home", "podinfo", "run", "log"):
            (short_path / name).mkdir()
            os.chown(short_path / name, NOBODY, NOBODY)
        os.chown(short_path, NOBODY, NOBODY)
    with start_daemon(short_path, under=few_processes()) as daemon:
        yield daemon


def answer_soon(wire: Wire, request_id: int) -> None:
    begun = time.monotonic()
    assert wire.request(request_id, "ping")["result"] == {}
    assert not wire.call(request_id, "list_processes")["isError"]
    assert time.monotonic() - begun < SOON_SECONDS


def answered(reply: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = reply["result"]["structuredContent"]
    return result


BOMB = ":(){ :|:& };:"


def test_a_fork_bomb_that_is_waited_for_ends_by_its_timeout(crowded: Daemon) -> None:
    """L60"""
    with Wire(crowded.socket) as bomber, Wire(crowded.socket) as other:
        call = {"command": f"{BOMB}; sleep 300", "timeout_seconds": 2}
        params = {"name": "run_command", "arguments": call}
        bomber.send({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            answer_soon(other, 2)
        ended = answered(bomber.receive())
        assert (ended["state"], ended["left_running"]) == ("timed_out", 0)
        assert ended["duration_seconds"] < 10
        assert marked(ended["process_id"]) == []
        ran = other.call(3, "run_command", command="echo ok | cat")
        assert not ran["isError"], ran
        assert ran["structuredContent"]["stdout"] == "ok\n"


def test_a_command_of_too_many_processes_is_ended_and_told_so(daemon: Daemon) -> None:
    """L60: before it has all that the pod may have, of which others need some."""
    many = contract.COMMAND_PROCESSES + 50
    with Wire(daemon.socket) as wire:
        ran = wire.call(
            1, "run_command", command=f"for i in $(seq {many}); do sleep 300 & done; wait"
        )["structuredContent"]
        assert (ran["state"], ran["signal"], ran["left_running"]) == ("killed", "SIGKILL", 0)
        assert f"more than the {contract.COMMAND_PROCESSES} that a command may have" in ran["note"]
        assert marked(ran["process_id"]) == []


def test_a_command_may_have_some_hundreds_of_processes(daemon: Daemon) -> None:
    with Wire(daemon.socket) as wire:
        command = "for i in $(seq 400); do sleep 4 & done; wait; echo all"
        ran = wire.call(1, "run_command", command=command)["structuredContent"]
        assert (ran["exit_code"], ran["stdout"], ran["note"]) == (0, "all\n", "")


def test_a_fork_bomb_that_is_left_behind_is_found_and_ended(crowded: Daemon) -> None:
    """L60: its first process ends at once, so no timeout would ever meet it."""
    with Wire(crowded.socket) as wire:
        bomb = wire.call(1, "run_command", command=BOMB)["structuredContent"]

        def works() -> bool:
            answer_soon(wire, 2)
            reply = wire.call(3, "run_command", command="echo ok | cat", timeout_seconds=2)
            return bool(not reply["isError"] and reply["structuredContent"]["stdout"] == "ok\n")

        eventually(lambda: marked(bomb["process_id"]) == [])
        eventually(works)

        def left() -> int:
            rows = wire.call(4, "list_processes", max_entries=1000)["structuredContent"]
            (row,) = [r for r in rows["processes"] if r["process_id"] == bomb["process_id"]]
            return int(row["left_running"])

        eventually(lambda: left() == 0)
        assert marked(bomb["process_id"]) == []


def test_a_memory_hog_is_told_and_hurts_nobody(daemon: Daemon, wire: Wire) -> None:
    hog = "ulimit -v 500000; python3 -c 'x = bytearray(10**9)'"
    ran = wire.call(1, "run_command", command=hog)["structuredContent"]
    assert ran["exit_code"] == 1
    assert "MemoryError" in ran["stderr"]
    answer_soon(wire, 2)
    assert memory_mib(daemon) < 200


# --- floods -----------------------------------------------------------------------------------------------


def memory_mib(daemon: Daemon, what: str = "VmRSS") -> float:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) / 1024


def test_two_gigabytes_of_output_pass_through_little_memory(own_daemon: Daemon) -> None:
    """At most 75 MiB idle, at most 64 more while they pass, and others are answered meanwhile."""
    size = 2_000_000_000
    with Wire(own_daemon.socket) as flooded, Wire(own_daemon.socket) as other:
        idle = memory_mib(own_daemon)
        assert idle < 75
        flood = {"command": f"head -c {size} /dev/zero", "timeout_seconds": 60}
        params = {"name": "run_command", "arguments": flood}
        flooded.send({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        for _ in range(5):
            answer_soon(other, 2)
        flooded.socket.settimeout(60)
        ran = answered(flooded.receive())
        assert (ran["exit_code"], ran["stdout_bytes"]) == (0, size)
        assert memory_mib(own_daemon, "VmHWM") < idle + 64
        assert memory_mib(own_daemon, "VmHWM") < 75 + 64


# --- a full disk ------------------------------------------------------------------------------------------

SMALL = 1024 * 1024


@pytest.fixture
def full(short_path: Path) -> Iterator[Daemon]:
    """A daemon whose home is a small memory file system, mounted where only it sees it."""
    for tool in ("unshare", "mount"):
        assert shutil.which(tool), f"{tool} is needed (util-linux)"
    home = short_path / "home"
    home.mkdir()
    mount = f'mount -t tmpfs -o size={SMALL},mode=777 none "$0" && exec "$@"'
    under = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(home)]
    with start_daemon(short_path, under=under) as daemon:
        yield daemon


def test_a_full_home_loses_no_content_and_leaves_no_rest(full: Daemon) -> None:
    with Wire(full.socket) as wire:
        old = "old content\n" * 1000
        wire.call(1, "write_file", path="kept", content=old)
        filled = wire.call(2, "run_command", command="head -c 5000000 /dev/zero > filler; echo $?")
        assert filled["structuredContent"]["stdout"] == "1\n"
        assert "No space left on device" in filled["structuredContent"]["stderr"]
        for tool, arguments in (
            ("write_file", {"path": "kept", "content": "n" * 500_000}),
            ("write_file", {"path": "new", "content": "n" * 500_000}),
            ("write_file", {"path": "kept", "content": "n" * 500_000, "append": True}),
            (
                "edit_file",
                {"path": "kept", "old_text": "old", "new_text": "n" * 600, "replace_all": True},
            ),
        ):
            failed = wire.call(3, tool, **arguments)
            assert failed["isError"], tool
            assert (
                "no space is left in the home; the old content is unchanged"
                in (failed["content"][0]["text"])
            )
        listed = wire.call(4, "list_files")["structuredContent"]["entries"]
        assert sorted(entry["path"] for entry in listed) == ["filler", "kept"]
        assert wire.call(5, "read_file", path="kept")["structuredContent"]["content"] == old
        assert not wire.call(6, "run_command", command=f"echo ok # {'x' * 200_000}")["isError"]
        assert not wire.call(7, "delete_file", path="filler")["isError"]
        assert not wire.call(8, "write_file", path="kept", content="n" * 500_000)["isError"]


def test_a_log_in_a_full_home_ends_no_command(full: Daemon) -> None:
    with Wire(full.socket) as wire:
        wire.call(1, "run_command", command="head -c 5000000 /dev/zero > filler")
        started = wire.call(2, "start_background", command="seq 1 1000; exit 3", log_file="log")
        if started["isError"]:
            assert "no space is left" in started["content"][0]["text"]
            return
        process_id = started["structuredContent"]["process_id"]
        end = wire.call(3, "read_output", process_id=process_id, until_end=True, wait_seconds=20)
        assert end["structuredContent"]["exit_code"] == 3
        assert end["structuredContent"]["eof"] is True


def test_who_takes_every_descriptor_of_the_daemon_ends_nothing(short_path: Path) -> None:
    few = ["prlimit", "--nofile=120:120"]
    with start_daemon(short_path, under=few) as daemon, Wire(daemon.socket) as wire:
        with contextlib.ExitStack() as silent:
            for _ in range(150):
                each = silent.enter_context(socket.socket(socket.AF_UNIX))
                each.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    each.connect(str(daemon.socket))
            eventually(lambda: "cannot be looked at" in daemon.stderr())

        def runs() -> bool:
            result = wire.call(secrets.token_hex(4), "run_command", command="true")
            return not result.get("isError")

        eventually(runs)
