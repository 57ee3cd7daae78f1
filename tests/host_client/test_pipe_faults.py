"""A kubectl that dies, hangs, truncates, closes cleanly or floods stderr, anywhere in the stream."""

from __future__ import annotations

import json
import os
import signal

import anyio
import pytest

from host_client.errors import PodpipeError
from host_client.host import Host
from in_pod_server.contract import (
    CONTRACT_VERSION,
    HELLO,
    HELLO_CONTRACT,
    HELLO_POD_UID,
    IN_FLIGHT_LIMIT,
)
from tests.host_client.conftest import StubCluster
from tests.host_client.test_session import BOUND, run

ENDINGS = ("close", "truncate", "die", "hang")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heart that beats faster than a test lasts."""
    monkeypatch.setattr("host_client.session.HEARTBEAT_SECONDS", 0.4)
    monkeypatch.setattr("host_client.session.HEARTBEAT_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("host_client.session.HELLO_SECONDS", 4.0)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("after", [0, 300, 1500, 60_000, 200_000])
async def test_an_answer_comes_and_the_command_runs_once(
    stub: StubCluster, ending: str, after: int
) -> None:
    """Before the hello, in it, in the request, and amid its answer."""
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            await host.sessions.forget((await host.launcher.status("work")).sandbox.id)
            stub.faults(pipe={"after": after, "ending": ending, "times": 1})
            facts = await run(host, "work", "echo id >> ran; seq 1 40000")
            assert (facts["exit_code"], facts["stdout_bytes"]) == (0, 228_894)
            assert (await run(host, "work", "cat ran"))["stdout"] == "id\n"
            # The last pipe may still be whole where the fault is that late.
            assert stub.execs() >= (2 if after == 200_000 else 3)


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_large_request_that_is_cut_is_whole_or_not_there(
    stub: StubCluster, ending: str
) -> None:
    content = "line\n" * 100_000
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            await host.sessions.forget((await host.launcher.status("work")).sandbox.id)
            stub.faults(pipe={"after": 200_000, "ending": ending, "times": 1})
            put = {"path": "f", "content": content, "create_only": True}
            answer = await host.sessions.call("work", "write_file", put)
            assert not answer.get("isError"), answer
            assert (await run(host, "work", "wc -c < f"))["stdout"] == f"{len(content)}\n"


async def test_a_flood_on_stderr_stalls_nothing_and_is_kept_to_its_tail(stub: StubCluster) -> None:
    """L12, L42: what is not read stalls kubectl whole; what is kept has to be little."""
    stub.faults(pipe={"after": 1 << 40, "noise": 20_000_000})
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            for number in range(3):
                assert (await run(host, "work", f"echo {number}"))["stdout"] == f"{number}\n"
            session = host.sessions.existing("work")
            assert session
            assert len(session.stderr) <= 4096


async def test_one_call_whose_client_is_slow_stalls_only_itself(stub: StubCluster) -> None:
    """L12: somebody who takes a call's progress, and with it the call's end, slowly."""
    taken = anyio.Event()

    async def slow(progress: float, total: float | None, message: str | None) -> None:
        await taken.wait()

    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            async with anyio.create_task_group() as tasks:
                answers: list[int] = []

                async def big(number: int) -> None:
                    answer = await host.sessions.call(
                        "work", "run_command", {"command": "seq 1 40000"}, on_progress=slow
                    )
                    await taken.wait()
                    answers.append(answer["structuredContent"]["stdout_bytes"] + number)

                for number in range(16):
                    tasks.start_soon(big, number)
                for _ in range(5):
                    assert (await run(host, "work", "echo quick"))["stdout"] == "quick\n"
                assert answers == []
                taken.set()
    assert sorted(answers) == [228_894 + number for number in range(16)]
    assert stub.execs() == 1


ANOTHER_POD = {
    "jsonrpc": "2.0",
    "id": 1,
    "result": {
        "capabilities": {
            "experimental": {HELLO: {HELLO_CONTRACT: CONTRACT_VERSION, HELLO_POD_UID: "another"}}
        }
    },
}
SECONDS: dict[str, dict[str, list[dict[str, object]]]] = {
    "hangs": {"pipe": [{"after": 0, "ending": "hang"}]},
    "hangs amid the hello": {"pipe": [{"after": 300, "ending": "hang"}]},
    "truncates": {"pipe": [{"after": 300, "ending": "truncate"}]},
    "truncates the answer": {"pipe": [{"after": 100_000, "ending": "truncate"}]},
    "floods stderr and dies": {"pipe": [{"after": 300, "ending": "die", "noise": 5_000_000}]},
    "answers for another pod": {"exec": [{"stdout": json.dumps(ANOTHER_POD) + "\n"}]},
    "succeeds without a word": {"exec": [{"code": 0}]},
    "ever anew": {"pipe": [{"after": 300 * n, "ending": ENDINGS[n % 4]} for n in range(7)]},
}


@pytest.mark.parametrize("first", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("second", SECONDS)
async def test_a_fault_of_the_pipe_that_takes_its_place_changes_nothing(
    stub: StubCluster, first: str, second: str
) -> None:
    """A call is under way, its kubectl fails, and so does the next one, otherwise."""
    ran = stub.folder / "homes/user-alice-pvc/ran"
    answers: list[int] = []
    with anyio.fail_after(BOUND):
        stub.faults(pipe={"after": 1 << 60})
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            await run(host, "work", "true")
            session = host.sessions.existing("work")
            assert session
            assert session.kubectl_pid

            async def big() -> None:
                facts = await run(host, "work", "echo id >> ran; sleep 2; seq 1 40000")
                answers.append(facts["stdout_bytes"])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(big)
                while not ran.exists():  # noqa: ASYNC110 - another process does it
                    await anyio.sleep(0.01)
                before = stub.execs()
                stub.faults(**SECONDS[second])
                os.kill(session.kubectl_pid, signal.Signals[first])
            assert answers == [228_894]
            assert (await run(host, "work", "cat ran"))["stdout"] == "id\n"
            assert stub.execs() >= before + 2


async def test_a_slow_way_is_not_taken_for_a_frozen_one(stub: StubCluster) -> None:
    """Heartbeats wait behind what is on its way, which took longer than they may."""
    stub.faults(pipe={"after": 1 << 60, "rate": 300_000})
    content = "line\n" * 200_000
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            put = {"path": "f", "content": content, "create_only": True}
            answer = await host.sessions.call("work", "write_file", put)
            assert not answer.get("isError"), answer
            assert (await run(host, "work", "head -c 300000 f"))["stdout"] == content[:300_000]
    assert stub.execs() == 1


async def test_more_calls_than_a_daemon_takes_at_once_leave_its_pipe_alive(
    stub: StubCluster,
) -> None:
    """It read no heartbeat while its hands were full, so the pipe was taken for frozen."""
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            began = await host.sessions.call("work", "start_background", {"command": "sleep 60"})
            waits = {"process_id": began["structuredContent"]["process_id"], "wait_seconds": 4}
            answered: list[str] = []

            async def wait() -> None:
                answer = await host.sessions.call("work", "read_output", waits, reads_only=True)
                answered.append(answer["structuredContent"]["state"])

            async with anyio.create_task_group() as tasks:
                for _ in range(IN_FLIGHT_LIMIT + 10):
                    tasks.start_soon(wait)
    assert answered == ["running"] * (IN_FLIGHT_LIMIT + 10)
    assert stub.execs() == 1


async def test_a_call_that_finds_no_place_beside_others_is_said_not_to_be_sent(
    stub: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host_client.session.CALLS_AT_ONCE", 1)
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, host, "work", "sleep 3; echo long >> ran")
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(PodpipeError, match=r"1 other calls in work.*was not sent"):
                    await host.sessions.call(
                        "work", "run_command", {"command": "echo no >> ran"}, within=1.0
                    )
            assert (await run(host, "work", "cat ran"))["stdout"] == "long\n"
    assert stub.execs() == 1
