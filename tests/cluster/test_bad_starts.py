"""Starts that must fail: one clear error with object, cause and next step; nothing left behind."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from host_client.errors import StillStarting
from host_client.host import Host
from host_client.identity import named_sandbox_id
from host_client.sandbox import object_name
from in_pod_server import contract as c
from in_pod_server.contract import CALL_LIMIT_SECONDS
from tests.cluster.conftest import Cluster

LIMIT_SECONDS = 20
"""The issue's own bound for a bad start."""


def refused(
    cluster: Cluster, code: int, *words: str, argv: tuple[str, ...] = (), **environment: str
) -> str:
    """Run a create that must fail; check code, words, time and that it says one thing."""
    start = time.monotonic()
    ended = cluster.podpipe("create", *argv, **environment)
    seconds = time.monotonic() - start
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    errors = [line for line in ended.stderr.splitlines() if not line.endswith("…")]
    error = "\n".join(errors)
    assert error.count("podpipe: ") == 1, ended.stderr
    assert "Traceback" not in error
    for word in words:
        assert word in error, error
    assert seconds < LIMIT_SECONDS
    return error


@pytest.fixture
def clean(cluster: Cluster, user: str) -> Iterator[Cluster]:
    """The cluster, with a check that the test left nothing in it."""
    before = cluster.left()
    yield cluster
    assert cluster.left() == before


def kubeconfig(folder: Path, server: str) -> str:
    path = folder / "kubeconfig"
    config = {
        "clusters": [{"name": "x", "cluster": {"server": server}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "users": [{"name": "x", "user": {"token": "x"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_no_kubectl(clean: Cluster) -> None:
    refused(clean, 4, "PODPIPE_KUBECTL", "absolute path", PODPIPE_KUBECTL="/nonexistent")


def test_no_kubeconfig(clean: Cluster) -> None:
    refused(clean, 4, "no kubeconfig", "/nonexistent/config", "KUBECONFIG",
            KUBECONFIG="/nonexistent/config")  # fmt: skip


def test_no_such_context(clean: Cluster) -> None:
    refused(clean, 4, "'nonesuch'", "podpipe-node" if _is_node(clean) else "known:",
            "PODPIPE_CONTEXT", PODPIPE_CONTEXT="nonesuch")  # fmt: skip


def _is_node(cluster: Cluster) -> bool:
    return cluster.environment["PODPIPE_CONTEXT"] == "podpipe-node"


def test_an_api_server_that_refuses_connections(clean: Cluster, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = kubeconfig(tmp_path, f"https://127.0.0.1:{port}")
    refused(clean, 4, f"127.0.0.1:{port}", "does not answer", "check that the cluster is up",
            KUBECONFIG=config, PODPIPE_CONTEXT="x")  # fmt: skip


@contextmanager
def silent_server() -> Iterator[int]:
    """A port on loopback that takes connections and never says a word."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def accept() -> None:
            while True:
                try:
                    held.append(silent.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield silent.getsockname()[1]
        finally:
            silent.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


def test_an_api_server_that_never_answers(clean: Cluster, tmp_path: Path) -> None:
    with silent_server() as port:
        config = kubeconfig(tmp_path, f"https://127.0.0.1:{port}")
        refused(clean, 4, "API server https://127.0.0.1", KUBECONFIG=config, PODPIPE_CONTEXT="x")


async def test_an_image_that_is_still_being_pulled_is_said_and_waited_for(clean: Cluster) -> None:
    """create answers before any client gives up; the next call goes on waiting."""
    if not _is_node(clean):
        pytest.fail("a registry on loopback is one only for a node on this machine")
    with silent_server() as port:
        settings = clean.settings(SANDBOX_IMAGE=f"127.0.0.1:{port}/slow:1")
        async with Host(settings) as host:
            start = time.monotonic()
            made = await host.launcher.create(name="slow")
            assert time.monotonic() - start < CALL_LIMIT_SECONDS
            assert (made.phase, made.detail) == (
                "starting",
                "mounting the home and pulling the image",
            )
            with pytest.raises(StillStarting, match="Call again to go on waiting"):
                await host.sessions.open("slow", wait=1)
            assert (await host.launcher.status("slow")).phase == "starting"
            await host.launcher.destroy("slow")
            await host.launcher.purge_home()
    # The kubelet lets go of the pod when its pull has ended, and of the home then.
    clean.kubectl("wait", "--for=delete", f"pod/{made.sandbox.pod_name}", "--timeout=60s")
    clean.kubectl("wait", "--for=delete", "pvc", "--all", "--timeout=60s")


@pytest.mark.parametrize(
    ("denied", "words"),
    [
        (("create", "configmaps"), ('cannot create resource "configmaps"',)),
        (("create", "pods"), ('cannot create resource "pods"',)),
        (("patch", "pods"), ('cannot patch resource "pods"',)),
        (("get", "persistentvolumeclaims"), ('cannot get resource "persistentvolumeclaims"',)),
    ],
)
def test_a_forbidden_verb_is_named(
    clean: Cluster, tmp_path: Path, denied: tuple[str, str], words: tuple[str, ...]
) -> None:
    rules = [
        {"apiGroups": [""], "resources": [resource], "verbs": [verb]}
        for resource in ("configmaps", "pods", "pods/exec", "persistentvolumeclaims")
        for verb in ("create", "get", "list", "patch", "delete")
        if (verb, resource) != denied
    ]
    config = limited(clean, tmp_path, rules)
    error = refused(clean, 1, *words, KUBECONFIG=config, PODPIPE_CONTEXT="x")
    assert "system:serviceaccount" in error
    clean.kubectl("delete", "serviceaccount,role,rolebinding", "limited")


def limited(cluster: Cluster, folder: Path, rules: list[dict[str, list[str]]]) -> str:
    """A kubeconfig of a service account that may do just this."""
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "limited"}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "limited"},
            "rules": rules,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "limited"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": "limited",
            },
            "subjects": [
                {"kind": "ServiceAccount", "name": "limited", "namespace": cluster.namespace}
            ],
        },
    )
    token = cluster.kubectl("create", "token", "limited").strip()
    admin = json.loads(
        cluster.kubectl("config", "view", "--minify", "--raw", "--flatten", "-o", "json")
    )
    config = {
        "clusters": [{"name": "x", "cluster": admin["clusters"][0]["cluster"]}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "users": [{"name": "x", "user": {"token": token}}],
        "current-context": "x",
    }
    path = folder / "limited.kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_an_image_that_cannot_be_pulled(clean: Cluster) -> None:
    """L44, as the next two and `test_a_request_beyond_every_node`."""
    refused(clean, 1, "ErrImagePull", "nonesuch.invalid/no:1", "SANDBOX_IMAGE",
            SANDBOX_IMAGE="nonesuch.invalid/no:1")  # fmt: skip


def test_an_image_name_that_is_none(clean: Cluster) -> None:
    refused(clean, 1, "InvalidImageName", "SANDBOX_IMAGE", SANDBOX_IMAGE="Not//An:Image:")


def test_an_image_without_a_daemon(clean: Cluster, user: str) -> None:
    """Any image of the node will do: pause has no interpreter."""
    if not _is_node(clean):
        pytest.fail("this test knows the pause image of the node provider only")
    refused(clean, 1, "cannot start", "SANDBOX_IMAGE", SANDBOX_IMAGE=_pause_image(clean))


def _pause_image(cluster: Cluster) -> str:
    images = cluster.get("nodes")["items"][0]["status"]["images"]
    names = [str(name) for image in images for name in image["names"] or []]
    return next(name for name in names if "pause" in name)


@pytest.fixture
def node_reads(cluster: Cluster) -> Iterator[None]:
    """What `render admin --cluster-reads` adds."""
    cluster.administer("--cluster-reads")
    yield
    name = f"podpipe.{cluster.namespace}"
    cluster.kubectl("delete", f"clusterrole/{name}", f"clusterrolebinding/{name}")


def test_a_limit_beyond_every_node(clean: Cluster, node_reads: None) -> None:
    refused(clean, 2, "cpu_limit=512", "more than any node of the cluster has", "ask for less",
            argv=("--cpu", "512"), MAX_CPU_LIMIT="512")  # fmt: skip
    refused(clean, 2, "memory_limit=9Ti", "the largest has",
            argv=("--memory", "9Ti"), MAX_MEMORY_LIMIT="9Ti")  # fmt: skip


def test_a_limit_beyond_the_maximum(clean: Cluster) -> None:
    refused(clean, 2, "cpu_limit=512", "maximum of 8", "MAX_CPU_LIMIT", argv=("--cpu", "512"))
    refused(clean, 2, "MAX_TTL_MINUTES", "1 to 1440", argv=("--ttl", "1441"))


def test_a_request_beyond_every_node(clean: Cluster) -> None:
    refused(clean, 1, "Unschedulable", "Insufficient cpu", "cpu 512",
            CPU_REQUEST="512", DEFAULT_CPU_LIMIT="512", MAX_CPU_LIMIT="512")  # fmt: skip


def test_a_quota_that_is_used_up(clean: Cluster) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none"},
        "spec": {"hard": {"pods": "0"}},
    }
    clean.apply(quota)
    clean.kubectl("wait", "--for=jsonpath={.status.hard.pods}=0", "resourcequota/none")
    try:
        refused(clean, 1, "Quota", "exceeded quota: none")
    finally:
        clean.kubectl("delete", "resourcequota", "none")


def test_a_name_taken_by_a_foreign_object(clean: Cluster, user: str) -> None:
    """L46, as the next."""
    name = object_name(named_sandbox_id(user, "taken"))
    clean.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "b"}}
    )
    before = clean.get("configmap", name)
    refused(clean, 1, f"ConfigMap {name}", "not made by podpipe", "Choose another name",
            argv=("--name", "taken"))  # fmt: skip
    assert clean.get("configmap", name) == before
    clean.kubectl("delete", "configmap", name)


def test_a_home_that_belongs_to_another_true_id(clean: Cluster, user: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": f"user-{user}-pvc",
            "labels": {c.LABEL_MANAGED_BY: c.PREFIX},
            "annotations": {c.ANNOTATION_USER_ID: "somebody else"},
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Mi"}},
        },
    }
    clean.apply(claim)
    error = refused(
        clean, 1, f"PersistentVolumeClaim user-{user}-pvc", "another user", "PODPIPE_USER"
    )
    assert "somebody else" not in error
    left = clean.get("persistentvolumeclaim", f"user-{user}-pvc")["metadata"]
    assert left["annotations"][c.ANNOTATION_USER_ID] == "somebody else"
    clean.kubectl("delete", "persistentvolumeclaim", f"user-{user}-pvc")


def test_the_stub_is_not_what_ran(cluster: Cluster, tmp_path: Path) -> None:
    """These tests are worth something only against a real API server."""
    version = subprocess.run(
        [cluster.environment["PODPIPE_KUBECTL"], "version", "-o", "json"],
        env={"KUBECONFIG": cluster.environment["KUBECONFIG"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(version.stdout)["serverVersion"]["gitVersion"].startswith("v1.")
