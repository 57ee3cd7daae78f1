"""What an administrator applies: rendered without a cluster, in step with what podpipe makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from host_client import manifest
from host_client.admin import Administration, beside, documents
from host_client.cli import main
from host_client.config import Settings
from host_client.errors import UsageError
from host_client.gateway import Gateway, Kind

SETTINGS = Settings(namespace="team", user="alice")
CLUSTER_SCOPED = ("Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


def rendered(settings: Settings = SETTINGS, **decided: Any) -> dict[str, dict[str, Any]]:
    """All objects, as kind/namespace/name."""
    return {
        "/".join(
            filter(None, (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]))
        ): o
        for o in documents(settings, Administration(**decided))
    }


def test_everything_is_in_the_two_namespaces_or_named_after_the_first() -> None:
    for ref, found in rendered(reaper_image="reaper:1").items():
        kind, *where = ref.split("/")
        if kind in CLUSTER_SCOPED:
            assert where in (["team"], ["team-admin"], ["podpipe.team"])
        else:
            assert where[0] in ("team", "team-admin"), ref
        assert found["apiVersion"]


def test_the_namespace_is_the_one_that_create_makes() -> None:
    assert rendered()["Namespace/team"] == manifest.namespace(SETTINGS)


def test_no_account_of_the_sandboxes_namespace_is_bound_to_anything() -> None:
    objects = rendered(reaper_image="reaper:1")
    accounts = [ref for ref in objects if ref.startswith("ServiceAccount/team/")]
    assert accounts == ["ServiceAccount/team/default"]
    assert objects[accounts[0]]["automountServiceAccountToken"] is False
    bound = [s for o in objects.values() for s in o.get("subjects", [])]
    assert {subject["namespace"] for subject in bound} == {"team-admin"}


def test_launchers_are_whom_the_administrator_names() -> None:
    objects = rendered(launchers=("User:alice@example.org", "Group:dev:s", "ServiceAccount:ci/job"))
    rbac = {"apiGroup": "rbac.authorization.k8s.io"}
    assert objects["RoleBinding/team/podpipe-launcher"]["subjects"] == [
        {"kind": "User", "name": "alice@example.org"} | rbac,
        {"kind": "Group", "name": "dev:s"} | rbac,
        {"kind": "ServiceAccount", "name": "job", "namespace": "ci"},
    ]
    assert "ServiceAccount/team-admin/podpipe-launcher" not in objects


def test_no_role_reads_secrets_or_says_all() -> None:
    roles = [o for o in documents(SETTINGS, Administration(purge=True, cluster_reads=True))
             if o["kind"].endswith("Role")]  # fmt: skip
    assert len(roles) == 3
    for rule in (rule for role in roles for rule in role["rules"]):
        assert not {"secrets", "*", "pods/*", "serviceaccounts"} & set(rule["resources"])
        assert not {"*", "escalate", "bind", "impersonate"} & set(rule["verbs"])


def test_rights_beyond_the_least_are_given_only_when_asked_for() -> None:
    def verbs(**decided: Any) -> set[tuple[str, str]]:
        rules = rendered(**decided)["Role/team/podpipe-launcher"]["rules"]
        return {(v, r) for rule in rules for r in rule["resources"] for v in rule["verbs"]}

    assert verbs(purge=True) - verbs() == {("delete", "persistentvolumeclaims")}
    more = rendered(cluster_reads=True).keys() - rendered().keys()
    assert more == {"ClusterRole/podpipe.team", "ClusterRoleBinding/podpipe.team"}


def test_the_policy_holds_the_images_and_the_longest_life_of_the_settings() -> None:
    def variables(**decided: Any) -> dict[str, str]:
        settings = replace(SETTINGS, image="a/b:1", max_ttl_minutes=7)
        policy = rendered(settings, **decided)["ValidatingAdmissionPolicy/podpipe.team"]
        return {v["name"]: v["expression"] for v in policy["spec"]["variables"]}

    assert variables()["images"] == '["a/b:1"]'
    assert variables(images=("c'd\"", "e/*"))["images"] == '["c\'d\\"", "e/*"]'
    assert variables()["deadline"] == "420"


def test_isolation_is_asked_of_a_pod_only_where_it_is_required() -> None:
    def asked(**decided: Any) -> list[str]:
        policy = rendered(**decided)["ValidatingAdmissionPolicy/podpipe.team"]
        return [v["message"] for v in policy["spec"]["validations"] if "gVisor" in v["message"]]

    assert asked() == []
    assert asked(isolation=True) == ["a sandbox here needs gVisor or a user namespace"]


def test_the_quota_holds_as_many_sandboxes_as_were_decided() -> None:
    settings = replace(SETTINGS, cpu_request="150m", memory_request="1Gi")
    hard = rendered(settings, max_sandboxes=3)["ResourceQuota/team/podpipe"]["spec"]["hard"]
    assert (hard["pods"], hard["requests.cpu"], hard["requests.memory"]) == (
        "3",
        "450m",
        "3221225472",
    )


def test_the_quota_holds_the_records_that_create_allows() -> None:
    hard = rendered(replace(SETTINGS, max_sandboxes=7))["ResourceQuota/team/podpipe"]["spec"][
        "hard"
    ]
    assert hard["count/configmaps"] == "27"


def test_further_networks_are_reached_when_they_are_named() -> None:
    def blocks(**decided: Any) -> list[str]:
        policy = rendered(**decided)["NetworkPolicy/team/podpipe"]
        return [to["ipBlock"]["cidr"] for rule in policy["spec"]["egress"] for to in rule["to"]
                if "ipBlock" in to]  # fmt: skip

    assert blocks() == ["0.0.0.0/0", "::/0"]
    assert blocks(egress=("10.1.2.0/24",)) == ["0.0.0.0/0", "::/0", "10.1.2.0/24"]


LED_TO = {
    kind: replace(
        SETTINGS,
        gateway=Gateway(kind, "apps.example.com", "https", 443, "nginx", ("infra", "public")),
    )
    for kind in get_args(Kind)
}


def rights(objects: dict[str, dict[str, Any]], role: str) -> set[tuple[str, str, str]]:
    return {
        (verb, group, resource)
        for rule in objects[f"Role/team/{role}"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize(
    ("kind", "group", "resource"),
    [
        ("ingress", "networking.k8s.io", "ingresses"),
        ("httproute", "gateway.networking.k8s.io", "httproutes"),
    ],
)
def test_launchers_may_make_what_leads_to_apps_where_the_cluster_does(
    kind: Kind, group: str, resource: str
) -> None:
    objects = rendered(LED_TO[kind], ingress_from=("ingress-nginx",))
    more = rights(objects, "podpipe-launcher") - rights(rendered(), "podpipe-launcher")
    assert more == {
        (verb, *named)
        for verb in ("create", "get", "patch")
        for named in (("", "services"), (group, resource))
    }
    assert ("delete", group, resource) in rights(objects, "podpipe-reaper")


def test_only_the_proxies_that_are_named_are_let_in_and_to_the_gateway_alone() -> None:
    def ingress(settings: Settings, *sources: str) -> Any:
        policies = rendered(settings, ingress_from=sources)
        return policies["NetworkPolicy/team/podpipe"]["spec"]["ingress"]

    assert ingress(SETTINGS) == []
    assert ingress(LED_TO["ingress"], "ingress-nginx", "10.1.0.0/16") == [
        {
            "from": [
                {
                    "namespaceSelector": {
                        "matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}
                    }
                },
                {"ipBlock": {"cidr": "10.1.0.0/16"}},
            ],
            "ports": [{"protocol": "TCP", "port": 8080}],
        }
    ]


def test_what_leads_to_apps_is_judged_only_where_the_cluster_leads_to_them() -> None:
    name = "ValidatingAdmissionPolicy/podpipe.team.gateway"
    assert name not in rendered()
    for kind, resource in (("ingress", "ingresses"), ("httproute", "httproutes")):
        objects = rendered(LED_TO[kind], ingress_from=("x",))
        judged = objects[name]["spec"]["matchConstraints"]["resourceRules"]
        assert [rule["resources"] for rule in judged] == [["services"], [resource]]
        assert f"ValidatingAdmissionPolicyBinding/{name.split('/')[1]}" in objects


def test_there_is_room_for_a_certificate_of_each_sandbox_where_some_are_issued() -> None:
    def secrets(settings: Settings, *sources: str) -> str:
        quota = rendered(settings, ingress_from=sources)["ResourceQuota/team/podpipe"]
        return str(quota["spec"]["hard"]["count/secrets"])

    assert secrets(SETTINGS) == secrets(LED_TO["httproute"], "x") == "20"
    assert secrets(LED_TO["ingress"], "x") == "1020"


def test_who_leads_to_apps_has_to_be_named_and_only_then() -> None:
    with pytest.raises(UsageError, match="GATEWAY=ingress needs --ingress-from"):
        rendered(LED_TO["ingress"])
    with pytest.raises(UsageError, match="--ingress-from needs GATEWAY=ingress or httproute"):
        rendered(ingress_from=("x",))
    for source in ("Nginx", "10.0.0.1", "a/b", ""):
        with pytest.raises(UsageError, match="--ingress-from"):
            rendered(LED_TO["ingress"], ingress_from=(source,))


def test_the_reaper_runs_in_the_cluster_only_with_an_image() -> None:
    assert not any(ref.startswith("CronJob") for ref in rendered())
    job = rendered(reaper_image="reaper:1")["CronJob/team-admin/podpipe-reaper"]
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "reaper:1"
    assert pod["containers"][0]["env"] == [{"name": "NAMESPACE", "value": "team"}]


@pytest.mark.parametrize(
    ("decided", "words"),
    [
        ({"launchers": ("alice",)}, "User:NAME"),
        ({"launchers": ("ServiceAccount:ci",)}, "ServiceAccount:NAMESPACE/NAME"),
        ({"egress": ("10.0.0.1",)}, "has no /length"),
        ({"egress": ("10.0.0.1/8",)}, "has host bits set"),
        ({"egress": ("everything/0",)}, "not a CIDR"),
        ({"max_sandboxes": 0}, "--max-sandboxes 0"),
        ({"max_homes": -1}, "--max-homes -1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(decided: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        rendered(**decided)
    assert words in str(refused.value)


def test_a_namespace_whose_second_name_would_be_too_long_is_refused() -> None:
    assert len(beside("a" * 57)) == 63
    with pytest.raises(UsageError, match="too long by 1"):
        beside("a" * 58)


def test_the_command_prints_documents_that_kubectl_applies_or_one_json_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMESPACE", "team")
    monkeypatch.setenv("PODPIPE_KUBECTL", "/nonexistent")
    assert main(["render", "admin", "--launcher", "Group:dev"]) == 0
    assert capsys.readouterr().out.count("\n---\n") + 1 == len(rendered(launchers=("Group:dev",)))
    assert main(["render", "admin", "--json"]) == 0
    assert capsys.readouterr().out.startswith("[\n")
    assert main(["render", "admin", "--egress", "x"]) == 2
    assert "--egress 'x' is not a CIDR" in capsys.readouterr().err
