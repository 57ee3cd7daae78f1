"""Who cancels a call has it stopped, whatever its pipe is doing at that moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from host_client.host import Host
from tests.host_client.conftest import StubCluster, runs
from tests.host_client.test_session import run

BOUND = 60
CLOSED_SECONDS = 15


@pytest.fixture
async def host(stub: StubCluster) -> AsyncIterator[Host]:
    """Its pipe is a process between dial and us, as kubectl is: what stops it freezes the pipe."""
    stub.faults(pipe={"after": 1 << 60})
    async with Host(stub.settings()) as opened:
        await opened.launcher.create(name="work")
        await run(opened, "work", "true")
        yield opened


async def begun(stub: StubCluster) -> int:
    """The process id of the command, once there is one."""
    path = stub.folder / "homes/user-alice-pvc/pid"
    while not path.exists() or not path.read_text(encoding="utf-8").endswith("\n"):  # noqa: ASYNC110 - another process does it
        await anyio.sleep(0.02)
    return int(path.read_text(encoding="utf-8"))


async def ended(pid: int) -> bool:
    with anyio.move_on_after(CLOSED_SECONDS):
        while runs(pid):  # noqa: ASYNC110 - another process does it
            await anyio.sleep(0.02)
    return not runs(pid)


def kubectl_of(host: Host) -> int:
    session = host.sessions.existing("work")
    assert session
    assert session.kubectl_pid
    return session.kubectl_pid


async def cancelled_when(
    host: Host, stub: StubCluster, broken: Any, *, cancels: bool = True
) -> int:
    """Begin a command, break its pipe, cancel its call; the command's process id."""
    call = {"command": "echo $$ > pid; exec sleep 300", "timeout_seconds": 600}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            lambda: host.sessions.call("work", "run_command", call, cancels=lambda: cancels)
        )
        pid = await begun(stub)
        await broken()
        tasks.cancel_scope.cancel()
    return pid


async def test_a_cancel_while_the_pipe_is_reopened_stops_the_command(
    stub: StubCluster, host: Host
) -> None:
    """It was told to a pipe that was no more, and the command went on for its whole time."""

    async def broken() -> None:
        before = stub.execs()
        stub.faults(exec={"stderr": "error: lost connection to pod", "times": 2})
        os.kill(kubectl_of(host), signal.SIGKILL)
        while stub.execs() == before:  # noqa: ASYNC110 - another process does it
            await anyio.sleep(0.01)

    with anyio.fail_after(BOUND):
        assert await ended(await cancelled_when(host, stub, broken))
        assert (await run(host, "work", "echo on"))["stdout"] == "on\n"


async def test_a_cancel_on_a_frozen_pipe_stops_the_command(
    stub: StubCluster, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host_client.session.CANCEL_ANSWER_SECONDS", 0.5)

    async def broken() -> None:
        os.kill(kubectl_of(host), signal.SIGSTOP)

    with anyio.fail_after(BOUND):
        assert await ended(await cancelled_when(host, stub, broken))


@pytest.mark.parametrize(
    "faults",
    [
        [{"after": 0, "ending": "hang"}],
        [{"after": 300, "ending": "hang"}, {"after": 700, "ending": "close"}],
        [{"after": 300, "ending": "truncate", "noise": 1_000_000}] * 3,
    ],
)
async def test_a_cancel_outlives_that_the_next_pipe_fails_too(
    stub: StubCluster, host: Host, faults: list[dict[str, object]]
) -> None:
    """A kubectl that hung before its hello took all the time that there was for the cancel."""

    async def broken() -> None:
        stub.faults(pipe=faults)
        os.kill(kubectl_of(host), signal.SIGKILL)

    with anyio.fail_after(BOUND):
        assert await ended(await cancelled_when(host, stub, broken))


async def test_a_daemon_that_knows_no_such_cancel_is_told_of(
    stub: StubCluster,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An older image answers that it has no such tool; nothing is begun by that."""
    monkeypatch.setattr("host_client.session.CANCEL_CALL", "podpipe/nonesuch")

    async def broken() -> None:
        os.kill(kubectl_of(host), signal.SIGKILL)

    with anyio.fail_after(BOUND):
        pid = await cancelled_when(host, stub, broken)
        assert "could not be cancelled" in caplog.text
        os.kill(pid, signal.SIGKILL)


async def test_a_client_that_only_goes_away_stops_nothing(stub: StubCluster, host: Host) -> None:
    async def broken() -> None:
        os.kill(kubectl_of(host), signal.SIGKILL)

    with anyio.fail_after(BOUND):
        pid = await cancelled_when(host, stub, broken, cancels=False)
        await run(host, "work", "true")
        assert runs(pid)
        os.kill(pid, signal.SIGKILL)


async def test_a_cancel_that_reaches_nobody_gives_up_and_says_so(
    stub: StubCluster,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("host_client.cancel.CANCEL_SECONDS", 1.0)

    async def broken() -> None:
        stub.faults(exec={"stderr": "error: lost connection to pod"})
        os.kill(kubectl_of(host), signal.SIGKILL)

    with anyio.fail_after(BOUND):
        began = time.monotonic()
        pid = await cancelled_when(host, stub, broken)
        assert time.monotonic() - began < CLOSED_SECONDS
    assert "could not be cancelled" in caplog.text
    assert runs(pid)
    os.kill(pid, signal.SIGKILL)
