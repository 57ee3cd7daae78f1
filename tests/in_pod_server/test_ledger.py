"""Named calls run at most once, whoever asks for them, over lost pipes and restarts."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.abc
import pytest
from mcp.types import CallToolResult, TextContent

from in_pod_server import ledger as module
from in_pod_server.contract import FATE_NOT_STARTED, FATE_UNKNOWN, META_FATE
from in_pod_server.ledger import Ledger

BOUND = 10


@pytest.fixture
async def tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


@pytest.fixture
def open_ledger(tmp_path: Path, tasks: anyio.abc.TaskGroup) -> Iterator[Callable[[str], Ledger]]:
    """Opens the ledger of one daemon after another, on the same journal."""
    with contextlib.ExitStack() as stack:
        yield lambda boot: stack.enter_context(Ledger(tmp_path / "j", boot, tasks))


class Work:
    """A call that counts its runs and ends when it is told to."""

    def __init__(self, text: str = "done", *, at_once: bool = True) -> None:
        self.runs = 0
        self.started = anyio.Event()
        self.go = anyio.Event()
        self.text = text
        if at_once:
            self.go.set()

    async def __call__(self) -> CallToolResult:
        self.runs += 1
        self.started.set()
        await self.go.wait()
        return CallToolResult(content=[TextContent(type="text", text=self.text)])


def text(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


def unknown(result: CallToolResult) -> bool:
    return (result.meta or {}).get(META_FATE) == FATE_UNKNOWN


def stays() -> bool:
    return False


async def test_a_finished_call_is_answered_again_and_not_run_again(
    open_ledger: Callable[[str], Ledger],
) -> None:
    ledger = open_ledger("boot")
    work = Work()
    first = await ledger.call("a", "boot", work, stays)
    again = await ledger.call("a", "boot", work, stays)
    assert (text(first), text(again), work.runs) == ("done", "done", 1)


async def test_a_running_call_is_joined(open_ledger: Callable[[str], Ledger]) -> None:
    ledger = open_ledger("boot")
    work = Work(at_once=False)
    answers: list[str] = []

    async def ask() -> None:
        answers.append(text(await ledger.call("a", "boot", work, stays)))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as askers:
            for _ in range(5):
                askers.start_soon(ask)
            await work.started.wait()
            work.go.set()
    assert (answers, work.runs) == (["done"] * 5, 1)


async def test_a_call_outlives_the_connection_that_brought_it(
    open_ledger: Callable[[str], Ledger],
) -> None:
    ledger = open_ledger("boot")
    work = Work(at_once=False)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as connection:
            connection.start_soon(ledger.call, "a", "boot", work, stays)
            await work.started.wait()
            connection.cancel_scope.cancel()
        work.go.set()
        assert text(await ledger.call("a", "boot", work, stays)) == "done"
    assert work.runs == 1


async def test_a_cancel_by_the_client_stops_the_call(open_ledger: Callable[[str], Ledger]) -> None:
    ledger = open_ledger("boot")
    work = Work(at_once=False)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as connection:
            connection.start_soon(ledger.call, "a", "boot", work, lambda: True)
            await work.started.wait()
            connection.cancel_scope.cancel()
        again = await ledger.call("a", "boot", work, stays)
    assert unknown(again)
    assert "cancelled" in text(again)
    assert work.runs == 1


async def test_after_a_restart_a_finished_call_is_still_answered(
    open_ledger: Callable[[str], Ledger],
) -> None:
    await open_ledger("old").call("a", "old", Work("kept"), stays)
    work = Work()
    again = await open_ledger("new").call("a", "old", work, stays)
    assert (text(again), work.runs) == ("kept", 0)


async def test_after_a_restart_a_call_that_never_arrived_is_run(
    open_ledger: Callable[[str], Ledger],
) -> None:
    open_ledger("old")
    work = Work()
    result = await open_ledger("new").call("a", "old", work, stays)
    assert (text(result), work.runs) == ("done", 1)


async def test_after_a_restart_a_call_that_had_begun_is_unknown(
    open_ledger: Callable[[str], Ledger], tasks: anyio.abc.TaskGroup
) -> None:
    old = open_ledger("old")
    begun = Work(at_once=False)
    tasks.start_soon(old.call, "a", "old", begun, stays)
    with anyio.fail_after(BOUND):
        await begun.started.wait()
        work = Work()
        result = await open_ledger("new").call("a", "old", work, stays)
    assert unknown(result)
    assert "restarted" in text(result)
    assert work.runs == 0


async def test_an_ending_ledger_begins_nothing_and_answers_what_it_began(
    open_ledger: Callable[[str], Ledger],
) -> None:
    ledger = open_ledger("boot")
    work, late = Work(at_once=False), Work()
    answers: list[str] = []

    async def ask() -> None:
        answers.append(text(await ledger.call("a", "boot", work, stays)))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as askers:
            askers.start_soon(ask)
            await work.started.wait()
            ledger.end()
            askers.start_soon(ask)
            for boot in ("boot", "old"):
                refused = await ledger.call("b", boot, late, stays)
                assert unknown(refused) == (boot == "old")  # nobody knows what that one did
            work.go.set()
    assert (answers, late.runs) == (["done", "done"], 0)
    refused = await ledger.call("b", "boot", late, stays)
    assert refused.meta == {META_FATE: FATE_NOT_STARTED}
    # The next daemon finds nothing of it, and runs it.
    assert text(await open_ledger("new").call("b", "boot", late, stays)) == "done"
    assert late.runs == 1


@pytest.mark.parametrize("damage", ["gone", "cut", "junk"])
async def test_without_its_journal_a_restart_never_runs_a_call_again(
    open_ledger: Callable[[str], Ledger], tmp_path: Path, damage: str
) -> None:
    journal = tmp_path / "j"
    await open_ledger("old").call("a", "old", Work(), stays)
    match damage:
        case "gone":
            journal.unlink()
        case "cut":
            journal.write_bytes(journal.read_bytes()[:5])
        case "junk":
            journal.write_bytes(b"\x00\xff junk\n[1]\n")
    work = Work()
    result = await open_ledger("new").call("a", "old", work, stays)
    assert unknown(result)
    assert work.runs == 0


class _Narrow(io.FileIO):
    """A file on a volume that is nearly full: it takes a part of a line, and says how much."""

    rooms: ClassVar[list[int]] = []
    """What it takes of the next lines; of those after them, all."""

    def write(self, data: Any, /) -> int:
        room = self.rooms.pop(0) if self.rooms else len(data)
        if room:
            return super().write(bytes(data)[:room])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("rooms", [[0], [0, 0], [9], [9, 0], [0, 9], [9, 9], [100, 9, 100, 9]])
async def test_a_journal_that_cannot_be_written_or_in_part_only_is_given_up_safely(
    open_ledger: Callable[[str], Ledger],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rooms: list[int],
) -> None:
    """The run volume is full: calls go on, and no later daemon takes them for not begun.

    What follows half a line would continue it, and neither could be read.
    """
    old = open_ledger("old")
    begun = Work(at_once=False)
    async with anyio.create_task_group() as callers:
        with contextlib.closing(_Narrow(tmp_path / "j", "ab")) as narrow:
            monkeypatch.setattr(old, "_file", narrow)
            monkeypatch.setattr(narrow, "rooms", rooms)
            for call_id in ("a", "b"):
                callers.start_soon(old.call, call_id, "old", begun, stays)
            await anyio.wait_all_tasks_blocked()
            assert begun.runs == 2
            monkeypatch.undo()
        new, work = open_ledger("new"), Work()
        for call_id in ("a", "b"):
            assert unknown(await new.call(call_id, "old", work, stays))
        assert work.runs == 0
        begun.go.set()


async def test_a_line_that_a_dying_daemon_did_not_finish_costs_the_next_start_nothing(
    open_ledger: Callable[[str], Ledger], tmp_path: Path
) -> None:
    open_ledger("first")
    with (tmp_path / "j").open("ab") as journal:
        journal.write(b'{"start": "half')
    await open_ledger("second").call("a", "second", Work("kept"), stays)
    third, work = open_ledger("third"), Work()
    assert text(await third.call("a", "second", work, stays)) == "kept"
    assert text(await third.call("never sent", "second", work, stays)) == "done"
    assert text(await third.call("never sent either", "first", work, stays)) == "done"
    assert work.runs == 2


@pytest.mark.parametrize(
    "junk", [b"\x00\xff", b"", b"17", b'"boot"', b"[" * 100_000, b'{"start": ["a"]}', b"{}"]
)
async def test_damage_amid_the_journal_proves_nothing(
    open_ledger: Callable[[str], Ledger], tmp_path: Path, junk: bytes
) -> None:
    """Whatever stood there may have been the beginning of the call that is asked for."""
    await open_ledger("old").call("a", "old", Work(), stays)
    path = tmp_path / "j"
    lines = path.read_bytes().split(b"\n")
    at = next(number for number, line in enumerate(lines) if b"start" in line)
    lines[at] = junk
    path.write_bytes(b"\n".join(line for line in lines if b"end" not in line))
    work = Work()
    assert unknown(await open_ledger("new").call("a", "old", work, stays))
    assert work.runs == 0
    after = open_ledger("after")
    assert text(await after.call("fresh", "new", work, stays)) == "done"
    assert work.runs == 1


@pytest.mark.parametrize(
    "instead", ["folder", "nothing and no space", "no folder to write anew in"]
)
async def test_what_becomes_of_the_journal_stops_no_call_and_no_start(
    open_ledger: Callable[[str], Ledger],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    instead: str,
) -> None:
    """Commands have the daemon's user, and one may tidy up what it does not know."""
    journal = tmp_path / "j"
    old = open_ledger("old")
    await old.call("a", "old", Work(), stays)
    match instead:
        case "folder":
            journal.unlink()
            (journal / "in it").mkdir(parents=True)
        case "nothing and no space":
            journal.unlink()
            narrow = _Narrow(tmp_path / "elsewhere", "ab")
            monkeypatch.setattr(narrow, "rooms", [9, 0])
            monkeypatch.setattr(old, "_file", narrow)
        case _:
            monkeypatch.setattr(module, "JOURNAL_BYTES", 0)
            journal.with_suffix(".new").mkdir()
    with anyio.fail_after(BOUND):
        for call_id in ("b", "b", "c"):
            assert text(await old.call(call_id, "old", Work(), stays)) == "done"
        old.__exit__()
        monkeypatch.undo()
        new, work = open_ledger("new"), Work()
        assert unknown(await new.call("b", "old", work, stays))
        assert work.runs == 0
        assert text(await new.call("fresh", "new", work, stays)) == "done"


async def test_a_result_that_is_no_unicode_is_kept_and_given(
    open_ledger: Callable[[str], Ledger],
) -> None:
    """It ended the daemon, with all its calls: whoever makes a result may not have escaped it."""
    ledger = open_ledger("boot")
    odd = "name \ud800 \udcff"
    with anyio.fail_after(BOUND):
        assert text(await ledger.call("a", "boot", Work(odd), stays)) == odd
        assert text(await ledger.call("a", "boot", Work(), stays)) == odd
        again = await open_ledger("new").call("a", "boot", Work(), stays)
    assert unknown(again) or "name " in text(again)


async def test_kept_results_are_bounded_and_a_dropped_one_is_not_run_again(
    open_ledger: Callable[[str], Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_RESULT_BYTES", 3000)
    ledger = open_ledger("boot")
    work = Work("x" * 1000)
    for number in range(10):
        await ledger.call(f"c{number}", "boot", work, stays)
    assert work.runs == 10
    assert text(await ledger.call("c9", "boot", work, stays)) == "x" * 1000
    dropped = await ledger.call("c0", "boot", work, stays)
    assert unknown(dropped)
    assert "it did run" in text(dropped)
    assert work.runs == 10


@pytest.mark.parametrize("boot", ["old", "new"])
async def test_a_call_that_may_be_forgotten_is_unknown_and_not_run_again(
    open_ledger: Callable[[str], Ledger], monkeypatch: pytest.MonkeyPatch, boot: str
) -> None:
    """Only so many calls are remembered, in a daemon and in the journal that the next one reads."""
    monkeypatch.setattr(module, "KEPT_CALLS", 3)
    monkeypatch.setattr(module, "JOURNAL_BYTES", 500)
    ledger = open_ledger("old")
    work = Work()
    for number in range(10):
        await ledger.call(f"c{number}", "old", work, stays)
    asked = ledger if boot == "old" else open_ledger("new")
    for call_id in ("c0", "never sent as far as is known"):
        again = await asked.call(call_id, "old", work, stays, age=5)
        assert unknown(again)
        assert "not known whether it ran" in text(again)
    assert work.runs == 10


async def test_a_call_that_is_younger_than_all_that_was_forgotten_is_run(
    open_ledger: Callable[[str], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_CALLS", 3)
    now = 1000.0
    monkeypatch.setattr("in_pod_server.ledger.time.monotonic", lambda: now)
    ledger = open_ledger("boot")
    work = Work()
    for number in range(10):
        await ledger.call(f"c{number}", "boot", work, stays)
    now += module.CLOCK_SECONDS + 10
    assert not unknown(await ledger.call("lost on its way", "boot", work, stays, age=9))
    assert unknown(await ledger.call("c0", "boot", work, stays, age=11))
    assert not unknown(await ledger.call("new", "boot", work, stays))
    assert work.runs == 12


async def test_the_journal_is_bounded(
    open_ledger: Callable[[str], Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOURNAL_BYTES", 20_000)
    journal = tmp_path / "j"
    ledger = open_ledger("old")
    for number in range(100):
        await ledger.call(f"c{number}", "old", Work("x" * 1000), stays)
        assert journal.stat().st_size <= 20_000
    work = Work()
    after = open_ledger("new")
    assert unknown(await after.call("c0", "old", work, stays))
    assert (await after.call("fresh", "old", work, stays)).is_error is not True
    assert work.runs == 1


async def test_a_cancel_by_id_ends_a_call_though_another_waits_for_it(
    open_ledger: Callable[[str], Ledger],
) -> None:
    """The connection that broke may still wait: its end has not been noticed."""
    ledger, work = open_ledger("b"), Work(at_once=False)
    results: list[CallToolResult] = []

    async def wait() -> None:
        results.append(await ledger.call("1", "b", work, lambda: False))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(wait)
            waiting.start_soon(wait)
            await work.started.wait()
            ledger.cancel("1")
    assert work.runs == 1
    assert len(results) == 2
    assert all(map(unknown, results))
    assert "cancelled" in text(results[0])


async def test_a_call_that_arrives_after_its_cancel_does_not_begin(
    open_ledger: Callable[[str], Ledger],
) -> None:
    """A pipe that is taken for broken may still bring it; or a new daemon is asked."""
    ledger, work = open_ledger("b"), Work()
    ledger.cancel("1")
    with anyio.fail_after(BOUND):
        assert unknown(await ledger.call("1", "b", work, lambda: False))
        assert unknown(await open_ledger("c").call("1", "b", work, lambda: False))
    assert work.runs == 0


async def test_a_cancel_of_what_has_ended_changes_nothing(
    open_ledger: Callable[[str], Ledger],
) -> None:
    ledger, work = open_ledger("b"), Work("done")
    with anyio.fail_after(BOUND):
        await ledger.call("1", "b", work, lambda: False)
        ledger.cancel("1")
        assert text(await ledger.call("1", "b", work, lambda: False)) == "done"
    assert work.runs == 1
