"""One pipe per sandbox, over the stub kubectl and the real daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from host_client.errors import PodpipeError, SandboxExpired, SessionLost, StillStarting
from host_client.host import Host
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


async def test_a_call_whose_pipe_dies_is_said_to_have_maybe_run_and_not_run_again(
    host: Host, stub: StubCluster
) -> None:
    await host.launcher.create(name="work")
    await run(host, "work", "true")
    home = next((stub.folder / "homes").iterdir())
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:

            async def lost() -> None:
                with pytest.raises(SessionLost, match="may have run") as caught:
                    await run(host, "work", "echo once >> ran; sleep 30")
                assert caught.value.sent

            tasks.start_soon(lost)
            while not (home / "ran").exists():  # noqa: ASYNC110 - another process writes it
                await anyio.sleep(0.01)
            os.kill(pipes()[0], signal.SIGKILL)
        assert (await run(host, "work", "cat ran"))["stdout"] == "once\n"


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
    monkeypatch.setattr("host_client.session.utc_now", lambda: over)
    monkeypatch.setattr(host.launcher, "_now", lambda: over)
    with pytest.raises(SandboxExpired):
        await run(host, "work", "true")


async def test_an_extension_made_elsewhere_keeps_the_open_pipe(
    host: Host, stub: StubCluster, monkeypatch: Any
) -> None:
    made = await host.launcher.create(name="work", ttl_minutes=5)
    await run(host, "work", "true")
    async with Host(stub.settings()) as elsewhere:
        await elsewhere.launcher.extend("work", 500)
    monkeypatch.setattr("host_client.session.utc_now", lambda: made.sandbox.expires_at)
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
