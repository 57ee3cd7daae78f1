"""Each line of doctor's report, against answers of an API server as they really are."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest

from host_client.admin import LAUNCHER, Administration, documents
from host_client.clock import timestamp, utc_now
from host_client.config import Settings
from host_client.doctor import access, cluster
from host_client.doctor.findings import Finding
from host_client.errors import Forbidden, KubectlError, NotFound
from host_client.gateway import Gateway, Kind
from host_client.kubectl import Kubectl
from tests.host_client.conftest import Podpipe, StubCluster

FORBIDDEN = Forbidden('Error from server (Forbidden): User "x" cannot get it')
MISSING = NotFound("Error from server (NotFound): not found")
POD_SECURITY = KubectlError('pods "x" is forbidden: violates PodSecurity "restricted:latest"')
POLICY = KubectlError("The pods \"x\" is invalid: ValidatingAdmissionPolicy 'podpipe.x' denied")
NO_CLASS = KubectlError('pods "x" is forbidden: pod rejected: RuntimeClass "gvisor" not found')

Answer = dict[str, Any] | KubectlError


class Answering(Kubectl):
    """A kubectl whose answers are set: by the resource that is got, or the kind that is tried."""

    def __init__(
        self, stub: StubCluster, answers: Mapping[str, Answer], settings: Settings | None = None
    ) -> None:
        super().__init__(settings or stub.settings())
        self._answers = answers

    async def run(self, *args: str, stdin: str = "", timeout: float = 1) -> str:
        asked = args[1] if args[0] == "get" else f"try {json.loads(stdin)['kind']}"
        if asked == "--raw" and args[2] in self._answers:
            asked = args[2]
        answer = self._answers[asked]
        if isinstance(answer, KubectlError):
            raise answer
        if "ahead" in answer:
            made = utc_now() + timedelta(seconds=answer["ahead"])
            answer = {"metadata": {"creationTimestamp": timestamp(made)}}
        return json.dumps(answer)


def tried(seconds: float = 0) -> Answer:
    """An object that the API server would make, by a clock that is so far ahead of ours."""
    return {"ahead": seconds}


def quota(**resources: tuple[str, str]) -> Answer:
    status = {
        "hard": {name.replace("_", "."): hard for name, (hard, _) in resources.items()},
        "used": {name.replace("_", "."): used for name, (_, used) in resources.items()},
    }
    return {"items": [{"metadata": {"name": "team"}, "status": status}]}


def policy(selector: dict[str, Any], *types: str) -> Answer:
    spec = {"podSelector": selector, "policyTypes": list(types)}
    return {"items": [{"metadata": {"name": "closed"}, "spec": spec}]}


def node(*images: str) -> Answer:
    status = {"images": [{"names": None}, {"names": list(images)}]}
    return {"items": [{"metadata": {"name": "one"}, "status": status}]}


IMAGE = "sandbox-base:latest"
NONE: Answer = {"items": []}
RUNS: Answer = {
    "items": [{"status": {"phase": "Running"}, "spec": {"containers": [{"image": IMAGE}]}}]
}

Check = Callable[[Kubectl, Settings], Awaitable[Finding]]


def takes(*, with_class: bool) -> Check:
    return lambda kubectl, settings: cluster.sandbox(kubectl, settings, with_class=with_class)


def image(kubectl: Kubectl, settings: Settings) -> Awaitable[Finding]:
    return cluster.image(kubectl, settings, deep=False)


def processes(kubectl: Kubectl, _: Settings) -> Awaitable[Finding]:
    return cluster.processes(kubectl)


def network(kubectl: Kubectl, _: Settings) -> Awaitable[Finding]:
    return cluster.network(kubectl, deep=False)


LINES: list[tuple[Check, dict[str, Answer], str, str]] = [
    (cluster.namespace, {"namespace": {}}, "ok", "sandbox-system"),
    (cluster.namespace, {"namespace": MISSING}, "warning", "does not exist yet"),
    (cluster.namespace, {"namespace": FORBIDDEN}, "unknown", "may not be read"),
    (cluster.clock, {"try ConfigMap": tried()}, "ok", "that of the API server"),
    (cluster.clock, {"try ConfigMap": tried(20)}, "ok", "behind"),
    (cluster.clock, {"try ConfigMap": tried(3600)}, "warning", "s behind the API server's"),
    (cluster.clock, {"try ConfigMap": tried(-3600)}, "warning", "s ahead of the API server's"),
    (cluster.clock, {"try ConfigMap": FORBIDDEN}, "unknown", "not told"),
    (cluster.pod_security, {"try Pod": POD_SECURITY}, "ok", "restricted is enforced"),
    (cluster.pod_security, {"try Pod": tried()}, "warning", "not restricted is let in"),
    (cluster.pod_security, {"try Pod": FORBIDDEN}, "unknown", "cannot get it"),
    (cluster.admission, {"try Pod": POLICY}, "ok", "is refused"),
    (cluster.admission, {"try Pod": tried()}, "warning", "is let in"),
    (cluster.admission, {"try Pod": POD_SECURITY}, "unknown", "another layer was first"),
    (cluster.runtime_class, {"runtimeclass": {}}, "ok", "gvisor"),
    (cluster.runtime_class, {"runtimeclass": MISSING}, "warning", "share the node's kernel"),
    (cluster.runtime_class, {"runtimeclass": FORBIDDEN, "try Pod": NO_CLASS},
     "warning", "share the node's kernel"),
    (cluster.runtime_class, {"runtimeclass": FORBIDDEN, "try Pod": tried()}, "ok", "gvisor"),
    (cluster.storage_class, {"storageclass": {}}, "ok", "standard"),
    (cluster.storage_class, {"storageclass": MISSING}, "warning", "default class is used"),
    (cluster.storage_class, {"storageclass": FORBIDDEN}, "unknown", "may not be read"),
    (cluster.quota, {"resourcequotas": NONE}, "ok", "none"),
    (cluster.quota, {"resourcequotas": FORBIDDEN}, "unknown", "may not be read"),
    (cluster.quota, {"resourcequotas": quota(pods=("50", "10"), limits_cpu=("100", "90"))},
     "ok", "room for 5 more sandboxes, by limits.cpu of team"),
    (cluster.quota, {"resourcequotas": quota(pods=("5", "4"))}, "warning", "room for 1 more"),
    (cluster.quota, {"resourcequotas": quota(requests_memory=("1Gi", "1100Mi"))},
     "failure", "room for 0 more"),
    (takes(with_class=False), {"try Pod": tried()}, "ok", "passes all admission"),
    (takes(with_class=True), {"try Pod": POLICY}, "failure", "is refused: The pods"),
    (image, {"pods": RUNS}, "ok", "runs here"),
    (image, {"pods": NONE, "nodes": FORBIDDEN}, "unknown", "runs nowhere here yet"),
    (image, {"pods": NONE, "nodes": node(f"docker.io/library/{IMAGE}")},
     "ok", "on 1 of 1 nodes"),
    (image, {"pods": NONE, "nodes": node("docker.io/library/sandbox-base:old")},
     "warning", "on 0 of 1 nodes"),
    (processes, {"nodes": FORBIDDEN}, "unknown", "may not be read"),
    (processes, {"nodes": NONE}, "unknown", "no node"),
    (processes, {"nodes": node(), "--raw": FORBIDDEN}, "unknown", "may not be read"),
    (processes, {"nodes": node(), "--raw": KubectlError("(BadRequest): address not allowed")},
     "unknown", "address not allowed"),
    (processes, {"nodes": node(), "--raw": {"kubeletconfig": {"podPidsLimit": 4096}}},
     "ok", "set on one"),
    (processes, {"nodes": node(), "--raw": {"kubeletconfig": {"podPidsLimit": -1}}},
     "warning", "no limit for a sandbox on one"),
    (processes, {"nodes": node(), "--raw": {"kubeletconfig": {}}}, "warning", "no limit"),
    (network, {"networkpolicies": policy({}, "Ingress", "Egress")}, "unknown", "closes the namespace; whether"),
    (network, {"networkpolicies": policy({}, "Ingress")}, "warning", "egress is open"),
    (network, {"networkpolicies": policy({"matchLabels": {"a": "b"}}, "Ingress", "Egress")},
     "warning", "egress is open"),
    (network, {"networkpolicies": NONE}, "warning", "egress is open"),
    (network, {"networkpolicies": FORBIDDEN}, "unknown", "may not be read"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "answers", "result", "words"), LINES)
async def test_a_line_says_what_was_found_and_what_is_to_be_done(
    stub: StubCluster, check: Check, answers: dict[str, Answer], result: str, words: str
) -> None:
    finding = await check(Answering(stub, answers), stub.settings())
    assert (finding.result, words in finding.detail) == (result, True), finding
    if result in ("warning", "failure"):
        assert finding.fix


async def test_what_was_not_tried_is_not_said_where_it_will_be(stub: StubCluster) -> None:
    kubectl = Answering(stub, {"networkpolicies": policy({}, "Ingress", "Egress")})
    finding = await cluster.network(kubectl, deep=True)
    assert (finding.result, finding.fix) == ("ok", "")
    kubectl = Answering(stub, {"pods": NONE, "nodes": FORBIDDEN})
    assert not (await cluster.image(kubectl, stub.settings(), deep=True)).fix


async def test_a_class_that_somebody_set_has_to_exist(stub: StubCluster) -> None:
    settings = stub.settings(RUNTIME_CLASS="kata", DEFAULT_STORAGE_CLASS="fast")
    kubectl = Answering(stub, {"runtimeclass": MISSING, "storageclass": MISSING})
    for finding in (
        await cluster.runtime_class(kubectl, settings),
        await cluster.storage_class(kubectl, settings),
    ):
        assert finding.result == "failure"
        assert finding.fix.startswith("set ")


async def test_an_emptied_class_is_the_cluster_s_default(stub: StubCluster) -> None:
    settings = stub.settings(RUNTIME_CLASS="", DEFAULT_STORAGE_CLASS="")
    kubectl = Answering(stub, {})
    assert (await cluster.runtime_class(kubectl, settings)).result == "ok"
    assert (await cluster.storage_class(kubectl, settings)).result == "ok"


@pytest.mark.parametrize(
    ("client", "server", "result"),
    [("34", "34+", "ok"), ("33", "34", "ok"), ("32", "34", "warning"), ("36", "34", "warning"),
     ("29", "30", "failure"), ("30", "29", "failure")],
)  # fmt: skip
def test_a_kubectl_is_within_one_minor_version_of_the_server(
    client: str, server: str, result: str
) -> None:
    versions = {
        f"{side}Version": {"major": "1", "minor": minor}
        for side, minor in (("client", client), ("server", server))
    }
    (finding,) = access.versions(versions)
    assert finding.result == result
    assert bool(finding.fix) == (result != "ok")


ROUTE_GROUPS = {
    "networking.k8s.io": ["ingresses"],
    "gateway.networking.k8s.io": ["httproutes"],
}


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_verbs_that_are_asked_for_are_the_role_that_an_administrator_gives(kind: Kind) -> None:
    """doctor's own reads and a crash's last words are not needed."""
    settings = Settings(user="u", gateway=Gateway(kind))
    sources = () if kind == "local" else ("ingress-nginx",)
    needed = access.needed(kind)
    role = next(
        found
        for found in documents(settings, Administration(purge=True, ingress_from=sources))
        if (found["kind"], found["metadata"]["name"]) == ("Role", LAUNCHER)
    )
    given = {
        (v, f"{r}.{group}" if group in ROUTE_GROUPS and r in ROUTE_GROUPS[group] else r)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for r in rule["resources"]
        for v in rule["verbs"]
    }
    assert given - {*needed, *access.WANTED} == {
        ("get", "namespaces"), ("get", "pods/log"), ("list", "networkpolicies"),
        ("list", "resourcequotas"),
    }  # fmt: skip
    assert {*needed, *access.WANTED} <= given


def test_nothing_is_tried_in_a_namespace_that_is_not_there(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    stub.replace({})
    report = podpipe("doctor", "--json", "--deep")
    assert report.returncode == 0
    found = json.loads(report.stdout)
    assert found[-1]["check"] in ("permissions", "removing homes")
    assert not any("--dry-run=server" in call for call in stub.calls)


@pytest.mark.parametrize("home", ["none before", "one before"])
def test_deep_makes_two_sandboxes_and_leaves_none(
    podpipe: Podpipe, stub: StubCluster, home: str
) -> None:
    """The stub's pods are all this machine, so one reaches the other: nothing enforces a policy."""
    if home == "one before":
        podpipe("create", "--name", "work")
        podpipe("destroy", "work")
    homes = stub.names("PersistentVolumeClaim")
    assert len(homes) == (home == "one before")
    report = podpipe("doctor", "--json", "--deep")
    found = {finding["check"]: finding for finding in json.loads(report.stdout)}
    assert found["sandbox made"]["result"] == "ok", found["sandbox made"]
    assert found["network"]["result"] == "failure"
    assert "a sandbox reaches another" in found["network"]["detail"]
    assert report.returncode == 1
    assert [line.split()[1] for line in report.stderr.splitlines() if "…" in line] == [
        "making",
        "trying",
        "removing",
    ]
    assert stub.names("ConfigMap") == stub.names("Pod") == []
    assert stub.names("PersistentVolumeClaim") == homes


def test_a_machine_without_ssh_is_told_what_it_goes_without(
    podpipe: Podpipe, stub: StubCluster, tmp_path: Path
) -> None:
    for path, result in ((stub.environment["PATH"], "ok"), (str(tmp_path), "warning")):
        report = json.loads(podpipe("doctor", "--json", PATH=path).stdout)
        (found,) = [each for each in report if each["check"] == "ssh"]
        assert found["result"] == result
    assert "openssh-client" in found["fix"]
