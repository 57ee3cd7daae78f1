"""One pipe per sandbox, over the stub kubectl and the real daemon."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from host_client.errors import (
    ContainerRestarted,
    PodpipeError,
    PodReplaced,
    RequestRefused,
    SandboxExpired,
    SessionLost,
    StillStarting,
    root_cause,
)
from host_client.host import Host
from host_client.pipe import Pipe
from host_client.session import SandboxSession
from in_pod_server.contract import META_CALL_AGE, META_CALL_ID
from tests.host_client.conftest import StubCluster

BOUND = 60
"""Seconds for a whole test: generous, as a daemon's start takes one and the machine may be busy."""


@pytest.fixture
async def host(stub: StubCluster) -> AsyncIterator[Host]:
    async with Host(stub.settings()) as opened:
        yield opened


async def run(host: Host, ref: str, command: str, **arguments: Any) -> dict[str, Any]:
    answer = await host.sessions.call(ref, "run_command", {"command": command, **arguments})
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


def pipes() -> list[int]:
    """The process ids of our kubectls (by now the dials) that are pipes."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and b"dial.py" in _cmdline(entry) and _parent(entry) == os.getpid()
    ]


def _cmdline(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 0


async def test_a_call_runs_in_the_sandbox_of_its_name(host: Host) -> None:
    with anyio.fail_after(BOUND):
        await host.launcher.create(name="work")
        facts = await run(host, "work", "echo out; echo err >&2; exit 3")
    assert (facts["exit_code"], facts["stdout"], facts["stderr"]) == (3, "out\n", "err\n")


async def test_many_calls_at_once_on_a_new_sandbox_open_one_pipe(
    host: Host, stub: StubCluster
) -> None:
    """L28: two concurrent opens leaked one session."""
    made = await host.launcher.create(name="work")
    answers: list[str] = []

    async def call(number: int) -> None:
        ref = "work" if number % 2 else made.sandbox.id
        answers.append((await run(host, ref, f"echo {number}"))["stdout"].strip())

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(call, number)
    assert sorted(answers, key=int) == [str(number) for number in range(12)]
    assert stub.execs() <= 2  # one per spelling of the sandbox at most; both lead to one session
    assert len({id(host.sessions.existing(ref)) for ref in ("work", made.sandbox.id)}) == 1


async def test_a_slow_call_does_not_delay_another(host: Host) -> None:
    """L58: one long command blocked everything."""
    await host.launcher.create(name="work")
    await run(host, "work", "true")
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, host, "work", "sleep 50")
            with anyio.fail_after(5):
                assert (await run(host, "work", "echo quick"))["stdout"] == "quick\n"
            tasks.cancel_scope.cancel()


async def test_a_pipe_that_died_between_calls_is_opened_anew(host: Host, stub: StubCluster) -> None:
    await host.launcher.create(name="work")
    with anyio.fail_after(BOUND):
        await run(host, "work", "echo kept > f")
        session = host.sessions.existing("work")
        assert session
        os.kill(pipes()[0], signal.SIGKILL)
        while session.alive:
            await anyio.lowlevel.checkpoint()
        assert (await run(host, "work", "cat f"))["stdout"] == "kept\n"
    assert stub.execs() == 2


async def test_a_pipe_that_broke_is_opened_anew_without_a_lookup(
    host: Host, stub: StubCluster
) -> None:
    """The hello proves which pod it is; looking it up first would double the time."""
    await host.launcher.create(name="work")
    with anyio.fail_after(BOUND):
        await run(host, "work", "true")
        session = host.sessions.existing("work")
        assert session
        stub.faults(get={"stderr": "Unable to connect to the server: no route to host"})
        os.kill(pipes()[0], signal.SIGKILL)
        while session.alive:
            await anyio.lowlevel.checkpoint()
        assert (await run(host, "work", "echo again"))["stdout"] == "again\n"


async def killed_while(
    host: Host, stub: StubCluster, command: str, kill: Callable[[], object]
) -> dict[str, Any]:
    """Run a command that writes `ran` first, and break something as soon as it has."""
    await run(host, "work", "true")
    home = next((stub.folder / "homes").iterdir())
    found: dict[str, Any] = {}

    async def call() -> None:
        found.update(await run(host, "work", f"echo once >> ran; {command}"))

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            while not (home / "ran").exists():  # noqa: ASYNC110 - another process writes it
                await anyio.sleep(0.01)
            kill()
    except BaseExceptionGroup as group:
        raise root_cause(group) from None
    return found


def daemon_pid(stub: StubCluster) -> int:
    (pid,) = stub.folder.glob("pods/*/pid")
    return int(pid.read_text(encoding="utf-8"))


async def test_a_call_whose_pipe_dies_is_joined_over_another_and_runs_once(
    host: Host, stub: StubCluster
) -> None:
    """L33: a restart of the API server lost the job, or ran it twice."""
    await host.launcher.create(name="work")
    with anyio.fail_after(BOUND):
        facts = await killed_while(
            host, stub, "sleep 1; echo end", lambda: os.kill(pipes()[0], signal.SIGKILL)
        )
        assert (facts["stdout"], facts["exit_code"]) == ("end\n", 0)
        assert (await run(host, "work", "cat ran"))["stdout"] == "once\n"


async def test_a_call_that_is_asked_for_again_says_how_old_it_is(
    host: Host, stub: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that the daemon knows whether it can have forgotten it."""
    asked: list[dict[str, Any]] = []
    request = SandboxSession.request

    async def noted(session: SandboxSession, *arguments: Any, **options: Any) -> dict[str, Any]:
        asked.append(options["meta"])
        return await request(session, *arguments, **options)

    monkeypatch.setattr(SandboxSession, "request", noted)
    await host.launcher.create(name="work")
    with anyio.fail_after(BOUND):
        await killed_while(host, stub, "sleep 1", lambda: os.kill(pipes()[0], signal.SIGKILL))
    first, again = asked[1], asked[-1]
    assert again[META_CALL_ID] == first[META_CALL_ID]
    assert META_CALL_AGE not in first
    assert 0 < again[META_CALL_AGE] < BOUND


async def test_a_call_that_ended_while_no_pipe_was_there_is_still_answered(
    host: Host, stub: StubCluster
) -> None:
    await host.launcher.create(name="work")

    def cut() -> None:
        stub.faults(exec={"stderr": "error: unable to upgrade connection", "times": 8})
        os.kill(pipes()[0], signal.SIGKILL)

    with anyio.fail_after(BOUND):
        facts = await killed_while(host, stub, "echo end", cut)
        assert facts["stdout"] == "end\n"
        assert (await run(host, "work", "cat ran"))["stdout"] == "once\n"


async def test_a_frozen_pipe_is_found_by_the_heartbeat_and_replaced(
    host: Host, stub: StubCluster, monkeypatch: Any
) -> None:
    """L32: a client froze for ever."""
    monkeypatch.setattr("host_client.session.HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr("host_client.session.HEARTBEAT_ANSWER_SECONDS", 0.5)
    await host.launcher.create(name="work")
    with anyio.fail_after(BOUND):
        facts = await killed_while(
            host, stub, "sleep 1; echo end", lambda: os.kill(pipes()[0], signal.SIGSTOP)
        )
        assert facts["stdout"] == "end\n"
        assert (await run(host, "work", "cat ran"))["stdout"] == "once\n"


async def test_a_call_whose_container_ended_is_told_and_not_run_again(
    host: Host, stub: StubCluster
) -> None:
    await host.launcher.create(name="work")
    with anyio.fail_after(BOUND):
        with pytest.raises(ContainerRestarted, match="may have run in part"):
            await killed_while(
                host, stub, "sleep 30", lambda: os.kill(daemon_pid(stub), signal.SIGKILL)
            )
        assert (await run(host, "work", "cat ran"))["stdout"] == "once\n"


async def test_a_call_whose_pod_was_replaced_is_told_and_not_run_again(
    host: Host, stub: StubCluster
) -> None:
    made = await host.launcher.create(name="work")
    name = made.sandbox.pod_name
    uid = stub.objects[f"Pod/{name}"]["metadata"]["uid"]
    objects = stub.objects

    def lose() -> None:
        """As a node that dies: the daemon has no time to answer, and the pod is gone."""
        del objects[f"Pod/{name}"]
        (stub.folder / "state.json").write_text(json.dumps(objects), encoding="utf-8")
        os.kill(daemon_pid(stub), signal.SIGKILL)

    with anyio.fail_after(BOUND):
        with pytest.raises(PodReplaced, match="survive") as caught:
            await killed_while(host, stub, "sleep 30", lose)
        assert (await run(host, "work", "cat ran"))["stdout"] == "once\n"
    assert caught.value.old_uid == uid
    assert caught.value.new_uid not in ("", uid)


async def test_a_call_whose_sandbox_is_destroyed_is_answered_as_ended(
    host: Host, stub: StubCluster
) -> None:
    """The daemon ends its commands and answers for them before it goes."""
    await host.launcher.create(name="work")
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:
            facts = await killed_while(
                host, stub, "sleep 30", lambda: tasks.start_soon(host.launcher.destroy, "work")
            )
    assert (facts["state"], facts["signal"]) == ("killed", "SIGTERM")


async def test_a_call_whose_sandbox_vanishes_is_told_so(host: Host, stub: StubCluster) -> None:
    await host.launcher.create(name="work")

    def lose() -> None:
        (stub.folder / "state.json").write_text("{}", encoding="utf-8")
        os.kill(daemon_pid(stub), signal.SIGKILL)

    with anyio.fail_after(BOUND):
        with pytest.raises(SessionLost, match=r"no sandbox 'work'.* may have run"):
            await killed_while(host, stub, "sleep 30", lose)


async def test_a_call_that_can_never_be_asked_again_is_unknown(
    host: Host, stub: StubCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr("host_client.sessions.RECONNECT_SECONDS", 1.0)
    await host.launcher.create(name="work")

    def cut() -> None:
        gone = {"stderr": "Unable to connect to the server: no route to host"}
        stub.faults(get=gone, exec=gone)
        os.kill(pipes()[0], signal.SIGKILL)

    with anyio.fail_after(BOUND):
        with pytest.raises(SessionLost, match=r"does not answer.* may have run") as caught:
            await killed_while(host, stub, "sleep 30", cut)
    assert caught.value.sent


async def test_fifty_calls_with_dying_pipes_all_get_their_own_answer(
    host: Host, stub: StubCluster
) -> None:
    """L29: shared retry state broke under concurrency."""
    await host.launcher.create(name="work")
    await run(host, "work", "true")
    answers: dict[int, str] = {}

    async def call(number: int) -> None:
        facts = await run(
            host, "work", f"echo {number} >> ran; sleep 0.{number % 5}; echo {number}"
        )
        answers[number] = facts["stdout"].strip()

    async def kill_often() -> None:
        for _ in range(5):
            await anyio.sleep(0.2)
            for pid in pipes():
                os.kill(pid, signal.SIGKILL)

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_often)
            for number in range(50):
                tasks.start_soon(call, number)
        ran = (await run(host, "work", "sort -n ran"))["stdout"].split()
    assert answers == {number: str(number) for number in range(50)}
    assert ran == [str(number) for number in range(50)]


async def test_an_unused_pipe_is_closed_and_opened_again(
    stub: StubCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr("host_client.session.HEARTBEAT_SECONDS", 0.1)
    async with Host(stub.settings(PODPIPE_IDLE_SECONDS="1")) as host:
        await host.launcher.create(name="work")
        with anyio.fail_after(BOUND):
            while pipes():  # noqa: ASYNC110 - the end of a process
                await anyio.sleep(0.05)
            assert (await run(host, "work", "echo again"))["stdout"] == "again\n"


async def test_a_long_call_keeps_its_pipe_however_long_it_takes(
    stub: StubCluster, monkeypatch: Any
) -> None:
    """L10: five minutes of silence ended as success."""
    monkeypatch.setattr("host_client.session.HEARTBEAT_SECONDS", 0.1)
    async with Host(stub.settings(PODPIPE_IDLE_SECONDS="1")) as host:
        await host.launcher.create(name="work")
        with anyio.fail_after(BOUND):
            facts = await run(host, "work", "sleep 3; echo end")
    assert facts["stdout"] == "end\n"
    assert stub.execs() == 1


async def test_a_reading_call_whose_pipe_dies_is_asked_again(host: Host, stub: StubCluster) -> None:
    await host.launcher.create(name="work")
    started = await run(host, "work", "sleep 30", wait_seconds=0)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                answer = await host.sessions.call(
                    "work",
                    "read_output",
                    {"process_id": started["process_id"], "wait_seconds": 3},
                    reads_only=True,
                )
                assert answer["structuredContent"]["state"] == "running"

            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            os.kill(pipes()[0], signal.SIGKILL)


async def test_a_suspended_sandbox_is_resumed_by_a_call_and_keeps_its_files(host: Host) -> None:
    with anyio.fail_after(BOUND):
        await host.launcher.create(name="work")
        await run(host, "work", "echo kept > f")
        first = host.sessions.existing("work")
        await host.launcher.suspend("work")
        await host.sessions.forget("work")
        assert (await run(host, "work", "cat f"))["stdout"] == "kept\n"
        second = host.sessions.existing("work")
    assert first
    assert second
    assert (first.pod.uid, first.boot_id) != (second.pod.uid, second.boot_id)


async def test_an_expired_sandbox_is_refused_even_over_an_open_pipe(
    host: Host, monkeypatch: Any
) -> None:
    made = await host.launcher.create(name="work")
    await run(host, "work", "true")
    over = made.sandbox.expires_at
    monkeypatch.setattr(host.clock, "now", lambda: over)
    with pytest.raises(SandboxExpired):
        await run(host, "work", "true")


async def test_an_extension_made_elsewhere_keeps_the_open_pipe(
    host: Host, stub: StubCluster, monkeypatch: Any
) -> None:
    made = await host.launcher.create(name="work", ttl_minutes=5)
    await run(host, "work", "true")
    async with Host(stub.settings()) as elsewhere:
        await elsewhere.launcher.extend("work", 500)
    monkeypatch.setattr(host.clock, "now", lambda: made.sandbox.expires_at)
    await run(host, "work", "true")
    assert stub.execs() == 1


async def test_a_pod_that_never_answers_is_said_to_be_starting(
    host: Host, stub: StubCluster
) -> None:
    made = await host.launcher.create(name="work")
    await host.sessions.forget(made.sandbox.id)
    stub.faults(exec={"stderr": "error: unable to upgrade connection: container not found"})
    with anyio.fail_after(BOUND):
        with pytest.raises(StillStarting, match="container not found"):
            await host.sessions.open("work", wait=1)
        stub.faults()
        assert (await run(host, "work", "echo ok"))["stdout"] == "ok\n"


async def test_opening_is_tried_again_before_the_hello(host: Host, stub: StubCluster) -> None:
    """L31: exec too early found no container."""
    stub.faults(exec={"stderr": "error: container not found", "times": 2})
    with anyio.fail_after(BOUND):
        await host.launcher.create(name="work")
        assert (await run(host, "work", "echo ok"))["stdout"] == "ok\n"
    assert stub.execs() == 3


async def test_success_without_a_hello_is_no_connection(host: Host, stub: StubCluster) -> None:
    """V2: kubectl may end with 0 and nothing on stderr though nothing worked."""
    stub.faults(exec={"code": 0, "times": 1})
    with anyio.fail_after(BOUND):
        await host.launcher.create(name="work")
        assert (await run(host, "work", "echo ok"))["stdout"] == "ok\n"


async def test_noise_before_the_hello_is_skipped(host: Host, stub: StubCluster) -> None:
    """L42: noise on stdout and stderr is not the protocol; 1 MB of it does not stall the pipe."""
    await host.launcher.create(name="work")
    noisy = stub.folder / "noisy"
    real = stub.environment["PODPIPE_KUBECTL"]
    noisy.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" exec "*)\n'
        "  head -c 1000000 /dev/zero | tr '\\0' 'E' >&2\n"
        "  echo 'Defaulted container \"sandbox\" out of: sandbox'\n"
        "  printf '\\377\\376 junk\\n'\n"
        "esac\n"
        f'exec {real} "$@"\n',
        encoding="utf-8",
    )
    noisy.chmod(0o755)
    with anyio.fail_after(BOUND):
        async with Host(stub.settings(PODPIPE_KUBECTL=str(noisy))) as other:
            assert (await run(other, "work", "echo ok"))["stdout"] == "ok\n"


async def test_an_image_of_another_contract_is_refused_with_the_fix(
    host: Host, stub: StubCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr("host_client.session.CONTRACT_VERSION", 999)
    with anyio.fail_after(BOUND):
        with pytest.raises(PodpipeError, match="scripts/image build"):
            await host.launcher.create(name="work")
    assert set(stub.objects) == {"Namespace/sandbox-system"}


async def test_leaving_closes_every_pipe(stub: StubCluster) -> None:
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            for name in ("a", "b"):
                await host.launcher.create(name=name)
                await run(host, name, "true")
    assert pipes() == []


async def test_one_sandbox_that_cannot_connect_does_not_delay_another(
    host: Host, stub: StubCluster
) -> None:
    await host.launcher.create(name="good")
    await run(host, "good", "true")
    await host.launcher.create(name="bad")
    stub.faults(exec={"stderr": "error: container not found"})
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.sessions.open, "bad")
            with anyio.fail_after(10):
                assert (await run(host, "good", "echo ok"))["stdout"] == "ok\n"
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "text"},
        {"content": [1]},
        {"content": [{"type": "text", "text": 5}]},
        {"content": [], "_meta": [1]},
        {"content": [], "structuredContent": []},
    ],
)
async def test_an_answer_that_is_no_tool_s_result_is_told_as_that(
    host: Host, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    """A command has its daemon's user, and may have put something else in its place."""
    await host.launcher.create(name="work")
    asked = Pipe.request

    async def request(self: Pipe, method: str, *args: Any, **options: Any) -> dict[str, Any]:
        result = await asked(self, method, *args, **options)
        return answer if method == "tools/call" else result

    monkeypatch.setattr(Pipe, "request", request)
    with anyio.fail_after(BOUND):
        with pytest.raises(RequestRefused, match=r"no result of run_command.*may have run"):
            await host.sessions.call("work", "run_command", {"command": "true"})
        monkeypatch.undo()
        assert (await run(host, "work", "echo on"))["stdout"] == "on\n"
