"""Which cluster is meant, which kubectl is run, and what its failures mean."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from host_client import errors
from host_client.config import Settings
from host_client.errors import KubectlError, PrerequisiteError
from host_client.kubectl import Kubectl
from host_client.target import Target, find_kubectl
from tests.host_client.conftest import StubCluster


def fake(folder: Path, script: str) -> str:
    path = folder / "fake-kubectl"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_a_missing_kubectl_is_one_clear_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("host_client.target._COMMON_DIRS", ())
    settings = Settings(environment={"PATH": str(tmp_path)})
    with pytest.raises(PrerequisiteError, match="PODPIPE_KUBECTL"):
        find_kubectl(settings)


def test_a_named_kubectl_that_is_not_executable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="not an executable file"):
        find_kubectl(Settings(kubectl=str(tmp_path)))


def test_kubectl_is_found_in_the_usual_folders_where_path_is_short(
    tmp_path: Path, monkeypatch: Any
) -> None:
    fake(tmp_path, "exit 0")
    (tmp_path / "fake-kubectl").rename(tmp_path / "kubectl")
    monkeypatch.setattr("host_client.target._COMMON_DIRS", (str(tmp_path),))
    assert find_kubectl(Settings(environment={"PATH": "/nonexistent"})) == f"{tmp_path}/kubectl"


def test_no_kubeconfig_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match=r"no kubeconfig: .*config does not exist"):
        Target.resolve(Settings(environment={"HOME": str(tmp_path)}))


def test_an_unknown_context_is_named_with_the_known_ones(stub: StubCluster) -> None:
    with pytest.raises(PrerequisiteError, match=r"'nonesuch' does not exist .*known: stub"):
        Target.resolve(stub.settings(PODPIPE_CONTEXT="nonesuch"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("", "no current context"),
        ("[]", "no current context"),
        ("current-context: a", "context 'a' does not exist"),
        ("current-context: a\ncontexts: [{name: a, context: {cluster: c}}]", "has no server"),
        ("current-context: a\ncontexts: [{name: a}]", "has no server"),
        ("current-context: a\ncontexts: [{name: a, context: foo}]", "has no server"),
        ("[" * 5000, "cannot be read"),
    ],
)
def test_a_broken_kubeconfig_is_told_from_a_missing_one(
    stub: StubCluster, content: str, message: str
) -> None:
    stub.kubeconfig.write_text(content, encoding="utf-8")
    with pytest.raises(PrerequisiteError, match=message):
        Target.resolve(stub.settings())


def test_kubeconfig_files_merge_as_kubectl_merges_them(stub: StubCluster) -> None:
    """The first file to set a value wins, and a missing one is skipped."""
    second = stub.folder / "second"
    second.write_text(
        "current-context: other\n"
        "contexts: [{name: other, context: {cluster: far}}]\n"
        "clusters: [{name: far, cluster: {server: https://far}},"
        " {name: stub, cluster: {server: https://wrong}}]\n",
        encoding="utf-8",
    )
    both = os.pathsep.join([str(stub.folder / "none"), str(stub.kubeconfig), str(second)])
    first = Target.resolve(stub.settings(KUBECONFIG=both))
    assert (first.context, first.server) == ("stub", "https://stub:6443")
    named = Target.resolve(stub.settings(KUBECONFIG=both, PODPIPE_CONTEXT="other"))
    assert named.server == "https://far"


async def test_a_switched_current_context_changes_nothing(stub: StubCluster) -> None:
    kubectl = Kubectl(stub.settings())
    config = json.loads(stub.kubeconfig.read_text(encoding="utf-8"))
    config["contexts"].append({"name": "other", "context": {"cluster": "stub"}})
    config["current-context"] = "other"
    stub.kubeconfig.write_text(json.dumps(config), encoding="utf-8")
    await kubectl.json("version", "-o", "json")
    assert "--context=stub" in stub.calls[-1]


async def test_a_context_that_points_elsewhere_by_now_is_refused(stub: StubCluster) -> None:
    kubectl = Kubectl(stub.settings())
    stub.write_kubeconfig("https://elsewhere:6443")
    with pytest.raises(PrerequisiteError, match=r"stub:6443.*now points to https://elsewhere"):
        await kubectl.json("version", "-o", "json")
    assert not (stub.folder / "calls.jsonl").exists()


async def test_renewed_credentials_are_no_other_cluster(stub: StubCluster) -> None:
    kubectl = Kubectl(stub.settings())
    config = json.loads(stub.kubeconfig.read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"token": "renewed"}
    stub.kubeconfig.write_text(json.dumps(config), encoding="utf-8")
    assert await kubectl.json("version", "-o", "json")


def test_context_and_namespace_are_in_every_argv(stub: StubCluster) -> None:
    kubectl = Kubectl(stub.settings(NAMESPACE="team"))
    argv = kubectl.exec_argv("pod-1", ["dial"])
    assert argv[1:] == [
        "--context=stub", "--namespace=team", "exec", "-i", "-q", "pod-1", "-c", "sandbox",
        "--", "dial",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ('Error from server (NotFound): pods "x" not found', errors.NotFound),
        ('Error from server (AlreadyExists): configmaps "x" already exists', errors.AlreadyExists),
        ("Error from server (Conflict): the object has been modified", errors.Conflict),
        ("error: Apply failed with 1 conflict: conflict with other", errors.Conflict),
        ('Error from server (Forbidden): pods is forbidden: User "u" cannot list', errors.Forbidden),
        ("error: You must be logged in to the server (Unauthorized)", errors.Forbidden),
        ("The connection to the server x:6443 was refused - did you specify the right host or port?",
         errors.ApiUnreachable),
        ("Unable to connect to the server: dial tcp: lookup x: no such host", errors.ApiUnreachable),
        ("Unable to connect to the server: net/http: TLS handshake timeout", errors.ApiUnreachable),
        ('error: unable to recognize "STDIN": Get "https://x/api": dial tcp: connect: connection refused',
         errors.ApiUnreachable),
        ("Unable to connect to the server: getting credentials: exec: exit 1", errors.ApiUnreachable),
        ("E1129 01:02:03.4 1 x.go:1] noise\nerror: something else", KubectlError),
        ("", KubectlError),
    ],
)  # fmt: skip
async def test_stderr_tells_what_a_failure_was(
    stub: StubCluster, stderr: str, kind: type[KubectlError]
) -> None:
    stub.faults(version={"stderr": stderr, "code": 1})
    with pytest.raises(KubectlError) as failed:
        await Kubectl(stub.settings()).run("version")
    assert type(failed.value) is kind
    assert "noise" not in str(failed.value)
    assert failed.value.argv[-1] == "version"


async def test_success_is_believed_only_with_json(stub: StubCluster) -> None:
    """kubectl has ended with 0 without having done anything (its exit code is no evidence)."""
    for script in ("exit 0", "echo all good", "echo '[1]'"):
        settings = stub.settings(PODPIPE_KUBECTL=fake(stub.folder, script))
        with pytest.raises(KubectlError, match="printed no JSON object"):
            await Kubectl(settings).json("get", "pods")


async def test_a_kubectl_that_hangs_is_killed_and_reported(stub: StubCluster) -> None:
    settings = stub.settings(PODPIPE_KUBECTL=fake(stub.folder, "exec sleep 60"))
    with anyio.fail_after(10):
        with pytest.raises(errors.ApiUnreachable, match=r"no answer from kubectl within 0\.2 s"):
            await Kubectl(settings).run("version", timeout=0.2)


async def test_a_credential_plugin_that_asks_gets_no_input(stub: StubCluster) -> None:
    script = 'read answer && echo "{}" || { echo "getting credentials: no input" >&2; exit 1; }'
    settings = stub.settings(PODPIPE_KUBECTL=fake(stub.folder, script))
    with anyio.fail_after(10):
        with pytest.raises(errors.ApiUnreachable, match="no input"):
            await Kubectl(settings).run("version")


async def test_kubectl_gets_the_whole_environment_and_no_terminal(stub: StubCluster) -> None:
    script = 'test -t 1 && exit 9; printf \'{"k": "%s", "p": "%s"}\' "$KUBECONFIG" "$AWS_PROFILE"'
    settings = stub.settings(PODPIPE_KUBECTL=fake(stub.folder, script), AWS_PROFILE="work")
    assert await Kubectl(settings).json("get") == {"k": str(stub.kubeconfig), "p": "work"}


async def test_deleting_checks_the_uid(stub: StubCluster) -> None:
    stub.add({"kind": "Pod", "metadata": {"name": "p", "uid": "old"}})
    kubectl = Kubectl(stub.settings())
    assert not await kubectl.delete("pods", "p", uid="another")
    assert stub.names("Pod") == ["p"]
    assert await kubectl.delete("pods", "p", uid="old")
    assert not await kubectl.delete("pods", "p", uid="old")


def test_inside_a_pod_no_kubeconfig_is_needed(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert Target.resolve(Settings(environment=environment)).context == ""


def test_a_target_is_the_same_whatever_the_files_dates_are(stub: StubCluster) -> None:
    target = Target.resolve(stub.settings())
    assert replace(target, stamps=()) == target
