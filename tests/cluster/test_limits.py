"""Floods, fork bombs, want of memory and full disks in a real pod hurt the command, not the daemon."""

from __future__ import annotations

import anyio
import pytest

from host_client.errors import ContainerRestarted, PodpipeError
from host_client.host import Host
from host_client.launcher import START_WAIT_SECONDS
from tests.cluster.conftest import Cluster
from tests.cluster.pods import answered_soon, run, sandbox, tool


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


@pytest.mark.breaks_node
async def test_a_fork_bomb_hurts_only_itself(cluster: Cluster, user: str) -> None:
    """L60"""
    async with sandbox(cluster) as host:
        facts = await run(host, ":(){ :|:& };:; sleep 60", timeout_seconds=30)
        # By the limit of processes, unless the node is so busy that it never has so many.
        assert facts["state"] in ("killed", "timed_out")
        await answered_soon(host)
        # A busy node takes longer over them than the call waits; the daemon goes on.
        while (await tool(host, "list_processes", running_only=True))["processes"]:  # noqa: ASYNC110
            await anyio.sleep(0.2)
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


SEGMENT = """python3 -c '
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
size = {} << 20
place = libc.shmat(libc.shmget(0, ctypes.c_size_t(size), 0o1600), None, 0)
for page in range(0, size, 4096):
    ctypes.memset(place + page, 1, 1)
'"""


async def test_shared_memory_that_outlives_its_command_can_be_removed(
    cluster: Cluster, user: str
) -> None:
    async with sandbox(cluster, memory_limit="256Mi") as host:
        before = await host.sessions.open("work")
        for _ in range(4):  # until too little is left, which may end the last
            facts = await run(host, SEGMENT.format(60))
        assert facts["out_of_memory"] is True
        facts = await run(host, "sleep 1; ipcs -m | grep -c 62914560")
        assert facts["exit_code"] == 0, facts
        assert "SysV" in facts["note"]
        assert (await run(host, "ipcrm -a"))["exit_code"] == 0
        facts = await run(host, "python3 -c 'print(len(bytearray(10**8)))'")
        assert (facts["stdout"], facts["note"]) == ("100000000\n", "")
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
