"""Want of memory is told as such, where the kernel counts it and where nobody does."""

from __future__ import annotations

from pathlib import Path

import pytest

from in_pod_server.launch import Launcher
from in_pod_server.memory import OomCounter, memory_limit
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
