"""What an administrator applies once: roles, network policy, limits, admission policy, the reaper.

Everything is rendered from the same settings as the sandboxes themselves, so that what is allowed
and what is made agree. Nothing here touches a cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

from host_client import manifest
from host_client.config import DEFAULT_RUNTIME_CLASS, Settings
from host_client.errors import UsageError
from host_client.quantity import quantity
from in_pod_server.contract import PREFIX

LAUNCHER = f"{PREFIX}-launcher"
REAPER = f"{PREFIX}-reaper"
"""Names of the roles, and of the service accounts that have them."""

TEMPLATES = ("access", "limits", "network", "policy", "gateway", "reaper")

_SUBJECT = re.compile(r"(User|Group):(.+)|ServiceAccount:([a-z0-9-]+)/([a-z0-9.-]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Administration:
    """What an administrator decides, beside the settings.

    Args:
        launchers: who may make sandboxes: User:NAME, Group:NAME, ServiceAccount:NAMESPACE/NAME;
            empty for a service account of their own.
        images: what a sandbox may be made of, a trailing `*` for anything; empty for SANDBOX_IMAGE.
        egress: CIDRs that sandboxes reach although they are not the internet.
        ingress_from: namespaces, or CIDRs, of the proxies that lead to apps; not for GATEWAY=local.
        reaper_image: what the reaper's CronJob runs; empty for no CronJob.
        max_sandboxes: pods at once; MAX_SANDBOXES counts those that are suspended too.
        max_homes: volumes in the namespace.
        isolation: whether a sandbox must have gVisor or a user namespace.
        purge: whether launchers may delete homes.
        cluster_reads: whether launchers may read classes and nodes.
    """

    launchers: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    egress: tuple[str, ...] = ()
    ingress_from: tuple[str, ...] = ()
    reaper_image: str = ""
    max_sandboxes: int = 50
    max_homes: int = 200
    isolation: bool = False
    purge: bool = False
    cluster_reads: bool = False


def beside(namespace: str) -> str:
    """The namespace of the service accounts and the reaper, where no sandbox lives.

    Raises:
        UsageError: the name would be too long for a namespace.
    """
    name = f"{namespace}-admin"
    if len(name) > 63:
        raise UsageError(
            f"NAMESPACE={namespace!r} is too long by {len(name) - 63}: {name} is used too"
        )
    return name


def documents(settings: Settings, administration: Administration) -> list[manifest.Object]:
    """All objects, in the order in which they can be applied.

    Raises:
        UsageError: a subject, CIDR or number makes no sense.
    """
    a = administration
    for name, number in (("--max-sandboxes", a.max_sandboxes), ("--max-homes", a.max_homes)):
        if number < 1:
            raise UsageError(f"{name} {number} has to be at least 1")
    for block in a.egress:
        _check_cidr("--egress", block)
    in_cluster, kind = settings.gateway.in_cluster, settings.gateway.kind
    if in_cluster and not a.ingress_from:
        raise UsageError(
            f"GATEWAY={kind} needs --ingress-from, the namespace of the proxies that lead to apps, "
            "such as ingress-nginx: the network policy lets nobody else in"
        )
    if a.ingress_from and not in_cluster:
        raise UsageError("--ingress-from needs GATEWAY=ingress or httproute: else nobody is let in")
    namespace = settings.namespace
    values: Mapping[str, Any] = {
        "a": a,
        "settings": settings,
        "namespace": namespace,
        "beside": beside(namespace),
        "name": PREFIX,
        "scoped": f"{PREFIX}.{namespace}",
        "gateway": settings.gateway,
        "sources": [_source(where) for where in a.ingress_from],
        "launcher": LAUNCHER,
        "reaper": REAPER,
        "images": a.images or (settings.image,),
        "runtime_class": settings.runtime_class or DEFAULT_RUNTIME_CLASS,
        "pull_secrets": settings.pull_secrets,
        "subjects": [_subject(who) for who in a.launchers]
        or [{"kind": "ServiceAccount", "name": LAUNCHER, "namespace": beside(namespace)}],
        "label": lambda name: f"object.metadata.?labels[?{cel(name)}].orValue('')",
        "cel": cel,
        "total": lambda each: _times(each, a.max_sandboxes),
    }
    found = [manifest.namespace(settings), manifest.namespace(settings, beside(namespace))]
    for template in TEMPLATES:
        found += manifest.render_all(f"admin/{template}.yaml.j2", **values)
    return found


def cel(value: object) -> str:
    """A string, number or list as a literal of the policy's expression language."""
    return json.dumps(value, ensure_ascii=False)


def _times(each: str, count: int) -> str:
    """`count` times a quantity, as a plain number."""
    total = quantity(each, "a limit") * count
    return str(int(total)) if total == total.to_integral_value() else f"{int(total * 1000)}m"


def _subject(who: str) -> manifest.Object:
    match = _SUBJECT.fullmatch(who)
    if not match:
        raise UsageError(
            f"--launcher {who!r} is not User:NAME, Group:NAME or ServiceAccount:NAMESPACE/NAME"
        )
    if match[1]:
        return {"apiGroup": "rbac.authorization.k8s.io", "kind": match[1], "name": match[2]}
    return {"kind": "ServiceAccount", "name": match[4], "namespace": match[3]}


def _source(where: str) -> manifest.Object:
    """What lets a namespace or a CIDR in, for a network policy."""
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", where):
        labels = {"kubernetes.io/metadata.name": where}
        return {"namespaceSelector": {"matchLabels": labels}}
    _check_cidr("--ingress-from", where)
    return {"ipBlock": {"cidr": where}}


def _check_cidr(option: str, block: str) -> None:
    try:
        if "/" not in block:
            raise ValueError("it has no /length")
        ip_network(block)
    except ValueError as error:
        raise UsageError(f"{option} {block!r} is not a CIDR such as 10.1.2.0/24: {error}") from None
