"""Pods weaker than a sandbox's: each refused by the real API server, by the layer that is meant to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from host_client.backends.pod import PodBackend
from host_client.clock import utc_now
from host_client.kubectl import Kubectl
from host_client.sandbox import draft_sandbox
from tests.cluster.conftest import POLICY_SECONDS, Cluster

Pod = dict[str, Any]
Weaken = Callable[[Pod], object]

POD_SECURITY = 'violates PodSecurity "restricted'
POLICY = "ValidatingAdmissionPolicy 'podpipe."
LIMIT_RANGE = "maximum {} usage per Container"


def container(pod: Pod) -> Any:
    return pod["spec"]["containers"][0]


def security(pod: Pod) -> Any:
    return container(pod)["securityContext"]


def volume(source: dict[str, Any]) -> Weaken:
    return lambda pod: pod["spec"]["volumes"].append({"name": "more", **source})


def spec(**fields: Any) -> Weaken:
    return lambda pod: pod["spec"].update(fields)


def env(source: dict[str, Any]) -> Weaken:
    return lambda pod: container(pod)["env"].append({"name": "MORE", "valueFrom": source})


def probe(name: str) -> Weaken:
    return lambda pod: container(pod).update({name: {"httpGet": {"port": 80}}})


WEAKENED: dict[str, tuple[Weaken, str, str]] = {
    # Pod Security
    "privileged": (lambda p: security(p).update(privileged=True, allowPrivilegeEscalation=True),
                   POD_SECURITY, "privileged"),
    "escalation": (lambda p: security(p).update(allowPrivilegeEscalation=True),
                   POD_SECURITY, "allowPrivilegeEscalation"),
    "host path": (volume({"hostPath": {"path": "/"}}), POD_SECURITY, "hostPath"),
    "host network": (spec(hostNetwork=True), POD_SECURITY, "hostNetwork=true"),
    "host processes": (spec(hostPID=True), POD_SECURITY, "hostPID=true"),
    "host IPC": (spec(hostIPC=True), POD_SECURITY, "hostIPC=true"),
    "host port": (lambda p: container(p).update(ports=[{"containerPort": 1, "hostPort": 1}]),
                  POD_SECURITY, "hostPort"),
    "capability": (lambda p: security(p)["capabilities"].update(add=["NET_ADMIN"]),
                   POD_SECURITY, "NET_ADMIN"),
    "capabilities kept": (lambda p: security(p).pop("capabilities"),
                          POD_SECURITY, "unrestricted capabilities"),
    "no seccomp": (lambda p: p["spec"]["securityContext"].pop("seccompProfile"),
                   POD_SECURITY, "seccompProfile"),
    "seccomp off": (lambda p: p["spec"]["securityContext"].update(
                    seccompProfile={"type": "Unconfined"}), POD_SECURITY, "seccompProfile"),
    "root": (lambda p: p["spec"]["securityContext"].update(runAsUser=0), POD_SECURITY, "runAsUser=0"),
    "perhaps root": (lambda p: security(p).update(runAsNonRoot=False), POD_SECURITY, "runAsNonRoot"),
    # the admission policy
    "no labels": (lambda p: p["metadata"].pop("labels"), POLICY, "carries podpipe's labels"),
    "other name": (lambda p: p["metadata"].update(name="other"), POLICY, "called after its sandbox"),
    "no record": (lambda p: p["metadata"].pop("ownerReferences"), POLICY, "hangs from the record"),
    "token": (spec(automountServiceAccountToken=True), POLICY, "no token"),
    "token by default": (lambda p: p["spec"].pop("automountServiceAccountToken"),
                         POLICY, "no token"),
    "token as a volume": (
        volume({"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}),
        POLICY, "has its user's home"),
    "other account": (spec(serviceAccountName="other"), POLICY, "no token"),
    "service links": (spec(enableServiceLinks=True), POLICY, "enableServiceLinks"),
    "second container": (lambda p: p["spec"]["containers"].append(container(p) | {"name": "more"}),
                         POLICY, "is one container"),
    "init container": (lambda p: p["spec"].update(initContainers=[container(p) | {"name": "more"}]),
                       POLICY, "is one container"),
    "other image": (lambda p: container(p).update(image="debian:trixie-slim"), POLICY, "image"),
    "image that begins alike": (lambda p: container(p).update(image=container(p)["image"] + "x"),
                                POLICY, "image"),
    "writable root": (lambda p: security(p).pop("readOnlyRootFilesystem"), POLICY, "read-only"),
    "secret in the environment": (env({"secretKeyRef": {"name": "s", "key": "k"}}),
                                  POLICY, "comes from no secret"),
    "config in the environment": (
        lambda p: container(p).update(envFrom=[{"configMapRef": {"name": "c"}}]),
        POLICY, "comes from no secret"),
    "secret as a volume": (volume({"secret": {"secretName": "s"}}), POLICY, "has its user's home"),
    "another's home": (volume({"persistentVolumeClaim": {"claimName": "user-bob-pvc"}}),
                       POLICY, "has its user's home"),
    "scratch space without end": (volume({"emptyDir": {}}), POLICY, "has its user's home"),
    "part of a volume": (lambda p: container(p)["volumeMounts"][0].update(subPath="x"),
                         POLICY, "subPath"),
    "liveness probe": (probe("livenessProbe"), POLICY, "probes"),
    "readiness probe": (probe("readinessProbe"), POLICY, "probes"),
    "lifecycle hook": (lambda p: container(p).update(
                       lifecycle={"preStop": {"exec": {"command": ["true"]}}}), POLICY, "probes"),
    "no end": (lambda p: p["spec"].pop("activeDeadlineSeconds"), POLICY, "MAX_TTL_MINUTES"),
    "late end": (spec(activeDeadlineSeconds=10**9), POLICY, "MAX_TTL_MINUTES"),
    "slow end": (spec(terminationGracePeriodSeconds=3600), POLICY, "within two minutes"),
    "device": (lambda p: container(p)["resources"]["limits"].update({"example.org/gpu": "1"}),
               POLICY, "no device"),
    "chosen node": (spec(nodeName="control-plane"), POLICY, "chooses the node"),
    "node kept for others": (spec(tolerations=[{"operator": "Exists"}]), POLICY, "chooses the node"),
    "priority": (spec(priorityClassName="system-node-critical", priority=None),
                 POLICY, "chooses the node"),
    # the LimitRange, and the quota
    "cpu": (lambda p: container(p)["resources"]["limits"].update(cpu="4000"),
            LIMIT_RANGE.format("cpu"), "limit is 4k"),
    "memory": (lambda p: container(p)["resources"]["limits"].update(memory="20Ti"),
               LIMIT_RANGE.format("memory"), "limit is 20Ti"),
    "scratch space": (
        lambda p: container(p)["resources"]["limits"].update({"ephemeral-storage": "1Ti"}),
        LIMIT_RANGE.format("ephemeral-storage"), "limit is 1Ti"),
}  # fmt: skip
"""What is weaker: how, the layer whose words refuse it, and a word of the reason."""


@pytest.fixture(scope="module", autouse=True)
def other_account(cluster: Cluster) -> Iterator[None]:
    """One that exists: a pod of one that does not is refused before anybody looks."""
    cluster.kubectl("create", "serviceaccount", "other")
    yield
    cluster.kubectl("delete", "serviceaccount", "other")


@pytest.mark.parametrize("weakness", WEAKENED)
def test_a_weakened_pod_is_refused_by_its_layer(cluster: Cluster, weakness: str) -> None:
    weaken, layer, reason = WEAKENED[weakness]
    pod = cluster.pod()
    weaken(pod)
    refusal = cluster.refusal(pod)
    assert layer in refusal
    assert reason in refusal.replace('"', "")


def test_our_own_pod_is_let_in_by_every_layer(cluster: Cluster) -> None:
    assert cluster.refusal(cluster.pod()) == ""


def test_a_pod_without_limits_gets_the_defaults(cluster: Cluster) -> None:
    pod = cluster.pod()
    container(pod).pop("resources")
    made = json.loads(
        cluster.kubectl(
            "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod)
        )
    )
    assert container(made)["resources"] == container(cluster.pod())["resources"] | {
        "requests": {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "8Gi"}
    }


def test_one_sandbox_more_than_the_quota_has_is_refused(cluster: Cluster) -> None:
    quota = {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "0"}}}
    cluster.apply({"apiVersion": "v1", "kind": "ResourceQuota"} | quota)
    try:
        cluster.kubectl("wait", "--for=jsonpath={.status.hard.pods}=0", "resourcequota/full")
        assert "exceeded quota: full" in cluster.refusal(cluster.pod())
    finally:
        cluster.kubectl("delete", "resourcequota", "full")


@pytest.fixture
async def made(cluster: Cluster, user: str) -> str:
    """The name of a sandbox's pod, which need not run."""
    settings = cluster.settings()
    backend = PodBackend(Kubectl(settings), settings)
    sandbox = await backend.claim(draft_sandbox(settings, utc_now(), "work"))
    return (await backend.start(sandbox, None)).name


def changed(cluster: Cluster, pod: str, changes: dict[str, Any], *argv: str) -> str:
    """Why the API server does not let the administrator change a pod; empty where it does."""
    return cluster.attempt("patch", "pod", pod, "-p", json.dumps(changes), *argv).stderr


async def test_a_sandbox_that_is_there_is_not_weakened(cluster: Cluster, made: str) -> None:
    secured = container(cluster.pod())["securityContext"]
    more = {"name": "more", "image": "debian", "securityContext": secured}
    refusal = changed(cluster, made, {"spec": {"ephemeralContainers": [more]}},
                      "--subresource=ephemeralcontainers")  # fmt: skip
    assert "is one container, and none is added" in refusal
    other = {"spec": {"containers": [{"name": "sandbox", "image": "debian"}]}}
    assert "the image is not one that the administrator allows" in changed(cluster, made, other)
    hidden = {"metadata": {"labels": {"podpipe/user": None}}}
    assert "carries podpipe's labels" in changed(cluster, made, hidden)


@contextmanager
def policy(cluster: Cluster, weak: Pod, *options: str) -> Iterator[None]:
    """What `render admin` makes of other options, from when it refuses the pod `weak` until it ends."""
    other = cluster.podpipe("render", "admin", "--allow-purge", *options).stdout
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=other, everywhere=True)
    try:
        deadline = time.monotonic() + POLICY_SECONDS
        while POLICY not in cluster.refusal(weak):
            assert time.monotonic() < deadline, "the policy does not come into force"
        yield
    finally:
        cluster.administer()
        deadline = time.monotonic() + POLICY_SECONDS
        while cluster.refusal(cluster.pod()):
            assert time.monotonic() < deadline, "the first policy does not come back"


async def test_a_pod_of_an_earlier_policy_is_told_its_expiry_and_no_more(
    cluster: Cluster, made: str
) -> None:
    with policy(cluster, cluster.pod(), "--image", "later:1"):
        notes = {"metadata": {"annotations": {"podpipe/expires-at": "2030-01-01T00:00:00Z"}}}
        assert changed(cluster, made, notes) == ""
        labels = {"metadata": {"labels": {"other": "label"}}}
        assert POLICY in changed(cluster, made, labels)


def test_a_pod_that_shares_the_kernel_is_refused_where_isolation_is_required(
    cluster: Cluster,
) -> None:
    """A user namespace will do; gVisor cannot be asked for on a cluster that has none."""
    pod = cluster.pod()
    with policy(cluster, pod, "--require-isolation"):
        assert "a sandbox here needs gVisor or a user namespace" in cluster.refusal(pod)
        pod["spec"]["hostUsers"] = False
        assert cluster.refusal(pod) == ""
