"""What doctor says of the way to apps through the cluster."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from host_client.config import Settings
from host_client.doctor import gateway
from host_client.kubectl import Kubectl
from tests.host_client.conftest import Podpipe, StubCluster
from tests.host_client.test_doctor import (
    FORBIDDEN,
    MISSING,
    NONE,
    POLICY,
    Answer,
    Answering,
    Check,
    policy,
    tried,
)
from tests.host_client.test_gateway import HTTPROUTE, INGRESS

API = gateway.GATEWAY_API
PUBLIC = f"{API}/namespaces/infra/gateways/public"
NAMED = INGRESS | {"INGRESS_CLASS": "nginx"}


def classes(*defaults: str, others: tuple[str, ...] = ()) -> Answer:
    marked = {"annotations": {gateway.DEFAULT_CLASS: "true"}}
    return {
        "items": [
            *({"metadata": {"name": name} | marked} for name in defaults),
            *({"metadata": {"name": name}} for name in others),
        ]
    }


def listening(*froms: str | None) -> Answer:
    listeners: list[dict[str, Any]] = [
        {"allowedRoutes": {"namespaces": {"from": each}}} if each else {} for each in froms
    ]
    return {"spec": {"listeners": listeners}}


WIDE: Answer = {
    "spec": {
        "gatewayClassName": "public",
        "listeners": [
            {
                "hostname": "*.apps.example.com",
                "allowedRoutes": {"namespaces": {"from": "All"}},
            }
        ],
    }
}
CLASS = f"{API}/gatewayclasses/public"


def controlled(by: str) -> Answer:
    return {"spec": {"controllerName": by}}


def letting_in(**rule: Any) -> Answer:
    found = policy({}, "Ingress", "Egress")
    assert isinstance(found, dict)
    found["items"][0]["spec"]["ingress"] = [rule]
    return found


async def way_in(kubectl: Kubectl, _: Settings) -> Any:
    return await gateway.way_in(kubectl)


LINES: list[tuple[Check, dict[str, str], dict[str, Answer], str, str]] = [
    (gateway.ingress_class, NAMED, {"ingressclass": {}}, "ok", "nginx"),
    (gateway.ingress_class, NAMED, {"ingressclass": MISSING}, "failure", "nginx does not exist"),
    (gateway.ingress_class, NAMED, {"ingressclass": FORBIDDEN}, "unknown", "may not be read"),
    (gateway.ingress_class, INGRESS, {"ingressclasses": classes("nginx", others=("b",))},
     "ok", "nginx, the cluster's default"),
    (gateway.ingress_class, INGRESS, {"ingressclasses": classes("a", "b")},
     "failure", "several are the default: a, b"),
    (gateway.ingress_class, INGRESS, {"ingressclasses": classes(others=("a", "b"))},
     "failure", "none is the default; there are: a, b"),
    (gateway.ingress_class, INGRESS, {"ingressclasses": NONE}, "failure", "there is none"),
    (gateway.gateway_api, HTTPROUTE, {API: MISSING}, "failure", "has no Gateway API"),
    (gateway.gateway_api, HTTPROUTE, {API: FORBIDDEN}, "unknown", "may not be read"),
    (gateway.gateway_api, HTTPROUTE, {API: {}, PUBLIC: MISSING}, "failure", "does not exist"),
    (gateway.gateway_api, HTTPROUTE, {API: {}, PUBLIC: FORBIDDEN}, "unknown", "may not be read"),
    (gateway.gateway_api, HTTPROUTE, {API: {}, PUBLIC: listening(None, "All")},
     "ok", "infra/public"),
    (gateway.gateway_api, HTTPROUTE, {API: {}, PUBLIC: listening("Selector")}, "ok", "infra"),
    (gateway.gateway_api, HTTPROUTE, {API: {}, PUBLIC: listening(None, "Same")},
     "failure", "routes of its own namespace only"),
    (gateway.gateway_api, HTTPROUTE, {API: {}, PUBLIC: WIDE, CLASS: controlled("traefik.io/x")},
     "warning", "one sandbox's apps to another's pod"),
    (gateway.gateway_api, HTTPROUTE, {API: {}, PUBLIC: WIDE, CLASS: controlled("other.io/x")},
     "ok", "infra/public"),
    (gateway.gateway_api, HTTPROUTE, {API: {}, PUBLIC: WIDE, CLASS: FORBIDDEN},
     "ok", "infra/public"),
    (gateway.gateway_api, HTTPROUTE | {"NAMESPACE": "infra"}, {API: {}, PUBLIC: listening("Same")},
     "ok", "infra/public"),
    (gateway.route, INGRESS, {"try Service": tried(), "try Ingress": tried()},
     "ok", "passes all admission"),
    (gateway.route, INGRESS, {"try Service": tried(), "try Ingress": POLICY},
     "failure", "its Ingress is refused"),
    (gateway.route, HTTPROUTE, {"try Service": FORBIDDEN}, "failure", "its Service is refused"),
    (way_in, INGRESS, {"networkpolicies": NONE}, "ok", "no network policy"),
    (way_in, INGRESS, {"networkpolicies": policy({}, "Egress")}, "ok", "no network policy"),
    (way_in, INGRESS, {"networkpolicies": policy({}, "Ingress", "Egress")},
     "failure", "keep the proxies out"),
    (way_in, INGRESS, {"networkpolicies": letting_in(ports=[{"port": 9}])},
     "failure", "keep the proxies out"),
    (way_in, INGRESS, {"networkpolicies": letting_in(ports=[{"port": 8080}])},
     "ok", "closed lets some in, to port 8080"),
    (way_in, INGRESS, {"networkpolicies": letting_in()}, "ok", "closed lets some in"),
    (way_in, INGRESS, {"networkpolicies": FORBIDDEN}, "unknown", "may not be read"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "environment", "answers", "result", "words"), LINES)
async def test_a_line_says_what_was_found_and_what_is_to_be_done(
    stub: StubCluster,
    check: Check,
    environment: dict[str, str],
    answers: dict[str, Answer],
    result: str,
    words: str,
) -> None:
    settings = stub.settings(**environment)
    finding = await check(Answering(stub, answers, settings), settings)
    assert (finding.result, words in finding.detail) == (result, True), finding
    if result in ("warning", "failure"):
        assert finding.fix


async def test_names_are_looked_up_two_labels_below_the_domain(
    stub: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    missing = True

    def lookup(host: str, port: int) -> list[object]:
        asked.append(f"{host}:{port}")
        if missing:
            raise socket.gaierror("unknown")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    found = await gateway.names(stub.settings(**INGRESS).gateway)
    assert (found.result, asked) == ("failure", ["app.podpipe-doctor.apps.example.com:443"])
    assert "have a DNS record *.apps.example.com made" in found.fix
    missing = False
    found = await gateway.names(stub.settings(**INGRESS).gateway)
    assert (found.result, found.detail) == ("ok", "*.apps.example.com resolves")
    asked.clear()
    found = await gateway.names(stub.settings(GATEWAY="ingress").gateway)
    assert (found.result, asked) == ("ok", []), "names below localhost are the browser's"


async def test_what_cannot_be_taken_is_not_tried(stub: StubCluster) -> None:
    settings = stub.settings(GATEWAY="ingress")
    answers: dict[str, Answer] = {"ingressclasses": NONE, "networkpolicies": NONE}
    kubectl = Answering(stub, answers, settings)
    found = [each async for each in gateway.examined(kubectl, settings)]
    assert [each.check for each in found] == ["ingress class", "way in", "names"]
    assert [each async for each in gateway.examined(kubectl, stub.settings())] == []


def test_the_report_has_the_lines_of_the_way_to_apps(podpipe: Podpipe, stub: StubCluster) -> None:
    stub.add({"kind": "IngressClass", "metadata": {"name": "nginx"}})
    report = podpipe("doctor", "--json", GATEWAY="ingress", INGRESS_CLASS="nginx")
    found = {each["check"]: each for each in json.loads(report.stdout)}
    assert {name: found[name]["result"] for name in ("ingress class", "route", "names")} == {
        "ingress class": "ok", "route": "ok", "names": "ok"
    }  # fmt: skip
    assert found["permissions"]["detail"].startswith("all 21 verbs")
    plain = json.loads(podpipe("doctor", "--json").stdout)
    assert not {"ingress class", "route", "names"} & {each["check"] for each in plain}
