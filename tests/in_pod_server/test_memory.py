"""Want of memory is told as such, where the kernel counts it and where nobody does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from in_pod_server import guard
from in_pod_server.launch import NICENESS, Launcher
from in_pod_server.memory import Gauge, OomCounter, memory_limit
from in_pod_server.process import Process
from in_pod_server.processes import ProcessTable
from in_pod_server.telling import command_result
from tests.in_pod_server.support import PATIENCE, data_of, text_of

V2 = "0::/kubepods/pod1/c1\n"
V1 = "9:name=systemd:/x\n4:memory:/process/1\n3:cpu,cpuacct:/\n0::/\n"


def counter(tmp_path: Path, cgroups: str, file: str, text: str) -> OomCounter:
    proc = tmp_path / "cgroup"
    proc.write_text(cgroups)
    path = tmp_path / "fs" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return OomCounter(proc=proc, mount=tmp_path / "fs")


EVENTS = "low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"


@pytest.mark.parametrize(
    ("cgroups", "file", "text"),
    [
        (V2, "kubepods/pod1/c1/memory.events", EVENTS),
        (V2, "memory.events", EVENTS),
        ("0::/\n", "memory.events", EVENTS),
        (V1, "memory/process/1/memory.oom_control", CONTROL),
        (V1, "memory/memory.oom_control", CONTROL),
    ],
)
def test_the_count_is_found_in_either_version_of_cgroups(
    tmp_path: Path, cgroups: str, file: str, text: str
) -> None:
    assert counter(tmp_path, cgroups, file, text).kills() == 3


@pytest.mark.parametrize(
    ("cgroups", "file", "text", "limit"),
    [
        (V2, "kubepods/pod1/c1/memory.max", "268435456\n", 268435456),
        (V2, "memory.max", "max\n", None),
        (V1, "memory/memory.limit_in_bytes", "268435456\n", 268435456),
        (V1, "memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        (V1, "elsewhere", "1\n", None),
    ],
)
def test_the_limit_is_found_in_either_version_of_cgroups(
    tmp_path: Path, cgroups: str, file: str, text: str, limit: int | None
) -> None:
    counter(tmp_path, cgroups, file, text)
    assert memory_limit(proc=tmp_path / "cgroup", mount=tmp_path / "fs") == limit


def test_a_count_that_nobody_keeps_is_none(tmp_path: Path) -> None:
    assert OomCounter(proc=tmp_path / "absent").kills() is None
    assert counter(tmp_path, V2, "memory.events", "max 1\n").kills() is None
    other = tmp_path / "b"
    other.mkdir()
    gone = counter(other, V2, "memory.events", EVENTS)
    (tmp_path / "b" / "fs" / "memory.events").unlink()
    assert gone.kills() is None


async def run_with(tmp_path: Path, oom: OomCounter, command: str, *, stop: bool = False) -> Process:
    home = tmp_path / "home"
    home.mkdir()
    launcher = Launcher(home=home, run_dir=tmp_path, user="u", tmp_dir=tmp_path)
    async with ProcessTable(launcher, log_dir=tmp_path, oom=oom) as table:
        process = table.run(command, workdir="", env={}, stdin=b"", timeout=PATIENCE)
        if stop:
            process.stop(9, 0)
        await process.wait(PATIENCE)
        return process


async def test_a_process_killed_for_want_of_memory_is_told_as_such(tmp_path: Path) -> None:
    oom = counter(tmp_path, V2, "memory.events", EVENTS)
    kernel = f"echo oom_kill 4 > {tmp_path}/fs/memory.events"
    process = await run_with(tmp_path, oom, f"{kernel}; kill -KILL $$")
    result = command_result(process)
    assert text_of(result).startswith(
        "killed by SIGKILL\n[the sandbox ran out of memory meanwhile, "
    )
    assert "a process of it had to be killed" in text_of(result)
    assert data_of(result)["out_of_memory"] is True


async def test_a_child_killed_for_want_of_memory_is_told_too(tmp_path: Path) -> None:
    oom = counter(tmp_path, V1, "memory/memory.oom_control", CONTROL)
    kernel = f"echo oom_kill 5 > {tmp_path}/fs/memory/memory.oom_control"
    process = await run_with(tmp_path, oom, f"(bash -c 'kill -KILL $$'); {kernel}; exit 137")
    assert text_of(command_result(process)).startswith(
        "exit code 137\n[the sandbox ran out of memory meanwhile, and 2 processes of it"
    )


async def test_where_nobody_counts_only_what_nobody_asked_for_is_suspected(tmp_path: Path) -> None:
    nobody = OomCounter(proc=tmp_path / "absent")
    killed = command_result(await run_with(tmp_path, nobody, "kill -KILL $$"))
    assert "most often the sandbox has run out of memory" in text_of(killed)
    assert data_of(killed)["out_of_memory"] is False
    (tmp_path / "again").mkdir()
    stopped = command_result(await run_with(tmp_path / "again", nobody, "sleep 301", stop=True))
    assert text_of(stopped) == "killed by SIGKILL"


async def test_a_kill_without_want_of_memory_is_not_called_so(tmp_path: Path) -> None:
    oom = counter(tmp_path, V2, "memory.events", EVENTS)
    assert text_of(command_result(await run_with(tmp_path, oom, "kill -KILL $$"))) == (
        "killed by SIGKILL"
    )


# --- the gauge and the guard ---------------------------------------------------------------------

STATISTICS = "anon 1\nfile 30\nshmem 5\ninactive_file 10\nactive_file 12\nslab_reclaimable 3\n"
TOTALS = "cache 9\ninactive_file 1\nactive_file 2\ntotal_inactive_file 10\ntotal_active_file 15\n"


@pytest.mark.parametrize(
    ("cgroups", "folder", "files"),
    [
        (V2, "kubepods/pod1/c1", ("memory.max", "memory.current", STATISTICS)),
        (V2, "", ("memory.max", "memory.current", STATISTICS)),
        (V1, "memory/process/1", ("memory.limit_in_bytes", "memory.usage_in_bytes", TOTALS)),
        (V1, "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", TOTALS)),
    ],
)
def test_what_the_kernel_can_take_back_is_not_counted_as_used(
    tmp_path: Path, cgroups: str, folder: str, files: tuple[str, str, str]
) -> None:
    limit, usage, statistics = files
    counter(tmp_path, cgroups, f"{folder}/{limit}".lstrip("/"), "1000\n")
    mount = tmp_path / "fs"
    (mount / folder / usage).write_text("100\n")
    gauge = Gauge.find(proc=tmp_path / "cgroup", mount=mount)
    assert gauge is not None
    assert gauge.used() is None, "without its statistics nobody knows"
    (mount / folder / "memory.stat").write_text(statistics)
    assert (gauge.limit, gauge.used()) == (1000, 75)


def test_where_nobody_limits_or_tells_there_is_no_gauge(tmp_path: Path) -> None:
    counter(tmp_path, V2, "memory.max", "max\n")
    (tmp_path / "fs" / "memory.current").write_text("5\n")
    assert Gauge.find(proc=tmp_path / "cgroup", mount=tmp_path / "fs") is None
    (tmp_path / "fs" / "memory.max").write_text("5\n")
    (tmp_path / "fs" / "memory.current").unlink()
    assert Gauge.find(proc=tmp_path / "cgroup", mount=tmp_path / "fs") is None


class Full(Gauge):
    """Says that no memory is left, from when it is told to until some command has ended."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, Path(), Path())
        self.until: list[Process] = []
        self.looks = 0

    def used(self) -> int:
        self.looks += 1
        waits = self.until and not any(process.done.is_set() for process in self.until)
        return self.limit if waits else 0


@contextlib.asynccontextmanager
async def guarded_with(tmp_path: Path, limit: int) -> AsyncIterator[tuple[ProcessTable, Full]]:
    home = tmp_path / "home"
    home.mkdir()
    launcher = Launcher(home=home, run_dir=tmp_path, user="u", tmp_dir=tmp_path)
    gauge = Full(limit)
    nobody = OomCounter(proc=tmp_path / "absent")
    async with (
        ProcessTable(launcher, log_dir=tmp_path, oom=nobody) as table,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(guard.watch, table, gauge)
        yield table, gauge
        tasks.cancel_scope.cancel()


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[ProcessTable, Full]]:
    async with guarded_with(tmp_path, 1000) as both:
        yield both


def start(table: ProcessTable, command: str) -> Process:
    return table.run(command, workdir="", env={}, stdin=b"", timeout=PATIENCE)


HOG = "python3 -c 'import time; x = bytearray({} << 20); print(flush=True); time.sleep(1000)'"
MANY = f"for i in 1 2 3 4; do {HOG.format(20)} & done; wait"
ONE = HOG.format(40)


async def written(first: Process, second: Process, *totals: int) -> None:
    while (first.stdout.total, second.stdout.total) != totals:  # noqa: ASYNC110 - they write it
        await anyio.sleep(0.01)


async def test_when_memory_is_used_up_the_command_that_uses_most_is_ended_and_told(
    guarded: tuple[ProcessTable, Full],
) -> None:
    """By all its processes together: each of the many is smaller than the one."""
    table, gauge = guarded
    one, many = start(table, ONE), start(table, MANY)
    with anyio.fail_after(PATIENCE):
        await written(one, many, 1, 4)
        gauge.until = [one, many]
        await many.done.wait()
    assert not one.done.is_set()
    result = command_result(many)
    assert text_of(result).startswith(
        "killed by SIGKILL\n[the sandbox ran out of memory, and this command was ended, since it used most"
    )
    assert data_of(result)["out_of_memory"] is True
    assert many.left_running == 0
    assert data_of(command_result(one))["out_of_memory"] is False


SHARING = """exec python3 -c '
import mmap, os, time
size = {} << 20
pages = mmap.mmap(-1, size)
for _ in range({}):
    if not os.fork():
        break
for start in range(0, size, 4096):
    pages[start] = 1
print(flush=True)
time.sleep(1000)
'"""


async def test_shared_memory_that_ends_with_its_command_is_that_commands(
    guarded: tuple[ProcessTable, Full],
) -> None:
    table, gauge = guarded
    one, hog = start(table, ONE), start(table, SHARING.format(80, 0))
    with anyio.fail_after(PATIENCE):
        await written(one, hog, 1, 1)
        gauge.until = [one, hog]
        await hog.done.wait()
    assert (hog.ended_for_memory, one.ended_for_memory) == (True, False)


async def test_memory_that_a_commands_processes_share_is_counted_once(
    guarded: tuple[ProcessTable, Full],
) -> None:
    table, gauge = guarded
    one, sharing = start(table, HOG.format(100)), start(table, SHARING.format(30, 3))
    with anyio.fail_after(PATIENCE):
        await written(one, sharing, 1, 4)
        gauge.until = [one, sharing]
        await one.done.wait()
    assert (one.ended_for_memory, sharing.ended_for_memory) == (True, False)


async def test_memory_that_is_no_commands_ends_none_that_holds_little(tmp_path: Path) -> None:
    """What lies in /dev/shm or in a SysV segment: nobody could delete it any more."""
    async with guarded_with(tmp_path, 1 << 30) as (table, gauge):
        small = start(table, f"sleep {4 * guard.LONGEST_SECONDS}; echo done")
        gauge.until = [Process("never", "", small.leader, small.stdout, small.stderr)]
        deleting = start(table, f"touch {tmp_path}/x; rm {tmp_path}/x; echo gone")
        for each, says in ((deleting, "gone"), (small, "done")):
            await each.wait(PATIENCE)
            told = text_of(command_result(each))
            assert told.startswith("exit code 0\n")
            assert told.endswith(f"\n{says}\n")
            assert data_of(command_result(each))["out_of_memory"] is False
        assert "files in /dev/shm" in told
        assert "SysV" in told
        assert "suspend and resume" in told
        hog = start(table, HOG.format(guard.worth(1 << 30) >> 20))
        await hog.wait(PATIENCE)
    assert hog.ended_for_memory
    assert "/dev/shm" in text_of(command_result(hog))


async def test_many_commands_that_hold_little_each_are_ended_for_what_they_hold_together(
    tmp_path: Path,
) -> None:
    async with guarded_with(tmp_path, 256 << 20) as (table, gauge):
        each_bytes = guard.worth(256 << 20) * 3 // 4
        commands = [start(table, SHARING.format(each_bytes >> 20, 0)) for _ in range(4)]
        with anyio.fail_after(PATIENCE):
            while sum(each.stdout.total for each in commands) != len(commands):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            gauge.until = commands
            while not any(each.done.is_set() for each in commands):  # noqa: ASYNC110 - any of them
                await anyio.sleep(0.01)
        assert sum(each.ended_for_memory for each in commands) == 1


async def test_what_a_finished_command_left_running_is_ended_for_memory_too(
    guarded: tuple[ProcessTable, Full],
) -> None:
    table, gauge = guarded
    left = start(table, "sleep 1000 > /dev/null 2>&1 & :")
    with anyio.fail_after(PATIENCE):
        await left.done.wait()
        assert left.left_running == 1
        gauge.until = [Process("never", "", left.leader, left.stdout, left.stderr)]
        while left.left_running:  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.01)
    assert left.ended_for_memory


async def test_nobody_looks_at_the_memory_while_no_command_runs(
    guarded: tuple[ProcessTable, Full],
) -> None:
    table, gauge = guarded
    await start(table, "true").wait(PATIENCE)
    await anyio.sleep(2 * guard.LONGEST_SECONDS)
    before = gauge.looks
    await anyio.sleep(2 * guard.LONGEST_SECONDS)
    assert gauge.looks == before
    process = start(table, "sleep 1000")
    with anyio.fail_after(PATIENCE):
        while gauge.looks == before:  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.01)
    process.stop(9, 0)
    await process.wait(PATIENCE)


@pytest.mark.parametrize("limit", [64 << 20, 256 << 20, 4 << 30, 64 << 30])
def test_what_is_kept_free_is_a_part_of_the_memory_but_never_much(limit: int) -> None:
    assert 8 << 20 <= guard.reserve(limit) <= min(limit // 8, 256 << 20)


async def test_a_command_and_what_it_starts_give_way_to_the_daemon(
    guarded: tuple[ProcessTable, Full],
) -> None:
    """Else it has no turn, among a hundred that take memory, before there is none left."""
    table, _ = guarded
    process = start(table, "sleep 0.1; nice; bash -c nice")
    await process.wait(PATIENCE)
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    assert text_of(command_result(process)).endswith(f"\n{expected}\n{expected}\n")
