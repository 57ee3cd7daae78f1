"""A new sandbox with a new home up to its first answer, beside a bare pod made with kubectl.

The bare pod has the same image, resources and security context and a new claim of the same size and
class; it is applied, waited for, and asked to run `true`. Both sides end with nothing left, outside
what is timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import anyio

from host_client.config import Settings
from host_client.host import Host
from host_client.identity import home_claim
from host_client.kubectl import CALL_TIMEOUT_SECONDS, Kubectl
from in_pod_server.contract import CONTAINER, SOCKET, WORKSPACE
from tests.bench.harness import Row, Sample, Sides, Span
from tests.bench.lab import CLEANUP_SECONDS, LABEL, PLAIN_CALL, WAIT, Lab, checked, cleaned

AGES = (
    "read up rest </proc/uptime; read -r stat </proc/1/stat; "
    "echo $up ${stat##*) } | cut -d' ' -f1,21; getconf CLK_TCK; "
    f"date +%s.%N; stat -c %.9Y {SOCKET}"
)
"""Read in the pod: uptime and start of PID 1, ticks a second, now, and birth of the socket."""

_CLAIM = "PersistentVolumeClaim"
_CLAIM_FIELDS = ("accessModes", "resources", "storageClassName")
_CONTAINER_FIELDS = ("image", "imagePullPolicy", "securityContext", "resources")
_POD_FIELDS = (
    "securityContext",
    "activeDeadlineSeconds",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "runtimeClassName",
    "imagePullSecrets",
)


class TimedKubectl(Kubectl):
    """Remembers when each of its calls began and ended."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.calls: list[tuple[str, float, float]] = []

    async def run(self, *args: str, stdin: str = "", timeout: float = CALL_TIMEOUT_SECONDS) -> str:
        """As `Kubectl.run`."""
        began = time.perf_counter()
        try:
            return await super().run(*args, stdin=stdin, timeout=timeout)
        finally:
            self.calls.append((_label(args), began, time.perf_counter()))


class TimedHost(Host):
    """A host whose kubectl remembers."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.timed = TimedKubectl(settings)

    @property
    def kubectl(self) -> Kubectl:
        """The one that remembers."""
        return self.timed


def _label(args: tuple[str, ...]) -> str:
    """A call in a few words, the same in every sample: no name of an object is in it."""
    verb, what = args[0], args[1]
    if what == "--raw":
        kind = next(part for part in reversed(args[2].split("/")) if part.endswith("s"))
        return f"kubectl {verb} --raw {kind}"
    return f"kubectl {verb}" + ("" if what.startswith("-") else f" {what}")


def _spans(calls: list[tuple[str, float, float]], began: float) -> list[Span]:
    seen: dict[str, int] = {}
    spans = []
    for label, begin, end in calls:
        seen[label] = seen.get(label, 0) + 1
        number = f" #{seen[label]}" if seen[label] > 1 else ""
        spans.append(Span(label + number, begin - began, end - began))
    return spans


async def _ours(lab: Lab, host: TimedHost) -> Sample:
    host.timed.calls.clear()
    began = time.perf_counter()
    sandbox = (await host.launcher.create()).sandbox
    created = time.perf_counter()
    await host.sessions.open(sandbox.id)
    opened = time.perf_counter()
    checked(await host.sessions.call(sandbox.id, *PLAIN_CALL))
    answered = time.perf_counter()
    spans = [
        Span("Launcher.create", 0.0, created - began),
        Span("Sessions.open", created - began, opened - began),
        Span("first call", opened - began, answered - began),
        *_spans(host.timed.calls, began),
    ]
    asked = time.perf_counter()
    seen = checked(await host.sessions.call(sandbox.id, "run_command", {"command": AGES}))
    spans += _in_pod(str(seen.get("stdout", "")), (asked + time.perf_counter()) / 2 - began)
    await _take_down(lab, host, sandbox.id)
    return Sample(answered - began, tuple(spans))


def _in_pod(said: str, now: float) -> list[Span]:
    """When the container's first process began and when the daemon listened, on our clock.

    Args:
        said: what `AGES` printed; ages need no clock that both sides share.
        now: when it was printed, as seconds after the sample's begin.
    """
    try:
        up, start, ticks, wall, born = (float(word) for word in said.split())
    except ValueError:
        return []  # a sandboxed kernel may show less of /proc
    listening = now - (wall - born)
    return [Span("in the pod: first process to listening", now - (up - start / ticks), listening)]


async def _bare(lab: Lab, objects: tuple[Mapping[str, Any], ...]) -> Sample:
    name = objects[0]["metadata"]["name"]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    began = time.perf_counter()
    await lab.type("apply", "-f", "-", stdin=text)
    applied = time.perf_counter()
    await lab.type("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={WAIT}")
    ready = time.perf_counter()
    await lab.exec_true(name)
    answered = time.perf_counter()
    volume = await lab.volume_of(name)
    await lab.type("delete", f"pod/{name}", f"pvc/{name}", "--wait=false")
    await lab.type("wait", "--for=delete", f"pod/{name}", f"--timeout={WAIT}")
    await lab.volume_gone(name, volume)
    return Sample(
        answered - began,
        (
            Span("kubectl apply", 0.0, applied - began),
            Span("kubectl wait", applied - began, ready - began),
            Span("kubectl exec true", ready - began, answered - began),
        ),
    )


def bare_objects(
    name: str, run: str, pod: Mapping[str, Any], claim: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """A claim and a bare pod, both of one name.

    Args:
        name: of both.
        run: value of the label by which they are found again.
        pod: a sandbox's, as the cluster has it: image, resources and security context are taken.
        claim: a home, likewise: size, class and access mode.
    """
    metadata = {"name": name, "namespace": pod["metadata"]["namespace"], "labels": {LABEL: run}}
    container = _picked(pod["spec"]["containers"][0], _CONTAINER_FIELDS) | {
        "name": CONTAINER,
        "command": ["sleep", "infinity"],
        "volumeMounts": [{"name": "home", "mountPath": WORKSPACE}],
    }
    spec = _picked(pod["spec"], _POD_FIELDS) | {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "home", "persistentVolumeClaim": {"claimName": name}}],
    }
    wanted = _picked(claim["spec"], _CLAIM_FIELDS)
    return (
        {"apiVersion": "v1", "kind": _CLAIM, "metadata": metadata, "spec": wanted},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
    )


def _picked(source: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {field: source[field] for field in fields if field in source}


async def like_ours(lab: Lab, host: Host) -> tuple[Mapping[str, Any], ...]:
    """The bare objects that compare with this host's sandboxes; makes one to look at."""
    status = await host.launcher.create()
    claim = home_claim(host.settings.user_key)
    found = await host.kubectl.get("persistentvolumeclaims", claim)
    assert status.pod, f"{status.sandbox.id} has no pod"
    assert found, f"{claim} is gone"
    pod = await host.kubectl.get("pods", status.pod.name)
    assert pod, f"{status.pod.name} is gone"
    await _take_down(lab, host, status.sandbox.id)
    return bare_objects(f"{LABEL}-{lab.run}", lab.run, pod, found)


async def _take_down(lab: Lab, host: Host, sandbox_id: str) -> None:
    claim = home_claim(host.settings.user_key)
    volume = await lab.volume_of(claim)
    await host.sessions.forget(sandbox_id)
    await host.launcher.destroy(sandbox_id)
    await host.launcher.purge_home()
    await lab.volume_gone(claim, volume)


@asynccontextmanager
async def _sides(lab: Lab) -> AsyncIterator[Sides]:
    host = TimedHost(replace(lab.settings, user=f"{lab.settings.user}-create"))
    try:
        async with cleaned(host, lab.tell):
            lab.tell("making a sandbox to take the bare pod's limits from")
            objects = await like_ours(lab, host)
            yield Sides(partial(_ours, lab, host), partial(_bare, lab, objects))
    finally:
        with anyio.fail_after(CLEANUP_SECONDS, shield=True):
            await lab.type("delete", "pod,pvc", "-l", f"{LABEL}={lab.run}", "--ignore-not-found")


ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="create",
        ours="create with a new home, to the first answer",
        baseline="kubectl apply of a bare pod and a new claim, wait for Ready, exec true",
        sides=_sides,
        runs=8,
        target=1.7,
    ),
)
