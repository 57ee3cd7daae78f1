"""Manifests hold what was asked for, and no value can change their structure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from host_client import manifest
from host_client.config import Settings
from host_client.sandbox import Sandbox, draft_sandbox
from in_pod_server import contract as c

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETTINGS = Settings(user="alice")
SANDBOX = replace(draft_sandbox(SETTINGS, NOW, "work"), uid="record-uid")
RWO = ["ReadWriteOnce"]

UNPRINTABLE = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | UNPRINTABLE,
        lambda inner: st.lists(inner) | st.dictionaries(UNPRINTABLE, inner),
    )
)
@example({"\n": None})
@example(["a\nb", {"key": "\n\n"}])
@example({"k" * 200: "\x85"})
def test_the_finalizer_round_trips_every_value(value: Any) -> None:
    text = manifest.yaml_scalar(value)
    assert yaml.safe_load(f"key: {text}\nnext: 1\n") == {"key": value, "next": 1}
    assert "\n" not in text


@given(UNPRINTABLE.filter(lambda text: "\0" not in text))
def test_no_user_text_changes_the_structure_of_a_record(text: str) -> None:
    hostile = replace(SANDBOX, user_id=text, session_id=text, name=text)
    expected = manifest.record(SANDBOX, SETTINGS)
    for name in (c.ANNOTATION_USER_ID, c.ANNOTATION_SESSION_ID, c.ANNOTATION_NAME):
        expected["metadata"]["annotations"][name] = text
    assert manifest.record(hostile, SETTINGS) == expected


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        manifest.yaml_scalar("\udcff")


def test_a_record_reads_back_as_the_sandbox_that_it_was_made_of() -> None:
    record = manifest.record(SANDBOX, SETTINGS)
    record["metadata"] |= {"uid": "record-uid", "resourceVersion": "7"}
    assert Sandbox.from_record(record) == replace(SANDBOX, version="7")


def test_the_pod_is_restricted_from_the_first_day() -> None:
    spec = manifest.pod(SANDBOX, SETTINGS, "gvisor", RWO)["spec"]
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["restartPolicy"] == "OnFailure"
    assert spec["activeDeadlineSeconds"] == SETTINGS.max_ttl_minutes * 60
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(container["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}
    assert not any("secret" in volume or "hostPath" in volume for volume in spec["volumes"])


def test_the_home_is_mounted_twice_and_every_writable_path_is_a_volume() -> None:
    spec = manifest.pod(SANDBOX, SETTINGS, "", RWO)["spec"]
    mounts = {m["mountPath"]: m["name"] for m in spec["containers"][0]["volumeMounts"]}
    assert mounts[c.HOME] == mounts[c.WORKSPACE] == "home"
    assert {c.TMP_DIR, c.RUN_DIR, c.LOG_DIR, c.PODINFO_DIR} < set(mounts)
    assert "runtimeClassName" not in spec
    assert {volume["name"] for volume in spec["volumes"]} == set(mounts.values())


def test_the_pod_hangs_from_its_record_and_the_home_does_not() -> None:
    pod = manifest.pod(SANDBOX, SETTINGS, "", RWO)
    assert pod["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": SANDBOX.object_name,
            "uid": "record-uid",
            "controller": True,
            "blockOwnerDeletion": False,
        }
    ]
    home = manifest.home(SETTINGS, "standard")
    assert home["metadata"]["name"] == "user-alice-pvc"
    assert "ownerReferences" not in home["metadata"]
    assert home["spec"]["storageClassName"] == "standard"
    assert "storageClassName" not in manifest.home(SETTINGS, "")["spec"]


def test_the_daemon_is_what_the_pod_starts() -> None:
    (container,) = manifest.pod(SANDBOX, SETTINGS, "", RWO)["spec"]["containers"]
    assert container["command"] == list(c.DAEMON_ARGV)
    assert container["env"] == [
        {"name": c.ENV_MAX_FILE_BYTES, "value": "5242880"},
        {"name": c.ENV_IDLE_SECONDS, "value": "0"},
        {"name": c.ENV_SANDBOX_ID, "value": SANDBOX.id},
    ]


def test_pull_secrets_are_named_only_where_set() -> None:
    assert "imagePullSecrets" not in manifest.pod(SANDBOX, SETTINGS, "", RWO)["spec"]
    named = manifest.pod(SANDBOX, replace(SETTINGS, pull_secrets=("a", "b")), "", RWO)
    assert named["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_a_small_sandbox_requests_no_more_than_its_limit() -> None:
    small = draft_sandbox(SETTINGS, NOW, cpu_limit="50m", memory_limit="128Mi")
    (container,) = manifest.pod(replace(small, uid="u"), SETTINGS, "", [])["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "50m", "memory": "128Mi"}


def test_the_namespace_enforces_restricted_pod_security() -> None:
    labels = manifest.namespace(SETTINGS)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert labels[c.LABEL_MANAGED_BY] == c.PREFIX


@pytest.mark.parametrize("modes", [["ReadWriteOnce"], ["ReadWriteOncePod"], []])
def test_pods_of_one_user_share_the_node_of_their_home(modes: list[str]) -> None:
    """A volume that one node writes is never waited for on another."""
    other = replace(draft_sandbox(SETTINGS, NOW, "other"), uid="other-uid")
    for sandbox in (SANDBOX, other):
        pod = manifest.pod(sandbox, SETTINGS, "", modes)
        (term,) = pod["spec"]["affinity"]["podAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        wanted = term["labelSelector"]["matchLabels"]
        assert wanted == {c.LABEL_MANAGED_BY: c.PREFIX, c.LABEL_USER: "alice"}
        assert wanted.items() <= pod["metadata"]["labels"].items(), "the first pod matches itself"


def test_a_home_that_many_nodes_write_binds_no_pod_to_one() -> None:
    pod = manifest.pod(SANDBOX, SETTINGS, "", ["ReadWriteOnce", "ReadWriteMany"])
    assert "affinity" not in pod["spec"]
    settings = replace(SETTINGS, storage_access_mode="ReadWriteMany")
    assert manifest.home(settings, "")["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "affinity" not in manifest.everything(SANDBOX, settings)[-1]["spec"]


@pytest.mark.parametrize("minutes", [0, 30])
def test_the_daemon_is_told_how_long_it_may_be_idle(minutes: int) -> None:
    spec = replace(SANDBOX.spec, idle_suspend_minutes=minutes)
    pod = manifest.pod(replace(SANDBOX, spec=spec), SETTINGS, "", RWO)
    env = {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}
    assert env[c.ENV_IDLE_SECONDS] == str(minutes * 60)
