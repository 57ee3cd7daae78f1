"""A host whose clock is wrong: sandboxes live by the API server's, whoever asks."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from host_client.backends.pod import PodBackend
from host_client.clock import Clock, timestamp, utc_now
from host_client.errors import SandboxExpired, SessionLost
from host_client.kubectl import Kubectl
from host_client.launcher import Launcher
from host_client.pod_view import PodView
from host_client.sandbox import Sandbox
from in_pod_server import contract as c
from tests.host_client.conftest import StubCluster

HOUR = timedelta(hours=1)
SLACK = timedelta(seconds=30)
"""What a create may take on a busy machine."""


def launcher(stub: StubCluster, off: timedelta) -> Launcher:
    """One on a host whose clock is so far ahead of the API server's."""
    settings = stub.settings()

    async def connect(_: Sandbox, pod: PodView) -> None:
        if f"Pod/{pod.name}" not in stub.objects:
            raise SessionLost("container not found", sent=False)

    clock = Clock(lambda: utc_now() + off)
    return Launcher(PodBackend(Kubectl(settings), settings), settings, connect, clock)


def expire_in(stub: StubCluster, life: timedelta) -> datetime:
    (key,) = [key for key in stub.objects if key.startswith("ConfigMap/")]
    record = stub.objects[key]
    when = utc_now() + life
    record["metadata"]["annotations"][c.ANNOTATION_EXPIRES_AT] = timestamp(when)
    stub.replace(stub.objects | {key: record})
    return when


@pytest.mark.parametrize("off", [-HOUR, timedelta(0), HOUR, timedelta(days=-400)])
async def test_a_sandbox_lives_as_long_as_it_was_asked_for_whatever_its_maker_s_clock(
    stub: StubCluster, off: timedelta
) -> None:
    began = utc_now()
    made = await launcher(stub, off).create(name="work", ttl_minutes=30)
    assert timedelta(0) <= made.sandbox.expires_at - began - timedelta(minutes=30) < SLACK
    assert timedelta(0) <= made.sandbox.created_at - began < SLACK
    for elsewhere in (launcher(stub, timedelta(0)), launcher(stub, -off), launcher(stub, off)):
        assert (await elsewhere.status("work")).sandbox == made.sandbox
        assert [s.sandbox for s in await elsewhere.list_all()] == [made.sandbox]
        assert [s.phase for s in await elsewhere.list_all()] == ["running"]
    (pod,) = [o for key, o in stub.objects.items() if key.startswith("Pod/")]
    told = pod["metadata"]["annotations"][c.ANNOTATION_EXPIRES_AT]
    assert told == timestamp(made.sandbox.expires_at)


@pytest.mark.parametrize("off", [-HOUR, HOUR])
async def test_an_extension_counts_from_now_whatever_the_host_s_clock(
    stub: StubCluster, off: timedelta
) -> None:
    await launcher(stub, timedelta(0)).create(name="work", ttl_minutes=1)
    began = utc_now()
    extended = await launcher(stub, off).extend("work", 45)
    assert timedelta(0) <= extended.sandbox.expires_at - began - timedelta(minutes=45) < SLACK
    assert (await launcher(stub, timedelta(0)).status("work")).sandbox == extended.sandbox


async def test_a_host_ahead_refuses_nothing_that_lives(stub: StubCluster) -> None:
    await launcher(stub, timedelta(0)).create(name="work", ttl_minutes=30)
    ahead = launcher(stub, HOUR)
    _, pod = await ahead.running("work")
    assert f"Pod/{pod.name}" in stub.objects
    await launcher(stub, HOUR).suspend("work")
    await launcher(stub, HOUR).running("work")
    await launcher(stub, HOUR).ensure("work")
    assert (await ahead.status("work")).sandbox.incarnation == 2, "it was made anew"


@pytest.mark.parametrize("state", ["ended", "suspended"])
async def test_a_host_behind_revives_nothing_that_has_expired(
    stub: StubCluster, state: str
) -> None:
    right = launcher(stub, timedelta(0))
    await right.create(name="work")
    if state == "ended":
        stub.change_pod(phase="Succeeded")
    else:
        await right.suspend("work")
    pods = stub.names("Pod")
    expire_in(stub, timedelta(minutes=-1))
    behind = launcher(stub, -HOUR)
    with pytest.raises(SandboxExpired, match="its home is kept"):
        await behind.running("work")
    for call in (behind.suspend("work"), behind.extend("work", 60)):
        with pytest.raises(SandboxExpired):
            await call
    assert (await launcher(stub, -HOUR).status("work")).phase == "expired"
    assert stub.names("Pod") == pods


async def test_where_the_api_server_s_clock_is_not_told_the_host_s_own_counts(
    stub: StubCluster,
) -> None:
    await launcher(stub, timedelta(0)).create(name="work", ttl_minutes=30)
    stub.faults(create={"stderr": "Error from server (Forbidden): configmaps is forbidden"})
    with pytest.raises(SandboxExpired):
        await launcher(stub, HOUR).running("work")
    assert (await launcher(stub, timedelta(0)).status("work")).phase == "running"


def test_what_an_answer_took_and_its_whole_seconds_are_no_difference() -> None:
    now = utc_now()
    clock = Clock(lambda: now)
    for heard, ahead in ((0, 0), (1, 0), (-2, 0), (3600, 3600), (-3600, -3600), (0, 0)):
        clock.hear(now + timedelta(seconds=heard), now)
        assert clock.now() - now == timedelta(seconds=ahead)
    assert not clock.unsure
    slow = Clock(lambda: now + timedelta(seconds=60))
    slow.hear(now + timedelta(seconds=30), now)
    assert slow.now() == slow.local()
