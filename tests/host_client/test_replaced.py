"""What Kubernetes took away is told with its reason; calls go on in what took its place, run once."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from host_client.errors import ContainerRestarted, PodReplaced
from host_client.host import Host
from tests.host_client.conftest import StubCluster
from tests.host_client.test_session import BOUND, daemon_pid, killed_while, run

EVICTION = 'Usage of EmptyDir volume "tmp" exceeds the limit "2Gi"'
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": f"{EVICTION}. "}


def restarted(reason: str, code: int) -> dict[str, Any]:
    """A pod's status after its container has ended and was started again."""
    ended = {"reason": reason, "exitCode": code}
    container = {"name": "sandbox", "state": {"running": {}}, "restartCount": 1}
    return {"containerStatuses": [container | {"lastState": {"terminated": ended}}]}


@pytest.fixture
async def host(stub: StubCluster) -> AsyncIterator[Host]:
    async with Host(stub.settings()) as opened:
        await opened.launcher.create(name="work")
        yield opened


async def told(host: Host, command: str) -> tuple[str, str]:
    """What a command printed, and what the sandbox is said to have lost before it."""
    answer = await host.sessions.call("work", "run_command", {"command": command})
    facts = answer["structuredContent"]
    news = facts.get("sandbox_news", "")
    last = answer["content"][-1]["text"]
    assert last == f"[before this {news}]" if news else "before this" not in last
    return facts["stdout"], news


async def test_calls_to_a_daemon_that_is_ending_run_once_in_the_next_pod(
    host: Host, stub: StubCluster
) -> None:
    """Those that it had read and those that it had not; none is said to be in doubt."""
    stubborn = "trap '' TERM; echo up > up; while :; do sleep 0.1; done"
    with anyio.fail_after(BOUND):
        await host.sessions.call("work", "start_background", {"command": stubborn})
        home = next((stub.folder / "homes").iterdir())
        while not (home / "up").exists():  # noqa: ASYNC110 - another process writes it
            await anyio.sleep(0.01)
        session = host.sessions.existing("work")
        assert session
        assert await host.kubectl.delete("pods", session.pod.name, uid=session.pod.uid)
        found: list[str] = []

        async def call(number: int) -> None:
            await anyio.sleep(number / 20)
            found.append((await run(host, "work", f"echo {number} >> ran; echo ok"))["stdout"])

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(call, number)
        assert found == ["ok\n"] * 20
        ran = (await run(host, "work", "sort -n ran"))["stdout"].split()
        assert ran == [str(number) for number in range(20)]
        assert host.sessions.existing("work") is not session


async def test_a_call_that_the_daemon_was_killed_before_reading_is_not_in_doubt(
    host: Host, stub: StubCluster
) -> None:
    """It had said that it ends, and what it had read by then."""
    with anyio.fail_after(BOUND):
        await run(host, "work", "true")
        session = host.sessions.existing("work")
        assert session
        pid = daemon_pid(stub)
        (pod,) = stub.names("Pod")
        stubborn = "trap '' TERM; for i in {1..600}; do sleep 0.1; done"
        await host.sessions.call("work", "start_background", {"command": stubborn})
        os.kill(pid, signal.SIGTERM)
        while not session.ending:
            await anyio.lowlevel.checkpoint()
        os.kill(pid, signal.SIGKILL)
        stub.change_pod(**EVICTED)
        printed, news = await told(host, "echo id >> ran; cat ran")
        assert printed == "id\n"
        assert news == (
            f"the pod of this sandbox was replaced (Evicted: {EVICTION}). Files in the home "
            "survive; processes and what was in /tmp do not"
        )
        assert stub.names("Pod") != [pod]


async def test_a_pod_that_was_evicted_between_calls_is_told_once_with_the_reason(
    host: Host, stub: StubCluster
) -> None:
    with anyio.fail_after(BOUND):
        await run(host, "work", "echo kept > f")
        os.kill(daemon_pid(stub), signal.SIGTERM)
        stub.change_pod(**EVICTED)
        status = await host.sessions.status("work")
        assert status.phase == "failed"
        assert f"Evicted: {EVICTION}" in status.detail
        assert "next call starts another" in status.detail
        printed, news = await told(host, "cat f")
        assert printed == "kept\n"
        assert f"Evicted: {EVICTION}" in news
        assert await told(host, "cat f") == ("kept\n", "")


async def test_a_host_that_did_not_see_the_pod_before_tells_it_as_well(
    host: Host, stub: StubCluster
) -> None:
    with anyio.fail_after(BOUND):
        await run(host, "work", "true")
        os.kill(daemon_pid(stub), signal.SIGTERM)
        stub.change_pod(**EVICTED)
        async with Host(stub.settings()) as other:
            assert "Evicted" in (await told(other, "true"))[1]
            assert (await told(other, "true"))[1] == ""
        async with Host(stub.settings()) as late:
            assert (await told(late, "true"))[1] == ""


async def test_what_was_ended_on_purpose_is_no_news(host: Host) -> None:
    with anyio.fail_after(BOUND):
        for _ in range(2):
            assert (await told(host, "true"))[1] == ""
            await host.launcher.suspend("work")
            await host.sessions.forget("work")
        assert (await told(host, "true"))[1] == ""


async def test_a_pod_evicted_under_a_call_is_told_with_the_reason(
    host: Host, stub: StubCluster
) -> None:
    def evict() -> None:
        stub.change_pod(**EVICTED)
        os.kill(daemon_pid(stub), signal.SIGKILL)

    with anyio.fail_after(BOUND):
        with pytest.raises(PodReplaced, match=r"Evicted: Usage of EmptyDir.*may have run") as found:
            await killed_while(host, stub, "sleep 30", evict)
        assert found.value.reason == f"Evicted: {EVICTION}"
        assert await told(host, "cat ran") == ("once\n", "")


async def test_a_pod_that_turns_out_to_be_ended_while_it_is_dialled_is_replaced(
    host: Host, stub: StubCluster
) -> None:
    """The API tells a second late that a pod has ended; that is no failed launch."""
    with anyio.fail_after(BOUND):
        await run(host, "work", "echo kept > f")
        await host.sessions.forget("work")
        stub.faults(exec={"stderr": "error: container not found"})
        before = stub.execs()

        async def notice() -> None:
            while stub.execs() < before + 2:  # noqa: ASYNC110 - a kubectl writes it down
                await anyio.sleep(0.01)
            stub.change_pod(**EVICTED)
            stub.faults()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(notice)
            assert (await run(host, "work", "cat f"))["stdout"] == "kept\n"
        assert (await host.launcher.status("work")).sandbox.incarnation == 2


async def test_a_container_that_was_killed_for_memory_under_a_call_is_told_so(
    host: Host, stub: StubCluster
) -> None:
    def kill() -> None:
        os.kill(daemon_pid(stub), signal.SIGKILL)
        stub.change_pod(**restarted("OOMKilled", 137))

    with anyio.fail_after(BOUND):
        with pytest.raises(ContainerRestarted, match=r"OOMKilled.*may have run in part") as found:
            await killed_while(host, stub, "sleep 30", kill)
        assert found.value.reason == "OOMKilled, exit code 137"
        assert await told(host, "cat ran") == ("once\n", "")


async def test_a_container_that_was_killed_for_memory_between_calls_is_told_once(
    host: Host, stub: StubCluster
) -> None:
    with anyio.fail_after(BOUND):
        await run(host, "work", "true")
        os.kill(daemon_pid(stub), signal.SIGKILL)
        stub.change_pod(**restarted("OOMKilled", 137))
        _, news = await told(host, "true")
        assert news == (
            "the container of this sandbox was restarted (OOMKilled, exit code 137). Files and /tmp "
            "survive; processes that ran do not"
        )
        assert (await told(host, "true"))[1] == ""
        assert "OOMKilled, exit code 137" in (await host.sessions.status("work")).detail
