"""Whether kubectl and server fit each other, and what the user may do in the namespace."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from host_client.doctor.findings import RENDER, Finding
from host_client.gateway import Kind
from host_client.kubectl import Kubectl

OLDEST_KUBERNETES = (1, 30)

NEEDED: Sequence[tuple[str, str]] = (
    ("create", "configmaps"),
    ("get", "configmaps"),
    ("list", "configmaps"),
    ("patch", "configmaps"),
    ("delete", "configmaps"),
    ("create", "pods"),
    ("get", "pods"),
    ("list", "pods"),
    ("patch", "pods"),
    ("delete", "pods"),
    ("create", "pods/exec"),
    ("get", "pods/exec"),
    ("create", "persistentvolumeclaims"),
    ("get", "persistentvolumeclaims"),
    ("patch", "persistentvolumeclaims"),
)
"""Verb and resource, in the namespace. exec needs both: kubectl's WebSocket asks for get, and from
Kubernetes 1.35 for create too."""

ROUTES = {
    "local": (),
    "ingress": ("services", "ingresses.networking.k8s.io"),
    "httproute": ("services", "httproutes.gateway.networking.k8s.io"),
}
"""Resources of what leads to apps, by GATEWAY."""


WANTED: Sequence[tuple[str, str]] = (("delete", "persistentvolumeclaims"),)
"""Only for removing homes: `destroy --purge-home`, client.py, and a first create that failed."""


def versions(version: dict[str, Any]) -> list[Finding]:
    """Whether client and server fit each other and us."""

    def minor(of: str) -> tuple[int, int]:
        info = version.get(of, {})
        digits = [re.sub(r"\D.*", "", str(info.get(key, ""))) or "0" for key in ("major", "minor")]
        return int(digits[0]), int(digits[1])

    client, server = minor("clientVersion"), minor("serverVersion")
    text = f"client {client[0]}.{client[1]}, server {server[0]}.{server[1]}"
    if min(client, server) < OLDEST_KUBERNETES:
        return [
            Finding(
                "versions",
                "failure",
                text,
                "upgrade what is older than 1.30; PODPIPE_KUBECTL names another kubectl",
            )
        ]
    if abs(client[1] - server[1]) > 1:
        fix = "use a kubectl within one minor version of the server (PODPIPE_KUBECTL)"
        return [Finding("versions", "warning", text, fix)]
    return [Finding("versions", "ok", text)]


def needed(kind: Kind) -> Sequence[tuple[str, str]]:
    """Verb and resource of all that a launcher does, where this is what leads to apps."""
    return [*NEEDED, *((verb, r) for r in ROUTES[kind] for verb in ("create", "get", "patch"))]


async def verbs(kubectl: Kubectl, kind: Kind = "local") -> AsyncIterator[Finding]:
    """What the user may not do of all that a launcher does, and of what it does if it may.

    Args:
        kubectl: the pinned cluster.
        kind: of what leads to apps.
    """
    asked = needed(kind)
    missing = [f"{v} {r}" for v, r in asked if not await _allowed(kubectl, v, r)]
    if missing:
        yield Finding(
            "permissions",
            "failure",
            f"not allowed in {kubectl.namespace}: {', '.join(missing)}",
            f"have an administrator name you as --launcher: {RENDER}",
        )
    else:
        yield Finding("permissions", "ok", f"all {len(asked)} verbs allowed in the namespace")
    if missing := [f"{v} {r}" for v, r in WANTED if not await _allowed(kubectl, v, r)]:
        yield Finding(
            "removing homes",
            "warning",
            f"not allowed: {', '.join(missing)}; homes stay until an administrator deletes them",
            "nothing, unless you want `destroy --purge-home`: then have --allow-purge rendered",
        )


async def _allowed(kubectl: Kubectl, verb: str, resource: str) -> bool:
    named, _, sub = resource.partition("/")
    plural, _, group = named.partition(".")
    attributes = {
        "namespace": kubectl.namespace,
        "verb": verb,
        "group": group,
        "resource": plural,
        "subresource": sub,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await kubectl.json(
        "create", "--raw", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "-f", "-",
        stdin=json.dumps(review),
    )  # fmt: skip
    return bool(answer.get("status", {}).get("allowed"))
