"""Expiry and idleness as a host sees them: the daemon ends itself, and what its callers are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import anyio
import pytest

from host_client.clock import timestamp, utc_now
from host_client.errors import SandboxExpired, SandboxSuspended
from host_client.host import Host
from host_client.losses import NEWS
from host_client.reaper import sweep
from host_client.sandbox import Sandbox
from in_pod_server import contract as c
from tests.host_client.conftest import StubCluster
from tests.host_client.test_session import BOUND, run
from tests.idling import idle_after

IDLE_SECONDS = 2
SECONDS = 12
"""Time for a resume on a busy machine, and then not much."""


@pytest.fixture
async def host(stub: StubCluster) -> AsyncIterator[Host]:
    async with Host(stub.settings()) as opened:
        yield opened


@pytest.fixture
def idles_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    idle_after(IDLE_SECONDS, monkeypatch)


async def resumed(host: Host, stub: StubCluster, *, seconds: float) -> None:
    """A sandbox whose new pod has so many seconds to live, from before it is made."""
    made = await host.launcher.create(name="work")
    await host.launcher.suspend("work")
    await host.sessions.forget("work")
    short = timestamp(utc_now() + timedelta(seconds=seconds))
    objects = stub.objects
    objects[f"ConfigMap/{made.sandbox.object_name}"]["metadata"]["annotations"][
        c.ANNOTATION_EXPIRES_AT
    ] = short
    stub.replace(objects)


async def until(host: Host, phase: str) -> str:
    """Wait until the sandbox is so; its detail."""
    while True:
        status = await host.launcher.status("work")
        if status.phase == phase:
            return status.detail
        await anyio.sleep(0.2)


async def test_a_sandbox_ends_at_its_expiry_and_no_call_revives_it(
    host: Host, stub: StubCluster
) -> None:
    with anyio.fail_after(BOUND):
        await resumed(host, stub, seconds=SECONDS)
        await run(host, "work", "echo kept > f")
        stopped = await host.sessions.call("work", "run_command", {"command": "sleep 40"})
        assert stopped["structuredContent"]["state"] == "killed"
        assert "its time was over" in str(stopped["content"])
        for call in (
            run(host, "work", "true"),
            host.open("work"),
            host.launcher.suspend("work"),
            host.sessions.extend("work", 10),
        ):
            with pytest.raises(SandboxExpired, match=r"its home is kept. Create a new sandbox"):
                await call
        (pod,) = [o for key, o in stub.objects.items() if key.startswith("Pod/")]
        assert pod["status"]["phase"] == "Succeeded"
        assert (await host.launcher.status("work")).phase == "expired"
        await host.launcher.destroy("work")
        await host.launcher.create(name="again")
        assert (await run(host, "again", "cat f"))["stdout"] == "kept\n"


async def test_an_extension_in_time_reaches_the_daemon_by_the_pipe(
    host: Host, stub: StubCluster
) -> None:
    """The kubelet may take a minute, and the sandbox has seconds."""
    with anyio.fail_after(BOUND):
        await resumed(host, stub, seconds=SECONDS)
        await run(host, "work", "true")
        (name,) = stub.names("Pod")
        annotations = stub.folder / "pods" / name / "podinfo" / "annotations"
        before = annotations.read_text(encoding="utf-8")
        status = await host.sessions.extend("work", 30)
        annotations.write_text(before, encoding="utf-8")  # no kubelet has come by yet
        assert (await run(host, "work", "sleep 15; echo on"))["stdout"] == "on\n"
        for told in (status, await host.launcher.status("work"), *await host.launcher.list_all()):
            assert told.sandbox.expires_at == status.sandbox.expires_at
            assert told.phase == "running"


async def test_an_extension_without_a_pipe_reaches_the_daemon_too(
    host: Host, stub: StubCluster
) -> None:
    with anyio.fail_after(BOUND):
        await resumed(host, stub, seconds=SECONDS)
        await run(host, "work", "true")
        async with Host(stub.settings()) as other:
            await other.sessions.extend("work", 30)
        assert (await run(host, "work", "sleep 15; echo on"))["stdout"] == "on\n"


@pytest.mark.usefixtures("idles_in_seconds")
async def test_an_idle_sandbox_is_suspended_by_itself_and_resumed_by_the_next_call(
    stub: StubCluster,
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(stub.settings(IDLE_SUSPEND_MINUTES="30")) as host:
            made = await host.launcher.create(name="work")
            await run(host, "work", "echo kept > f")
            detail = await until(host, "suspended")
            assert "it was idle for" in detail
            answer = await host.sessions.call("work", "run_command", {"command": "cat f"})
            facts = answer["structuredContent"]
            assert facts["stdout"] == "kept\n"
            assert "it was idle for" in facts[NEWS]
            status = await host.launcher.status("work")
            assert (status.phase, status.sandbox.id) == ("running", made.sandbox.id)
            assert status.sandbox.spec.idle_suspend_minutes == 30
            assert status.sandbox.incarnation == 2
            assert status.sandbox.expires_at == made.sandbox.expires_at


@pytest.mark.usefixtures("idles_in_seconds")
async def test_where_calls_do_not_resume_they_wake_no_idle_sandbox_either(
    stub: StubCluster,
) -> None:
    settings = stub.settings(IDLE_SUSPEND_MINUTES="30", PODPIPE_RESUME="manual")
    with anyio.fail_after(BOUND):
        async with Host(settings) as host:
            await host.launcher.create(name="work")
            await run(host, "work", "echo kept > f")
            await until(host, "suspended")
            with pytest.raises(SandboxSuspended, match="nothing was sent"):
                await run(host, "work", "cat f")
            assert (await host.launcher.status("work")).phase == "suspended"
            await host.open("work", resume=True)
            assert (await run(host, "work", "cat f"))["stdout"] == "kept\n"


@pytest.mark.usefixtures("idles_in_seconds")
async def test_calls_about_when_a_sandbox_goes_idle_each_run_once(stub: StubCluster) -> None:
    """A call that meets the end is not started there, and goes to the new pod."""
    with anyio.fail_after(3 * BOUND):
        async with Host(stub.settings(IDLE_SUSPEND_MINUTES="30")) as host:
            await host.launcher.create(name="work")
            for number, pause in enumerate((1.6, 1.8, 2.0, 2.2, 2.4, 2.6, 2.8, 3.0)):
                await run(host, "work", f"echo {number} >> ran")
                await anyio.sleep(pause)
            ran = (await run(host, "work", "cat ran"))["stdout"].split()
            assert ran == [str(number) for number in range(8)]
            assert (await host.launcher.status("work")).sandbox.incarnation > 1


@pytest.mark.usefixtures("idles_in_seconds")
async def test_no_sandbox_goes_idle_unless_the_setting_says_so(host: Host) -> None:
    with anyio.fail_after(BOUND):
        await host.launcher.create(name="work")
        await run(host, "work", "true")
        await anyio.sleep(IDLE_SECONDS + 2)
        assert (await host.launcher.status("work")).phase == "running"


# --- time that stands still ----------------------------------------------------------------------

HOUR = timedelta(hours=1)


def age(stub: StubCluster, sandbox: Sandbox, **notes: timedelta | None) -> None:
    """Write times into a record, each so long before now."""
    objects = stub.objects
    found = objects[f"ConfigMap/{sandbox.object_name}"]["metadata"]["annotations"]
    for name, before in notes.items():
        found[getattr(c, name)] = timestamp(utc_now() - before) if before else ""
    stub.replace(objects)


async def suspended(
    host: Host, stub: StubCluster, expired: timedelta, since: timedelta | None = None
) -> None:
    """A sandbox that would have expired so long ago, and was suspended before or after that."""
    made = (await host.launcher.create(name="work")).sandbox
    await host.launcher.suspend("work")
    await host.sessions.forget("work")
    times = {"ANNOTATION_EXPIRES_AT": expired}
    age(stub, made, **(times | {"ANNOTATION_SUSPENDED_AT": since} if since else times))


async def test_suspended_time_counts_for_nothing_where_the_setting_says_so(
    stub: StubCluster,
) -> None:
    """Suspended two hours ago with an hour to go: it has that hour when it is resumed."""
    with anyio.fail_after(BOUND):
        async with Host(stub.settings(TTL_WHILE_SUSPENDED="stops")) as host:
            await suspended(host, stub, HOUR, 2 * HOUR)
            status = await host.launcher.status("work")
            assert status.phase == "suspended"
            assert abs(status.sandbox.expires_at - utc_now() - HOUR) < timedelta(minutes=1)
            assert not (await sweep(host.kubectl)).deleted
            assert (await run(host, "work", "echo on"))["stdout"] == "on\n"
            now = (await host.launcher.status("work")).sandbox
            assert now.suspended_at is None
            assert abs(now.expires_at - utc_now() - HOUR) < timedelta(minutes=1)


async def test_an_extension_of_a_sandbox_whose_time_stands_still_counts_from_now(
    stub: StubCluster,
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(stub.settings(TTL_WHILE_SUSPENDED="stops")) as host:
            await suspended(host, stub, HOUR, 2 * HOUR)
            await host.launcher.extend("work", 120)
            assert (await run(host, "work", "echo on"))["stdout"] == "on\n"
            now = (await host.launcher.status("work")).sandbox
            assert abs(now.expires_at - utc_now() - 2 * HOUR) < timedelta(minutes=1)


@pytest.mark.parametrize("setting", ["runs", ""])
async def test_suspended_time_counts_unless_the_setting_says_otherwise(
    stub: StubCluster, setting: str
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(stub.settings(TTL_WHILE_SUSPENDED=setting)) as host:
            await suspended(host, stub, HOUR)
            with pytest.raises(SandboxExpired):
                await run(host, "work", "echo on")
            assert len((await sweep(host.kubectl)).deleted) == 1


async def test_a_sandbox_that_expired_before_it_was_suspended_stays_expired(
    stub: StubCluster,
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(stub.settings(TTL_WHILE_SUSPENDED="stops")) as host:
            await suspended(host, stub, 2 * HOUR, HOUR)
            with pytest.raises(SandboxExpired):
                await run(host, "work", "echo on")
            assert len((await sweep(host.kubectl)).deleted) == 1


@pytest.mark.usefixtures("idles_in_seconds")
async def test_the_time_of_a_sandbox_that_went_idle_stands_still_since_its_pod_ended(
    stub: StubCluster,
) -> None:
    """Its record says that it runs: whoever comes first takes the time from the pod."""
    with anyio.fail_after(BOUND):
        settings = stub.settings(IDLE_SUSPEND_MINUTES="30", TTL_WHILE_SUSPENDED="stops")
        async with Host(settings) as host:
            made = (await host.launcher.create(name="work")).sandbox
            await until(host, "suspended")
            age(stub, made, ANNOTATION_EXPIRES_AT=HOUR)
            stub.change_pod(
                containerStatuses=[
                    {
                        "name": c.CONTAINER,
                        "state": {
                            "terminated": {
                                "exitCode": 0,
                                "finishedAt": timestamp(utc_now() - 2 * HOUR),
                            }
                        },
                    }
                ]
            )
            assert (await host.launcher.status("work")).phase == "suspended"
            assert not (await sweep(host.kubectl)).deleted
            assert (await run(host, "work", "echo on"))["stdout"] == "on\n"
            now = (await host.launcher.status("work")).sandbox
            assert abs(now.expires_at - utc_now() - HOUR) < timedelta(minutes=1)
