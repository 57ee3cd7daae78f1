"""What a record and its pods say together."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_client import manifest
from host_client.clock import parse_timestamp, timestamp
from host_client.config import Settings
from host_client.errors import PodpipeError, UsageError
from host_client.pod_view import PodView
from host_client.sandbox import Sandbox, draft_sandbox, phase
from in_pod_server import contract as c

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETTINGS = Settings(user="alice")
SANDBOX = replace(draft_sandbox(SETTINGS, NOW), uid="record-uid", version="1")


def pod(status: dict[str, Any], **metadata: Any) -> PodView:
    return PodView.from_object(
        {
            "metadata": {
                "name": SANDBOX.pod_name,
                "uid": "pod-uid",
                "creationTimestamp": timestamp(NOW),
            }
            | metadata,
            "spec": {},
            "status": status,
        }
    )


def container(**state: Any) -> dict[str, Any]:
    restarts = state.pop("restarts", 0)
    last = state.pop("last", {})
    return {
        "phase": "Pending",
        "containerStatuses": [
            {"name": c.CONTAINER, "state": state, "restartCount": restarts, "lastState": last}
        ],
    }


RUNNING = pod(container(running={}) | {"phase": "Running"})
PENDING = pod({"phase": "Pending"})


def unschedulable(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


@pytest.mark.parametrize(
    "reason",
    [
        "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
        "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
    ],
)  # fmt: skip
def test_a_container_that_cannot_start_fails_with_kubernetes_words(reason: str) -> None:
    view = pod(container(waiting={"reason": reason, "message": "because"}))
    assert view.failure(NOW) == (reason, "because")


def test_a_container_that_keeps_ending_fails_with_its_exit() -> None:
    ended = {"terminated": {"reason": "Error", "exitCode": 3}}
    for view in (
        pod(container(waiting={"reason": "CrashLoopBackOff"}, restarts=1, last=ended)),
        pod(container(terminated=ended["terminated"], restarts=1)),
    ):
        failure = view.failure(NOW)
        assert failure
        assert failure[0] == "CrashLoopBackOff"
        assert "Error, exit code 3" in failure[1]


@pytest.mark.parametrize(
    ("ended", "failed"),
    [
        ({"exitCode": 1, "startedAt": timestamp(NOW), "finishedAt": timestamp(NOW)}, True),
        ({"exitCode": 1}, True),
        ({"exitCode": 137, "reason": "Error"}, False),
        ({"exitCode": 143, "reason": "Error"}, False),
        (
            {
                "exitCode": 1,
                "startedAt": timestamp(NOW),
                "finishedAt": timestamp(NOW + timedelta(seconds=60)),
            },
            False,
        ),
        (
            {
                "exitCode": 137,
                "reason": "OOMKilled",
                "startedAt": timestamp(NOW),
                "finishedAt": timestamp(NOW),
            },
            True,
        ),
    ],
)
def test_a_container_that_had_served_is_started_again_and_one_that_never_did_has_failed(
    ended: dict[str, Any], failed: bool
) -> None:
    status = container(
        waiting={"reason": "CrashLoopBackOff"}, restarts=2, last={"terminated": ended}
    )
    assert bool(pod(status).failure(NOW)) == failed


def test_a_restarted_container_that_runs_is_no_failure() -> None:
    ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    view = pod(container(running={}, restarts=5, last=ended) | {"phase": "Running"})
    assert view.failure(NOW) is None
    assert view.last_exit == "OOMKilled, exit code 137"


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory. "},
         "Evicted: The node was low on memory"),
        ({"phase": "Failed", "conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet",
             "message": "Pod was terminated in response to imminent node shutdown."}]},
         "TerminationByKubelet: Pod was terminated in response to imminent node shutdown"),
        ({"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "False"}]}, ""),
        (container(terminated={"reason": "Error", "exitCode": 143}) | {"phase": "Failed"},
         "Error, exit code 143"),
        (container(running={}), ""),
    ],
)  # fmt: skip
def test_why_a_pod_ended_is_what_kubernetes_says(status: dict[str, Any], why: str) -> None:
    assert pod(status).why_ended == why


@pytest.mark.parametrize(
    "message",
    [
        'persistentvolumeclaim "h" not found',
        "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)",
        "pod has unbound immediate PersistentVolumeClaims. preemption: 0/1 nodes are available",
        "1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }",
        "1 node(s) had untolerated taint(s)",
    ],
)
def test_a_scheduler_that_lags_behind_is_given_longer(message: str) -> None:
    """Seen after the API server had been restarted: the claim was there, and its volume too."""
    view = pod(unschedulable(f"0/1 nodes are available: {message}"))
    assert view.failure(NOW + timedelta(seconds=20)) is None
    assert view.failure(NOW + timedelta(seconds=31)) is not None


def test_unschedulable_is_given_a_moment_for_a_new_volume() -> None:
    view = pod(unschedulable("0/1 nodes: Insufficient cpu"))
    assert view.failure(NOW + timedelta(seconds=2)) is None
    assert view.failure(NOW + timedelta(seconds=9)) == (
        "Unschedulable",
        "0/1 nodes: Insufficient cpu",
    )
    assert "Insufficient cpu" in view.progress


@pytest.mark.parametrize(
    ("sandbox", "pods", "expected"),
    [
        (SANDBOX, [RUNNING], "running"),
        (SANDBOX, [PENDING], "starting"),
        (SANDBOX, [], "starting"),
        (SANDBOX, [pod({"phase": "Succeeded"})], "suspended"),
        (SANDBOX, [pod({"phase": "Failed", "reason": "Evicted"})], "failed"),
        (SANDBOX, [pod(container(waiting={"reason": "ErrImagePull"}))], "failed"),
        (replace(SANDBOX, state="Suspended"), [RUNNING], "stopping"),
        (replace(SANDBOX, state="Suspended"), [], "suspended"),
        (replace(SANDBOX, expires_at=NOW), [RUNNING], "expired"),
        (SANDBOX, [pod({"phase": "Running"}, deletionTimestamp="x")], "starting"),
    ],
)
def test_phase_follows_from_record_and_pods(
    sandbox: Sandbox, pods: list[PodView], expected: str
) -> None:
    assert phase(sandbox, pods, NOW) == expected


def test_the_pod_of_another_incarnation_is_not_the_present_one() -> None:
    assert phase(replace(SANDBOX, incarnation=2), [RUNNING], NOW) == "starting"


@pytest.mark.parametrize("minutes", [0, -1, SETTINGS.max_ttl_minutes + 1])
def test_a_lifetime_outside_the_limits_is_refused(minutes: int) -> None:
    with pytest.raises(UsageError, match="MAX_TTL_MINUTES"):
        SANDBOX.with_lifetime(NOW, minutes)


def test_no_extension_outlives_what_the_pod_can_live() -> None:
    later = NOW + timedelta(hours=23)
    extended = SANDBOX.with_lifetime(later, SETTINGS.max_ttl_minutes)
    assert extended.expires_at == NOW + timedelta(minutes=SETTINGS.max_ttl_minutes)


@pytest.mark.parametrize(
    "text", ["2026-01-02T03:04:05Z", "2026-01-02T04:04:05+01:00", "2026-01-01T22:04:05-05:00"]
)
def test_times_of_any_zone_are_the_same_moment(text: str) -> None:
    assert parse_timestamp(text) == NOW


@pytest.mark.parametrize("text", ["2026-01-02T03:04:05", "soon", ""])
def test_a_time_without_zone_or_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"zone|isoformat"):
        parse_timestamp(text)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (c.ANNOTATION_EXPIRES_AT, "whenever"),
        (c.ANNOTATION_STATE, "Asleep"),
        (c.ANNOTATION_INCARNATION, "two"),
        (c.ANNOTATION_USER_ID, None),
        (c.ANNOTATION_CREATED_AT, "0001-01-01T00:00:00+14:00"),
    ],
)
def test_an_unreadable_record_is_named_and_left_alone(annotation: str, value: str | None) -> None:
    record = manifest.record(SANDBOX, SETTINGS)
    record["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    if value is None:
        del record["metadata"]["annotations"][annotation]
    else:
        record["metadata"]["annotations"][annotation] = value
    with pytest.raises(PodpipeError, match=f"ConfigMap {SANDBOX.object_name} is unreadable"):
        Sandbox.from_record(record)


@pytest.mark.parametrize(
    "spec", ["[" * 100_000, "{}", "[]", "null", '{"max_ttl_minutes": "x"}', "x"]
)
def test_an_unreadable_spec_is_named(spec: str) -> None:
    record = manifest.record(SANDBOX, SETTINGS) | {"data": {"spec": spec}}
    record["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    with pytest.raises(PodpipeError, match="is unreadable"):
        Sandbox.from_record(record)


@pytest.mark.parametrize("ttl", [0, -1, 10**12, "1440"])
def test_a_spec_with_a_lifetime_out_of_range_is_unreadable(ttl: object) -> None:
    record = manifest.record(SANDBOX, SETTINGS)
    record["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    facts = json.loads(record["data"]["spec"]) | {"max_ttl_minutes": ttl}
    record["data"]["spec"] = json.dumps(facts)
    with pytest.raises(PodpipeError, match="is unreadable"):
        Sandbox.from_record(record)


def test_what_a_newer_podpipe_added_to_a_spec_is_left_out() -> None:
    record = manifest.record(SANDBOX, SETTINGS)
    record["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    record["data"]["spec"] = json.dumps(json.loads(record["data"]["spec"]) | {"gpus": 8})
    assert Sandbox.from_record(record).spec == SANDBOX.spec


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5000)), max_size=8),
    st.integers(0, 60),
)
def test_a_sandbox_lives_its_time_however_often_it_was_suspended(
    stops: bool, turns: list[tuple[int, int]], last: int
) -> None:
    """Minutes that it ran and was suspended, in turns; its lifetime is an hour."""
    sandbox = replace(SANDBOX, spec=replace(SANDBOX.spec, ttl_stops=stops))
    sandbox = sandbox.with_lifetime(NOW, 60)
    now, lived = NOW, 0
    for ran, slept in turns:
        now += timedelta(minutes=ran)
        lived += ran
        if sandbox.expired(now):
            break
        sandbox = sandbox.suspended(now)
        now += timedelta(minutes=slept)
        lived += 0 if stops else slept
        if sandbox.expired(now):
            break
        sandbox = sandbox.resumed(now)
    else:
        now += timedelta(minutes=last)
        lived += last
    assert sandbox.expired(now) == (lived >= 60)
