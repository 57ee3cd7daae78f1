"""Which cluster `scripts/cluster` means, and what it answers, on machines made of stub programs.

Kind itself is not run anywhere here: its node image comes from a registry that the project's test
machine cannot reach. What is tested is how kind and docker are called.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.local.stubs import CHECKOUT, Machine

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="speaks of what root gets to see")


def test_a_docker_engine_and_kind_make_a_kind_cluster_with_its_own_kubeconfig(
    machine: Machine,
) -> None:
    machine.has_kind()
    machine.has_kubectl(context="", labelled=False)

    up = machine.run("cluster", "up", "--json")

    kubeconfig = machine.state / "podpipe" / "kind" / "kubeconfig"
    assert up.returncode == 0, up.stderr
    assert json.loads(up.stdout)["provider"] == "kind"
    assert (
        f"kind create cluster --name podpipe --kubeconfig {kubeconfig} --wait 120s" in machine.calls
    )
    env = json.loads(machine.run("cluster", "env", "--json").stdout)
    assert env["KUBECONFIG"] == str(kubeconfig)
    assert env["PODPIPE_CONTEXT"] == "kind-podpipe"


def test_a_second_up_starts_the_kind_cluster_that_is_there(machine: Machine) -> None:
    machine.has_kind()
    machine.has_kubectl(context="")
    machine.run("cluster", "up")

    assert machine.run("cluster", "up").returncode == 0

    assert sum(call.startswith("kind create") for call in machine.calls) == 1
    assert "docker start podpipe-control-plane" in machine.calls


def test_down_stops_the_kind_cluster_and_purge_deletes_it_with_all_folders(
    machine: Machine,
) -> None:
    machine.has_kind()
    machine.has_kubectl(context="")
    machine.has("rm")
    machine.run("cluster", "up")

    assert machine.run("cluster", "down").returncode == 0
    assert "docker stop podpipe-control-plane" in machine.calls
    assert not any(call.startswith("kind delete") for call in machine.calls)

    purged = machine.run("cluster", "down", "--purge")
    assert purged.returncode == 0, purged.stderr
    assert any(call.startswith("kind delete cluster --name podpipe") for call in machine.calls)
    assert not (machine.state / "podpipe").exists()


def test_the_current_context_is_used_when_its_cluster_carries_podpipe(machine: Machine) -> None:
    machine.has_kind()
    machine.has_kubectl(context="team", labelled=True)

    up = machine.run("cluster", "up", "--json")

    answer = json.loads(up.stdout)
    assert (answer["provider"], answer["version"]) == ("existing", "v1.33.1")
    assert answer["image"] == {"name": "sandbox-base:latest", "loaded": True}
    assert not any(call.startswith("kind create") for call in machine.calls)


def test_the_current_context_is_left_alone_when_its_cluster_does_not_carry_podpipe(
    machine: Machine,
) -> None:
    machine.has_kind()
    machine.has_kubectl(context="production", labelled=False)

    assert json.loads(machine.run("cluster", "up", "--json").stdout)["provider"] == "kind"


def test_an_existing_cluster_is_used_when_asked_for_and_never_stopped(machine: Machine) -> None:
    machine.has_kubectl(context="team")

    assert machine.run("cluster", "up", "--provider", "existing").returncode == 0
    down = machine.run("cluster", "down")

    assert down.returncode == 0
    assert "nothing was stopped" in down.stdout


def test_env_prints_lines_for_a_shell_with_absolute_paths(machine: Machine) -> None:
    machine.has_kubectl(context="my team")
    machine.run("cluster", "up", "--provider", "existing")

    lines = machine.run("cluster", "env").stdout.splitlines()

    kubectl = Path(machine.env["PATH"]) / "kubectl"
    assert lines == [
        f"export KUBECONFIG={machine.env['HOME']}/.kube/config",
        "export PODPIPE_CONTEXT='my team'",
        f"export PODPIPE_KUBECTL={kubectl}",
    ]


def test_a_list_of_kubeconfigs_stays_a_list(machine: Machine) -> None:
    machine.has_kubectl(context="team")
    both = f"{machine.env['HOME']}/.kube/config:/nowhere"

    env = machine.run("cluster", "env", "--provider", "existing", "--json", KUBECONFIG=both)

    assert json.loads(env.stdout)["KUBECONFIG"] == both


@pytest.mark.parametrize(("command", "code"), [("status", 1), ("env", 3), ("down", 0)])
def test_with_nothing_up_every_command_says_what_to_run(
    machine: Machine, command: str, code: int
) -> None:
    done = machine.run("cluster", command)

    assert done.returncode == code
    assert "run `scripts/cluster up`" in done.stdout + done.stderr


def test_another_clusters_policies_are_left_to_its_network_plugin(machine: Machine) -> None:
    machine.has_kubectl(context="prod", labelled=True)
    machine.run("cluster", "up", "--provider", "existing")

    done = machine.run("cluster", "policies", "on")

    assert done.returncode == 1
    assert "up to the network plugin of the existing cluster" in done.stderr
    assert "doctor --deep" in done.stderr


def test_kind_without_docker_is_a_missing_prerequisite(machine: Machine) -> None:
    machine.has_kubectl(context="")
    machine.has("kind")

    done = machine.run("cluster", "up", "--provider", "kind", "--json")

    assert done.returncode == 4
    assert "docker info" in json.loads(done.stdout)["error"]


@root_only
def test_without_apt_the_node_names_the_packages_it_needs(machine: Machine) -> None:
    done = machine.run("cluster", "up", "--provider", "node")

    assert done.returncode == 4
    assert "containerd" in done.stderr
    assert "etcd-server" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_provider_is_a_usage_error(machine: Machine) -> None:
    assert machine.run("cluster", "up", "--provider", "cloud").returncode == 2


@pytest.mark.parametrize("script", ["cluster", "image"])
def test_help_shows_an_example_and_the_exit_codes(machine: Machine, script: str) -> None:
    text = machine.run(script, "--help").stdout

    assert "example:" in text
    assert "exit codes: 0 done, 1 failed" in text


@pytest.mark.parametrize("script", ["cluster", "image"])
def test_scripts_are_thin_and_can_be_run(script: str) -> None:
    path = CHECKOUT / "scripts" / script

    assert os.access(path, os.X_OK)
    assert f"-m host_client.local.{script}" in path.read_text("utf-8")


def test_a_python_that_is_too_old_is_named_with_the_fix(machine: Machine) -> None:
    """env.sh speaks before any Python of ours can: it is the first thing a newcomer runs."""
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        machine.has(name, "exit 1")
    for name in ("cat", "cksum"):
        (Path(machine.env["PATH"]) / name).symlink_to(f"/usr/bin/{name}")

    done = machine.bash(""". "$CHECKOUT/scripts/env.sh"; podpipe_env "$PWD" """)

    assert done.returncode == 4
    assert "needs Python 3.11 or newer: install it" in done.stderr


def test_a_python_without_the_venv_module_is_named_with_the_fix(machine: Machine) -> None:
    machine.has("python3", """case "$*" in *ensurepip*) exit 1 ;; esac""")
    for name in ("cat", "cksum"):
        (Path(machine.env["PATH"]) / name).symlink_to(f"/usr/bin/{name}")

    done = machine.bash(""". "$CHECKOUT/scripts/env.sh"; podpipe_env "$PWD" """)

    assert done.returncode == 4
    assert "apt-get install python3-venv" in done.stderr
