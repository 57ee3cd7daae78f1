"""`podpipe doctor`: what podpipe needs, looked at one by one, each with its fix.

Every check is one line: ok, warning or failure. Later checks that cannot be made without an earlier
one are left out, so that the first failure is the one to mend.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from host_client.config import DEFAULT_RUNTIME_CLASS, DEFAULT_STORAGE_CLASS, Settings
from host_client.errors import ApiUnreachable, Forbidden, KubectlError, NotFound, PodpipeError
from host_client.kubectl import Kubectl, find_kubectl

Result = Literal["ok", "warning", "failure"]

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


WANTED: Sequence[tuple[str, str]] = (("delete", "persistentvolumeclaims"),)
"""Only for removing homes: `destroy --purge-home`, client.py, and a first create that failed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Args:
        check: what was looked at.
        result: how it is.
        detail: what was found.
        fix: what to do; empty where nothing is.
    """

    check: str
    result: Result
    detail: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """The form of `--json`."""
        return asdict(self)


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Look at everything that `settings` needs, in the order in which it is needed."""
    env_file = f", settings from {settings.env_file}" if settings.env_file else ""
    yield Finding("user", "ok", f"{settings.user!r}, key {settings.user_key}{env_file}")
    try:
        find_kubectl(settings)
    except PodpipeError as error:
        fix = "install kubectl, or set PODPIPE_KUBECTL to the absolute path of one"
        yield Finding("kubectl", "failure", str(error), fix)
        return
    try:
        kubectl = Kubectl(settings)
    except PodpipeError as error:
        fix = (
            "set KUBECONFIG to the file that reaches your cluster and PODPIPE_CONTEXT to a context "
            "that `kubectl config get-contexts` lists; `scripts/cluster up` makes a cluster"
        )
        yield Finding("kubeconfig", "failure", str(error), fix)
        return
    where = f"context {kubectl.target.context!r}, server {kubectl.target.server}"
    yield Finding("kubectl", "ok", kubectl.path)
    yield Finding("kubeconfig", "ok", where)
    try:
        version = await kubectl.json("version", "-o", "json")
        for finding in _versions(version):
            yield finding
    except ApiUnreachable as error:
        yield Finding(
            "API server",
            "failure",
            str(error),
            (
                f"start the cluster, or renew the login, until this works: {_shell(kubectl)} get --raw /readyz"
            ),
        )
        return
    except KubectlError as error:
        yield Finding(
            "API server",
            "failure",
            str(error),
            f"renew the kubeconfig's credentials, until this works: {_shell(kubectl)} auth whoami",
        )
        return
    async for finding in _namespace(kubectl, settings):
        yield finding
    async for finding in _verbs(kubectl):
        yield finding
    async for finding in _classes(kubectl, settings):
        yield finding


def _versions(version: dict[str, Any]) -> list[Finding]:
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


async def _namespace(kubectl: Kubectl, settings: Settings) -> AsyncIterator[Finding]:
    name = settings.namespace
    try:
        found = await kubectl.json("get", "namespace", name, "-o", "json")
    except NotFound:
        yield Finding(
            "namespace",
            "warning",
            f"{name} does not exist yet",
            "nothing: the first `podpipe create` makes it",
        )
        return
    except Forbidden:
        yield Finding(
            "namespace",
            "warning",
            f"{name} may not be read: unknown",
            (
                "nothing, if `podpipe create` works; else have an administrator make it, or set "
                "NAMESPACE to one of yours"
            ),
        )
        return
    level = found["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce", "none")
    if level == "restricted":
        yield Finding("namespace", "ok", f"{name}, Pod Security {level}")
    else:
        yield Finding(
            "namespace",
            "warning",
            f"{name}, Pod Security {level}",
            f"kubectl label namespace {name} pod-security.kubernetes.io/enforce=restricted",
        )


async def _verbs(kubectl: Kubectl) -> AsyncIterator[Finding]:
    missing = [f"{v} {r}" for v, r in NEEDED if not await _allowed(kubectl, v, r)]
    if missing:
        yield Finding(
            "permissions",
            "failure",
            f"not allowed in {kubectl.namespace}: {', '.join(missing)}",
            f"have an administrator grant these verbs in a Role of namespace {kubectl.namespace}",
        )
    else:
        yield Finding("permissions", "ok", f"all {len(NEEDED)} verbs allowed in the namespace")
    if missing := [f"{v} {r}" for v, r in WANTED if not await _allowed(kubectl, v, r)]:
        yield Finding(
            "removing homes",
            "warning",
            f"not allowed: {', '.join(missing)}; homes stay until an administrator deletes them",
            "nothing, unless you want `destroy --purge-home`: then have this verb granted",
        )


async def _allowed(kubectl: Kubectl, verb: str, resource: str) -> bool:
    group, _, sub = resource.partition("/")
    attributes = {
        "namespace": kubectl.namespace,
        "verb": verb,
        "resource": group,
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


async def _classes(kubectl: Kubectl, settings: Settings) -> AsyncIterator[Finding]:
    for kind, wanted, default, fallback in (
        (
            "runtimeclass",
            settings.runtime_class,
            DEFAULT_RUNTIME_CLASS,
            "the cluster's default runtime",
        ),
        (
            "storageclass",
            settings.storage_class,
            DEFAULT_STORAGE_CLASS,
            "the cluster's default class",
        ),
    ):
        name = default if wanted is None else wanted
        setting = "RUNTIME_CLASS" if kind == "runtimeclass" else "DEFAULT_STORAGE_CLASS"
        known = f"{_shell(kubectl)} get {kind}"
        if not name:
            yield Finding(kind, "ok", fallback)
            continue
        try:
            await kubectl.json("get", kind, name, "-o", "json")
        except NotFound:
            if wanted is None:
                found = f"{name} does not exist; {fallback} is used"
                fix = f"nothing, if that suits; else set {setting} to one that `{known}` lists"
                yield Finding(kind, "warning", found, fix)
            else:
                fix = f"set {setting} to one that `{known}` lists, or leave it unset"
                yield Finding(kind, "failure", f"{name} does not exist", fix)
        except Forbidden:
            fix = f"nothing, if `podpipe create` works; else ask an administrator which {setting} to set"
            yield Finding(kind, "warning", f"{name} may not be read: unknown", fix)
        else:
            yield Finding(kind, "ok", name)


def _shell(kubectl: Kubectl) -> str:
    """The beginning of a command that asks the same cluster."""
    context = ["--context", kubectl.target.context] if kubectl.target.context else []
    return shlex.join([kubectl.path, *context])
