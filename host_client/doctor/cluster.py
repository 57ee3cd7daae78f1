"""What the cluster and the namespace would do with a sandbox: asked of the API server, made nowhere."""

from __future__ import annotations

import copy
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import datetime
from decimal import Decimal

from host_client import manifest
from host_client.clock import parse_timestamp, utc_now
from host_client.config import DEFAULT_RUNTIME_CLASS, DEFAULT_STORAGE_CLASS, Settings
from host_client.doctor import access, gateway
from host_client.doctor.findings import RENDER, Finding, shell
from host_client.errors import ApiUnreachable, Forbidden, KubectlError, NotFound, UsageError
from host_client.kubectl import Kubectl, Object
from host_client.quantity import quantity
from host_client.sandbox import draft_sandbox

SKEW_SECONDS = 30.0
"""A clock that is further off shortens or lengthens lives noticeably."""
FEW = 3
"""With room for fewer sandboxes than this the quota is worth a warning."""

NODES = 10
"""How many nodes are asked for their configuration, one after the other."""

DEEP = "`podpipe doctor --deep` finds out, with two sandboxes of its own"


async def examined(kubectl: Kubectl, settings: Settings, *, deep: bool) -> AsyncIterator[Finding]:
    """All checks that need an API server, in the order in which they build on one another.

    Args:
        kubectl: the pinned cluster.
        settings: how sandboxes are made.
        deep: whether sandboxes will be made to try what no dry run tells.

    Raises:
        NotFound: the namespace does not exist, which was said; nothing can be tried in it.
    """
    found = await namespace(kubectl, settings)
    yield found
    async for each in access.verbs(kubectl, settings.gateway.kind):
        yield each
    if "does not exist" in found.detail:
        raise NotFound(found.detail)
    yield await clock(kubectl, settings)
    yield await pod_security(kubectl, settings)
    yield await admission(kubectl, settings)
    runtime = await runtime_class(kubectl, settings)
    yield runtime
    yield await storage_class(kubectl, settings)
    yield await quota(kubectl, settings)
    yield await sandbox(kubectl, settings, with_class=runtime.result != "warning")
    yield await image(kubectl, settings, deep=deep)
    yield await processes(kubectl)
    yield await network(kubectl, deep=deep)
    async for each in gateway.examined(kubectl, settings):
        yield each


async def namespace(kubectl: Kubectl, settings: Settings) -> Finding:
    """Whether it is there."""
    name = settings.namespace
    try:
        await kubectl.json("get", "namespace", name, "-o", "json")
    except NotFound:
        fix = "nothing: the first `podpipe create` makes it, if you may"
        return Finding("namespace", "warning", f"{name} does not exist yet", fix)
    except Forbidden:
        fix = "nothing, if the lines below are ok; else set NAMESPACE to one that is yours"
        return Finding("namespace", "unknown", f"{name} may not be read", fix)
    return Finding("namespace", "ok", name)


async def clock(kubectl: Kubectl, settings: Settings) -> Finding:
    """How far this machine's clock is from the API server's, which sandboxes expire by."""
    record = manifest.record(draft_sandbox(settings, utc_now()), settings)
    before = utc_now()
    try:
        tried = await kubectl.would_create(record)
    except Forbidden:
        return Finding("clock", "unknown", "the API server's clock is not told", "see permissions")
    skew = _skew(parse_timestamp(tried["metadata"]["creationTimestamp"]), before, utc_now())
    detail = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the API server's"
    if abs(skew) > SKEW_SECONDS:
        fix = "set this machine's clock (timedatectl set-ntp true), or the control plane's"
        return Finding("clock", "warning", detail, fix)
    return Finding("clock", "ok", "that of the API server" if not skew else detail)


def _skew(theirs: datetime, before: datetime, after: datetime) -> float:
    """Seconds by which our clock is ahead; what the call itself took does not count."""
    if before <= theirs <= after:
        return 0.0
    nearest = before if theirs < before else after
    return (nearest - theirs).total_seconds()


async def pod_security(kubectl: Kubectl, settings: Settings) -> Finding:
    """Whether a pod that is not restricted is refused."""
    weak = probe(settings)
    del weak["spec"]["securityContext"]["seccompProfile"]
    refusal = await _refusal(kubectl, weak)
    if "violates PodSecurity" in refusal:
        return Finding("Pod Security", "ok", "restricted is enforced")
    if refusal:
        return Finding("Pod Security", "unknown", f"another layer was first: {refusal}")
    label = "pod-security.kubernetes.io/enforce=restricted"
    fix = f"have an administrator run: kubectl label namespace {settings.namespace} {label}"
    return Finding("Pod Security", "warning", "a pod that is not restricted is let in", fix)


async def admission(kubectl: Kubectl, settings: Settings) -> Finding:
    """Whether a pod that is restricted and yet weaker than a sandbox is refused."""
    weak = probe(settings)
    weak["spec"]["enableServiceLinks"] = True
    refusal = await _refusal(kubectl, weak)
    if "ValidatingAdmissionPolicy" in refusal:
        return Finding("admission policy", "ok", "a pod weaker than a sandbox is refused")
    if refusal:
        return Finding("admission policy", "unknown", f"another layer was first: {refusal}")
    fix = f"have an administrator run: {RENDER}"
    return Finding("admission policy", "warning", "a pod weaker than a sandbox is let in", fix)


async def runtime_class(kubectl: Kubectl, settings: Settings) -> Finding:
    """Whether the one that sandboxes ask for exists."""
    wanted = settings.runtime_class
    name = DEFAULT_RUNTIME_CLASS if wanted is None else wanted
    if not name:
        return Finding("runtimeclass", "ok", "the cluster's default runtime")
    try:
        await kubectl.json("get", "runtimeclass", name, "-o", "json")
    except NotFound:
        missing = True
    except Forbidden:
        refusal = await _refusal(kubectl, probe(settings, name))
        missing = f'RuntimeClass "{name}" not found' in refusal
    else:
        missing = False
    if not missing:
        return Finding("runtimeclass", "ok", name)
    known = f"one that `{shell(kubectl)} get runtimeclass` lists"
    if wanted is None:
        detail = f"{name} does not exist: sandboxes share the node's kernel"
        fix = f"install gVisor; or set RUNTIME_CLASS to {known}, or to nothing to accept it"
        return Finding("runtimeclass", "warning", detail, fix)
    fix = f"set RUNTIME_CLASS to {known}, or leave it unset"
    return Finding("runtimeclass", "failure", f"{name} does not exist", fix)


async def storage_class(kubectl: Kubectl, settings: Settings) -> Finding:
    """Whether the one of new homes exists; no dry run would tell."""
    wanted = settings.storage_class
    name = DEFAULT_STORAGE_CLASS if wanted is None else wanted
    if not name:
        return Finding("storageclass", "ok", "the cluster's default class")
    known = f"one that `{shell(kubectl)} get storageclass` lists"
    try:
        await kubectl.json("get", "storageclass", name, "-o", "json")
    except NotFound:
        if wanted is None:
            detail = f"{name} does not exist; the cluster's default class is used"
            fix = f"nothing, if that suits; else set DEFAULT_STORAGE_CLASS to {known}"
            return Finding("storageclass", "warning", detail, fix)
        fix = f"set DEFAULT_STORAGE_CLASS to {known}, or leave it unset"
        return Finding("storageclass", "failure", f"{name} does not exist", fix)
    except Forbidden:
        detail = "may not be read" + ("; the cluster's default class is used" if not wanted else "")
        fix = "nothing, if `podpipe create` works; else have --cluster-reads rendered for you"
        return Finding("storageclass", "unknown", f"{name} {detail}", fix)
    return Finding("storageclass", "ok", name)


async def quota(kubectl: Kubectl, settings: Settings) -> Finding:
    """How many sandboxes of the default size there is room for."""
    try:
        quotas = (await kubectl.json("get", "resourcequotas", "-o", "json"))["items"]
    except Forbidden:
        return Finding("quota", "unknown", "may not be read", f"an administrator's: {RENDER}")
    room: dict[str, int] = {}
    for each in quotas:
        hard, used = each["status"].get("hard", {}), each["status"].get("used", {})
        for resource, needed in _needs(settings).items():
            if resource in hard:
                left = _amount(hard[resource]) - _amount(used.get(resource, "0"))
                room[f"{resource} of {each['metadata']['name']}"] = max(0, int(left / needed))
    if not room:
        return Finding("quota", "ok", "none")
    tightest = min(room, key=lambda name: room[name])
    detail = f"room for {room[tightest]} more sandboxes, by {tightest}"
    if room[tightest] < FEW:
        fix = "destroy sandboxes that are not needed (`podpipe list`), or have the quota raised"
        return Finding("quota", "warning" if room[tightest] else "failure", detail, fix)
    return Finding("quota", "ok", detail)


def _needs(settings: Settings) -> Mapping[str, Decimal]:
    """What a sandbox takes of each resource that a quota may count."""
    amounts = {
        "pods": "1",
        "count/pods": "1",
        "count/configmaps": "1",
        "requests.cpu": settings.cpu_request,
        "cpu": settings.cpu_request,
        "requests.memory": settings.memory_request,
        "memory": settings.memory_request,
        "limits.cpu": settings.cpu_limit,
        "limits.memory": settings.memory_limit,
        "limits.ephemeral-storage": settings.ephemeral_storage_limit,
    }
    return {name: quantity(amount, name) for name, amount in amounts.items()}


def _amount(text: str) -> Decimal:
    """A quantity that may be nothing."""
    try:
        return quantity(text, "quota")
    except UsageError:
        return Decimal(0)


async def sandbox(kubectl: Kubectl, settings: Settings, *, with_class: bool) -> Finding:
    """Whether the API server would take the pod of a sandbox as it is."""
    name = DEFAULT_RUNTIME_CLASS if settings.runtime_class is None else settings.runtime_class
    refusal = await _refusal(kubectl, probe(settings, name if with_class else ""))
    if refusal:
        fix = f"change what it names; if it is the image, an administrator allows it by --image: {RENDER}"
        return Finding("sandbox", "failure", f"its pod is refused: {refusal}", fix)
    return Finding("sandbox", "ok", "its pod passes all admission")


async def image(kubectl: Kubectl, settings: Settings, *, deep: bool) -> Finding:
    """Whether the image is known to be there; only a pull can prove that it is not.

    Args:
        kubectl: the pinned cluster.
        settings: name the image.
        deep: whether a sandbox of it will be made.
    """
    pods = (await kubectl.json("get", "pods", "-o", "json"))["items"]
    for pod in pods:
        if pod.get("status", {}).get("phase") == "Running" and any(
            container["image"] == settings.image for container in pod["spec"]["containers"]
        ):
            return Finding("image", "ok", f"{settings.image} runs here")
    try:
        nodes = (await kubectl.json("get", "nodes", "-o", "json"))["items"]
    except Forbidden:
        fix = "" if deep else DEEP
        return Finding("image", "unknown", f"{settings.image} runs nowhere here yet", fix)
    names = [
        {
            name
            for image in node["status"].get("images", [])
            for name in image.get("names") or []  # null: its tag has gone to another
        }
        for node in nodes
    ]
    having = sum(any(_same_image(name, settings.image) for name in each) for each in names)
    detail = f"{settings.image} is on {having} of {len(nodes)} nodes"
    if having:
        return Finding("image", "ok", detail)
    fix = "nothing, if the nodes can pull it; else `scripts/image load` or push, or SANDBOX_IMAGE"
    return Finding("image", "warning", detail, fix)


def _same_image(name: str, wanted: str) -> bool:
    """Nodes list images with their registry and tag written out."""
    tagged = wanted if ":" in wanted.rpartition("/")[2] or "@" in wanted else f"{wanted}:latest"
    return tagged in (name, name.removeprefix("docker.io/").removeprefix("library/"))


async def processes(kubectl: Kubectl) -> Finding:
    """Whether a fork bomb ends at a sandbox's edge, which is the kubelet's to see to.

    The limit is that of the pod, so nothing inside a container shows it.
    """
    unlimited: list[str] = []
    try:
        nodes = (await kubectl.json("get", "nodes", "-o", "json"))["items"]
        names = [str(node["metadata"]["name"]) for node in nodes[:NODES]]
        for name in names:
            path = f"/api/v1/nodes/{name}/proxy/configz"
            config = (await kubectl.json("get", "--raw", path))["kubeletconfig"]
            if int(config.get("podPidsLimit", -1)) <= 0:
                unlimited.append(name)
    except Forbidden:
        fix = "an administrator's doctor tells it"
        return Finding("processes", "unknown", "the kubelets' podPidsLimit may not be read", fix)
    except ApiUnreachable:
        raise
    except KubectlError as error:
        # An API server passes on no request to a node on its own loopback, say.
        fix = "look for podPidsLimit in the configuration of the kubelets"
        return Finding("processes", "unknown", f"the kubelets cannot be asked: {error}", fix)
    if not names:
        return Finding("processes", "unknown", "the cluster has no node")
    if unlimited:
        detail = f"no limit for a sandbox on {', '.join(unlimited)}"
        fix = "have podPidsLimit set in the kubelet's configuration, to 4096 for example"
        return Finding("processes", "warning", detail, fix)
    return Finding("processes", "ok", f"podPidsLimit is set on {', '.join(names)}")


async def network(kubectl: Kubectl, *, deep: bool) -> Finding:
    """Whether a policy closes the namespace; that something enforces it shows only by trying.

    Args:
        kubectl: the pinned cluster.
        deep: whether that will be tried.
    """
    try:
        policies = (await kubectl.json("get", "networkpolicies", "-o", "json"))["items"]
    except Forbidden:
        return Finding("network policy", "unknown", "may not be read", "" if deep else DEEP)
    for policy in policies:
        spec = policy["spec"]
        everything = not any(spec.get("podSelector", {}).values())
        if everything and {"Ingress", "Egress"} <= set(spec.get("policyTypes", [])):
            detail = f"{policy['metadata']['name']} closes the namespace"
            if deep:
                return Finding("network policy", "ok", detail)
            detail += "; whether it is enforced was not tried"
            return Finding("network policy", "unknown", detail, DEEP)
    fix = f"have an administrator run: {RENDER}"
    return Finding("network policy", "warning", "none for all pods: egress is open", fix)


def probe(settings: Settings, runtime: str = "") -> Object:
    """The pod of a sandbox that does not exist.

    Args:
        settings: of the sandbox.
        runtime: its runtime class; empty for the cluster's default.
    """
    draft = replace(draft_sandbox(settings, utc_now()), uid=str(uuid.uuid4()))
    return copy.deepcopy(manifest.pod(draft, settings, runtime, [settings.storage_access_mode]))


async def _refusal(kubectl: Kubectl, pod: Object) -> str:
    """Why the API server would not let a pod in; empty where it would."""
    try:
        await kubectl.would_create(pod)
    except (ApiUnreachable, NotFound):
        raise
    except KubectlError as error:
        return " ".join(str(error).split())
    return ""
