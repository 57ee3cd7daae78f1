"""What leads to apps in the cluster: said by settings, rendered for each sandbox, gone with it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from host_client import manifest
from host_client.backends import gateway as leading
from host_client.config import Settings
from host_client.errors import Forbidden, LaunchFailed, NameTaken, PodpipeError, UsageError
from host_client.gateway import MAX_DOMAIN, Gateway
from host_client.host import Host
from host_client.sandbox import draft_sandbox
from host_client.server import build_server
from in_pod_server import contract as c
from tests.host_client.conftest import Podpipe, StubCluster
from tests.in_pod_server.gateways import free_port

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
INGRESS = {"GATEWAY": "ingress", "BASE_DOMAIN": "apps.example.com"}
HTTPROUTE = {
    "GATEWAY": "httproute", "BASE_DOMAIN": "apps.example.com", "HTTPROUTE_PARENT": "infra/public"
}  # fmt: skip
LEADING = ("Service", "Ingress", "HTTPRoute")
PORT = 3000


def settings_of(**environment: str) -> Settings:
    return Settings.from_env({"PODPIPE_USER": "alice", **environment}, cwd=Path("/"))


def leading_to(stub: StubCluster) -> dict[str, list[str]]:
    return {kind: names for kind in LEADING if (names := stub.names(kind))}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"GATEWAY": "router"}, "GATEWAY='router' has to be local or ingress or httproute"),
        ({"BASE_DOMAIN": "apps.example.com"}, "needs GATEWAY=ingress or httproute"),
        ({"GATEWAY": "httproute"}, "HTTPROUTE_PARENT='' has to be NAMESPACE/NAME"),
        (HTTPROUTE | {"HTTPROUTE_PARENT": "public"}, "has to be NAMESPACE/NAME"),
        (INGRESS | {"INGRESS_CLASS": "No Class"}, "INGRESS_CLASS='No Class'"),
        (INGRESS | {"GATEWAY_ANNOTATIONS": "a=b,c"}, "has 'c', which is no NAME=VALUE"),
        (INGRESS | {"GATEWAY_ANNOTATIONS": "a b=c"}, "has 'a b=c'"),
        (INGRESS | {"GATEWAY_ANNOTATIONS": "größe=1"}, "has 'größe=1'"),
        *((INGRESS | {"GATEWAY_SCHEME": scheme}, "has to be https or http")
          for scheme in ("ftp", "https:", "https:0", "http:65536", "https://x", "HTTPS")),
        *((INGRESS | {"BASE_DOMAIN": domain}, "is no domain")
          for domain in ("Apps.example.com", "a..b", "-a.b", "*.a.b", "a.b.", "10.0.0.1", "a_b",
                         f"{'a' * 64}.b", f"{'a.' * (MAX_DOMAIN // 2)}ab", "a/b", "a.b:80")),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(
    environment: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        settings_of(**environment)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "page"),
    [
        ({}, "http://work.sandbox.localhost:8790/"),
        ({"PODPIPE_OPEN_PORT": "9000"}, "http://work.sandbox.localhost:9000/"),
        (INGRESS, "https://work.apps.example.com/"),
        (INGRESS | {"GATEWAY_SCHEME": "https:8443"}, "https://work.apps.example.com:8443/"),
        (INGRESS | {"GATEWAY_SCHEME": "http"}, "http://work.apps.example.com/"),
        (INGRESS | {"GATEWAY_SCHEME": "http:80"}, "http://work.apps.example.com/"),
        ({"GATEWAY": "ingress", "GATEWAY_SCHEME": "http:8080"},
         "http://work.sandbox.localhost:8080/"),
        (HTTPROUTE, "https://work.apps.example.com/"),
    ],
)  # fmt: skip
def test_addresses_are_those_that_the_settings_say(environment: dict[str, str], page: str) -> None:
    gateway = settings_of(**environment).gateway
    assert gateway.address("work") == page
    assert gateway.address("work", "web", "t") == f"{page.replace('work', 'web.work')}?token=t"


def test_the_longest_host_is_one_that_dns_and_kubernetes_take() -> None:
    domain = ".".join(["d" * 56] * 3)
    assert len(domain) == MAX_DOMAIN
    gateway = settings_of(**INGRESS | {"BASE_DOMAIN": domain}).gateway
    assert len(gateway.host("s" * 41, "a" * 40)) == 253


def rendered(environment: Mapping[str, str]) -> tuple[str, dict[str, dict[str, Any]]]:
    """A sandbox's id, and what leads to it by kind."""
    settings = settings_of(**environment)
    sandbox = replace(draft_sandbox(settings, NOW, "work"), uid="record-uid")
    return sandbox.id, {o["kind"]: o for o in manifest.gateway(sandbox, settings)}


@pytest.mark.parametrize("environment", [INGRESS, HTTPROUTE])
def test_what_leads_to_a_sandbox_hangs_from_its_record_and_is_called_like_it(
    environment: dict[str, str],
) -> None:
    sandbox_id, objects = rendered(environment)
    assert len(objects) == 2
    for found in objects.values():
        metadata = found["metadata"]
        assert metadata["name"] == f"sandbox-{sandbox_id}"
        assert metadata["labels"][c.LABEL_SANDBOX] == sandbox_id
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "name": f"sandbox-{sandbox_id}",
                "uid": "record-uid",
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ]


def test_the_service_has_the_labels_of_the_sandboxs_pods_whatever_their_incarnation() -> None:
    settings = settings_of(**INGRESS)
    sandbox = replace(draft_sandbox(settings, NOW, "work"), uid="u")
    service = next(o for o in manifest.gateway(sandbox, settings) if o["kind"] == "Service")
    assert service["spec"]["type"] == "ClusterIP"
    assert [port["targetPort"] for port in service["spec"]["ports"]] == [c.GATEWAY_PORT]
    selector = service["spec"]["selector"].items()
    for incarnation in (1, 7):
        pod = manifest.pod(replace(sandbox, incarnation=incarnation), settings, "", [])
        assert selector <= pod["metadata"]["labels"].items()
    for other in (
        draft_sandbox(settings, NOW, "other"),
        draft_sandbox(replace(settings, user="bob"), NOW, "work"),
    ):
        pod = manifest.pod(replace(other, uid="v"), settings, "", [])
        assert not selector <= pod["metadata"]["labels"].items()


def test_an_ingress_leads_page_and_apps_to_the_service() -> None:
    sandbox_id, objects = rendered(
        INGRESS | {"INGRESS_CLASS": "nginx", "GATEWAY_ANNOTATIONS": "a.b/size=0, c.d/issuer=x=y"}
    )
    ingress = objects["Ingress"]
    assert ingress["apiVersion"] == "networking.k8s.io/v1"
    assert ingress["metadata"]["annotations"] == {"a.b/size": "0", "c.d/issuer": "x=y"}
    spec = ingress["spec"]
    hosts = [f"{sandbox_id}.apps.example.com", f"*.{sandbox_id}.apps.example.com"]
    assert [rule["host"] for rule in spec["rules"]] == hosts
    assert spec["ingressClassName"] == "nginx"
    assert spec["tls"] == [{"hosts": hosts, "secretName": f"sandbox-{sandbox_id}-tls"}]
    for rule in spec["rules"]:
        assert rule["http"]["paths"] == [
            {
                "path": "/",
                "pathType": "Prefix",
                "backend": {
                    "service": {"name": f"sandbox-{sandbox_id}", "port": {"number": c.GATEWAY_PORT}}
                },
            }
        ]


def test_an_ingress_says_no_more_than_is_set() -> None:
    _, objects = rendered(INGRESS | {"GATEWAY_SCHEME": "http"})
    assert objects["Ingress"]["spec"].keys() == {"rules"}
    assert "annotations" not in objects["Ingress"]["metadata"]
    assert "annotations" not in objects["Service"]["metadata"]


def test_an_httproute_leads_the_same_hosts_there_from_the_gateway_that_is_named() -> None:
    sandbox_id, objects = rendered(HTTPROUTE)
    route = objects["HTTPRoute"]
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"] == {
        "parentRefs": [{"namespace": "infra", "name": "public"}],
        "hostnames": [f"{sandbox_id}.apps.example.com", f"*.{sandbox_id}.apps.example.com"],
        "rules": [
            {"backendRefs": [{"name": f"sandbox-{sandbox_id}", "port": c.GATEWAY_PORT}]},
        ],
    }


def test_a_pod_is_told_to_listen_for_a_proxy_only_where_one_leads_to_it() -> None:
    def told(settings: Settings) -> bool:
        sandbox = replace(draft_sandbox(settings, NOW), uid="u")
        (container,) = manifest.pod(sandbox, settings, "", [])["spec"]["containers"]
        return c.ENV_GATEWAY_ADDRESS in {each["name"] for each in container["env"]}

    assert told(settings_of(**INGRESS))
    assert told(settings_of(**HTTPROUTE))
    assert not told(settings_of())
    assert manifest.gateway(draft_sandbox(settings_of(), NOW), settings_of()) == []


@pytest.mark.parametrize(("environment", "kind"), [(INGRESS, "Ingress"), (HTTPROUTE, "HTTPRoute")])
async def test_what_leads_to_a_sandbox_lives_as_long_as_its_record(
    stub: StubCluster, environment: dict[str, str], kind: str
) -> None:
    async with Host(stub.settings(**environment)) as host:
        made = await host.launcher.create(name="work")
        name = made.sandbox.object_name
        assert leading_to(stub) == {"Service": [name], kind: [name]}
        uids = [stub.objects[f"{each}/{name}"]["metadata"]["uid"] for each in ("Service", kind)]
        await host.launcher.suspend("work")
        await host.sessions.forget("work")
        assert leading_to(stub) == {"Service": [name], kind: [name]}
        await host.sessions.open("work")
        assert uids == [
            stub.objects[f"{each}/{name}"]["metadata"]["uid"] for each in ("Service", kind)
        ]
        await host.launcher.destroy("work")
    assert leading_to(stub) == {}


async def test_without_the_setting_nothing_of_it_is_asked_or_made(stub: StubCluster) -> None:
    async with Host(stub.settings()) as host:
        await host.launcher.create(name="work")
    assert leading_to(stub) == {}
    assert not [call for call in stub.calls if "services" in str(call) or "Ingress" in str(call)]


FORBIDDEN = (
    'Error from server (Forbidden): services "x" is forbidden: User "alice" cannot patch resource '
    '"services" in API group "" in the namespace "sandbox-system"'
)
POLICY = (
    "The ingresses \"x\" is invalid: : ValidatingAdmissionPolicy 'podpipe.gateway.x' with binding "
    "'podpipe.gateway.x' denied request: the hosts are not its own"
)
NO_KIND = (
    'error: resource mapping not found for name: "x" namespace: "y" from "STDIN": no matches for kind '
    '"HTTPRoute" in version "gateway.networking.k8s.io/v1"\nensure CRDs are installed first'
)


KIND_GONE = (
    "Error from server (NotFound): the server could not find the requested resource (patch "
    "httproutes.gateway.networking.k8s.io x)"
)


@pytest.mark.parametrize(
    ("environment", "said", "kind", "words"),
    [
        (INGRESS, FORBIDDEN, Forbidden, "render the roles with GATEWAY=ingress set"),
        (INGRESS, POLICY, LaunchFailed, "those that the administrator rendered?"),
        (HTTPROUTE, KIND_GONE, LaunchFailed, "this cluster knows no HTTPRoute"),
        (HTTPROUTE, NO_KIND, LaunchFailed, "Have the Gateway API installed, or set GATEWAY"),
    ],
)
async def test_a_refusal_is_told_with_what_to_do_and_leaves_nothing(
    stub: StubCluster, environment: dict[str, str], said: str, kind: type[PodpipeError], words: str
) -> None:
    stub.faults(apply={"stderr": said, "times": 1})
    async with Host(stub.settings(**environment)) as host:
        with pytest.raises(kind) as refused:
            await host.launcher.create(name="work")
    assert words in str(refused.value)
    assert stub.names("ConfigMap") == stub.names("Pod") == []
    assert leading_to(stub) == {}


async def test_a_resume_that_cannot_be_led_to_starts_no_pod_and_can_be_tried_again(
    stub: StubCluster,
) -> None:
    async with Host(stub.settings(**INGRESS)) as host:
        await host.launcher.create(name="work")
        await host.launcher.suspend("work")
        await host.sessions.forget("work")
        stub.faults(apply={"stderr": FORBIDDEN, "times": 1})
        with pytest.raises(Forbidden):
            await host.sessions.open("work")
        assert stub.names("Pod") == []
        await host.sessions.open("work")
        assert len(stub.names("Pod")) == 1


@pytest.mark.parametrize("kind", ["Service", "Ingress"])
@pytest.mark.parametrize("owner", [None, {"kind": "Deployment", "name": "theirs", "uid": "d"}])
async def test_somebody_elses_object_of_the_name_is_refused_and_left_as_it_is(
    stub: StubCluster, kind: str, owner: dict[str, str] | None
) -> None:
    settings = stub.settings(**INGRESS)
    name = draft_sandbox(settings, NOW, "work").object_name
    metadata = {"name": name, "ownerReferences": [owner]} if owner else {"name": name}
    stub.add({"kind": kind, "metadata": metadata, "spec": {"theirs": True}})
    before = stub.objects[f"{kind}/{name}"]
    async with Host(settings) as host:
        with pytest.raises(NameTaken, match=f"{kind} {name} in namespace sandbox-system was not"):
            await host.launcher.create(name="work")
    assert stub.objects[f"{kind}/{name}"] == before
    assert leading_to(stub) == {kind: [name]}
    assert stub.names("ConfigMap") == stub.names("Pod") == []


def left_by_a_predecessor(stub: StubCluster, name: str) -> None:
    owner = {"kind": "ConfigMap", "name": name, "uid": "gone"}
    stub.add({"kind": "Service", "metadata": {"name": name, "ownerReferences": [owner]}})


async def test_what_led_to_a_sandbox_of_the_same_name_is_waited_for(
    stub: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = stub.settings(**INGRESS)
    name = draft_sandbox(settings, NOW, "work").object_name
    left_by_a_predecessor(stub, name)
    looked = leading._left_over

    async def look(*arguments: Any) -> str:
        """The garbage collector comes after the first look."""
        found = await looked(*arguments)
        stub.replace({key: o for key, o in stub.objects.items() if key != f"Service/{name}"})
        return found

    monkeypatch.setattr(leading, "_left_over", look)
    async with Host(settings) as host:
        await host.launcher.create(name="work")
    owners = stub.objects[f"Service/{name}"]["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] != ["gone"]


async def test_what_a_predecessor_left_for_good_is_named(
    stub: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "LEFTOVER_SECONDS", 0.0)
    settings = stub.settings(**INGRESS)
    name = draft_sandbox(settings, NOW, "work").object_name
    left_by_a_predecessor(stub, name)
    async with Host(settings) as host:
        with pytest.raises(LaunchFailed, match=f"Service {name} of the sandbox that had this name"):
            await host.launcher.create(name="work")
    assert leading_to(stub) == {"Service": [name]}


async def test_tools_tell_the_clusters_address_and_serve_none_here(stub: StubCluster) -> None:
    stub.faults(gateway={"port": free_port()})
    port = free_port()
    settings = stub.settings(**INGRESS, PODPIPE_OPEN_PORT=str(port))
    with anyio.fail_after(60):
        async with Host(settings) as host, Client(build_server(host)) as client:
            made = await client.call_tool("create_sandbox", {"name": "work"})
            asked = {"sandbox_id": "work", "internal_port": PORT, "name": "web"}
            told = await client.call_tool("expose_port", asked)
            listed = await client.call_tool("list_apps", {"sandbox_id": "work"})
            assert made.structured_content
            assert told.structured_content
            assert listed.structured_content
            box = made.structured_content["sandbox_id"]
            assert made.structured_content["url"] == f"https://{box}.apps.example.com/"
            url = f"https://web.{box}.apps.example.com/"
            assert told.structured_content["url"] == url
            assert "warning" not in told.structured_content
            assert [app["url"] for app in listed.structured_content["apps"]] == [url]
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.1", port), 5)


async def test_a_sandbox_of_before_the_setting_is_led_to_from_its_next_start_on(
    stub: StubCluster,
) -> None:
    stub.faults(gateway={"port": free_port()})
    async with Host(stub.settings()) as host:
        await host.launcher.create(name="work")
    asked = {"sandbox_id": "work", "internal_port": PORT, "name": "web"}
    with anyio.fail_after(60):
        async with Host(stub.settings(**INGRESS)) as host, Client(build_server(host)) as client:
            told = await client.call_tool("expose_port", asked)
            assert told.structured_content
            assert "was started before GATEWAY=ingress" in told.structured_content["warning"]
            assert leading_to(stub) == {}
            await client.call_tool("suspend_sandbox", {"sandbox_id": "work"})
            told = await client.call_tool("expose_port", asked)
            assert told.structured_content
            assert "warning" not in told.structured_content
            assert set(leading_to(stub)) == {"Service", "Ingress"}
        moved = stub.settings(**INGRESS | {"BASE_DOMAIN": "other.example.com"})
        async with Host(moved) as host, Client(build_server(host)) as client:
            told = await client.call_tool("expose_port", asked)
            assert told.structured_content
            assert "BASE_DOMAIN=other.example.com" in told.structured_content["warning"]
            await client.call_tool("suspend_sandbox", {"sandbox_id": "work"})
            told = await client.call_tool("expose_port", asked)
            assert told.structured_content
            assert "warning" not in told.structured_content
            (name,) = stub.names("Ingress")
            first, _ = stub.objects[f"Ingress/{name}"]["spec"]["rules"]
            assert first["host"].endswith(".other.example.com")


def test_the_commands_hand_over_the_clusters_address_and_open_serves_nothing(
    podpipe: Podpipe, stub: StubCluster, tmp_path: Path
) -> None:
    stub.faults(gateway={"port": free_port()})
    podpipe.environment |= INGRESS
    podpipe("create", "--name", "work")
    assert podpipe("open").returncode == 2
    exposed = podpipe("expose", "work", str(PORT), "web")
    assert exposed.stdout.startswith("https://web.work-")
    assert "warning" not in exposed.stderr
    assert "podpipe open" not in exposed.stderr, "the cluster serves it"
    url = exposed.stdout.split()[0]
    assert url in podpipe("apps", "work").stdout
    assert f"{url}?token=" in podpipe("access", "work").stdout
    assert url.replace("web.", "") in podpipe("status", "work").stdout
    opened = podpipe("open", "work", "web", "--no-browser")
    assert (opened.returncode, opened.stdout.startswith(f"{url}?token=")) == (0, True)
    assert opened.stdout.count("\n") == 1


def test_open_starts_the_browser_on_the_clusters_address_and_ends(
    podpipe: Podpipe, stub: StubCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\ncp "${{1#file://}}" {tmp_path}/page\n', encoding="utf-8")
    browser.chmod(0o755)
    stub.faults(gateway={"port": free_port()})
    podpipe.environment |= INGRESS | {"BROWSER": str(browser)}
    podpipe("create", "--name", "work")
    opened = podpipe("open", "work")
    assert opened.returncode == 0, opened.stderr
    assert opened.stdout.strip() in (tmp_path / "page").read_text(encoding="utf-8")


def test_a_sandbox_that_does_not_listen_for_a_proxy_is_told_by_the_commands(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    stub.faults(gateway={"port": free_port()})
    podpipe("create", "--name", "work")
    podpipe.environment |= INGRESS
    for command in (["expose", "work", str(PORT), "web"], ["open", "work", "--no-browser"]):
        said = podpipe(*command)
        assert said.returncode == 0, said.stderr
        assert "was started before GATEWAY=ingress" in said.stderr


def test_the_default_gateway_is_this_machine() -> None:
    assert settings_of().gateway == Gateway()
    assert not Gateway().in_cluster
