"""Apps through an HTTPRoute of each sandbox: by the Gateway API's own definitions, on the real cluster."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from host_client import manifest
from host_client.clock import utc_now
from host_client.sandbox import draft_sandbox
from tests.cluster import proxies
from tests.cluster.conftest import Cluster, administered
from tests.cluster.gateways import APP_PORT, start_app
from tests.cluster.test_ingress import gone, leading_to, refusal, unjudged
from tests.gateway_api import definitions
from tests.in_pod_server.gateways import Place, free_port
from tests.in_pod_server.support import eventually

PORT = free_port()
DOMAIN = "apps.test"
KIND = "httproutes.gateway.networking.k8s.io"
HAS_NONE = "this cluster had the Gateway API before these tests"


@pytest.fixture(scope="module")
def led(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A namespace whose sandboxes an HTTPRoute leads to, if the cluster knows any."""
    with administered(
        environment,
        tmp_path_factory.mktemp("httproute"),
        "--ingress-from",
        "envoy-gateway-system",
        GATEWAY="httproute",
        BASE_DOMAIN=DOMAIN,
        GATEWAY_SCHEME=f"http:{PORT}",
        HTTPROUTE_PARENT="infra/public",
    ) as found:
        found.environment["PODPIPE_USER"] = f"ing-{secrets.token_hex(4)}"
        yield found


def known(cluster: Cluster) -> bool:
    return cluster.attempt("get", "crd", KIND, everywhere=True).returncode == 0


def test_a_cluster_without_the_gateway_api_is_told_so_and_nothing_is_left(led: Cluster) -> None:
    if known(led):
        pytest.skip(HAS_NONE)
    refused = led.podpipe("create", "--name", "work")
    assert refused.returncode == 1
    assert "this cluster knows no HTTPRoute, which GATEWAY=httproute needs" in refused.stderr
    # The Service was made, and goes with the record.
    eventually(lambda: not [ref for ref in led.left() if "/sandbox-" in ref])
    report = json.loads(led.podpipe("doctor", "--json").stdout)
    (found,) = [each for each in report if each["check"] == "gateway"]
    assert (found["result"], found["detail"]) == ("failure", "the cluster has no Gateway API (v1)")
    swept = led.podpipe("reap")
    assert swept.returncode == 0, swept.stderr


def established(cluster: Cluster) -> bool:
    """`kubectl wait` gives up where a definition is so new that its conditions are null."""
    found = json.loads(cluster.kubectl("get", "crd", KIND, "-o", "json", everywhere=True))
    conditions = found.get("status", {}).get("conditions") or []
    return any((each["type"], each["status"]) == ("Established", "True") for each in conditions)


@pytest.fixture(scope="module")
def routes(led: Cluster) -> Iterator[Cluster]:
    """The same on a cluster that knows them; what was brought for that goes again."""
    if known(led):
        yield led
        return
    files = [word for path in definitions() for word in ("-f", str(path))]
    led.kubectl("apply", "--server-side", *files, everywhere=True)
    try:
        eventually(lambda: established(led))
        yield led
    finally:
        led.kubectl("delete", "--timeout=60s", *files, everywhere=True)


def ours(cluster: Cluster) -> dict[str, Any]:
    settings = cluster.settings()
    draft = replace(draft_sandbox(settings, utc_now()), uid=secrets.token_hex(8))
    return {each["kind"]: each for each in manifest.gateway(draft, settings)}


def test_an_httproute_has_no_field_that_its_definition_does_not_know(routes: Cluster) -> None:
    found = json.dumps(ours(routes)["HTTPRoute"])
    argv = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    tried = routes.attempt(*argv, stdin=found)
    assert tried.returncode == 0, tried.stderr


def test_apps_are_reached_by_the_routes_hosts_until_the_record_takes_it_along(
    routes: Cluster,
) -> None:
    made = routes.podpipe("create", "--name", "work", "--json")
    assert made.returncode == 0, made.stderr
    facts = json.loads(made.stdout)
    sandbox_id, token = facts["sandbox_id"], facts["token"]
    assert leading_to(routes, sandbox_id, KIND) == {"Service", "HTTPRoute"}
    start_app(routes)
    assert routes.podpipe("expose", "work", str(APP_PORT), "web").returncode == 0
    eventually(lambda: len(proxies.endpoints(routes, f"sandbox-{sandbox_id}")) == 1)
    with proxies.leading(routes, PORT, kind=KIND):
        place = Place(("127.0.0.1", PORT), token, sandbox_id, DOMAIN)
        assert place.ask("GET", "/").status == 401
        assert place.seen("/x", place.bearer)["path"] == "/x"
        assert place.ask("GET", "/", place.bearer, app="").status == 200
        assert place.ask("GET", "/", place.bearer, app="nope").status == 404
    assert routes.podpipe("suspend", "work").returncode == 0
    assert routes.podpipe("resume", "work").returncode == 0
    assert routes.podpipe("destroy", "work", "--purge-home", "--yes").returncode == 0
    gone(routes, sandbox_id, KIND)


def test_the_reaper_takes_a_route_whose_sandbox_is_gone(routes: Cluster) -> None:
    """One without an owner, which no garbage collector takes."""
    orphan = ours(routes)["HTTPRoute"]
    del orphan["metadata"]["ownerReferences"]
    with unjudged(routes, orphan):
        routes.kubectl("create", "-f", "-", stdin=json.dumps(orphan))
    swept = routes.podpipe("reap", "--grace", "0", "--json")
    assert swept.returncode == 0, swept.stderr
    assert f"httproutes/{orphan['metadata']['name']}" in swept.stdout
    assert routes.get(KIND)["items"] == []


Object = dict[str, Any]


def backend(found: Object) -> Any:
    return found["spec"]["rules"][0]["backendRefs"][0]


BENT: dict[str, tuple[Callable[[Object], object], str]] = {
    "another's host": (lambda o: o["spec"]["hostnames"].append("www.apps.test"), "own hosts"),
    "every host": (lambda o: o["spec"].pop("hostnames"), "own hosts"),
    "another Gateway": (lambda o: o["spec"]["parentRefs"][0].update(name="x"), "of the Gateway"),
    "another's Gateway": (
        lambda o: o["spec"]["parentRefs"][0].update(namespace="x"), "of the Gateway"),
    "a mesh": (lambda o: o["spec"]["parentRefs"].append({"kind": "Service", "group": "", "name": "x"}),
               "of the Gateway"),
    "another's Service": (lambda o: backend(o).update(name="x"), "own Service"),
    "a Service elsewhere": (lambda o: backend(o).update(namespace="x"), "own Service"),
    "a redirect": (lambda o: o["spec"].update(rules=[{"filters": [
        {"type": "RequestRedirect", "requestRedirect": {"hostname": "evil.test"}}]}]), "own Service"),
    "other headers": (lambda o: backend(o).update(filters=[
        {"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["Host"]}}]),
        "as requests come"),
    "annotations": (lambda o: o["metadata"].update(annotations={"a.test/b": "c"}), "annotations"),
}  # fmt: skip


@pytest.mark.parametrize("case", BENT)
def test_what_leads_elsewhere_is_refused_by_the_policy(routes: Cluster, case: str) -> None:
    bend, words = BENT[case]
    found = copy.deepcopy(ours(routes)["HTTPRoute"])
    assert refusal(routes, found) == ""
    bend(found)
    said = refusal(routes, found)
    assert f"ValidatingAdmissionPolicy 'podpipe.{routes.namespace}.gateway'" in said
    assert words in said


def test_doctor_tells_of_the_gateway_that_is_missing(routes: Cluster) -> None:
    administrator = {"KUBECONFIG": routes.administrator["KUBECONFIG"]}
    found = json.loads(routes.podpipe("doctor", "--json", **administrator).stdout)
    (gateway,) = [each for each in found if each["check"] == "gateway"]
    assert (gateway["result"], gateway["detail"]) == ("failure", "infra/public does not exist")
    launcher = json.loads(routes.podpipe("doctor", "--json").stdout)
    told = {each["check"]: each["result"] for each in launcher}
    assert (told["gateway"], told["route"], told["permissions"]) == ("unknown", "ok", "ok")
