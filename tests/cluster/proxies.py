"""What an ingress controller does, by a Caddy of this machine: from Ingresses or HTTPRoutes and
EndpointSlices, as the API server has them, to pods' own addresses by the host of each request."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.cluster.conftest import Cluster
from tests.in_pod_server.gateways import proxy

REACH_SECONDS = 3

_CADDYFILE = """\
{{
	admin off
	persist_config off
	auto_https off
}}
http://:{port} {{
	bind 127.0.0.1
{routes}
	handle {{
		respond "no such host" 404
	}}
}}
"""
_ROUTE = """\
	@{name} host {host}
	handle @{name} {{
		{leads}
	}}
"""


def endpoints(cluster: Cluster, service: str) -> Sequence[str]:
    """Address and port of each pod that a Service leads to now."""
    slices = cluster.get("endpointslices", "-l", f"kubernetes.io/service-name={service}")["items"]
    return [
        f"{address}:{port['port']}"
        for found in slices
        for endpoint in found["endpoints"] or []
        if endpoint["conditions"].get("ready")
        for address in endpoint["addresses"]
        for port in found["ports"]
    ]


def hosts(found: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """The Service of each host of Ingresses and HTTPRoutes."""
    return {
        host: backend["name"]
        for each in found
        for rule in each["spec"]["rules"]
        for host in each["spec"].get("hostnames") or [rule["host"]]
        for backend in rule.get("backendRefs")
        or [path["backend"]["service"] for path in rule["http"]["paths"]]
    }


@contextlib.contextmanager
def leading(
    cluster: Cluster, port: int, *, scheme: str = "http", kind: str = "ingresses"
) -> Iterator[None]:
    """Lead requests on a port of the loopback to pods, as if clients had spoken `scheme`."""
    services = hosts(cluster.get(kind)["items"])
    routes = []
    for number, (host, service) in enumerate(services.items()):
        found = " ".join(endpoints(cluster, service))
        told = "{\n\t\t\theader_up X-Forwarded-Proto https\n\t\t}" if scheme == "https" else ""
        leads = f"reverse_proxy {found} {told}" if found else "respond 503"
        routes.append(_ROUTE.format(name=f"host{number}", host=host, leads=leads))
        for address in found.split():
            _reach(address)
    with proxy(_CADDYFILE.format(port=port, routes="".join(routes)), port):
        yield


def _reach(address: str) -> None:
    """Only where this machine is a node, or is routed to the pods' network, can it be the proxy."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except TimeoutError:
        pytest.skip(
            f"this machine does not reach {address}, a pod's own address: run it on a node, as the "
            "node of scripts/cluster is"
        )
