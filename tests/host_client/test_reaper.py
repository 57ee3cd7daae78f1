"""What is over, and its deletion: the decision by itself, and a sweep over the stub's API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_client.cli import main
from host_client.clock import timestamp
from host_client.errors import ApiUnreachable, Forbidden
from host_client.kubectl import Kubectl
from host_client.reaper import (
    DEPENDANTS,
    RECORDS,
    Doomed,
    Report,
    Unreadable,
    decide_dependant,
    decide_record,
    sweep,
)
from in_pod_server import contract as c
from tests.host_client.conftest import StubCluster
from tests.reaping import RACERS, ROOT, VERBS, Killed, When, killed_creates, race

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
GRACE = timedelta(minutes=10)
UID = "u-1"
PAST, FUTURE = "2020-01-01T00:00:00Z", "2199-01-01T00:00:00Z"


def labels(sandbox_id: str = "s1") -> dict[str, str]:
    return {c.LABEL_MANAGED_BY: c.PREFIX, c.LABEL_SANDBOX: sandbox_id, c.LABEL_USER: "alice"}


def record(expires: object = None, sandbox_id: str = "s1", **metadata: Any) -> dict[str, Any]:
    notes = {} if expires is None else {c.ANNOTATION_EXPIRES_AT: expires}
    return {
        "name": f"sandbox-{sandbox_id}",
        "uid": UID,
        "resourceVersion": "7",
        "creationTimestamp": timestamp(NOW),
        "labels": labels(sandbox_id),
        "annotations": notes,
    } | metadata


def owner(uid: str = UID, **changes: str) -> list[dict[str, str]]:
    return [{"kind": "ConfigMap", "name": "sandbox-s1", "uid": uid} | changes]


def part(age: timedelta = GRACE, owners: object = None, **metadata: Any) -> dict[str, Any]:
    return {
        "name": "sandbox-s1-abcde-1",
        "uid": "p",
        "resourceVersion": "8",
        "creationTimestamp": timestamp(NOW - age),
        "labels": labels(),
        "ownerReferences": owner() if owners is None else owners,
    } | metadata


def orphaned(found: dict[str, Any], records: Iterable[str] = ()) -> bool:
    return decide_dependant("pods", found, records, NOW, GRACE) is not None


# --- the decision ----------------------------------------------------------------------------------

zones = st.integers(-23 * 60 - 59, 23 * 60 + 59).map(lambda m: timezone(timedelta(minutes=m)))
moments = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 28))  # noqa: DTZ001 - zones are drawn


@given(moments, zones, moments, zones)
def test_a_sandbox_is_over_exactly_when_its_time_has_come_wherever_it_was_written(
    expires: datetime, written: timezone, now: datetime, read: timezone
) -> None:
    at, present = expires.replace(tzinfo=written), now.replace(tzinfo=read)
    decision = decide_record(record(at.isoformat()), present, GRACE)
    assert isinstance(decision, Doomed) == (present >= at)
    assert decision is None or isinstance(decision, Doomed)


@given(st.text() | st.datetimes().map(datetime.isoformat) | st.integers() | st.none())
def test_a_sandbox_whose_expiry_cannot_be_read_is_kept_and_told(expires: object) -> None:
    """Naive times are of no time zone, so of no time."""
    decision = decide_record(record(expires), NOW + timedelta(days=365_000), GRACE)
    assert isinstance(decision, Unreadable)
    assert decision.name == "sandbox-s1"


@pytest.mark.parametrize(
    ("expires", "over"),
    [
        ("2026-01-02T03:04:05Z", True),
        ("2026-01-02T03:04:06Z", False),
        ("2026-01-02T04:04:05+01:00", True),
        ("2026-01-02T03:04:05+01:00", True),
        ("2026-01-02T03:04:05-01:00", False),
        ("2024-02-29T00:00:00Z", True),
        ("2028-02-29T00:00:00Z", False),
        ("9999-12-31T23:59:59Z", False),
        ("0001-01-01T00:00:00Z", True),
    ],
)
def test_expiry_is_a_moment(expires: str, over: bool) -> None:
    assert (decide_record(record(expires), NOW, GRACE) is not None) == over


@pytest.mark.parametrize(
    ("since", "ended", "over"),
    [
        (None, None, True),
        (None, -1, True),
        ("", None, True),
        ("", -1, False),
        ("", 0, True),
        ("", 1, True),
        (-1, None, False),
        (-1, 1, False),
        (0, None, True),
        (1, -1, False),
        ("soon", None, False),
        ("2026-01-02T03:04:05", None, False),
    ],
)
def test_what_was_suspended_in_time_is_kept_where_its_time_stands_still(
    since: int | str | None, ended: int | None, over: bool
) -> None:
    """Seconds from its expiry; without the annotation its time runs on."""

    def at(seconds: int) -> datetime:
        return NOW - timedelta(hours=1) + timedelta(seconds=seconds)

    found = record(timestamp(at(0)))
    if since is not None:
        text = since if isinstance(since, str) else timestamp(at(since))
        found["annotations"][c.ANNOTATION_SUSPENDED_AT] = text
    decision = decide_record(found, NOW, GRACE, None if ended is None else at(ended))
    assert isinstance(decision, Doomed) == over


@pytest.mark.parametrize(
    "expires",
    [
        "2026-02-29T00:00:00Z", "2016-12-31T23:59:60Z", "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59", "+12026-01-01T00:00:00Z", "1767323045", "", "never",
    ],
)  # fmt: skip
def test_what_is_no_moment_that_can_be_computed_with_is_kept(expires: str) -> None:
    assert isinstance(decide_record(record(expires), NOW, GRACE), Unreadable)


def test_what_only_wears_a_records_labels_is_not_even_unreadable() -> None:
    assert decide_record(record("2020-01-01T00:00:00Z", name="their-config"), NOW, GRACE) is None
    assert decide_record(record(None, name="their-config"), NOW, GRACE) is None


@given(st.timedeltas(timedelta(), timedelta(days=1000)))
def test_a_create_that_was_never_finished_goes_after_the_grace(age: timedelta) -> None:
    begun = timestamp(NOW - timedelta(seconds=int(age.total_seconds())))
    unfinished = record(FUTURE, creationTimestamp=begun)
    unfinished["annotations"][c.ANNOTATION_STATE] = "Creating"
    decision = decide_record(unfinished, NOW, GRACE)
    assert isinstance(decision, Doomed) == (int(age.total_seconds()) >= GRACE.total_seconds())


@given(st.timedeltas(timedelta(), timedelta(days=1000)))
def test_what_lost_its_record_goes_only_after_the_grace_of_a_create_under_way(
    age: timedelta,
) -> None:
    whole = timedelta(seconds=int(age.total_seconds()))
    assert orphaned(part(whole)) == (whole >= GRACE)
    assert not orphaned(part(whole), {UID, "s1"})


@pytest.mark.parametrize(
    ("found", "records", "over"),
    [
        (part(), {"another", "s2"}, True),
        (part(), {"another", "s1"}, True),  # made again under its name: its record is another
        (part(owners=[]), (), True),
        (part(owners=[]), {"another", "s1"}, False),
        (part(name="sandbox-s1"), (), True),
        (part(name="sandbox-s1x-abcde-1"), (), False),
        (part(name="theirs"), (), False),
        (part(labels={c.LABEL_MANAGED_BY: c.PREFIX}), (), False),
        (part(owners=owner(kind="ReplicaSet")), (), False),
        (part(owners=owner(name="sandbox-s2")), (), False),
        (part(owners=owner("gone") + owner()), {UID}, False),
        (part(deletionTimestamp=timestamp(NOW)), (), False),
        (part(age=timedelta(hours=-1)), (), False),
    ],
)
def test_only_what_is_ours_by_label_name_and_owner_is_an_orphan(
    found: dict[str, Any], records: Iterable[str], over: bool
) -> None:
    assert orphaned(found, records) == over


# --- the sweep -------------------------------------------------------------------------------------


def add_record(stub: StubCluster, sandbox_id: str, expires: str | None, **changes: Any) -> None:
    metadata = record(expires, sandbox_id, uid=f"uid-{sandbox_id}") | changes
    stub.add({"kind": "ConfigMap", "metadata": metadata, "data": {}})


def add_part(stub: StubCluster, kind: str, sandbox_id: str, **changes: Any) -> None:
    metadata = part(
        name=f"sandbox-{sandbox_id}-{kind.lower()}",
        labels=labels(sandbox_id),
        owners=owner(f"uid-{sandbox_id}", name=f"sandbox-{sandbox_id}"),
        uid=f"{kind}-{sandbox_id}",
    )
    stub.add({"kind": kind, "metadata": metadata | changes, "spec": {}, "status": {}})


async def swept(stub: StubCluster, **options: Any) -> Report:
    with anyio.fail_after(60):
        return await sweep(Kubectl(stub.settings()), **options)


async def test_a_sweep_deletes_what_expired_with_all_that_it_owns_and_nothing_else(
    stub: StubCluster,
) -> None:
    for sandbox_id, expires in (("old", PAST), ("new", FUTURE)):
        add_record(stub, sandbox_id, expires)
        for kind in ("Pod", "Service"):
            add_part(stub, kind, sandbox_id)
    home = {"name": "user-alice-pvc", "labels": labels("old"), "uid": "home"}
    stub.add({"kind": "PersistentVolumeClaim", "metadata": home})
    report = await swept(stub)
    assert [each.ref for each in report.deleted] == [f"{RECORDS}/sandbox-old"]
    assert set(stub.objects) == {
        "Namespace/sandbox-system", "PersistentVolumeClaim/user-alice-pvc",
        "ConfigMap/sandbox-new", "Pod/sandbox-new-pod", "Service/sandbox-new-service",
    }  # fmt: skip
    assert (report.sandboxes, report.failed, report.kept) == (2, {}, [])


async def test_a_sweep_finds_orphans_of_every_kind_and_no_others(stub: StubCluster) -> None:
    for kind in ("Pod", "Service", "Ingress", "HTTPRoute", "Secret"):
        add_part(stub, kind, "gone")
        add_part(stub, kind, "young", creationTimestamp=timestamp(datetime.now(UTC)))
        add_part(stub, kind, "foreign", name=f"their-{kind.lower()}")
    report = await swept(stub)
    assert sorted(each.ref.split("/")[0] for each in report.deleted) == sorted(DEPENDANTS)
    assert len(stub.objects) == 1 + 5 + 5


async def test_a_dry_run_says_the_same_and_deletes_nothing(stub: StubCluster) -> None:
    add_record(stub, "old", PAST)
    add_part(stub, "Pod", "gone")
    before = stub.objects
    planned = await swept(stub, dry_run=True)
    assert stub.objects == before
    assert set(planned.deleted) == set((await swept(stub)).deleted)  # several go at once
    assert stub.names("ConfigMap") == stub.names("Pod") == []


async def test_the_clock_that_counts_is_the_api_servers(stub: StubCluster) -> None:
    """A host whose clock is an hour ahead must not end anybody's sandbox."""
    add_record(stub, "soon", timestamp(datetime.now(UTC) + timedelta(minutes=30)))
    add_record(stub, "late", timestamp(datetime.now(UTC) - timedelta(minutes=30)))
    stub.faults(clock={"seconds": -3600})
    assert (await swept(stub)).deleted == []
    stub.faults(clock={"seconds": 3600})
    assert len((await swept(stub)).deleted) == 2


async def test_many_pages_are_read_and_all_that_is_over_goes(stub: StubCluster) -> None:
    objects = stub.objects
    for number in range(1100):
        metadata = record(PAST if number % 2 else FUTURE, f"s{number}", uid=f"u{number}")
        objects[f"ConfigMap/{metadata['name']}"] = {"kind": "ConfigMap", "metadata": metadata}
    stub.replace(objects)
    report = await swept(stub, dry_run=True)
    assert (report.sandboxes, len(report.deleted)) == (1100, 550)


async def test_a_record_that_was_extended_after_the_look_is_kept(stub: StubCluster) -> None:
    """What the deletion meets is not what was decided about: it is read and decided about again."""
    add_record(stub, "old", PAST)

    def extend(text: str) -> None:
        if text.startswith("deleting"):
            add_record(stub, "old", FUTURE, resourceVersion="8")

    report = await swept(stub, progress=extend)
    assert (report.deleted, report.kept) == ([], [f"{RECORDS}/sandbox-old"])
    assert stub.names("ConfigMap") == ["sandbox-old"]


async def test_a_record_that_was_changed_but_is_still_over_goes(stub: StubCluster) -> None:
    add_record(stub, "old", PAST)

    def touch(text: str) -> None:
        if text.startswith("deleting"):
            add_record(stub, "old", PAST, resourceVersion="8")

    assert [each.version for each in (await swept(stub, progress=touch)).deleted] == ["8"]
    assert stub.names("ConfigMap") == []


async def test_what_cannot_be_deleted_is_named_and_the_rest_goes(stub: StubCluster) -> None:
    for sandbox_id in ("one", "two", "three"):
        add_record(stub, sandbox_id, PAST)
    stub.faults(http={"method": "DELETE", "path": "two", "status": 403, "message": "you may not"})
    report = await swept(stub)
    assert stub.names("ConfigMap") == ["sandbox-two"]
    assert list(report.failed) == [f"{RECORDS}/sandbox-two"]
    assert "you may not" in report.failed[f"{RECORDS}/sandbox-two"]


async def test_a_kind_that_may_not_be_listed_fails_by_name_and_the_rest_is_swept(
    stub: StubCluster,
) -> None:
    add_record(stub, "old", PAST)
    stub.faults(http={"method": "GET", "path": "services", "status": 403, "message": "no"})
    report = await swept(stub)
    assert list(report.failed) == ["services"]
    assert stub.names("ConfigMap") == []


@pytest.mark.parametrize("kind", ["secrets", "httproutes"])
async def test_what_podpipe_makes_seldom_or_never_need_not_be_readable(
    stub: StubCluster, kind: str
) -> None:
    stub.faults(http={"method": "GET", "path": kind, "status": 403, "message": "no"})
    report = await swept(stub)
    assert (report.failed, report.skipped) == ({}, [kind])


async def test_a_cluster_need_not_have_the_gateway_api(stub: StubCluster) -> None:
    add_record(stub, "old", PAST)
    stub.faults(http={"method": "GET", "path": "httproutes", "status": 404, "message": "no"})
    report = await swept(stub)
    assert (report.failed, report.skipped) == ({}, [])
    assert stub.names("ConfigMap") == []


async def test_nothing_is_deleted_where_the_records_cannot_be_listed(stub: StubCluster) -> None:
    add_part(stub, "Pod", "gone")
    stub.faults(http={"method": "GET", "path": "configmaps", "status": 403, "message": "no"})
    with pytest.raises(Forbidden):
        await swept(stub)
    assert stub.names("Pod") == ["sandbox-gone-pod"]


async def test_a_proxy_that_cannot_reach_the_server_is_said(stub: StubCluster) -> None:
    stub.faults(proxy={"stderr": "error: getting credentials: exec: no plugin"})
    with pytest.raises(ApiUnreachable, match="getting credentials"):
        await swept(stub)


async def test_a_killed_sweep_leaves_no_proxy(stub: StubCluster) -> None:
    script = (
        "import anyio; from host_client.api import proxied; from host_client.config import Settings\n"
        "from host_client.kubectl import Kubectl\n"
        "async def main():\n"
        "    async with proxied(Kubectl(Settings.from_env()), connections=1):\n"
        "        print('up', flush=True)\n"
        "        await anyio.sleep_forever()\n"
        "anyio.run(main)\n"
    )
    async with await anyio.open_process(
        [sys.executable, "-c", script], env=stub.environment, cwd=ROOT
    ) as host:
        assert host.stdout
        with anyio.fail_after(30):
            try:
                await host.stdout.receive()
                assert proxies(stub)
            finally:
                host.kill()
            while proxies(stub):  # noqa: ASYNC110 - a process that is not ours ends
                await anyio.sleep(0.02)


def proxies(stub: StubCluster) -> list[str]:
    """Processes of the stub that are proxies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes()
            if str(stub.folder).encode() in line and b"proxy" in line:
                found.append(path.parent.name)
    return found


# --- the command -----------------------------------------------------------------------------------


def command(stub: StubCluster, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    stub.be_here(monkeypatch)
    return main(["reap", *argv])


def test_the_command_tells_what_went_what_was_kept_and_what_failed(
    stub: StubCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for sandbox_id, expires in (("old", PAST), ("new", FUTURE), ("odd", "whenever")):
        add_record(stub, sandbox_id, expires)
    assert command(stub, monkeypatch) == 0
    said = capsys.readouterr()
    assert said.out == (
        f"configmaps/sandbox-old deleted: expired at {PAST}\ndeleted: 1, sandboxes seen: 3\n"
    )
    assert "kept sandbox-odd: podpipe/expires-at is 'whenever'" in said.err


def test_the_command_ends_with_1_where_something_failed(
    stub: StubCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_record(stub, "old", PAST)
    stub.faults(http={"method": "DELETE", "path": "old", "status": 500, "message": "broken"})
    assert command(stub, monkeypatch, "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert list(said["failed"]) == [f"{RECORDS}/sandbox-old"]
    assert said["deleted"] == []


@pytest.mark.parametrize("argv", [["--every", "-1"], ["--grace", "-1"], ["--every", "soon"]])
def test_times_that_make_no_sense_are_refused(
    argv: list[str], stub: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(stub, monkeypatch, *argv) == 2


# --- races and killed creates ----------------------------------------------------------------------


async def test_no_sandbox_is_lost_that_was_extended_while_it_was_reaped(stub: StubCluster) -> None:
    tally = await race(stub.settings(), rounds=3)
    assert tally.extended + tally.reaped == 3 * RACERS


@pytest.mark.parametrize("when", ["during", "after"])
def test_of_a_create_whose_host_is_killed_a_sweep_leaves_the_home_at_most(
    stub: StubCluster, monkeypatch: pytest.MonkeyPatch, when: When
) -> None:
    def swept_clean(killed: Killed) -> None:
        assert command(stub, monkeypatch, "--grace", "0") == 0
        left = {key.split("/")[0] for key in stub.objects} - {"Namespace", "PersistentVolumeClaim"}
        assert left == ({"ConfigMap", "Pod"} if killed.finished else set()), killed
        stub.replace({key: o for key, o in stub.objects.items() if o["kind"] == "Namespace"})

    killed = killed_creates(stub.environment, stub.folder, when, swept_clean)
    assert {each.call.split()[0] for each in killed} == set(VERBS)
