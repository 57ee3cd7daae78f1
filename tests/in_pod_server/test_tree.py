"""Which processes are a command's: those with its marker, in its session, or below one of them."""

from __future__ import annotations

import os
import subprocess

import anyio
import pytest

from in_pod_server import tree
from in_pod_server.tree import Census, Leader, Seen, Stat, members
from tests.in_pod_server.support import PATIENCE

LEADER = Leader("p1-x", 100, 1000)


def seen(
    pid: int,
    *,
    parent: int = 1,
    session: int = 0,
    started: int = 1001,
    marker: str | None = None,
    state: str = "S",
) -> Seen:
    return Seen(Stat(pid, state, parent, session or pid, started), marker)


HERE = seen(100, session=100, started=1000, marker="p1-x")


def pids(*census: Seen) -> list[int]:
    return sorted(stat.pid for stat in members(LEADER, census))


def test_the_marker_the_session_and_the_parent_each_make_a_member() -> None:
    assert pids(
        HERE,
        seen(101, marker="p1-x"),
        seen(102, session=100),
        seen(103, session=100, marker="set by the user"),
        seen(104, parent=101),
        seen(105, parent=104),
        seen(200, marker="p2-x"),
        seen(201),
    ) == [100, 101, 102, 103, 104, 105]


def test_a_session_number_given_away_again_is_a_stranger_s() -> None:
    stranger = seen(100, session=100, started=5000, marker="p9-x")
    assert pids(stranger, seen(300, parent=100, session=100, started=5001, marker="p9-x")) == []


def test_what_stays_in_the_session_after_its_leader_is_still_a_member() -> None:
    assert pids(seen(102, session=100), seen(103, session=100, marker="p1-x")) == [102, 103]


def test_what_is_older_than_the_command_or_dead_is_no_member() -> None:
    assert pids(HERE, seen(90, session=100, started=999), seen(101, session=100, state="Z")) == [
        100
    ]
    assert pids(seen(100, session=100, started=1000, state="Z"), seen(101, session=100)) == [101]


async def test_a_look_begins_after_it_was_asked_for_and_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    census = Census()
    looks = 0
    real = tree._pids

    def counted() -> list[int]:
        nonlocal looks
        looks += 1
        return real()

    monkeypatch.setattr(tree, "_pids", counted)
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(census.take)
    assert looks <= 2
    await census.take()
    assert looks <= 3


async def test_a_cancelled_look_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    census = Census()
    monkeypatch.setattr(tree, "SCAN_BATCH", 1)
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            first = anyio.CancelScope()

            async def cancelled() -> None:
                with first:
                    await census.take()

            tasks.start_soon(cancelled)
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(census.take)
            tasks.start_soon(census.take)
            await anyio.lowlevel.checkpoint()
            first.cancel()


async def test_a_marked_process_stays_marked_when_it_empties_its_environment() -> None:
    census = Census()
    child = subprocess.Popen(  # noqa: ASYNC220 - it is only looked at
        ["bash", "-c", "read x; exec env -i sleep 300"],
        env={"PATH": os.environ["PATH"], tree.MARKER: "p5-x"},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        with anyio.fail_after(PATIENCE):
            while {s.marker for s in await census.take() if s.stat.pid == child.pid} != {"p5-x"}:
                await anyio.lowlevel.checkpoint()
            assert child.stdin is not None
            child.stdin.write(b"\n")
            child.stdin.close()
            while tree._read(f"/proc/{child.pid}/environ") != b"":
                await anyio.lowlevel.checkpoint()
            marker = {s.marker for s in await census.take() if s.stat.pid == child.pid}
            assert marker == {"p5-x"}
    finally:
        child.kill()
        child.wait()


async def test_a_process_that_is_becoming_another_program_is_not_taken_for_a_stranger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = subprocess.Popen(["sleep", "300"], env={"PATH": os.environ["PATH"], tree.MARKER: "p6"})  # noqa: ASYNC220
    real, hidden = tree._read, [True] * 5

    def without_memory(path: str) -> bytes | None:
        """As Linux shows a process between two programs: for a while, no environment."""
        if path == f"/proc/{child.pid}/environ" and hidden:
            hidden.pop()
            return b""
        return real(path)

    monkeypatch.setattr(tree, "_read", without_memory)
    try:
        with anyio.fail_after(PATIENCE):
            found = await Census().take()
    finally:
        child.kill()
        child.wait()
    assert not hidden
    assert [s.marker for s in found if s.stat.pid == child.pid] == ["p6"]


async def test_an_environment_that_is_empty_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = subprocess.Popen(["/bin/sleep", "300"], env={})  # noqa: ASYNC220 - it is only looked at
    real, looks = tree._read, 0

    def counted(path: str) -> bytes | None:
        nonlocal looks
        looks += path == f"/proc/{child.pid}/environ"
        return real(path)

    monkeypatch.setattr(tree, "_read", counted)
    try:
        with anyio.fail_after(PATIENCE):
            while not ((stat := tree.read_stat(child.pid)) and stat.has_empty_environment):
                await anyio.lowlevel.checkpoint()
            found = await Census().take()
    finally:
        child.kill()
        child.wait()
    assert [s.marker for s in found if s.stat.pid == child.pid] == [None]
    assert looks == 1
