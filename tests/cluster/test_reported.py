"""What people reported of the lives of sandboxes elsewhere: names, deletions, and what is left."""

from __future__ import annotations

import json
import time
from pathlib import Path

import anyio
import pytest

from host_client.errors import UsageError
from host_client.host import Host
from host_client.identity import MAX_NAME
from tests.cluster.conftest import Cluster
from tests.cluster.test_bad_starts import limited

BOUND = 170
DESTROY_SECONDS = 10
STUBBORN = "trap '' TERM HUP INT; echo on; while :; do sleep 1; done"


@pytest.mark.parametrize(
    "name",
    ["a" * 60, "a" * 63, "a" * 64, "a" * 253, "Upper", "under_score", "é", "名", "a b", "-a", "a."],
)
async def test_a_name_that_no_object_can_have_is_refused_before_anything_is_made(
    cluster: Cluster, user: str, name: str
) -> None:
    """L43"""
    before = cluster.left() if cluster.get("namespaces")["items"] else []
    async with Host(cluster.settings()) as host:
        with pytest.raises(UsageError, match=f"at most {MAX_NAME} characters"):
            await host.launcher.create(name=name)
    assert cluster.left() == before


async def test_the_longest_name_runs(cluster: Cluster, user: str) -> None:
    """L43"""
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            name = "a" * MAX_NAME
            await host.launcher.create(name=name)
            ran = await host.sessions.call(name, "run_command", {"command": "echo ok"})
            assert ran["structuredContent"]["stdout"] == "ok\n"


async def test_a_name_that_was_just_destroyed_is_made_anew_ten_times_over_one_home(
    cluster: Cluster, user: str
) -> None:
    """L47, L48: at once, each in seconds, though a command hears no TERM."""
    uids = set()
    with anyio.fail_after(2 * BOUND):
        async with Host(cluster.settings()) as host:
            for number in range(10):
                made = await host.launcher.create(name="work")
                assert made.pod
                uids.add(made.pod.uid)
                command = {"command": f"echo {number} >> f; wc -l < f"}
                ran = await host.sessions.call("work", "run_command", command)
                assert ran["structuredContent"]["stdout"] == f"{number + 1}\n"
                started = await host.sessions.call(
                    "work", "start_background", {"command": STUBBORN}
                )
                seen = {"process_id": started["structuredContent"]["process_id"], "wait_seconds": 9}
                assert "on" in str(await host.sessions.call("work", "read_output", seen))
                began = time.monotonic()
                await host.launcher.destroy("work")
                assert time.monotonic() - began < DESTROY_SECONDS
                await host.sessions.forget("work")
    assert len(uids) == 10
    kinds = "pods,configmaps,persistentvolumeclaims,services,secrets"
    left = cluster.get(kinds, "-l", f"podpipe/user={user}")["items"]
    assert [part["kind"] for part in left] == ["PersistentVolumeClaim"]


async def test_a_home_that_is_purged_is_never_bound_again(cluster: Cluster, user: str) -> None:
    """L47: the claim may be Terminating yet when the next sandbox is made."""
    claims = set()
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            for _ in range(3):
                await host.launcher.create(name="work")
                fresh = {"command": "ls -A; echo x > f"}
                ran = await host.sessions.call("work", "run_command", fresh)
                assert "f" not in ran["structuredContent"]["stdout"].split()
                (claim,) = cluster.get("pvc", "-l", f"podpipe/user={user}")["items"]
                claims.add(claim["metadata"]["uid"])
                await host.launcher.destroy("work")
                await host.sessions.forget("work")
                assert await host.launcher.purge_home()
                cluster.kubectl("wait", "--for=delete", f"pvc/{claim['metadata']['name']}")
    assert len(claims) == 3


def test_a_deletion_that_fails_is_told_with_the_object_and_by_the_exit_code(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    """L49: by whoever may do everything but delete; destroy, suspend and reap alike."""
    made = cluster.podpipe("create", "--name", "work", "--json")
    assert made.returncode == 0, made.stderr
    sandbox_id = json.loads(made.stdout)["sandbox_id"]
    before = cluster.left()
    rules = [
        {"apiGroups": [""], "resources": [resource], "verbs": ["create", "get", "list", "patch"]}
        for resource in (
            "configmaps", "pods", "pods/exec", "persistentvolumeclaims", "services", "secrets",
        )
    ] + [{"apiGroups": ["networking.k8s.io"], "resources": ["ingresses"], "verbs": ["list"]}]  # fmt: skip
    weak = {"KUBECONFIG": limited(cluster, tmp_path, rules), "PODPIPE_CONTEXT": "x"}
    try:
        for command in ("destroy", "suspend"):
            ended = cluster.podpipe(command, "work", **weak)
            assert ended.returncode == 1
            assert "cannot delete resource" in ended.stderr
            assert sandbox_id in ended.stderr
        assert cluster.left() == before
        past = "podpipe/expires-at=2020-01-01T00:00:00Z"
        cluster.kubectl("annotate", "--overwrite", f"configmap/sandbox-{sandbox_id}", past)
        reaped = cluster.podpipe("reap", "--json", **weak)
        assert reaped.returncode == 1
        assert f"configmaps/sandbox-{sandbox_id}" in json.loads(reaped.stdout)["failed"]
        assert cluster.left() == before
    finally:
        cluster.kubectl("delete", "serviceaccount,role,rolebinding", "limited")
