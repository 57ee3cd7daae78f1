"""Apps through an Ingress of each sandbox, on the real cluster: made, led to, refused, gone again."""

from __future__ import annotations

import copy
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from host_client import manifest
from host_client.admin import LAUNCHER
from host_client.backends.gateway import lead_to
from host_client.backends.pod import PodBackend
from host_client.clock import utc_now
from host_client.errors import NameTaken
from host_client.host import Host
from host_client.kubectl import Kubectl
from host_client.sandbox import draft_sandbox
from tests.cluster import proxies
from tests.cluster.conftest import POLICY_SECONDS, Cluster, administered
from tests.cluster.gateways import APP_PORT, start_app
from tests.cluster.test_roles import Stage, fails, succeeds, without
from tests.in_pod_server import test_gateway
from tests.in_pod_server.gateways import Place, free_port
from tests.in_pod_server.support import eventually

DOMAIN = "apps.test"
PORT = free_port()
GONE_SECONDS = 120.0
"""The garbage collector of a busy cluster takes its time, and looks for new kinds twice a minute."""
OF_THE_PROXY = {
    "test_a_host_that_is_no_app_of_the_sandbox_is_not_found",
    "test_case_port_and_domain_of_a_host_say_nothing",
    "test_a_target_that_names_another_host_goes_by_that_host_alone",
}
"""A proxy chooses the sandbox by the host, and has words of its own for those it does not know."""

globals().update(
    {
        name: test
        for name, test in vars(test_gateway).items()
        if name.startswith("test_") and name not in OF_THE_PROXY
    }
)


@pytest.fixture(scope="module")
def led(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A namespace whose sandboxes an Ingress leads to."""
    with administered(
        environment,
        tmp_path_factory.mktemp("ingress"),
        "--ingress-from",
        "ingress-nginx",
        GATEWAY="ingress",
        BASE_DOMAIN=DOMAIN,
        GATEWAY_SCHEME=f"http:{PORT}",
        GATEWAY_ANNOTATIONS="example.com/body-size=0",
        INGRESS_CLASS="test",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def place(led: Cluster) -> Iterator[Place]:
    led.environment["PODPIPE_USER"] = f"ing-{secrets.token_hex(4)}"
    made = led.podpipe("create", "--name", "work", "--json")
    assert made.returncode == 0, made.stderr
    facts = json.loads(made.stdout)
    assert facts["url"] == f"http://{facts['sandbox_id']}.{DOMAIN}:{PORT}/"
    start_app(led)
    for name, port in (("web", APP_PORT), ("other", APP_PORT), ("down", APP_PORT + 1)):
        exposed = led.podpipe("expose", "work", str(port), name)
        assert exposed.stdout.startswith(f"http://{name}.{facts['sandbox_id']}.{DOMAIN}:{PORT}/")
    eventually(lambda: len(proxies.endpoints(led, f"sandbox-{facts['sandbox_id']}")) == 1)
    with proxies.leading(led, PORT):
        yield Place(("127.0.0.1", PORT), facts["token"], facts["sandbox_id"], DOMAIN)
    assert led.podpipe("destroy", "work", "--purge-home", "--yes").returncode == 0


def test_a_host_that_no_ingress_names_leads_nowhere(place: Place) -> None:
    for host in (f"web.x.{DOMAIN}", DOMAIN, f"a.web.{place.base}", f"web.{place.base}.evil.test"):
        assert place.ask("GET", "/", place.bearer, host=host).status == 404, host
    assert place.ask("GET", "/", place.bearer, app="nope").json() == {"error": "no such app"}


def test_a_link_sets_a_cookie_for_tls_alone_and_leads_to_the_clean_address(
    led: Cluster, place: Place
) -> None:
    with proxies.leading(led, port := free_port(), scheme="https"):
        secure = replace(place, address=("127.0.0.1", port))
        html = {"Accept": "text/html"}
        gone = secure.ask("GET", f"/x?a=1&token={place.token}", html)
        assert (gone.status, gone.headers["location"]) == (303, "/x?a=1")
        (cookie,) = gone.set_cookies
        assert cookie.startswith(f"{place.cookie};")
        assert cookie.endswith("; Secure")
        seen = secure.seen("/x?a=1", {"Cookie": place.cookie})
        assert seen["path"] == "/x?a=1"
        assert seen["headers"]["x-forwarded-proto"] == "https"
        assert seen["headers"]["x-forwarded-for"].startswith("127.0.0.1, ")
        page = secure.ask("GET", "/go/web", {"Cookie": place.cookie}, app="")
        assert page.headers["location"].startswith(f"https://{secure.host()}/?token=")
        assert secure.ask("GET", "/x").status == 401
        with secure.websocket("/ws", {"Cookie": place.cookie}) as (opened, _):
            opened.send("hello")
            assert opened.recv() == "hello"


def test_open_and_access_hand_over_the_same_addresses(led: Cluster, place: Place) -> None:
    opened = led.podpipe("open", "work", "web", "--no-browser")
    assert opened.returncode == 0, opened.stderr
    address = f"http://{place.host()}"
    assert opened.stdout.startswith(f"{address}/?token=")
    target = opened.stdout.strip().removeprefix(address)
    assert place.ask("GET", target, {"Accept": "text/html"}).status == 303
    assert f"{address}/?token=" in led.podpipe("access", "work", "--for", "1m").stdout
    listed = json.loads(led.podpipe("apps", "work", "--json").stdout)["apps"]
    assert {app["name"]: app["url"] for app in listed}["web"] == f"{address}/"


@pytest.fixture
def made(led: Cluster) -> Iterator[tuple[str, str]]:
    """A sandbox of its own, by name and id; gone afterwards with its home."""
    user, name = led.environment["PODPIPE_USER"], f"ing-{secrets.token_hex(3)}"
    led.environment["PODPIPE_USER"] = name
    created = led.podpipe("create", "--name", name, "--json")
    assert created.returncode == 0, created.stderr
    yield name, json.loads(created.stdout)["sandbox_id"]
    led.podpipe("destroy", name, "--purge-home", "--yes")
    led.environment["PODPIPE_USER"] = user


def leading_to(cluster: Cluster, sandbox_id: str, kind: str = "ingresses") -> set[str]:
    found = cluster.get(f"services,{kind}", "-l", f"podpipe/sandbox={sandbox_id}")["items"]
    return {each["kind"] for each in found}


def gone(cluster: Cluster, sandbox_id: str, kind: str = "ingresses") -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while left := leading_to(cluster, sandbox_id, kind):
        assert time.monotonic() < deadline, f"the garbage collector leaves {left}"
        time.sleep(0.2)


def test_a_service_leads_to_the_present_pod_and_goes_with_the_record(
    led: Cluster, made: tuple[str, str]
) -> None:
    name, sandbox_id = made
    service = f"sandbox-{sandbox_id}"

    def leads_to_the_pod() -> bool:
        pods = led.get("pods", "-l", f"podpipe/sandbox={sandbox_id}")["items"]
        addresses = [f"{pod['status'].get('podIP')}:8080" for pod in pods]
        return addresses == list(proxies.endpoints(led, service))

    assert leading_to(led, sandbox_id) == {"Service", "Ingress"}
    eventually(lambda: leads_to_the_pod() and bool(proxies.endpoints(led, service)))
    first = proxies.endpoints(led, service)
    uid = led.get("service", service)["metadata"]["uid"]
    assert led.podpipe("suspend", name).returncode == 0
    eventually(lambda: not proxies.endpoints(led, service))
    assert leading_to(led, sandbox_id) == {"Service", "Ingress"}
    assert led.podpipe("resume", name).returncode == 0
    eventually(lambda: leads_to_the_pod() and bool(proxies.endpoints(led, service)))
    assert proxies.endpoints(led, service) != first, "another pod has another address"
    assert led.get("service", service)["metadata"]["uid"] == uid
    assert led.podpipe("destroy", name).returncode == 0
    gone(led, sandbox_id)


def test_a_name_that_was_destroyed_is_led_to_again_at_once(
    led: Cluster, made: tuple[str, str]
) -> None:
    name, sandbox_id = made
    assert led.podpipe("destroy", name).returncode == 0
    again = led.podpipe("create", "--name", name)
    assert again.returncode == 0, again.stderr
    owner = led.get("configmap", f"sandbox-{sandbox_id}")["metadata"]["uid"]
    for kind in ("service", "ingress"):
        owners = led.get(kind, f"sandbox-{sandbox_id}")["metadata"]["ownerReferences"]
        assert [each["uid"] for each in owners] == [owner]


def test_settings_that_are_not_the_administrators_are_refused_and_start_nothing(
    led: Cluster, made: tuple[str, str]
) -> None:
    name, sandbox_id = made
    assert led.podpipe("suspend", name).returncode == 0
    refused = led.podpipe("resume", name, BASE_DOMAIN="other.test")
    assert refused.returncode == 1
    assert "an Ingress here leads from its sandbox's own hosts below BASE_DOMAIN" in refused.stderr
    assert "BASE_DOMAIN, INGRESS_CLASS and GATEWAY_ANNOTATIONS those that" in refused.stderr
    assert led.get("pods", "-l", f"podpipe/sandbox={sandbox_id}")["items"] == []
    resumed = led.podpipe("resume", name)
    assert resumed.returncode == 0, resumed.stderr


def test_what_reap_deletes_takes_along_what_led_to_it(led: Cluster, made: tuple[str, str]) -> None:
    _, sandbox_id = made
    over = {"metadata": {"annotations": {"podpipe/expires-at": "2020-01-01T00:00:00Z"}}}
    led.kubectl("patch", "configmap", f"sandbox-{sandbox_id}", "-p", json.dumps(over))
    reaped = led.podpipe("reap", "--json")
    assert reaped.returncode == 0, reaped.stderr
    assert f"configmaps/sandbox-{sandbox_id}" in reaped.stdout
    gone(led, sandbox_id)


async def test_a_service_of_somebody_else_is_refused_and_left(led: Cluster) -> None:
    settings = replace(led.settings(), user=f"ing-{secrets.token_hex(4)}")
    draft = draft_sandbox(settings, utc_now(), "work")
    name = draft.object_name
    theirs = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"ports": [{"port": 1}]},
    }  # fmt: skip
    with unjudged(led, theirs):  # it was there before the administrator's policy
        made = json.loads(led.kubectl("create", "-o", "json", "-f", "-", stdin=json.dumps(theirs)))[
            "metadata"
        ]
    try:
        async with Host(settings) as host:
            with pytest.raises(NameTaken, match=f"Service {name} in namespace {led.namespace}"):
                await host.launcher.create(name="work")
        now = led.get("service", name)["metadata"]
        assert (now["uid"], now["resourceVersion"]) == (made["uid"], made["resourceVersion"])
        assert not led.get("configmaps,pods", "-l", f"podpipe/sandbox={draft.id}")["items"]
    finally:
        led.kubectl("delete", "service", name)


@contextmanager
def unjudged(cluster: Cluster, found: dict[str, Any]) -> Iterator[None]:
    """The policy of what leads to apps, which refuses an object, is not in force while this lasts."""
    binding = f"validatingadmissionpolicybinding/podpipe.{cluster.namespace}.gateway"
    cluster.kubectl("delete", binding, everywhere=True)
    _judged(cluster, found, refused=False)
    try:
        yield
    finally:
        cluster.administer()
        other = found | {"metadata": found["metadata"] | {"name": "other"}}
        _judged(cluster, other, refused=True)


def _judged(cluster: Cluster, found: dict[str, Any], *, refused: bool) -> None:
    """An API server notices a policy that came or went a moment later."""
    deadline = time.monotonic() + POLICY_SECONDS
    while bool(refusal(cluster, found)) != refused:
        assert time.monotonic() < deadline, "the policy does not come into force, or stays in it"
        time.sleep(0.2)


Object = dict[str, Any]


def rule(found: Object) -> Any:
    return found["spec"]["rules"][0]


def backend(found: Object) -> Any:
    return rule(found)["http"]["paths"][0]["backend"]["service"]


BENT: dict[str, tuple[str, Callable[[Object], object], str]] = {
    "another's host": ("Ingress", lambda o: rule(o).update(host="www.apps.test"), "own hosts"),
    "every host": ("Ingress", lambda o: rule(o).pop("host"), "own hosts"),
    "no rules": ("Ingress", lambda o: o["spec"].update(
        rules=[], defaultBackend={"service": {"name": "x", "port": {"number": 1}}}), "own hosts"),
    "a default backend": ("Ingress", lambda o: o["spec"].update(
        defaultBackend={"service": {"name": "x", "port": {"number": 1}}}), "own Service"),
    "another's Service": ("Ingress", lambda o: backend(o).update(name="x"), "own Service"),
    "another class": ("Ingress", lambda o: o["spec"].update(ingressClassName="x"), "the class"),
    "another's certificate": ("Ingress", lambda o: o["spec"].update(
        tls=[{"hosts": [rule(o)["host"]], "secretName": "theirs"}]), "own hosts"),
    "a certificate for every host": ("Ingress", lambda o: o["spec"].update(
        tls=[{"secretName": o["metadata"]["name"] + "-tls"}]), "own hosts"),
    "a snippet": ("Ingress", lambda o: o["metadata"]["annotations"].update(
        {"nginx.ingress.kubernetes.io/server-snippet": "x"}), "annotations"),
    "another value": ("Ingress", lambda o: o["metadata"]["annotations"].update(
        {"example.com/body-size": "1"}), "annotations"),
    "a node's port": ("Service", lambda o: o["spec"].update(type="NodePort"), "within the cluster"),
    "a name outside": ("Service", lambda o: o["spec"].update(
        type="ExternalName", externalName="x.test"), "within the cluster"),
    "an address outside": ("Service", lambda o: o["spec"].update(externalIPs=["192.0.2.1"]),
                           "within the cluster"),
    "everybody's pods": ("Service", lambda o: o["spec"]["selector"].pop("podpipe/sandbox"),
                         "for the apps of one sandbox"),
    "no selector": ("Service", lambda o: o["spec"].pop("selector"), "for the apps of one sandbox"),
    "another port": ("Service", lambda o: o["spec"]["ports"][0].update(targetPort=22),
                     "for the apps of one sandbox"),
    "another name": ("Service", lambda o: o["metadata"].update(name="x"), "its record's name"),
    "no labels": ("Ingress", lambda o: o["metadata"].pop("labels"), "its record's name"),
    "no record": ("Ingress", lambda o: o["metadata"].pop("ownerReferences"), "hangs from"),
}  # fmt: skip


def ours(cluster: Cluster) -> dict[str, Object]:
    settings = cluster.settings()
    draft = replace(draft_sandbox(settings, utc_now()), uid=secrets.token_hex(8))
    return {each["kind"]: each for each in manifest.gateway(draft, settings)}


def refusal(cluster: Cluster, found: Object) -> str:
    tried = cluster.attempt("create", "--dry-run=server", "-f", "-", stdin=json.dumps(found))
    return tried.stderr if tried.returncode else ""


@pytest.mark.parametrize("case", BENT)
def test_what_leads_elsewhere_is_refused_by_the_policy(led: Cluster, case: str) -> None:
    kind, bend, words = BENT[case]
    found = copy.deepcopy(ours(led)[kind])
    assert refusal(led, found) == ""
    bend(found)
    said = refusal(led, found)
    assert f"ValidatingAdmissionPolicy 'podpipe.{led.namespace}.gateway'" in said
    assert words in said


def test_a_controllers_own_annotations_stay_when_the_sandbox_is_resumed(
    led: Cluster, made: tuple[str, str]
) -> None:
    name, sandbox_id = made
    led.kubectl("create", "serviceaccount", "controller")
    account = f"system:serviceaccount:{led.namespace}:controller"
    role = ("--verb=patch,get", "--resource=ingresses.networking.k8s.io")
    led.kubectl("create", "role", "controller", *role)
    led.kubectl("create", "rolebinding", "controller", "--role=controller",
                f"--serviceaccount={led.namespace}:controller")  # fmt: skip
    try:
        note = ("annotate", "ingress", f"sandbox-{sandbox_id}", "example.net/backend=healthy")
        assert "annotations here are those" in led.attempt(*note).stderr, "of an administrator"
        eventually(lambda: led.attempt(*note, f"--as={account}").returncode == 0)
        assert led.podpipe("suspend", name).returncode == 0
        resumed = led.podpipe("resume", name)
        assert resumed.returncode == 0, resumed.stderr
        notes = led.get("ingress", f"sandbox-{sandbox_id}")["metadata"]["annotations"]
        assert notes["example.net/backend"] == "healthy"
    finally:
        led.kubectl("delete", "serviceaccount,role,rolebinding", "controller")


@pytest.fixture
async def stage(led: Cluster) -> AsyncIterator[Stage]:
    settings = replace(led.settings(), user=f"ing-{secrets.token_hex(4)}")
    backend = PodBackend(Kubectl(settings), settings)
    sandbox = await backend.claim(draft_sandbox(settings, utc_now(), "work"))
    pod = await backend.start(sandbox, None)
    home = await backend.home()
    assert home
    yield Stage(settings, sandbox, pod, home)
    led.kubectl("delete", "configmap", sandbox.object_name, "--ignore-not-found")
    led.kubectl("delete", "persistentvolumeclaims", "-l", f"podpipe/user={settings.user_key}")


async def lead_anew(on: Stage) -> None:
    """Of a sandbox that is nowhere, so that the garbage collector takes what is made of it."""
    draft = replace(draft_sandbox(on.settings, utc_now()), uid=secrets.token_hex(8))
    await lead_to(on.kubectl, draft, on.settings)


@pytest.mark.parametrize("resource", ["services", "ingresses"])
@pytest.mark.parametrize("verb", ["create", "get", "patch"])
async def test_a_launcher_needs_each_of_its_rights(
    led: Cluster, stage: Stage, verb: str, resource: str
) -> None:
    with without(led, LAUNCHER, (verb, resource)):
        await fails(lead_anew, stage)
        refused = led.podpipe("doctor", "--json")
        (permissions,) = (
            each for each in json.loads(refused.stdout) if each["check"] == "permissions"
        )
        assert permissions["result"] == "failure"
        assert f"{verb} {resource}" in permissions["detail"]
    await succeeds(lead_anew, stage)


def test_the_launcher_may_do_no_more_with_them(led: Cluster) -> None:
    who = f"--as=system:serviceaccount:{led.namespace}-admin:{LAUNCHER}"
    for resource in ("services", "ingresses.networking.k8s.io"):
        for verb in ("delete", "list", "watch", "update", "deletecollection"):
            asked = led.attempt("auth", "can-i", verb, resource, who)
            assert asked.stdout.strip() == "no", f"{verb} {resource}"


def test_doctor_tells_of_the_class_and_of_the_name_that_are_missing(led: Cluster) -> None:
    administrator = led.podpipe("doctor", "--json", KUBECONFIG=led.administrator["KUBECONFIG"])
    found = {each["check"]: each for each in json.loads(administrator.stdout)}
    assert found["ingress class"]["result"] == "failure"
    assert found["ingress class"]["detail"] == "test does not exist"
    assert found["way in"]["result"] == "ok"
    assert (found["names"]["result"], DOMAIN in found["names"]["fix"]) == ("failure", True)
    launcher = json.loads(led.podpipe("doctor", "--json").stdout)
    told = {each["check"]: each["result"] for each in launcher}
    assert (told["ingress class"], told["route"]) == ("unknown", "ok")
