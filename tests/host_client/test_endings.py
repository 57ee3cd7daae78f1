"""How calls end that cannot end well: typed, with what survived and what to do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from host_client.errors import (
    ApiUnreachable,
    Forbidden,
    PodpipeError,
    SandboxEnded,
    SandboxSuspended,
    SessionLost,
    StillStarting,
    VersionMismatch,
)
from host_client.host import Host
from tests.host_client.conftest import StubCluster
from tests.host_client.test_session import BOUND, daemon_pid, killed_while, pipes, run

DENIED = 'Error from server (Forbidden): configmaps is forbidden: User "x" cannot list resource'
REFUSED = "The connection to the server stub:6443 was refused - did you specify the right host?"


@pytest.fixture
async def host(stub: StubCluster) -> AsyncIterator[Host]:
    async with Host(stub.settings()) as opened:
        yield opened


async def test_a_call_that_is_joined_has_all_the_time_that_it_was_given(
    host: Host, stub: StubCluster, monkeypatch: Any
) -> None:
    """The bound on finding another pipe is none on the call: it was lost when it took longer."""
    monkeypatch.setattr("host_client.sessions.RECONNECT_SECONDS", 1.0)
    await host.launcher.create(name="work")
    with anyio.fail_after(BOUND):
        facts = await killed_while(
            host, stub, "sleep 4; echo end", lambda: os.kill(pipes()[0], signal.SIGKILL)
        )
        assert facts["stdout"] == "end\n"
        assert (await run(host, "work", "cat ran"))["stdout"] == "once\n"


async def test_one_deadline_holds_for_all_of_a_call_on_a_frozen_daemon(
    host: Host, stub: StubCluster, monkeypatch: Any
) -> None:
    """Waiting, connecting and asking again share it; they do not have it one after the other."""
    monkeypatch.setattr("host_client.session.HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr("host_client.session.HEARTBEAT_ANSWER_SECONDS", 0.5)
    await host.launcher.create(name="work")
    await run(host, "work", "true")
    os.kill(daemon_pid(stub), signal.SIGSTOP)
    try:
        with anyio.fail_after(BOUND):
            for kind, said in ((SessionLost, "may have run"), (StillStarting, "does not answer")):
                began = time.monotonic()
                with pytest.raises(kind, match=said):
                    await host.sessions.call("work", "run_command", {"command": "x"}, within=4)
                assert time.monotonic() - began < 12  # four, and what a busy machine needs
    finally:
        os.kill(daemon_pid(stub), signal.SIGCONT)


async def test_a_frozen_daemon_is_not_said_to_be_running(
    host: Host, stub: StubCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr("host_client.sessions.PROBE_SECONDS", 0.5)
    await host.launcher.create(name="work")
    await run(host, "work", "true")
    with anyio.fail_after(BOUND):
        assert (await host.sessions.status("work")).detail == ""
        os.kill(daemon_pid(stub), signal.SIGSTOP)
        try:
            for _ in range(2):  # over the live pipe, and by a new one once that is given up
                status = await host.sessions.status("work")
                assert "not answering" in status.detail
                assert "files in the home are kept" in status.detail
        finally:
            os.kill(daemon_pid(stub), signal.SIGCONT)
        assert (await run(host, "work", "echo ok"))["stdout"] == "ok\n"


async def test_a_call_whose_sandbox_was_destroyed_by_others_is_told_so(
    host: Host, stub: StubCluster
) -> None:
    await host.launcher.create(name="work")

    def lose() -> None:
        (stub.folder / "state.json").write_text("{}", encoding="utf-8")
        os.kill(daemon_pid(stub), signal.SIGKILL)

    with anyio.fail_after(BOUND):
        with pytest.raises(SandboxEnded, match=r"destroyed.*home survives.*Create") as caught:
            await killed_while(host, stub, "sleep 30", lose)
    assert (caught.value.reason, caught.value.sent) == ("destroyed", True)


async def test_a_call_whose_sandbox_expired_under_it_is_told_so(
    host: Host, stub: StubCluster, monkeypatch: Any
) -> None:
    made = await host.launcher.create(name="work")

    def expire() -> None:
        monkeypatch.setattr(host.clock, "now", lambda: made.sandbox.expires_at)
        os.kill(pipes()[0], signal.SIGKILL)

    with anyio.fail_after(BOUND):
        with pytest.raises(SandboxEnded, match="expired while run_command ran") as caught:
            await killed_while(host, stub, "sleep 30", expire)
    assert caught.value.reason == "expired"


async def test_a_suspended_sandbox_is_not_resumed_where_the_setting_says_so(
    stub: StubCluster,
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(stub.settings(PODPIPE_RESUME="manual")) as host:
            await host.launcher.create(name="work")
            await run(host, "work", "echo kept > f")
            await host.launcher.suspend("work")
            await host.sessions.forget("work")
            with pytest.raises(SandboxSuspended, match=r"files are kept.*Resume it first"):
                await run(host, "work", "cat f")
            assert stub.names("Pod") == []
            with pytest.raises(SandboxSuspended):
                await host.open("work")
            with pytest.raises(SandboxSuspended):
                await host.transfers.get("work", "f", str(stub.folder))
            await host.open("work", resume=True)
            assert (await run(host, "work", "cat f"))["stdout"] == "kept\n"


async def test_a_forbidden_exec_is_told_at_once_and_leaves_nothing(
    host: Host, stub: StubCluster
) -> None:
    stub.faults(exec={"stderr": 'Error from server (Forbidden): pods "x" is forbidden: no'})
    with anyio.fail_after(BOUND):
        began = time.monotonic()
        with pytest.raises(Forbidden, match=r"nothing was sent.*get and create on pods/exec"):
            await host.launcher.create(name="work")
        assert time.monotonic() - began < 20
    assert set(stub.objects) == {"Namespace/sandbox-system"}


async def test_an_image_of_another_contract_is_a_version_mismatch(
    host: Host, monkeypatch: Any
) -> None:
    monkeypatch.setattr("host_client.session.CONTRACT_VERSION", 999)
    with anyio.fail_after(BOUND):
        with pytest.raises(VersionMismatch, match=r"Nothing was sent.*are kept.*scripts/image"):
            await host.launcher.create(name="work")


@pytest.mark.parametrize(
    ("said", "told"),
    [(REFUSED, ApiUnreachable), (DENIED, Forbidden)],
    ids=["unreachable", "forbidden"],
)
async def test_an_api_server_that_was_there_before_is_waited_for(
    host: Host, stub: StubCluster, monkeypatch: Any, said: str, told: type[PodpipeError]
) -> None:
    """A call that comes while it restarts is answered; only one that never comes back is told.

    One that has just started refuses everybody: it answers before it has read the roles.
    """
    await host.launcher.create(name="work")
    with anyio.fail_after(BOUND):
        await run(host, "work", "true")
        stub.faults(get={"stderr": said, "times": 3})
        await host.sessions.forget("work")
        assert (await run(host, "work", "echo ok"))["stdout"] == "ok\n"
        monkeypatch.setattr("host_client.sessions.UNREACHABLE_SECONDS", 0.5)
        stub.faults(get={"stderr": said})
        await host.sessions.forget("work")
        with pytest.raises(told, match=r"check that the cluster is up|forbidden"):
            await run(host, "work", "echo ok")


async def test_a_call_goes_on_when_the_api_server_has_not_read_the_roles_yet(
    host: Host, stub: StubCluster
) -> None:
    """Its pipe was broken by the restart; the command runs on meanwhile."""
    with anyio.fail_after(BOUND):
        await host.launcher.create(name="work")
        session = await host.sessions.open("work")
        found: dict[str, Any] = {}

        async def call() -> None:
            found.update(await run(host, "work", "echo id >> ran; touch began; sleep 2; cat ran"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            while not list(stub.folder.glob("homes/*/began")):  # noqa: ASYNC110 - another process
                await anyio.sleep(0.05)
            denied = {"stderr": DENIED, "times": 3}
            stub.faults(get=denied, exec=denied)
            assert session.kubectl_pid
            os.kill(session.kubectl_pid, signal.SIGKILL)
        assert found["stdout"] == "id\n"


async def test_an_api_server_that_never_was_there_is_told_at_once(
    host: Host, stub: StubCluster
) -> None:
    stub.faults(get={"stderr": REFUSED})
    with anyio.fail_after(10):
        with pytest.raises(ApiUnreachable):
            await run(host, "work", "echo ok")


async def test_sandboxes_of_a_host_that_was_killed_are_found_again(
    stub: StubCluster,
) -> None:
    """L61: a restart forgot its pods; and a pod deleted by hand does not trouble the others."""
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as first:
            for name in ("a", "b"):
                await first.launcher.create(name=name)
            await run(first, "a", "echo kept > f")
        async with Host(stub.settings()) as second:
            assert [s.sandbox.name for s in await second.launcher.list_all()] == ["a", "b"]
            assert (await run(second, "a", "cat f"))["stdout"] == "kept\n"
            (gone,) = [n for n in stub.names("Pod") if n.startswith("sandbox-a")]
            uid = stub.objects[f"Pod/{gone}"]["metadata"]["uid"]
            assert await second.kubectl.delete("pods", gone, uid=uid)
            assert (await run(second, "b", "echo b"))["stdout"] == "b\n"
            assert (await run(second, "a", "cat f"))["stdout"] == "kept\n"
