"""As many sandboxes as there may be and not one more, whoever asks at the same time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from host_client.clock import timestamp
from host_client.config import Settings
from host_client.errors import LimitReached
from host_client.room import Room
from host_client.sandbox import object_name
from in_pod_server import contract as c
from tests.host_client.conftest import StubCluster
from tests.host_client.test_launcher import launcher, now

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def record(user: str = "alice", **annotations: str) -> dict[str, Any]:
    expires = {c.ANNOTATION_EXPIRES_AT: timestamp(NOW + timedelta(hours=1))}
    return {"metadata": {"labels": {c.LABEL_USER: user}, "annotations": expires | annotations}}


async def full(records: list[dict[str, Any]], per_user: int, in_all: int = 100) -> bool:
    async def listed() -> list[dict[str, Any]]:
        return records

    settings = Settings(user="alice", max_sandboxes_per_user=per_user, max_sandboxes=in_all)
    try:
        await Room(listed, settings, lambda: NOW).refuse_full()
    except LimitReached:
        return True
    return False


async def test_only_ones_own_count_for_a_user_and_all_for_the_namespace() -> None:
    there = [record(), record("bob"), record("bob")]
    assert not await full(there, per_user=2)
    assert await full(there, per_user=1)
    assert await full(there, per_user=2, in_all=3)
    assert not await full(there, per_user=2, in_all=4)


@pytest.mark.parametrize(
    ("annotations", "counts"),
    [
        ({c.ANNOTATION_EXPIRES_AT: timestamp(NOW)}, False),
        ({c.ANNOTATION_EXPIRES_AT: "2026-01-02T05:04:05+02:00"}, False),
        ({c.ANNOTATION_EXPIRES_AT: "2026-01-02T05:04:06+02:00"}, True),
        ({c.ANNOTATION_EXPIRES_AT: "2026-01-02T03:04:05"}, True),
        ({c.ANNOTATION_EXPIRES_AT: "soon"}, True),
        ({c.ANNOTATION_STATE: "Suspended"}, True),
    ],
)
async def test_what_has_expired_takes_no_room_and_what_is_unreadable_does(
    annotations: dict[str, str], counts: bool
) -> None:
    assert await full([record(**annotations)], per_user=1) == counts


async def test_a_record_without_annotations_counts_and_one_that_is_going_does_not() -> None:
    bare = {"metadata": {"labels": {c.LABEL_USER: "alice"}}}
    going = {"metadata": record()["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert await full([bare], per_user=1)
    assert not await full([going], per_user=1)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("MAX_SANDBOXES_PER_USER", "user 'alice' has as many sandboxes as a user may have, 2"),
        ("MAX_SANDBOXES", "namespace sandbox-system has as many sandboxes of all users as it may"),
    ],
)
async def test_one_too_many_is_refused_before_anything_is_made(
    stub: StubCluster, setting: str, said: str
) -> None:
    one = launcher(stub, now, **{setting: "2"})
    await one.create(name="first")
    await one.create()
    before, calls = stub.objects, len(stub.calls)
    with pytest.raises(LimitReached, match=said) as refused:
        await one.create(name="third")
    assert setting in str(refused.value)
    assert stub.objects == before
    assert not {"create", "apply", "patch", "delete"} & {
        word for call in stub.calls[calls:] for word in call
    }


async def test_a_suspended_sandbox_keeps_its_room_and_a_destroyed_one_gives_it_back(
    stub: StubCluster,
) -> None:
    one = launcher(stub, MAX_SANDBOXES_PER_USER="1")
    await one.create(name="first")
    await one.suspend("first")
    with pytest.raises(LimitReached):
        await one.create(name="second")
    await one.destroy("first")
    assert (await one.create(name="second")).phase == "running"


async def test_users_share_the_namespaces_room_and_not_their_own(stub: StubCluster) -> None:
    limits = {"MAX_SANDBOXES_PER_USER": "1", "MAX_SANDBOXES": "2"}
    for user in ("alice", "bob"):
        await launcher(stub, now, PODPIPE_USER=user, **limits).create()
    with pytest.raises(LimitReached, match="of all users"):
        await launcher(stub, now, PODPIPE_USER="carol", **limits).create()


async def test_hosts_that_create_at_once_make_no_more_than_there_may_be(stub: StubCluster) -> None:
    """Each had counted before any had made its own."""
    hosts = [launcher(stub, MAX_SANDBOXES_PER_USER="2") for _ in range(5)]
    made: list[str] = []
    refused: list[str] = []
    counted = 0
    all_counted = anyio.Event()

    def together(listed: Any) -> Any:
        first = True

        async def records() -> Any:
            nonlocal counted, first
            found = await listed()
            if first:
                first = False
                counted += 1
                if counted == len(hosts):
                    all_counted.set()
                await all_counted.wait()
            return found

        return records

    async def create(host: Any, name: str) -> None:
        try:
            made.append((await host.create(name=name)).sandbox.id)
        except LimitReached as error:
            refused.append(str(error))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for number, host in enumerate(hosts):
                host._room._records = together(host._room._records)
                tasks.start_soon(create, host, f"racer-{number}")
    assert (len(made), len(refused)) == (2, 3)
    assert sorted(stub.names("ConfigMap")) == sorted(map(object_name, made))
    assert len(stub.names("Pod")) == 2
