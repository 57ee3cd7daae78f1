"""The life of sandboxes, over the stub kubectl: every refusal, and what is left after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from host_client.backends.pod import PodBackend
from host_client.errors import (
    Forbidden,
    LaunchFailed,
    NameTaken,
    PodpipeError,
    SandboxExpired,
    SandboxNotFound,
    SessionLost,
    StillStarting,
    UsageError,
)
from host_client.identity import named_sandbox_id
from host_client.kubectl import Kubectl
from host_client.launcher import Launcher
from host_client.pod_view import PodView
from host_client.sandbox import Sandbox, object_name
from in_pod_server import contract as c
from tests.clocks import Moved
from tests.host_client.conftest import StubCluster


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def launcher(
    stub: StubCluster, clock: Callable[[], datetime] = now, **environment: str
) -> Launcher:
    settings = stub.settings(**environment)

    async def connect(_: Sandbox, pod: PodView) -> None:
        """Answers when the stub's pod runs, without a daemon."""
        found = stub.objects.get(f"Pod/{pod.name}", {})
        if found.get("status", {}).get("phase") != "Running":
            raise SessionLost("container not found", sent=False)

    return Launcher(PodBackend(Kubectl(settings), settings), settings, connect, Moved(clock))


def status(ended: dict[str, Any] | None = None, **state: Any) -> dict[str, Any]:
    container = {"name": c.CONTAINER, "state": state, "restartCount": 1 if ended else 0}
    if ended:
        container["lastState"] = {"terminated": ended}
    return {"phase": "Pending", "containerStatuses": [container]}


WAITING = status(waiting={"reason": "ContainerCreating"})
RUNNING = status(running={}) | {"phase": "Running"}


def set_status(stub: StubCluster, pod: str, value: dict[str, Any]) -> None:
    found = stub.objects[f"Pod/{pod}"]
    stub.add(found | {"status": value})


async def test_create_makes_a_record_a_pod_and_a_home(stub: StubCluster) -> None:
    made = await launcher(stub).create(name="work")
    assert made.phase == "running"
    assert stub.names("ConfigMap") == [object_name(made.sandbox.id)]
    assert stub.names("Pod") == [f"{object_name(made.sandbox.id)}-{made.sandbox.uid[:5]}-1"]
    assert stub.names("PersistentVolumeClaim") == ["user-alice-pvc"]


async def test_a_sandbox_is_found_by_id_and_by_name_from_another_process(
    stub: StubCluster,
) -> None:
    made = await launcher(stub).create(name="work")
    elsewhere = launcher(stub)
    for ref in ("work", made.sandbox.id):
        assert (await elsewhere.status(ref)).sandbox == made.sandbox


async def test_a_sandbox_of_another_user_does_not_exist(stub: StubCluster) -> None:
    made = await launcher(stub).create()
    bob = launcher(stub, PODPIPE_USER="bob")
    assert await bob.list_all() == []
    for call in (bob.status, bob.running, bob.suspend, bob.destroy):
        with pytest.raises(SandboxNotFound):
            await call(made.sandbox.id)
    assert stub.names("Pod")


@pytest.mark.parametrize("ref", ["", "nonesuch", "UPPER", "a b", "x" * 200, "-o", "../x", "a\n"])
async def test_what_does_not_exist_is_said_so(stub: StubCluster, ref: str) -> None:
    with pytest.raises(SandboxNotFound, match="podpipe list"):
        await launcher(stub).status(ref)


async def test_a_missing_namespace_is_made(stub: StubCluster) -> None:
    await launcher(stub, NAMESPACE="fresh").create()
    labels = stub.objects["Namespace/fresh"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


async def test_a_missing_namespace_that_may_not_be_made_is_explained(stub: StubCluster) -> None:
    stub.faults(apply={"stderr": "Error from server (Forbidden): namespaces is forbidden"})
    with pytest.raises(Forbidden, match="ask an administrator for it, or set NAMESPACE"):
        await launcher(stub, NAMESPACE="fresh").create()
    assert stub.names("ConfigMap") == []


async def test_a_taken_name_is_refused_and_left_as_it_is(stub: StubCluster) -> None:
    one = launcher(stub)
    await one.create(name="work")
    before = stub.objects
    with pytest.raises(NameTaken, match=r"exists already.*`podpipe destroy work`"):
        await one.create(name="work")
    assert stub.objects == before


async def test_a_foreign_object_of_that_name_is_untouched(stub: StubCluster) -> None:
    name = object_name(named_sandbox_id("alice", "work"))
    stub.add({"kind": "ConfigMap", "metadata": {"name": name}, "data": {"theirs": "yes"}})
    before = stub.objects
    with pytest.raises(NameTaken, match="not made by podpipe; it was left untouched"):
        await launcher(stub).create(name="work")
    assert stub.objects == before


async def test_a_new_sandbox_waits_for_the_pod_of_the_old_one_of_its_name(
    stub: StubCluster,
) -> None:
    """It took the dying pod for its own: same name, and apply replaced the owner."""
    one = launcher(stub)
    old = await one.create(name="work")
    pod = stub.objects[f"Pod/{old.sandbox.pod_name}"]
    await one.destroy("work")
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stub.add(pod)
    seen: list[str] = []

    def progress(text: str) -> None:
        seen.append(text)
        if "to end" in text:
            remove(stub, f"Pod/{pod['metadata']['name']}")

    with anyio.fail_after(20):
        new = await one.create(name="work", progress=progress)
    assert f"waiting for pod {pod['metadata']['name']} to end" in seen
    assert new.sandbox.pod_name != old.sandbox.pod_name
    assert stub.names("Pod") == [new.sandbox.pod_name]


def remove(stub: StubCluster, key: str) -> None:
    objects = stub.objects
    del objects[key]
    (stub.folder / "state.json").write_text(json.dumps(objects), encoding="utf-8")


async def test_a_suspend_that_died_half_way_is_completed_before_a_resume(
    stub: StubCluster,
) -> None:
    """The record said Suspended, its pod ran on, and a second one was started beside it."""
    one = launcher(stub)
    made = await one.create(name="work")
    record = stub.objects[f"ConfigMap/{made.sandbox.object_name}"]
    record["metadata"]["annotations"][c.ANNOTATION_STATE] = "Suspended"
    stub.add(record)
    _, pod = await one.running("work")
    assert stub.names("Pod") == [pod.name]
    assert pod.name != made.sandbox.pod_name


async def test_a_pod_of_an_older_incarnation_is_ended_first(stub: StubCluster) -> None:
    one = launcher(stub)
    made = await one.create(name="work")
    record = stub.objects[f"ConfigMap/{made.sandbox.object_name}"]
    record["metadata"]["annotations"][c.ANNOTATION_INCARNATION] = "2"
    stub.add(record)
    _, pod = await one.running("work")
    assert stub.names("Pod") == [pod.name]
    assert pod.name.endswith("-2")


async def test_a_suspend_while_another_host_resumes_leaves_one_pod_at_most(
    stub: StubCluster,
) -> None:
    one, other = launcher(stub), launcher(stub)
    await one.create(name="work")
    await one.suspend("work")
    with anyio.fail_after(60):
        for _ in range(4):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.running, "work")
                tasks.start_soon(one.suspend, "work")
            assert len(stub.names("Pod")) <= 1
            status = await one.status("work")
            assert status.phase in ("running", "suspended")
            assert bool(stub.names("Pod")) == (status.phase == "running")


async def test_a_cancelled_suspend_is_completed_once_it_has_begun(stub: StubCluster) -> None:
    one = launcher(stub)
    made = await one.create(name="work")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.suspend, "work")
        while _state(stub, made.sandbox.object_name) != "Suspended":  # noqa: ASYNC110
            await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()
    assert stub.names("Pod") == []


def _state(stub: StubCluster, record: str) -> str:
    notes = stub.objects[f"ConfigMap/{record}"]["metadata"]["annotations"]
    return str(notes[c.ANNOTATION_STATE])


async def test_a_container_that_served_and_was_killed_twice_is_waited_for(
    stub: StubCluster,
) -> None:
    one = launcher(stub)
    made = await one.create(name="work")
    killed = {"exitCode": 137, "reason": "Error"}
    waiting = {
        "name": c.CONTAINER,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": killed},
        "restartCount": 2,
    }
    set_status(stub, made.sandbox.pod_name, {"phase": "Pending", "containerStatuses": [waiting]})
    with pytest.raises(StillStarting, match=r"exit code 137.* is started again"):
        await one.running("work", wait=0.5)
    assert stub.names("Pod") == [made.sandbox.pod_name]


async def test_an_unreadable_record_is_said_to_be_so_and_protects_its_home(
    stub: StubCluster,
) -> None:
    one = launcher(stub)
    made = await one.create(name="work")
    record = stub.objects[f"ConfigMap/{made.sandbox.object_name}"]
    record["metadata"]["annotations"][c.ANNOTATION_STATE] = "Paused"
    stub.add(record)
    for call in (one.status, one.destroy):
        with pytest.raises(PodpipeError, match=r"is unreadable.*kubectl get configmap"):
            await call("work")
    with pytest.raises(PodpipeError, match=f"in use by ConfigMap {made.sandbox.object_name}"):
        await one.purge_home()


async def test_a_refused_pod_leaves_no_home_that_was_applied_before_it(stub: StubCluster) -> None:
    """kubectl applies a list one by one: the home is there when the pod is refused."""
    stub.add({"kind": "Quota", "metadata": {"name": "no-pods"}})
    with pytest.raises(LaunchFailed, match="exceeded quota"):
        await launcher(stub).create()
    assert set(stub.objects) == {"Namespace/sandbox-system", "Quota/no-pods"}


@pytest.mark.parametrize(
    ("labels", "owner", "message"),
    [
        ({}, "alice", "was not made by podpipe"),
        ({c.LABEL_MANAGED_BY: c.PREFIX}, "Alice", "belongs to another user"),
        ({c.LABEL_MANAGED_BY: c.PREFIX}, None, "belongs to another user"),
    ],
)
async def test_a_home_of_another_true_id_is_refused(
    stub: StubCluster, labels: dict[str, str], owner: str | None, message: str
) -> None:
    notes = {c.ANNOTATION_USER_ID: owner} if owner else {}
    stub.add(
        {
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "user-alice-pvc", "labels": labels, "annotations": notes},
        }
    )
    before = stub.objects
    with pytest.raises(NameTaken, match=message):
        await launcher(stub).create()
    assert stub.objects == before


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ('pods "x" is forbidden: exceeded quota: q, requested: pods=1', "Quota"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest"', "PodSecurity"),
        ("pods is forbidden: maximum cpu usage per Container is 1", "LimitRange"),
        ('pods "x" is forbidden: ValidatingAdmissionPolicy denied request', "AdmissionPolicy"),
        ('The Pod "x" is invalid: spec: Invalid value: "y"', "Invalid"),
    ],
)
async def test_a_refused_pod_is_named_and_leaves_nothing(
    stub: StubCluster, stderr: str, reason: str
) -> None:
    stub.faults(apply={"stderr": f"Error from server (Forbidden): {stderr}"})
    with pytest.raises(LaunchFailed) as failed:
        await launcher(stub).create()
    assert failed.value.reason == reason
    assert stderr in str(failed.value)
    assert set(stub.objects) == {"Namespace/sandbox-system"}


async def test_a_forbidden_verb_is_named_and_leaves_nothing(stub: StubCluster) -> None:
    stub.faults(apply={"stderr": 'Error from server (Forbidden): cannot patch resource "pods"'})
    with pytest.raises(Forbidden, match='cannot patch resource "pods"'):
        await launcher(stub).create()
    assert set(stub.objects) == {"Namespace/sandbox-system"}


@pytest.mark.parametrize(
    ("state", "reason", "hint"),
    [
        ({"waiting": {"reason": "ErrImagePull", "message": "no such image"}}, "ErrImagePull",
         "SANDBOX_IMAGE"),
        ({"waiting": {"reason": "CrashLoopBackOff"}, "ended": {"exitCode": 1}},
         "CrashLoopBackOff", "podpipe image"),
        ({"waiting": {"reason": "CreateContainerConfigError", "message": "x"}},
         "CreateContainerConfigError", "Nothing of it was left"),
    ],
)  # fmt: skip
async def test_a_pod_that_cannot_start_fails_at_once_and_leaves_nothing(
    stub: StubCluster, state: dict[str, Any], reason: str, hint: str
) -> None:
    stub.faults(pod=status(**state), logs={"stdout": "", "code": 1})
    with anyio.fail_after(20):
        with pytest.raises(LaunchFailed, match=hint) as failed:
            await launcher(stub).create()
    assert failed.value.reason == reason
    assert set(stub.objects) == {"Namespace/sandbox-system"}


async def test_a_failed_create_keeps_a_home_that_was_there_before(stub: StubCluster) -> None:
    one = launcher(stub)
    await one.destroy((await one.create()).sandbox.id)
    stub.faults(pod=status(waiting={"reason": "ErrImagePull"}))
    with pytest.raises(LaunchFailed):
        await one.create()
    assert stub.names("PersistentVolumeClaim") == ["user-alice-pvc"]


async def test_a_cancelled_create_leaves_nothing(stub: StubCluster) -> None:
    stub.faults(pod=WAITING)
    with anyio.move_on_after(1.5):
        await launcher(stub).create()
    assert set(stub.objects) == {"Namespace/sandbox-system"}


async def test_a_slow_start_is_said_and_the_next_call_waits(
    stub: StubCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr("host_client.launcher.START_WAIT_SECONDS", 0.5)
    stub.faults(pod=WAITING)
    one = launcher(stub)
    made = await one.create(name="slow")
    assert (made.phase, made.detail) == ("starting", "mounting the home and pulling the image")
    with pytest.raises(StillStarting, match="Call again"):
        await one.running("slow", wait=0.1)
    set_status(stub, made.sandbox.pod_name, RUNNING)
    _, pod = await one.running("slow", wait=5)
    assert pod.name == made.sandbox.pod_name


async def test_an_argument_without_sense_touches_nothing(stub: StubCluster) -> None:
    one = launcher(stub)
    for bad in (
        {"name": "Not A Name"},
        {"ttl_minutes": 100_000},
        {"ttl_minutes": 0},
        {"ttl_minutes": -1},
        {"cpu_limit": "many"},
        {"cpu_limit": "9"},
        {"memory_limit": "4 gigs"},
        {"memory_limit": "17Gi"},
    ):
        with pytest.raises(UsageError):
            await one.create(**bad)
    assert not (stub.folder / "calls.jsonl").exists()


async def test_suspend_and_resume_make_a_new_incarnation(stub: StubCluster) -> None:
    one = launcher(stub)
    made = await one.create(name="work")
    assert (await one.suspend("work")).phase == "suspended"
    assert stub.names("Pod") == []
    assert (await one.status("work")).phase == "suspended"
    sandbox, pod = await one.running("work")
    assert sandbox.incarnation == 2
    assert pod.name == f"{object_name(made.sandbox.id)}-{made.sandbox.uid[:5]}-2"
    assert (sandbox.expires_at, sandbox.spec) == (made.sandbox.expires_at, made.sandbox.spec)


async def test_two_hosts_that_resume_at_once_make_one_pod(stub: StubCluster) -> None:
    await launcher(stub).create(name="work")
    await launcher(stub).suspend("work")
    pods: list[str] = []

    async def resume() -> None:
        pods.append((await launcher(stub).running("work"))[1].uid)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(resume)
    assert len(set(pods)) == 1
    assert len(stub.names("Pod")) == 1


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_a_pod_that_ended_is_made_anew(stub: StubCluster, phase: str) -> None:
    one = launcher(stub)
    made = await one.create(name="work")
    set_status(stub, made.sandbox.pod_name, {"phase": phase})
    sandbox, pod = await one.running("work")
    assert (sandbox.incarnation, pod.name) == (2, sandbox.pod_name)


async def test_a_pod_that_vanished_is_made_anew(stub: StubCluster) -> None:
    one = launcher(stub)
    made = await one.create(name="work")
    await Kubectl(stub.settings()).delete(
        "pods", made.sandbox.pod_name, uid=stub.objects[f"Pod/{made.sandbox.pod_name}"]["metadata"]["uid"]
    )  # fmt: skip
    _, pod = await one.running("work")
    assert stub.names("Pod") == [pod.name]


async def test_a_failed_resume_keeps_the_record_suspended(stub: StubCluster) -> None:
    one = launcher(stub)
    await one.create(name="work")
    await one.suspend("work")
    stub.faults(pod=status(waiting={"reason": "ErrImagePull"}))
    with pytest.raises(LaunchFailed):
        await one.running("work")
    assert (await one.status("work")).phase == "suspended"
    assert stub.names("Pod") == []
    stub.faults()
    assert (await one.running("work"))[1].container_running


async def test_expired_is_final_and_says_that_the_home_is_kept(stub: StubCluster) -> None:
    made = await launcher(stub).create(name="work", ttl_minutes=10)
    late = launcher(stub, lambda: made.sandbox.expires_at)
    assert (await late.status("work")).phase == "expired"
    for call in (late.running, late.suspend, lambda ref: late.extend(ref, 10)):
        with pytest.raises(SandboxExpired, match="its home is kept"):
            await call("work")
    await late.destroy("work")
    assert stub.names("PersistentVolumeClaim") == ["user-alice-pvc"]


async def test_extend_moves_the_expiry_and_tells_the_pod(stub: StubCluster) -> None:
    one = launcher(stub)
    made = await one.create(name="work", ttl_minutes=10)
    later = (await one.extend("work", 120)).sandbox.expires_at
    assert later > made.sandbox.expires_at + timedelta(minutes=100)
    assert (await one.status("work")).sandbox.expires_at == later
    notes = stub.objects[f"Pod/{made.sandbox.pod_name}"]["metadata"]["annotations"]
    assert datetime.fromisoformat(notes[c.ANNOTATION_EXPIRES_AT]) == later


async def test_extend_never_shortens(stub: StubCluster) -> None:
    one = launcher(stub)
    made = await one.create(name="work", ttl_minutes=100)
    assert (await one.extend("work", 1)).sandbox.expires_at == made.sandbox.expires_at


async def test_concurrent_extensions_lose_none(stub: StubCluster) -> None:
    one = launcher(stub)
    await one.create(name="work", ttl_minutes=10)
    async with anyio.create_task_group() as tasks:
        for minutes in (50, 300, 100):
            tasks.start_soon(one.extend, "work", minutes)
    left = (await one.status("work")).sandbox.expires_at - now()
    assert left > timedelta(minutes=298)


async def test_destroy_removes_all_but_the_home(stub: StubCluster) -> None:
    one = launcher(stub)
    await one.create(name="work")
    await one.destroy("work")
    assert set(stub.objects) == {
        "Namespace/sandbox-system",
        "PersistentVolumeClaim/user-alice-pvc",
    }
    with pytest.raises(SandboxNotFound):
        await one.destroy("work")


async def test_destroy_then_create_of_the_same_name_is_a_new_sandbox(stub: StubCluster) -> None:
    one = launcher(stub)
    first = await one.create(name="work")
    await one.destroy("work")
    second = await one.create(name="work")
    assert second.sandbox.uid != first.sandbox.uid


async def test_a_failed_delete_is_not_reported_as_done(stub: StubCluster) -> None:
    one = launcher(stub)
    await one.create(name="work")
    stub.faults(delete={"stderr": "Error from server (Forbidden): cannot delete configmaps"})
    with pytest.raises(Forbidden, match="cannot delete"):
        await one.destroy("work")
    assert stub.names("ConfigMap")


async def test_a_home_in_use_is_not_purged(stub: StubCluster) -> None:
    one = launcher(stub)
    await one.create(name="work")
    with pytest.raises(PodpipeError, match="in use by ConfigMap sandbox-work-"):
        await one.purge_home()
    await one.destroy("work")
    assert await one.purge_home()
    assert not await one.purge_home()
    assert stub.names("PersistentVolumeClaim") == []


async def test_one_unreadable_record_does_not_hide_the_others(stub: StubCluster) -> None:
    one = launcher(stub)
    made = await one.create(name="good")
    broken = (await one.create(name="broken")).sandbox.object_name
    record = stub.objects[f"ConfigMap/{broken}"]
    record["metadata"]["annotations"][c.ANNOTATION_EXPIRES_AT] = "whenever"
    stub.add(record)
    assert [found.sandbox.id for found in await one.list_all()] == [made.sandbox.id]
    assert any(broken in warning for warning in one.warnings)


async def test_a_label_alone_makes_no_pod_ours(stub: StubCluster) -> None:
    """A pod that only wears our labels is never reached: ownership is by uid."""
    one = launcher(stub)
    made = await one.create(name="work")
    real = stub.objects[f"Pod/{made.sandbox.pod_name}"]
    await one.suspend("work")
    stray = {"kind": "Pod", "metadata": {"name": "stray", "labels": real["metadata"]["labels"]}}
    stub.add(stray | {"spec": {}, "status": RUNNING})
    assert (await one.status("work")).phase == "suspended"
    await one.destroy("work")
    assert stub.names("Pod") == ["stray"]


async def test_gvisor_is_used_where_it_exists_and_missed_aloud_where_not(
    stub: StubCluster,
) -> None:
    plain = launcher(stub)
    await plain.create(name="plain")
    assert any("gvisor" in warning for warning in plain.warnings)
    stub.add({"kind": "RuntimeClass", "metadata": {"name": "gvisor"}})
    isolated = launcher(stub)
    made = await isolated.create(name="isolated")
    assert isolated.warnings == [w for w in isolated.warnings if "gvisor" not in w]
    assert stub.objects[f"Pod/{made.sandbox.pod_name}"]["spec"]["runtimeClassName"] == "gvisor"


async def test_the_storage_class_falls_back_with_a_warning(stub: StubCluster) -> None:
    one = launcher(stub)
    await one.create()
    claim = stub.objects["PersistentVolumeClaim/user-alice-pvc"]
    assert "storageClassName" not in claim["spec"]
    assert any("DEFAULT_STORAGE_CLASS" in warning for warning in one.warnings)


async def test_a_limit_beyond_every_node_is_refused_and_leaves_nothing(stub: StubCluster) -> None:
    for name, cpu, memory in (("small", "1900m", "3Gi"), ("large", "4", "16Gi")):
        allocatable = {"cpu": cpu, "memory": memory}
        stub.add(
            {"kind": "Node", "metadata": {"name": name}, "status": {"allocatable": allocatable}}
        )
    before = stub.objects
    one = launcher(stub, MAX_CPU_LIMIT="1024", MAX_MEMORY_LIMIT="1Ti")
    with pytest.raises(UsageError, match=r"cpu_limit=512 is more than any node .* largest has 4"):
        await one.create(cpu_limit="512")
    with pytest.raises(UsageError, match=r"memory_limit=17Gi .* largest has 16Gi"):
        await one.create(memory_limit="17Gi")
    assert stub.objects == before
    assert (await one.create(cpu_limit="4", memory_limit="16Gi")).phase == "running"


async def test_limits_are_let_be_where_nodes_may_not_be_read(stub: StubCluster) -> None:
    stub.faults(nodes={"stderr": "Error from server (Forbidden): nodes is forbidden"})
    assert (await launcher(stub).create(cpu_limit="8")).phase == "running"


NO_ACCOUNT = (
    'Error from server (Forbidden): pods "x" is forbidden: error looking up service account '
    'default: serviceaccount "default" not found'
)


async def test_a_namespace_that_is_so_new_that_it_has_no_service_account_is_waited_for(
    stub: StubCluster,
) -> None:
    stub.faults(apply={"stderr": NO_ACCOUNT, "times": 2})
    with anyio.fail_after(20):
        assert (await launcher(stub).create()).phase == "running"


async def test_a_service_account_that_never_comes_is_said(
    stub: StubCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr("host_client.backends.pod.SERVICE_ACCOUNT_WAIT_SECONDS", 0.5)
    stub.faults(apply={"stderr": NO_ACCOUNT})
    with anyio.fail_after(20):
        with pytest.raises(Forbidden, match="looking up service account"):
            await launcher(stub).create()
    assert set(stub.objects) == {"Namespace/sandbox-system"}


async def test_where_classes_may_not_be_read_the_refusal_of_gvisor_tells(
    stub: StubCluster,
) -> None:
    stub.faults(
        classes={"stderr": "Error from server (Forbidden): runtimeclasses is forbidden"},
        apply={
            "stderr": 'Error from server (Forbidden): pods "x" is forbidden: pod rejected: '
            'RuntimeClass "gvisor" not found',
            "times": 1,
        },
    )
    one = launcher(stub)
    made = await one.create()
    assert "runtimeClassName" not in stub.objects[f"Pod/{made.sandbox.pod_name}"]["spec"]
    assert any("gvisor" in warning for warning in one.warnings)
    assert any("DEFAULT_STORAGE_CLASS" in warning for warning in one.warnings)


async def test_a_runtime_class_that_was_asked_for_is_never_left_out(stub: StubCluster) -> None:
    stub.faults(
        apply={
            "stderr": 'Error from server (Forbidden): pods "x" is forbidden: pod rejected: '
            'RuntimeClass "kata" not found',
        }
    )
    with pytest.raises(LaunchFailed, match="kata"):
        await launcher(stub, RUNTIME_CLASS="kata").create()
    assert set(stub.objects) == {"Namespace/sandbox-system"}


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            "0/3 nodes are available: 3 node(s) didn't match pod affinity rules.",
            "Its home is on the node where other sandboxes of yours run",
        ),
        ("0/1 nodes are available: 1 node(s) had untolerated taint(s).", "kubectl get nodes"),
        ("0/1 nodes are available: 1 Insufficient cpu.", "ask for less"),
    ],
)
async def test_a_pod_that_fits_no_node_is_refused_with_what_helps(
    stub: StubCluster, message: str, hint: str
) -> None:
    """The second sandbox of a home on a full node too: it never waits for the volume."""
    unfit = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    stub.faults(pod={"phase": "Pending", "conditions": [unfit | {"message": message}],
                     "containerStatuses": []})  # fmt: skip
    with anyio.fail_after(60):
        with pytest.raises(LaunchFailed, match=hint) as failed:
            await launcher(stub).create()
    assert failed.value.reason == "Unschedulable"
    assert set(stub.objects) == {"Namespace/sandbox-system"}
