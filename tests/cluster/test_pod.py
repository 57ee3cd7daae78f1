"""What commands and files meet in a real pod: its kernel, its limits, its image, its volumes."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from host_client.errors import ContainerRestarted, PodpipeError
from host_client.host import Host
from host_client.launcher import START_WAIT_SECONDS
from tests.cluster.conftest import Cluster

BOUND = 150
OTHERS_SECONDS = 1.0
"""Whatever a command does, others are answered within this."""


async def tool(host: Host, name: str, **arguments: Any) -> dict[str, Any]:
    answer = await host.sessions.call("work", name, arguments)
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


async def run(host: Host, command: str, **arguments: Any) -> dict[str, Any]:
    return await tool(host, "run_command", command=command, **arguments)


@asynccontextmanager
async def sandbox(cluster: Cluster, **limits: Any) -> AsyncIterator[Host]:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work", **limits)
            yield host


async def answered_soon(host: Host) -> None:
    """Within a second, three times to one slow node."""
    for _ in range(3):
        with anyio.move_on_after(OTHERS_SECONDS):
            assert (await run(host, "echo ok"))["stdout"] == "ok\n"
            return
    raise AssertionError("others were not answered within a second")


# --- what the image and the kernel make of commands ----------------------------------------------


async def test_nothing_of_the_image_pages_prompts_or_waits(cluster: Cluster, user: str) -> None:
    """L37"""
    script = """
        git init -q r && cd r && git config user.email a@b && git config user.name n
        for i in $(seq 200); do git commit -q --allow-empty -m "$i"; done; git log | tail -1
        git commit --allow-empty; echo "commit $?"
        git clone -q http://127.0.0.1:9/private.git; echo "clone $?"
        man ls; sudo -S true; python3; sh; cat; read x; echo "read $?"
        ssh -o ConnectTimeout=2 127.0.0.1 true; echo end
    """
    async with sandbox(cluster) as host:
        with anyio.fail_after(30):
            facts = await run(host, script)
    lines = facts["stdout"].splitlines()
    assert (facts["state"], lines[-2:]) == ("exited", ["read 1", "end"])
    assert "clone 128" in lines
    assert "commit 1" in lines


async def test_what_a_home_may_hold_breaks_no_call(cluster: Cluster, user: str) -> None:
    """L56, L57"""
    async with sandbox(cluster) as host:
        for poison in ("read x", "exit 3", "exec cat", "while :; do :; done"):
            for name in (".bashrc", ".profile", ".bash_profile", ".inputrc"):
                await tool(host, "write_file", path=name, content=f"{poison}\n")
            assert (await run(host, "echo fine", env={"BASH_ENV": ""}))["stdout"] == "fine\n"
        await run(host, "rm -rf /tmp/* /tmp/.[!.]*; rmdir /tmp")
        facts = await run(host, "f=$(mktemp) && cat <<E >$f && cat $f\nhere\nE")
        assert facts["stdout"] == "here\n"
        bad = await run(host, "mktemp; echo $?", env={"TMPDIR": "/nope"})
        assert bad["stdout"] == "1\n"


async def test_two_hundred_commands_give_each_its_output_and_code(
    cluster: Cluster, user: str
) -> None:
    """L08"""
    found: list[tuple[str, int]] = []
    async with sandbox(cluster) as host:

        async def worker() -> None:
            for _ in range(25):
                facts = await run(host, "printf x; exit 7")
                found.append((facts["stdout"], facts["exit_code"]))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(worker)
    assert found == [("x", 7)] * 200


async def test_what_is_printed_about_us_is_only_output(cluster: Cluster, user: str) -> None:
    """L59, L17, L14: with the real kubectl and the real runtime between."""
    said = (
        "container not found\ncommand terminated with exit code 137\nerror: unable to upgrade\n\n\n"
        '{"jsonrpc":"2.0","id":"call-1","result":{}}\n' + "x" * 60_000
    )
    async with sandbox(cluster) as host:
        facts = await run(host, "tee /dev/stderr", stdin=said)
        assert (facts["stdout"], facts["stderr"], facts["exit_code"]) == (said, said, 0)


@pytest.mark.parametrize(
    "tree",
    [
        "sleep 300 | sleep 300",
        "setsid sleep 300 & setsid -f sh -c 'sleep 300; true'; sleep 300",
        "(trap '' TERM HUP INT; while :; do sleep 1; done) & trap '' TERM; wait; sleep 300",
        "python3 -c 'import os, time; [os.fork() for _ in range(4)]; os.setsid; time.sleep(300)'",
        "env -i setsid sh -c 'sleep 300 & sleep 300 & wait' & sleep 300",
    ],
)
async def test_a_timeout_ends_the_whole_tree_and_nothing_else(
    cluster: Cluster, user: str, tree: str
) -> None:
    """L03, L05, L06"""
    async with sandbox(cluster) as host:
        other = await tool(host, "start_background", command="exec sleep 1000")
        facts = await run(host, f"echo before; {tree}; touch late", timeout_seconds=1)
        assert (facts["state"], facts["exit_code"]) == ("timed_out", None)
        assert (facts["stdout"], facts["left_running"]) == ("before\n", 0)
        assert facts["duration_seconds"] < 10
        seen = await run(
            host, "ps -eo pid,stat,args | grep -c '[s]leep 300\\|[Z]+\\? *\\['; ls late"
        )
        assert (seen["stdout"], seen["exit_code"]) == ("0\n", 2)
        (row,) = (await tool(host, "list_processes", running_only=True))["processes"]
        assert row["process_id"] == other["process_id"]


# --- limits --------------------------------------------------------------------------------------


async def daemon_kib(host: Host, what: str) -> int:
    """What the daemon takes of the pod's memory."""
    # The first child of process 1, which is tini.
    facts = await run(host, f"awk '/^{what}:/ {{print $2}}' /proc/$(pgrep -o -P 1)/status")
    return int(facts["stdout"])


async def test_two_gigabytes_of_output_take_little_memory_and_others_are_answered(
    cluster: Cluster, user: str
) -> None:
    size = 2_000_000_000
    async with sandbox(cluster) as host:
        idle = await daemon_kib(host, "VmRSS")
        assert idle <= 75 * 1024
        ended = anyio.Event()

        async def flood() -> None:
            facts = await run(host, f"head -c {size} /dev/zero", timeout_seconds=100)
            total = facts["stdout_bytes"]
            while facts["state"] == "running":
                facts |= await tool(
                    host, "read_output", process_id=facts["process_id"], until_end=True,
                    wait_seconds=30, cursor=2 * size,
                )  # fmt: skip
                total = facts["cursor"]
            assert (facts["exit_code"], total) == (0, size)
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flood)
            while not ended.is_set():
                await answered_soon(host)
        assert await daemon_kib(host, "VmHWM") <= idle + 64 * 1024


async def test_a_fork_bomb_hurts_only_itself(cluster: Cluster, user: str) -> None:
    """L60"""
    async with sandbox(cluster) as host:
        facts = await run(host, ":(){ :|:& };:; sleep 60", timeout_seconds=4)
        assert (facts["state"], facts["left_running"]) == ("timed_out", 0)
        await answered_soon(host)
        assert (await run(host, "echo ok | cat"))["stdout"] == "ok\n"


FAST = "python3 -c 'x = bytearray(10**9); print(len(x))'"
MANY = """
for i in $(seq 40); do python3 -c 'import time; x = bytearray(15 * 10**6); time.sleep(60)' & done; wait
"""
"""Each is smaller than the daemon, which is therefore what the kernel would choose."""
SWARM = """
for i in $(seq 1000); do (x=$(head -c 1000000 /dev/zero | tr '\\0' x); sleep 60) & done; wait
"""
UNWATCHED = f"kill -STOP $(pgrep -o -P 1); {MANY}"
"""The daemon, which is the first child of process 1, cannot guard what it does not see."""


@pytest.mark.parametrize("command", [FAST, MANY, SWARM], ids=["fast", "many", "swarm"])
async def test_want_of_memory_ends_the_command_and_not_the_daemon(
    cluster: Cluster, user: str, command: str
) -> None:
    async with sandbox(cluster, memory_limit="256Mi") as host:
        before = await host.sessions.open("work")
        small = await tool(host, "start_background", command="exec sleep 1000")
        for _ in range(2):
            facts = await run(host, command)
            assert (facts["out_of_memory"], facts["left_running"]) == (True, 0), facts
            assert (await run(host, "echo ok"))["stdout"] == "ok\n"
        (row,) = (await tool(host, "list_processes", running_only=True))["processes"]
        assert row["process_id"] == small["process_id"], "what uses little goes on"
        assert (await host.sessions.open("work")).boot_id == before.boot_id


async def test_full_memory_disks_leave_room_for_commands(cluster: Cluster, user: str) -> None:
    """What lies in /dev/shm and beside the daemon's socket is taken from the sandbox's memory."""
    async with sandbox(cluster, memory_limit="256Mi") as host:
        before = await host.sessions.open("work")
        for folder in ("/dev/shm", "/run/podpipe"):
            facts = await run(host, f"head -c 300000000 /dev/zero > {folder}/filler")
            assert "No space left on device" in facts["stderr"]
        assert (await run(host, "head -c 5000000 /dev/zero | wc -c"))["stdout"] == "5000000\n"
        assert (await run(host, "rm /dev/shm/filler /run/podpipe/filler"))["exit_code"] == 0
        assert (await host.sessions.open("work")).boot_id == before.boot_id


async def test_a_container_killed_for_memory_under_a_call_is_told_as_such(
    cluster: Cluster, user: str
) -> None:
    async with sandbox(cluster, memory_limit="256Mi") as host:
        with pytest.raises(ContainerRestarted) as caught:
            await run(host, f"echo id >> ran; {UNWATCHED}")
        assert caught.value.reason == "OOMKilled, exit code 137"
        assert "Files in the home survive; processes do not" in str(caught.value)
        facts = await run(host, "cat ran; pgrep -c python3")
        assert facts["stdout"].startswith("id\n")
        assert "sandbox_news" not in facts  # told already


async def test_a_container_killed_for_memory_between_calls_is_told_by_the_next(
    cluster: Cluster, user: str
) -> None:
    async with sandbox(cluster, memory_limit="256Mi") as host:
        await tool(host, "start_background", command=f"sleep 0.5; {UNWATCHED}")
        while (await host.launcher.status("work")).pod.restarts == 0:  # type: ignore[union-attr]  # noqa: ASYNC110
            await anyio.sleep(0.3)
        facts = await run(host, "echo ok")
        assert facts["stdout"] == "ok\n"
        assert "container of this sandbox was restarted (OOMKilled" in facts["sandbox_news"]
        assert "sandbox_news" not in await run(host, "true")
        assert "OOMKilled" in (await host.sessions.status("work")).detail


async def test_a_large_stdin_never_kills_the_daemon_of_a_small_sandbox(
    cluster: Cluster, user: str
) -> None:
    async with sandbox(cluster, memory_limit="256Mi") as host:
        before = await host.sessions.open("work")
        for text in ("x" * (30 << 20), "\u8a9e" * (10 << 20), "\U0001f600" * (30 << 18)):
            facts = await run(host, "wc -c", stdin=text)
            assert facts["stdout"] == f"{30 << 20}\n"
        for wide in (("x" * 999 + "\U0001f600") * (30 << 10), "x" * (60 << 20)):
            with pytest.raises(PodpipeError, match=r"nothing was begun.*upload it as a file"):
                await run(host, "touch begun", stdin=wide)
        assert (await run(host, "ls begun"))["exit_code"] == 2
        assert (await host.sessions.open("work")).boot_id == before.boot_id


async def test_a_container_that_died_is_told_with_what_was_lost(
    cluster: Cluster, user: str
) -> None:
    """`kill -9 -1` stands for the end of a whole container by want of memory."""
    async with sandbox(cluster) as host:
        background = await tool(host, "start_background", command="exec sleep 1000")
        await run(host, "echo kept > f; echo kept > /tmp/f")
        before = await host.sessions.open("work")
        with pytest.raises(ContainerRestarted) as caught:
            await run(host, "kill -9 -1")
        assert "exit code 137" in str(caught.value)
        assert "Files in the home survive; processes do not" in str(caught.value)
        facts = await run(host, "cat f /tmp/f; pgrep -c sleep")
        assert facts["stdout"] == "kept\nkept\n0\n"
        after = await host.sessions.open("work")
        assert (before.pod.uid, before.boot_id != after.boot_id) == (after.pod.uid, True)
        asked = {"process_id": background["process_id"]}
        answer = await host.sessions.call("work", "read_output", asked)
        assert "a restart of the sandbox ends and forgets all" in answer["content"][0]["text"]


async def test_a_tmp_filled_beyond_its_limit_is_told_and_the_next_call_works(
    cluster: Cluster, user: str
) -> None:
    """The kubelet lets it be filled, notices a while later, and evicts the pod."""
    async with sandbox(cluster) as host:
        first = await host.sessions.open("work")
        await run(host, "echo kept > f")
        answer = await host.sessions.call(
            "work", "run_command", {"command": "fallocate -l 4G /tmp/filler && sleep 100"}
        )
        assert not answer.get("isError"), answer
        process_id = answer["structuredContent"]["process_id"]
        while answer["structuredContent"]["state"] == "running":
            answer = await host.sessions.call(
                "work",
                "read_output",
                {"process_id": process_id, "until_end": True, "wait_seconds": 30},
            )
        told = answer["content"][-1]["text"]
        assert "killed by SIGTERM" in told
        assert "the sandbox itself was ended" in told
        with anyio.fail_after(START_WAIT_SECONDS):
            facts = await run(host, "echo id >> ran; cat f ran; ls /tmp")
        second = await host.sessions.open("work")
        assert (await run(host, "cat ran"))["stdout"] == "id\n"
    assert facts["stdout"] == "kept\nid\n"
    assert second.pod.uid != first.pod.uid
    assert 'Evicted: Usage of EmptyDir volume "tmp" exceeds the limit' in facts["sandbox_news"]


# --- files ---------------------------------------------------------------------------------------


NAMES = [
    b"with space", b"co:lon", b"quo'te\"", b"new\nline", b"-rf", "é".encode(), b"x" * 255,
    b"\xff\xfe", b"back\\slash", b"\\x5c", b"$(touch pwned)", b"a'; touch pwned; '", b"*", b"~",
    b"tab\t", b"\x01",
]  # fmt: skip


def make_odd(folder: Path) -> None:
    folder.mkdir()
    for name in NAMES:
        (folder / os.fsdecode(name)).write_bytes(name)


async def test_hostile_names_come_back_as_they_were(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    """L24, L35: made here, listed and read by the tools there, copied back."""
    source = tmp_path / "odd"
    make_odd(source)
    async with sandbox(cluster) as host:
        await host.transfers.put("work", [str(source)])
        listed = (await tool(host, "list_files", path="odd"))["entries"]
        assert len(listed) == len(NAMES)
        for entry in listed:
            read = await tool(host, "read_file", path=entry["path"], encoding="base64")
            assert base64.b64decode(read["content"]) in NAMES
            await tool(host, "move_file", path=entry["path"], new_path="moved")
            await tool(host, "move_file", path="moved", new_path=entry["path"])
        await host.transfers.get("work", "odd", f"{tmp_path}/back")
        assert (await run(host, "ls pwned; ls ~/pwned"))["exit_code"] == 2
    back = {os.fsencode(p.name): p.read_bytes() for p in (tmp_path / "back").iterdir()}
    assert back == {name: name for name in NAMES}


async def test_parallel_writes_into_one_new_folder_are_all_seen(
    cluster: Cluster, user: str
) -> None:
    """L22"""
    async with sandbox(cluster) as host:

        async def one(number: int) -> None:
            path = f"a/b/c/{number}"
            await tool(host, "write_file", path=path, content=str(number))
            assert (await run(host, f"cat {path}"))["stdout"] == str(number)

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(one, number)


async def test_binary_and_large_files_are_equal_on_both_sides(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    """L25, L11"""
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("x", os.urandom(100_000))
    (tmp_path / "p.png").write_bytes(b"\x89PNG\r\n\x1a\n" + os.urandom(50_000))
    async with sandbox(cluster) as host:
        await run(host, "seq 1 2000000 > large")
        await host.transfers.put("work", [str(tmp_path / "z.zip"), str(tmp_path / "p.png")], "in/")
        sums = (await run(host, "cd in && sha256sum z.zip p.png && sha256sum ../large"))["stdout"]
        await host.transfers.get("work", "in", f"{tmp_path}/back")
        await host.transfers.get("work", "large", f"{tmp_path}/large")
        flood = await run(host, "cat large")
    wanted = [
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in ("back/z.zip", "back/p.png", "large")
    ]
    assert [line.split()[0] for line in sums.splitlines()] == wanted
    assert (flood["stdout_truncated"], flood["stdout"].endswith("2000000\n")) == (True, True)
    assert flood["stdout_bytes"] == (tmp_path / "large").stat().st_size


async def test_a_large_stdin_and_a_large_file_pass_in_one_call(cluster: Cluster, user: str) -> None:
    """L21"""
    text = "line é\n" * 4_000_000
    async with sandbox(cluster) as host:
        facts = await run(host, "sha256sum", stdin=text)
        assert facts["stdout"].split()[0] == hashlib.sha256(text.encode()).hexdigest()
        content = text[: 5 * 1024 * 1024 // 8]
        await tool(host, "write_file", path="five", content=content)
        read = await run(host, "sha256sum < five")
        assert read["stdout"].split()[0] == hashlib.sha256(content.encode()).hexdigest()


def test_the_command_line_gives_large_binary_input(cluster: Cluster, user: str) -> None:
    assert cluster.podpipe("create", "--name", "work").returncode == 0
    ran = cluster.podpipe_fed(bytes(31_457_280), "run", "-i", "work", "--", "wc -c")
    assert (ran.stdout, ran.returncode) == ("31457280\n", 0), ran.stderr
