"""What the single node is told, and how it speaks when something is in its way."""

from __future__ import annotations

import io
import json
import socket
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from cryptography import x509

from host_client.local import binaries, machine, node_config, pki, policies
from host_client.local.console import Console
from host_client.local.containerd import canonical, replaced
from host_client.local.node import Node
from host_client.local.node_config import COMPONENTS, Layout, Ports
from host_client.local.tools import Failure, MissingPrerequisite, tail
from in_pod_server import contract

LAYOUT = Layout(Path("/state/node"), Path("/cache/bin"))
PORTS = Ports()


def console() -> Console:
    return Console(io.StringIO())


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("sandbox-base", "docker.io/library/sandbox-base:latest"),
        ("sandbox-base:latest", "docker.io/library/sandbox-base:latest"),
        ("team/sandbox:1", "docker.io/team/sandbox:1"),
        ("docker.io/sandbox:1", "docker.io/library/sandbox:1"),
        ("docker.io/library/sandbox:1", "docker.io/library/sandbox:1"),
        ("localhost/podpipe/pause:1", "localhost/podpipe/pause:1"),
        ("registry.example:5000/team/sandbox", "registry.example:5000/team/sandbox:latest"),
        ("sandbox@sha256:ab", "docker.io/library/sandbox@sha256:ab"),
    ],
)
def test_an_image_name_is_written_out_as_containerd_stores_it(given: str, stored: str) -> None:
    assert canonical(given) == stored
    assert canonical(stored) == stored


def test_loading_another_image_drops_the_one_that_the_name_meant_before() -> None:
    before = {"x:1": "sha256:old", "sha256:config": "sha256:old"}

    assert replaced(before, {"x:1": "sha256:new", "sha256:config": "sha256:old"}, "x:1") == [
        "sha256:config"
    ]


def test_loading_the_same_image_again_drops_nothing() -> None:
    images = {"x:1": "sha256:same", "sha256:config": "sha256:same"}

    assert replaced(images, images, "x:1") == []
    assert replaced(images, {"x:1": "sha256:same"}, "x:1") == []


def test_an_image_with_another_name_stays() -> None:
    before = {"x:1": "sha256:old", "x:2": "sha256:old", "sha256:config": "sha256:old"}
    after = {**before, "x:1": "sha256:new"}

    assert replaced(before, after, "x:1") == []


def test_everything_listens_on_loopback_only() -> None:
    """A node on a laptop in a café: neither etcd nor the API server may be reached from outside."""
    told = [word for name in COMPONENTS for word in node_config.argv(LAYOUT, PORTS, name)]
    config = json.loads(node_config.kubelet_config(LAYOUT, PORTS, Path("/etc/resolv.conf")))

    assert config["address"] == "127.0.0.1"
    assert "--bind-address=127.0.0.1" in told
    assert told.count("--secure-port=0") == 2
    urls = [word for word in told if "-urls=" in word]
    assert len(urls) == 4
    assert all("=https://127.0.0.1:" in url for url in urls)


def test_etcd_takes_only_clients_with_a_certificate_of_ours() -> None:
    told = node_config.argv(LAYOUT, PORTS, "etcd")

    assert "--client-cert-auth=true" in told
    assert "--peer-client-cert-auth=true" in told


def test_a_pod_may_not_have_more_processes_than_the_limit() -> None:
    config = json.loads(node_config.kubelet_config(LAYOUT, PORTS, Path("/etc/resolv.conf")))

    assert config["podPidsLimit"] == 4096


def test_homes_are_made_with_the_uid_of_the_sandbox_user() -> None:
    assert node_config.SANDBOX_UID == contract.UID
    told = node_config.argv(LAYOUT, PORTS, "kube-controller-manager")
    assert f"--reuid={contract.UID}" in told


def test_the_kubeconfig_names_one_context_and_the_recorded_port() -> None:
    config = json.loads(node_config.kubeconfig(LAYOUT, Ports(apiserver=7443), "admin"))

    assert config["current-context"] == "podpipe-node"
    assert config["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:7443"


def test_every_component_keeps_its_files_below_the_state_folder() -> None:
    for path in node_config.files(LAYOUT, PORTS, "overlayfs", Path("/etc/resolv.conf")):
        assert path.is_relative_to(LAYOUT.state)


def test_certificates_are_made_once_and_signed_by_the_nodes_own_authority(tmp_path: Path) -> None:
    pki.issue_missing(tmp_path, node_config.IDENTITIES)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    pki.issue_missing(tmp_path, node_config.IDENTITIES)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    authority = x509.load_pem_x509_certificate(first["ca.crt"])
    kubelet = x509.load_pem_x509_certificate(first["kubelet.crt"])
    kubelet.verify_directly_issued_by(authority)
    assert kubelet.subject.rfc4514_string() == "CN=system:node:localhost,O=system:nodes"
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*.key"))


def test_a_further_identity_is_added_to_the_authority_that_is_there(tmp_path: Path) -> None:
    """A later version may need one more certificate for a node that exists."""
    pki.issue_missing(tmp_path, node_config.IDENTITIES[:2])
    authority = (tmp_path / "ca.crt").read_bytes()
    pki.issue_missing(tmp_path, node_config.IDENTITIES)

    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert (tmp_path / "kubelet.crt").exists()


@pytest.mark.parametrize("said", ["go1.23.12", "go1.9", "devel", ""])
def test_an_old_go_is_one_sentence_with_the_fix(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    go.write_text(f"#!/bin/sh\necho {said}\n", "utf-8")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(MissingPrerequisite, match=r"Go 1\.24.*https://go\.dev/dl/") as refused:
        binaries.build(tmp_path / "cache", console())
    assert refused.value.exit_code == 4
    assert not (tmp_path / "cache").exists()


def test_a_missing_go_is_one_sentence_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(MissingPrerequisite, match=r"Go is missing.*https://go\.dev/dl/"):
        binaries.build(tmp_path / "cache", console())


def test_a_cache_that_is_full_needs_no_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = binaries.build_folder(tmp_path) / "bin"
    folder.mkdir(parents=True)
    for name in (*node_config.BINARIES, "pause"):
        (folder / name).touch()
    monkeypatch.setenv("PATH", "/nonexistent")

    assert binaries.build(tmp_path, console()) == folder


def test_an_interrupted_build_is_not_taken_for_a_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is killed leaves half a file under the name that it was told."""
    stub = tmp_path / "go"
    stub.write_text(
        '#!/bin/sh\n[ "$1" = env ] && echo go1.24.1 && exit\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo half > "$2"; shift; done\nkill -9 $$\n',
        "utf-8",
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = binaries.build_folder(tmp_path) / "bin"
    folder.mkdir(parents=True)
    for name in node_config.BINARIES:
        (folder / name).touch()

    with pytest.raises(Failure):
        binaries.build(tmp_path, console())

    assert binaries.missing_binaries(tmp_path) == ["pause"]


def test_the_go_module_names_published_versions_of_kubernetes_own_libraries() -> None:
    upstream = (
        "module k8s.io/kubernetes\n\nreplace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n)\n"
    )

    text = binaries.go_mod(upstream)

    assert "require k8s.io/kubernetes v1.34.4\n" in text
    assert "replace k8s.io/api => k8s.io/api v0.34.4\n" in text


@pytest.mark.skipif(sys.platform != "linux", reason="the node is Linux only")
def test_a_cold_start_picks_another_port_and_says_who_holds_the_usual_one(tmp_path: Path) -> None:
    said = io.StringIO()
    node = Node(tmp_path / "node", tmp_path / "cache", Console(said))
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        (tmp_path / "node").mkdir()
        (tmp_path / "node" / "ports.json").write_text(
            json.dumps(asdict(Ports(kubelet=taken))), "utf-8"
        )

        ports = node._ports(list(COMPONENTS), cold=True)

    assert ports.kubelet != taken
    assert f"port {taken} is taken by" in said.getvalue()


@pytest.mark.skipif(sys.platform != "linux", reason="the node is Linux only")
def test_a_running_node_whose_lost_part_lost_its_port_as_well_names_the_holder(
    tmp_path: Path,
) -> None:
    """The others know the recorded port: another one would need all of them to start again."""
    node = Node(tmp_path / "node", tmp_path / "cache", console())
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        (tmp_path / "node").mkdir()
        (tmp_path / "node" / "ports.json").write_text(
            json.dumps(asdict(Ports(kubelet=taken))), "utf-8"
        )

        with pytest.raises(Failure, match=rf"port {taken} is now held by .*scripts/cluster down"):
            node._ports(["kubelet"], cold=False)


def test_a_process_that_dies_at_its_start_is_reported_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path / "node", tmp_path / "cache", console())
    (tmp_path / "node" / "log").mkdir(parents=True)
    (tmp_path / "node" / "log" / "etcd.log").write_text(
        "a lot\n" * 2000 + "bind: in use\n", "utf-8"
    )

    message = str(node._died("etcd"))

    assert message.startswith("etcd ended right after its start")
    assert message.endswith("bind: in use")
    assert len(message) < 5000


def test_only_our_networks_rules_are_deleted() -> None:
    rules = [
        "-P POSTROUTING ACCEPT",
        "-N CNI-0123",
        "-N CNI-9999",
        '-A POSTROUTING -s 10.88.0.2/32 -m comment --comment "name: \\"podman\\" id: \\"a\\"" -j CNI-9999',
        '-A POSTROUTING -s 10.244.0.2/32 -m comment --comment "name: \\"podpipe\\" id: \\"b\\"" -j CNI-0123',
        '-A CNI-0123 -d 10.244.0.0/24 -m comment --comment "name: \\"podpipe\\" id: \\"b\\"" -j ACCEPT',
        "-A POSTROUTING -o docker0 -j MASQUERADE",
    ]

    deleted = machine.deletions(rules)

    assert [argv[0] for argv in deleted] == ["-D", "-F", "-X"]
    assert deleted[0][1] == "POSTROUTING"
    assert deleted[0][-1] == "CNI-0123"
    assert deleted[1:] == [["-F", "CNI-0123"], ["-X", "CNI-0123"]]


def test_only_the_rules_of_the_policies_are_deleted() -> None:
    rules = [
        "-P INPUT ACCEPT",
        "-N DOCKER",
        "-N KUBE-FIREWALL",
        "-N KUBE-NWPLCY-DEFAULT",
        "-N KUBE-POD-FW-0123",
        "-N KUBE-ROUTER-INPUT",
        "-A INPUT -j KUBE-FIREWALL",
        '-A INPUT -m comment --comment "kube-router netpol - X" -j KUBE-ROUTER-INPUT',
        "-A KUBE-POD-FW-0123 -d 10.244.0.9/32 -j KUBE-NWPLCY-DEFAULT",
        "-A DOCKER -i docker0 -j RETURN",
    ]

    deleted = policies.deletions(rules)

    chains = ["KUBE-NWPLCY-DEFAULT", "KUBE-POD-FW-0123", "KUBE-ROUTER-INPUT"]
    assert [argv[0] for argv in deleted] == ["-D", *["-F"] * 3, *["-X"] * 3]
    assert deleted[0][1:5] == ["INPUT", "-m", "comment", "--comment"]
    assert deleted[0][-1] == "KUBE-ROUTER-INPUT"
    assert [argv[1] for argv in deleted[1:]] == chains * 2


def test_a_folder_that_is_not_ours_is_never_unmounted(tmp_path: Path) -> None:
    homes = tmp_path / "homes"
    homes.mkdir()
    machine.unmount_homes(homes)

    assert machine.mounts_below(homes) == []


def test_the_tail_of_an_output_is_whole_lines() -> None:
    assert tail("short\n") == "short"
    text = tail("\n".join(f"line {number}" for number in range(1000)), 40)
    assert text.startswith("[...]\nline ")
    assert text.endswith("line 999")


def test_progress_on_no_terminal_is_plain_lines_with_elapsed_seconds() -> None:
    stream = io.StringIO()
    with Console(stream).step("building kubelet"):
        pass

    assert stream.getvalue() == "[   0.0s] building kubelet\n"
