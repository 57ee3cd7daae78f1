"""Where published apps are reached: at this machine's own address, or through the cluster's proxy.

What leads there in the cluster is an Ingress, or an HTTPRoute of the Gateway API; either is rendered
for each sandbox from what is said here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

from host_client.errors import UsageError

Kind = Literal["local", "ingress", "httproute"]

DOMAIN = "sandbox.localhost"
"""Of the local addresses; browsers lead every name below `localhost` to this machine."""
OPEN_PORT = 8790
MAX_DOMAIN = 170
"""With the longest app and sandbox in front of it a host is as long as a host may be."""

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DOMAIN = re.compile(rf"(?:{_LABEL}\.)*(?=[a-z0-9-]*[a-z-]){_LABEL}")
_PARENT = re.compile(rf"({_LABEL})/({_LABEL}(?:\.{_LABEL})*)")
_SCHEME = re.compile(r"(https?)(?::([1-9][0-9]{0,4}))?")
_ANNOTATION = re.compile(
    r"((?:[a-z0-9.-]{1,253}/)?[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?)=(.*)", re.ASCII
)
_USUAL_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Gateway:
    """How an app is reached.

    Args:
        kind: local for the listener of this machine, else what is rendered for each sandbox.
        domain: of all addresses.
        scheme: http or https, as clients speak it.
        port: where clients connect to.
        ingress_class: of an Ingress; empty for the cluster's default.
        parent: namespace and name of the Gateway of an HTTPRoute.
        annotations: of each Ingress or HTTPRoute, for the controller.
    """

    kind: Kind = "local"
    domain: str = DOMAIN
    scheme: str = "http"
    port: int = OPEN_PORT
    ingress_class: str = ""
    parent: tuple[str, str] = ("", "")
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_texts(cls, text: Callable[[str], str], open_port: int) -> Self:
        """Read the settings that say so.

        Args:
            text: gives a setting's text by its name, stripped; empty where it is unset.
            open_port: of the local listener.

        Raises:
            UsageError: one is malformed, or is missing for what GATEWAY says.
        """
        asked = text("GATEWAY") or "local"
        kind: Kind | None = next((each for each in get_args(Kind) if each == asked), None)
        if kind is None:
            raise UsageError(f"GATEWAY={asked!r} has to be {' or '.join(get_args(Kind))}")
        domain = text("BASE_DOMAIN") or DOMAIN
        if kind == "local":
            if domain != DOMAIN:
                raise UsageError(
                    f"BASE_DOMAIN={domain!r} needs GATEWAY=ingress or httproute: what this machine "
                    f"serves itself is at {DOMAIN}"
                )
            return cls(port=open_port)
        if len(domain) > MAX_DOMAIN or not _DOMAIN.fullmatch(domain):
            raise UsageError(
                f"BASE_DOMAIN={domain[:200]!r} is no domain of at most {MAX_DOMAIN} characters, such "
                "as apps.example.com"
            )
        said = text("GATEWAY_SCHEME") or "https"
        scheme = _SCHEME.fullmatch(said)
        port = int((scheme and scheme[2]) or 0)
        if not scheme or port > 65535:
            raise UsageError(
                f"GATEWAY_SCHEME={said!r} has to be https or http, with the port if it is another "
                "than usual: http:8080"
            )
        parent = _PARENT.fullmatch(text("HTTPROUTE_PARENT"))
        if kind == "httproute" and not parent:
            raise UsageError(
                f"HTTPROUTE_PARENT={text('HTTPROUTE_PARENT')!r} has to be NAMESPACE/NAME of the "
                "Gateway that GATEWAY=httproute is to use; `kubectl get gateways -A` lists them"
            )
        ingress_class = text("INGRESS_CLASS")
        if ingress_class and not _DOMAIN.fullmatch(ingress_class):
            raise UsageError(
                f"INGRESS_CLASS={ingress_class!r} is no class's name; `kubectl get ingressclass` lists them"
            )
        return cls(
            kind=kind,
            domain=domain,
            scheme=scheme[1],
            port=port or _USUAL_PORTS[scheme[1]],
            ingress_class=ingress_class,
            parent=(parent[1], parent[2]) if parent else ("", ""),
            annotations=_annotations(text("GATEWAY_ANNOTATIONS")),
        )

    @property
    def in_cluster(self) -> bool:
        """Whether the cluster's proxy leads to the apps, and nothing is served on this machine."""
        return self.kind != "local"

    @property
    def name(self) -> str:
        """What pods are told that leads to them; empty for nothing."""
        return f"{self.kind} {self.domain}" if self.in_cluster else ""

    def host(self, sandbox_id: str, app: str = "") -> str:
        """The host of an app, or of the sandbox's own page; `*` for every app."""
        return ".".join(filter(None, (app, sandbox_id, self.domain)))

    def address(self, sandbox_id: str, app: str = "", token: str = "") -> str:
        """The address of an app, or of the sandbox's own page.

        Args:
            sandbox_id: of the sandbox.
            app: its name; empty for the page.
            token: makes it a link that opens it.
        """
        port = "" if self.port == _USUAL_PORTS[self.scheme] else f":{self.port}"
        query = f"?token={token}" if token else ""
        return f"{self.scheme}://{self.host(sandbox_id, app)}{port}/{query}"


def _annotations(text: str) -> Mapping[str, str]:
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        match = _ANNOTATION.fullmatch(part)
        if not match:
            raise UsageError(
                f"GATEWAY_ANNOTATIONS has {part[:80]!r}, which is no NAME=VALUE, such as "
                "cert-manager.io/cluster-issuer=letsencrypt; more are separated by commas"
            )
        found[match[1]] = match[2]
    return found
