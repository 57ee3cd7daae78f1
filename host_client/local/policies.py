"""NetworkPolicies of the node, enforced by kube-router: built from its Go module when first wanted.

The node runs without it. A cluster that enforces policies has another network plugin for that, and
the tests turn this one on to see what ours keep out.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from host_client.local.binaries import BUILD_SECONDS, NICENESS, check_go, install
from host_client.local.console import Console
from host_client.local.node_config import NODE, SERVICE_SUBNET
from host_client.local.tools import exclusive, run

NAME: Final = "kube-router"
VERSION: Final = "v2.1.0"
PACKAGE: Final = "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
CHAINS: Final = ("KUBE-ROUTER-", "KUBE-POD-FW-", "KUBE-NWPLCY-")
SETS: Final = ("KUBE-DST-", "KUBE-SRC-")
"""What it makes; its own cleaning leaves both behind."""


def program(cache: Path, console: Console) -> Path:
    """The program, built if it is not there.

    Raises:
        MissingPrerequisite: Go, or Debian's ipset and no way to install it.
    """
    install({"ipset": "ipset"}, console)
    folder = cache / f"{NAME}-{VERSION}"
    built = folder / NAME
    if built.exists():
        return built
    check_go()
    with exclusive(cache / "build.lock"):
        if not built.exists():
            draft = folder / ".unfinished"
            draft.mkdir(parents=True, exist_ok=True)
            env = {**os.environ, "CGO_ENABLED": "0", "GOBIN": str(draft), "GOWORK": "off"}
            argv = ["nice", "-n", str(NICENESS), "go", "install", "-trimpath", "-ldflags=-s -w"]
            with console.step(f"building {NAME} {VERSION}, once"):
                run([*argv, f"{PACKAGE}@{VERSION}"], env=env, timeout=BUILD_SECONDS)
            (draft / NAME).replace(built)
            draft.rmdir()
    return built


def argv(program: Path, kubeconfig: Path) -> list[str]:
    """Its command line: policies alone, on no port."""
    return [
        str(program),
        "--run-firewall=true",
        "--run-router=false",
        "--run-service-proxy=false",
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={NODE}",
        f"--service-cluster-ip-range={SERVICE_SUBNET}",
        "--metrics-port=0",
        "--health-port=0",
    ]


def remove_traces() -> None:
    """Remove the chains and sets that it leaves behind."""
    rules = run(["iptables", "-w", "-S"], check=False).stdout.splitlines()
    for arguments in deletions(rules):
        run(["iptables", "-w", *arguments], check=False)
    if not any(rule.startswith("-N KUBE-ROUTER-") for rule in rules):
        return  # no ipset may be there to ask
    for name in run(["ipset", "list", "-n"], check=False).stdout.split():
        if name.startswith(SETS):
            run(["ipset", "destroy", name], check=False)


def deletions(rules: Iterable[str]) -> list[list[str]]:
    """The iptables arguments that remove its chains and the rules of others that jump to them."""
    split = [shlex.split(rule) for rule in rules]
    chains = [rule[1] for rule in split if rule[0] == "-N" and rule[1].startswith(CHAINS)]
    jumps = [rule for rule in split if rule[0] == "-A" and rule[1] not in chains]
    return [
        *(["-D", *rule[1:]] for rule in jumps if rule[-2] == "-j" and rule[-1] in chains),
        *(["-F", chain] for chain in chains),
        *(["-X", chain] for chain in chains),
    ]
