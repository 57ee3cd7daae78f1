"""The roles hold no right that is not used: taken away, each makes some call of podpipe fail."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
import pytest

from host_client.admin import LAUNCHER, REAPER
from host_client.api import proxied
from host_client.backends.pod import PodBackend
from host_client.clock import utc_now
from host_client.config import Settings
from host_client.errors import Forbidden, KubectlError, NameTaken
from host_client.kubectl import Kubectl
from host_client.pod_view import PodView
from host_client.reaper import MAY_BE_HIDDEN, RESOURCES, sweep
from host_client.sandbox import Sandbox, draft_sandbox
from tests.cluster.conftest import Cluster

EFFECT_SECONDS = 20.0
"""An API server notices a changed role a moment later."""


@dataclass
class Stage:
    """A sandbox that is there, and podpipe with the role that a test changes.

    Args:
        settings: of its user.
        sandbox: its record.
        pod: its pod, which need not run.
        home: its user's.
    """

    settings: Settings
    sandbox: Sandbox
    pod: PodView
    home: Mapping[str, Any]

    @property
    def kubectl(self) -> Kubectl:
        """As the role has it."""
        return Kubectl(self.settings)

    @property
    def backend(self) -> PodBackend:
        """Likewise."""
        return PodBackend(self.kubectl, self.settings)


Call = Callable[[Stage], Awaitable[object]]


async def claim_taken(on: Stage) -> None:
    with pytest.raises(NameTaken):
        await on.backend.claim(on.sandbox)


async def restart(on: Stage) -> None:
    await on.backend.start(replace(on.sandbox, incarnation=2), on.home)


async def first_home(on: Stage) -> None:
    settings = replace(on.settings, user=f"{on.settings.user}-new")
    await PodBackend(Kubectl(settings), settings).start(
        replace(on.sandbox, user_id=settings.user, user_key=settings.user_key, incarnation=3), None
    )


async def last_words(on: Stage) -> None:
    try:
        await on.kubectl.run("logs", on.pod.name, "--tail=1")
    except Forbidden:
        raise
    except KubectlError:
        pass  # it has not run yet


def executed(**environment: str) -> Call:
    async def call(on: Stage) -> None:
        kubectl = on.kubectl
        kubectl.environment |= environment
        try:
            await kubectl.run("exec", on.pod.name, "--", "/nonesuch")
        except KubectlError as error:
            if "forbidden" in str(error).lower():
                raise Forbidden(str(error)) from error

    return call


def read(*argv: str) -> Call:
    return lambda on: on.kubectl.run("get", *argv)


LAUNCHER_USES: Mapping[tuple[str, str], Call] = {
    ("create", "configmaps"): lambda on: on.backend.claim(draft_sandbox(on.settings, utc_now())),
    ("get", "configmaps"): claim_taken,
    ("list", "configmaps"): lambda on: on.backend.observe(on.sandbox.id),
    ("patch", "configmaps"): lambda on: on.backend.update(on.sandbox, on.sandbox),
    ("delete", "configmaps"): lambda on: on.backend.delete(replace(on.sandbox, uid="another")),
    ("create", "pods"): restart,
    ("get", "pods"): lambda on: on.backend.announce(on.sandbox, on.pod),
    ("list", "pods"): lambda on: on.backend.pods_left(on.sandbox),
    ("patch", "pods"): lambda on: on.backend.announce(on.sandbox, on.pod),
    ("delete", "pods"): lambda on: on.backend.stop(replace(on.pod, uid="another")),
    ("get", "pods/log"): last_words,
    # Where a proxy on the way knows no WebSocket, or kubectl is older than 1.31.
    ("create", "pods/exec"): executed(KUBECTL_REMOTE_COMMAND_WEBSOCKETS="false"),
    ("create", "persistentvolumeclaims"): first_home,
    ("get", "persistentvolumeclaims"): lambda on: on.backend.home(),
    ("patch", "persistentvolumeclaims"): first_home,
    ("delete", "persistentvolumeclaims"): lambda on: on.backend.delete_home("another"),
    # What doctor tells of.
    ("get", "namespaces"): lambda on: on.kubectl.run("get", "namespace", on.settings.namespace),
    ("list", "resourcequotas"): read("resourcequotas"),
    ("list", "networkpolicies"): read("networkpolicies"),
}
"""Each right of the launcher, and what podpipe does with it. `get pods/exec` is not here: without it
kubectl tries again by SPDY, which costs every connection a round trip and fails behind some proxies."""


async def swept(on: Stage) -> None:
    report = await sweep(on.kubectl)
    if report.failed:
        raise Forbidden(str(report.failed))


def reread(resource: str) -> Call:
    async def call(on: Stage) -> None:
        async with proxied(on.kubectl, connections=1) as api:
            await api.one(RESOURCES[resource], "nonesuch")

    return call


def deletion(resource: str) -> Call:
    async def call(on: Stage) -> None:
        async with proxied(on.kubectl, connections=1) as api:
            await api.delete(RESOURCES[resource], "nonesuch", uid="another", version="1")

    return call


REAPER_USES: Mapping[tuple[str, str], Call] = {
    (verb, resource): call
    for resource in RESOURCES
    if resource not in MAY_BE_HIDDEN
    for verb, call in (
        ("list", swept),
        ("get", reread(resource)),
        ("delete", deletion(resource)),
    )
}
"""Each right of the reaper, likewise; an object is read when it changed before it was deleted."""


def rules(cluster: Cluster, role: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.get("role", role)["rules"]
    return found


def rights(found: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(v, r) for rule in found for r in rule["resources"] for v in rule["verbs"]}


@pytest.fixture
async def stage(cluster: Cluster, user: str) -> AsyncIterator[Stage]:
    settings = cluster.settings()
    backend = PodBackend(Kubectl(settings), settings)
    sandbox = await backend.claim(draft_sandbox(settings, utc_now(), "work"))
    pod = await backend.start(sandbox, None)
    home = await backend.home()
    assert home
    yield Stage(settings, sandbox, pod, home)
    cluster.kubectl("delete", "configmap", sandbox.object_name, "--ignore-not-found")
    cluster.kubectl("delete", "persistentvolumeclaims", "-l", f"podpipe/user={user}-new")


@contextmanager
def without(cluster: Cluster, role: str, right: tuple[str, str]) -> Iterator[None]:
    """The role lacks a right for as long as the block lasts."""
    whole = rules(cluster, role)
    less = [
        {"apiGroups": rule["apiGroups"], "resources": [r],
         "verbs": [v for v in rule["verbs"] if (v, r) != right] or ["none"]}
        for rule in whole for r in rule["resources"]
    ]  # fmt: skip
    assert right in rights(whole) - rights(less)
    _replace(cluster, role, less)
    try:
        yield
    finally:
        _replace(cluster, role, whole)


def _replace(cluster: Cluster, role: str, found: list[dict[str, Any]]) -> None:
    patch = [{"op": "replace", "path": "/rules", "value": found}]
    cluster.kubectl("patch", "role", role, "--type=json", "-p", json.dumps(patch))


async def fails(call: Call, on: Stage) -> None:
    """Wait until a call is forbidden."""
    with anyio.fail_after(EFFECT_SECONDS):
        while True:
            try:
                await call(on)
            except Forbidden:
                return
            except NameTaken:
                pass  # its objects are there since the last try
            await anyio.sleep(0.1)


async def succeeds(call: Call, on: Stage) -> None:
    """Wait until a call is not forbidden any more."""
    with anyio.fail_after(EFFECT_SECONDS):
        while True:
            try:
                await call(on)
            except Forbidden:
                await anyio.sleep(0.1)
            else:
                return


@pytest.mark.parametrize("right", LAUNCHER_USES, ids=" ".join)
async def test_a_launcher_needs_each_of_its_rights(
    cluster: Cluster, stage: Stage, right: tuple[str, str]
) -> None:
    with without(cluster, LAUNCHER, right):
        await fails(LAUNCHER_USES[right], stage)
    await succeeds(LAUNCHER_USES[right], stage)


@pytest.mark.parametrize("right", REAPER_USES, ids=" ".join)
async def test_the_reaper_needs_each_of_its_rights(
    cluster: Cluster, stage: Stage, right: tuple[str, str]
) -> None:
    reaper = replace(stage, settings=cluster.reaper_settings())
    with without(cluster, REAPER, right):
        await fails(REAPER_USES[right], reaper)
    await succeeds(REAPER_USES[right], reaper)


@pytest.mark.parametrize("verb", ["get", "create"])
def test_doctor_names_the_verb_of_exec_that_is_missing(
    cluster: Cluster, user: str, verb: str
) -> None:
    """L39: which of the two a server asks for depends on its version and on kubectl's."""
    with without(cluster, LAUNCHER, (verb, "pods/exec")):
        deadline = time.monotonic() + EFFECT_SECONDS
        while not (found := _not_ok(cluster)):
            assert time.monotonic() < deadline, "the role is not seen to have changed"
    (permissions,) = found
    assert permissions["result"] == "failure"
    assert permissions["detail"].endswith(f": {verb} pods/exec")


def _not_ok(cluster: Cluster) -> list[dict[str, str]]:
    """What doctor says of permissions, unless they are ok."""
    report = json.loads(cluster.podpipe("doctor", "--json").stdout)
    return [f for f in report if (f["check"], f["result"] == "ok") == ("permissions", False)]


async def test_hosts_that_may_not_read_runtime_classes_make_the_same_pod(stage: Stage) -> None:
    """The second asks for gVisor anew, and finds the pod that the first had to make without."""
    again = await stage.backend.start(stage.sandbox, stage.home)
    assert again.uid == stage.pod.uid


def test_no_right_of_a_role_is_without_a_use(cluster: Cluster) -> None:
    assert rights(rules(cluster, LAUNCHER)) == {*LAUNCHER_USES, ("get", "pods/exec")}
    assert rights(rules(cluster, REAPER)) == {*REAPER_USES}


@pytest.mark.parametrize(
    ("verb", "resource"),
    [("get", "secrets"), ("list", "secrets"), ("create", "jobs.batch"), ("update", "pods"),
     ("patch", "pods/ephemeralcontainers"), ("create", "pods/portforward"), ("get", "nodes"),
     ("create", "serviceaccounts/token"), ("create", "rolebindings"), ("patch", "namespaces"),
     ("deletecollection", "pods"), ("create", "persistentvolumes"), ("watch", "pods")],
)  # fmt: skip
def test_what_no_role_may(cluster: Cluster, verb: str, resource: str) -> None:
    for account in (LAUNCHER, REAPER):
        who = f"--as=system:serviceaccount:{cluster.namespace}-admin:{account}"
        kind, _, sub = resource.partition("/")
        asked = cluster.attempt("auth", "can-i", verb, kind, f"--subresource={sub}", who)
        assert asked.stdout.strip() == "no", f"{account} may {verb} {resource}"
