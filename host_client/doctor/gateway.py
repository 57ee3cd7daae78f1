"""What leads to apps from outside: whether the cluster has it, takes ours, and names lead there."""

from __future__ import annotations

import socket
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from host_client import manifest
from host_client.clock import utc_now
from host_client.config import Settings
from host_client.doctor.findings import RENDER, Finding, shell
from host_client.errors import ApiUnreachable, Forbidden, KubectlError, NotFound
from host_client.gateway import Gateway
from host_client.kubectl import Kubectl
from host_client.sandbox import draft_sandbox
from in_pod_server.contract import GATEWAY_PORT

LOOKUP_SECONDS = 5.0
DEFAULT_CLASS = "ingressclass.kubernetes.io/is-default-class"
GATEWAY_API = "/apis/gateway.networking.k8s.io/v1"


async def examined(kubectl: Kubectl, settings: Settings) -> AsyncIterator[Finding]:
    """All checks of what GATEWAY names; none where apps are at this machine's own address."""
    gateway = settings.gateway
    if not gateway.in_cluster:
        return
    parent = ingress_class if gateway.kind == "ingress" else gateway_api
    found = await parent(kubectl, settings)
    yield found
    if found.result != "failure":
        yield await route(kubectl, settings)
    yield await way_in(kubectl)
    yield await names(gateway)


async def ingress_class(kubectl: Kubectl, settings: Settings) -> Finding:
    """Whether a controller takes our Ingresses."""
    name = settings.gateway.ingress_class
    known = f"`{shell(kubectl)} get ingressclass` lists them"
    try:
        if name:
            await kubectl.json("get", "ingressclass", name, "-o", "json")
            return Finding("ingress class", "ok", name)
        classes = (await kubectl.json("get", "ingressclasses", "-o", "json"))["items"]
    except NotFound:
        fix = f"set INGRESS_CLASS to one that there is ({known}), or have a controller installed"
        return Finding("ingress class", "failure", f"{name} does not exist", fix)
    except Forbidden:
        fix = "nothing, if an app's address works; else have --cluster-reads rendered for you"
        return Finding("ingress class", "unknown", "classes may not be read", fix)
    standard = [
        each["metadata"]["name"]
        for each in classes
        if each["metadata"].get("annotations", {}).get(DEFAULT_CLASS) == "true"
    ]
    if len(standard) == 1:
        return Finding("ingress class", "ok", f"{standard[0]}, the cluster's default")
    some = ", ".join(each["metadata"]["name"] for each in classes)
    if standard:
        detail, fix = f"several are the default: {', '.join(standard)}", "set INGRESS_CLASS to one"
    elif some:
        detail, fix = f"none is the default; there are: {some}", "set INGRESS_CLASS to one of them"
    else:
        detail = "there is none: nothing takes Ingresses here"
        fix = "have an ingress controller installed, or set GATEWAY=local"
    return Finding("ingress class", "failure", detail, fix)


async def gateway_api(kubectl: Kubectl, settings: Settings) -> Finding:
    """Whether the Gateway API is there, and the Gateway that our HTTPRoutes name."""
    namespace, name = settings.gateway.parent
    try:
        await kubectl.json("get", "--raw", GATEWAY_API)
    except NotFound:
        fix = "have the Gateway API and an implementation installed, or set GATEWAY to ingress or local"
        return Finding("gateway", "failure", "the cluster has no Gateway API (v1)", fix)
    except Forbidden:
        return Finding("gateway", "unknown", "the cluster's APIs may not be read")
    try:
        path = f"{GATEWAY_API}/namespaces/{namespace}/gateways/{name}"
        found = await kubectl.json("get", "--raw", path)
    except NotFound:
        fix = f"set HTTPROUTE_PARENT to one that `{shell(kubectl)} get gateways -A` lists"
        return Finding("gateway", "failure", f"{namespace}/{name} does not exist", fix)
    except Forbidden:
        fix = "nothing, if an app's address works; else have --cluster-reads rendered for you"
        return Finding("gateway", "unknown", f"{namespace}/{name} may not be read", fix)
    if not _takes(found, kubectl.namespace == namespace):
        fix = f"have a listener's allowedRoutes of {namespace}/{name} name namespace {kubectl.namespace}"
        detail = f"{namespace}/{name} takes routes of its own namespace only"
        return Finding("gateway", "failure", detail, fix)
    if await _mixes(kubectl, found):
        detail = (
            f"a listener of {namespace}/{name} has a hostname with *, for which Traefik leads one "
        )
        fix = "have the listener's hostname left out: then each route's own hosts hold"
        return Finding("gateway", "warning", f"{detail}sandbox's apps to another's pod", fix)
    return Finding("gateway", "ok", f"{namespace}/{name}")


async def _mixes(kubectl: Kubectl, gateway: dict[str, Any]) -> bool:
    """Whether it is one of Traefik's whose listener is wider than our routes.

    Up to 3.6 at least it takes the listener's `*.example.com` for a route's `*.work.example.com`, so
    every sandbox's route takes every app's host, and with it the token of another.
    """
    spec = gateway.get("spec", {})
    if not any(each.get("hostname", "").startswith("*.") for each in spec.get("listeners", [])):
        return False
    try:
        path = f"{GATEWAY_API}/gatewayclasses/{spec.get('gatewayClassName')}"
        found = await kubectl.json("get", "--raw", path)
    except (NotFound, Forbidden):
        return False
    return str(found.get("spec", {}).get("controllerName", "")).startswith("traefik.io/")


def _takes(gateway: dict[str, Any], same_namespace: bool) -> bool:
    """Whether a listener may take routes of ours; what a selector says is not ours to read."""
    return same_namespace or any(
        listener.get("allowedRoutes", {}).get("namespaces", {}).get("from", "Same") != "Same"
        for listener in gateway.get("spec", {}).get("listeners", [])
    )


async def route(kubectl: Kubectl, settings: Settings) -> Finding:
    """Whether the API server would take what leads to a sandbox."""
    draft = replace(draft_sandbox(settings, utc_now()), uid=str(uuid.uuid4()))
    for wanted in manifest.gateway(draft, settings):
        try:
            await kubectl.would_create(wanted)
        except (ApiUnreachable, NotFound):
            raise
        except KubectlError as error:
            said = " ".join(str(error).split())
            fix = f"have an administrator render with your settings: {RENDER}"
            return Finding("route", "failure", f"its {wanted['kind']} is refused: {said}", fix)
    return Finding("route", "ok", "what leads to a sandbox passes all admission")


async def way_in(kubectl: Kubectl) -> Finding:
    """Whether network policies let a proxy in; which one, they say by labels that are not ours to read."""
    try:
        policies = (await kubectl.json("get", "networkpolicies", "-o", "json"))["items"]
    except Forbidden:
        return Finding("way in", "unknown", "network policies may not be read")
    closing = [
        each for each in policies if "Ingress" in each["spec"].get("policyTypes", ["Ingress"])
    ]
    if not closing:
        return Finding("way in", "ok", "no network policy keeps the proxies out")
    for each in closing:
        for rule in each["spec"].get("ingress", []):
            ports = rule.get("ports", [])
            if not ports or GATEWAY_PORT in [port.get("port") for port in ports]:
                name = each["metadata"]["name"]
                return Finding("way in", "ok", f"{name} lets some in, to port {GATEWAY_PORT}")
    fix = f"have an administrator name the proxies' namespace by --ingress-from: {RENDER}"
    return Finding("way in", "failure", "network policies keep the proxies out", fix)


async def names(gateway: Gateway) -> Finding:
    """Whether a name of an app would lead anywhere, as this machine resolves it."""
    if gateway.domain.endswith("localhost"):
        return Finding("names", "ok", f"browsers lead *.{gateway.domain} to their own machine")
    host = gateway.host("podpipe-doctor", "app")
    found = False
    with anyio.move_on_after(LOOKUP_SECONDS):
        try:
            await anyio.to_thread.run_sync(
                partial(socket.getaddrinfo, host, gateway.port), abandon_on_cancel=True
            )
            found = True
        except (OSError, UnicodeError):
            pass
    if found:
        return Finding("names", "ok", f"*.{gateway.domain} resolves")
    fix = (
        f"have a DNS record *.{gateway.domain} made that leads to the proxies; one is enough, for a "
        "wildcard covers names of any depth"
    )
    return Finding("names", "failure", f"{host} does not resolve here", fix)
