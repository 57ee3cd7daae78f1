"""What the node is made of: Debian packages, and Kubernetes built from its Go module.

A binary is built under another name and renamed when it is whole, so an interrupted build is
never taken for a finished one. The versions of all dependencies follow from Kubernetes' own
go.mod, which the Go checksum database vouches for.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Final

from host_client.local.console import Console
from host_client.local.node_config import BINARIES, KUBERNETES_VERSION
from host_client.local.tools import Failure, MissingPrerequisite, exclusive, run, run_json

PACKAGE_OF: Final = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "etcd": "etcd-server",
    "iptables": "iptables",
    "ip": "iproute2",
    "setpriv": "util-linux",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
"""Programs the node needs, and the Debian packages that bring them."""
OLDEST_GO: Final = (1, 24)
INSTALL_SECONDS: Final = 900.0
BUILD_SECONDS: Final = 3600.0
"""The kubelet alone takes five minutes on two cores."""
SBIN: Final = ("/usr/sbin", "/sbin")
NICENESS: Final = 10
STAGED: Final = re.compile(r"^\s*(?:replace\s+)?(\S+) => \./staging/", re.MULTILINE)
POLICY: Final = Path("/usr/sbin/policy-rc.d")
"""Debian's own switch against packages that start their services when they are installed."""

PAUSE_SOURCE: Final = """\
// Holds a pod's namespaces, and reaps its orphans where a pod shares one process namespace.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if pid, _ := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 {
				break
			}
		}
	}
}
"""


def require_linux_root() -> None:
    """The node is for Linux and root; say so before anything is changed.

    Also puts the administrator's programs on PATH, where Debian's plain `su` leaves them out.
    """
    elsewhere = "use --provider kind (Docker and kind) or --provider existing"
    if sys.platform != "linux":
        raise MissingPrerequisite(f"the node provider needs Linux: on this machine {elsewhere}")
    if os.geteuid() != 0:
        raise MissingPrerequisite(f"the node provider needs root: run it with sudo, or {elsewhere}")
    known = os.environ.get("PATH", "").split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*known, *(add for add in SBIN if add not in known)])


def install(packages_of: dict[str, str], console: Console) -> None:
    """Install the packages of the programs that are missing; nothing is asked of apt otherwise."""
    missing = sorted({package for tool, package in packages_of.items() if not shutil.which(tool)})
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise MissingPrerequisite(f"this needs apt, or these Debian packages' programs: {names}")
    if os.geteuid() != 0:
        raise MissingPrerequisite(f"missing packages: run `sudo apt-get install {names}`")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with console.step("reading the package lists (apt-get update)"):
        run(["apt-get", "update", "-q"], env=env, timeout=INSTALL_SECONDS)
    blocks_services = not POLICY.exists()
    if blocks_services:
        POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")
        POLICY.chmod(0o755)
    try:
        with console.step(f"installing {names}"):
            argv = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
            run(argv, env=env, timeout=INSTALL_SECONDS)
    finally:
        if blocks_services:
            POLICY.unlink()


def check_go() -> None:
    """One clear sentence when Go is missing or too old."""
    wanted = ".".join(map(str, OLDEST_GO))
    fix = f"install Go {wanted} or newer from https://go.dev/dl/ and put its bin folder on PATH"
    if shutil.which("go") is None:
        raise MissingPrerequisite(f"Kubernetes is built from source here and Go is missing: {fix}")
    text = run(["go", "env", "GOVERSION"], check=False).stdout.strip()
    found = re.search(r"go(\d+)\.(\d+)", text)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_GO:
        raise MissingPrerequisite(
            f"Kubernetes needs Go {wanted}, this is {text or 'unknown'}: {fix}"
        )


def build_folder(cache: Path) -> Path:
    """Where one version's source module and binaries are."""
    return cache / f"kubernetes-{KUBERNETES_VERSION}"


def missing_binaries(cache: Path) -> list[str]:
    """What has to be built, the pause program included."""
    folder = build_folder(cache) / "bin"
    return [name for name in (*BINARIES, "pause") if not (folder / name).exists()]


def build(cache: Path, console: Console) -> Path:
    """Build what is missing; the folder of the binaries."""
    folder = build_folder(cache) / "bin"
    if not missing_binaries(cache):
        return folder
    check_go()
    with exclusive(cache / "build.lock"):
        missing = missing_binaries(cache)
        kubernetes = [name for name in missing if name != "pause"]
        folder.mkdir(parents=True, exist_ok=True)
        if kubernetes:
            source = _module(cache, console)
            if len(kubernetes) == len(BINARIES):
                console.say("the first build takes about 15 minutes of processor time, once")
            for number, name in enumerate(kubernetes, 1):
                label = f"building {name} {KUBERNETES_VERSION} ({number} of {len(kubernetes)})"
                with console.step(label):
                    package = f"k8s.io/kubernetes/cmd/{name}"
                    _go_build(source, folder / name, package, _ldflags())
        if "pause" in missing:
            source = build_folder(cache) / "pause"
            source.mkdir(parents=True, exist_ok=True)
            (source / "go.mod").write_text("module podpipe.local/pause\n\ngo 1.24\n", "utf-8")
            (source / "main.go").write_text(PAUSE_SOURCE, encoding="utf-8")
            with console.step("building the pause program"):
                _go_build(source, folder / "pause", ".", "-s -w")
    return folder


def go_mod(kubernetes_go_mod: str) -> str:
    """A module that depends on Kubernetes.

    Kubernetes replaces its own libraries by folders of its repository; a dependant has to name
    their published versions, which are v0 where Kubernetes is v1.
    """
    staged = STAGED.findall(kubernetes_go_mod)
    if not staged:
        raise Failure(f"the go.mod of Kubernetes {KUBERNETES_VERSION} names no staged libraries")
    version = "v0" + KUBERNETES_VERSION.removeprefix("v1")
    lines = [
        "module podpipe.local/node",
        "",
        "go 1.24.0",
        "",
        f"require k8s.io/kubernetes {KUBERNETES_VERSION}",
        "",
        *(f"replace {module} => {module} {version}" for module in staged),
    ]
    return "\n".join(lines) + "\n"


def _module(cache: Path, console: Console) -> Path:
    source = build_folder(cache) / "module"
    source.mkdir(parents=True, exist_ok=True)
    with console.step(f"fetching Kubernetes {KUBERNETES_VERSION} by its Go module"):
        wanted = f"k8s.io/kubernetes@{KUBERNETES_VERSION}"
        answer = run_json(["go", "mod", "download", "-json", wanted], timeout=BUILD_SECONDS)
    upstream = Path(answer["GoMod"]).read_text(encoding="utf-8")
    (source / "go.mod").write_text(go_mod(upstream), encoding="utf-8")
    imports = "".join(f'\t_ "k8s.io/kubernetes/cmd/{name}"\n' for name in sorted(BINARIES))
    tools = f"//go:build tools\n\npackage tools\n\nimport (\n{imports})\n"
    (source / "tools.go").write_text(tools, encoding="utf-8")
    return source


def _ldflags() -> str:
    # Without these the server's version does not parse and kubectl complains.
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
    values = {
        "gitVersion": KUBERNETES_VERSION,
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z",
    }
    package = "k8s.io/component-base/version"
    return " ".join(["-s -w", *(f"-X {package}.{name}={value}" for name, value in values.items())])


def _go_build(source: Path, output: Path, package: str, ldflags: str) -> None:
    draft = output.with_name(f".{output.name}.unfinished")
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    argv = ["nice", "-n", str(NICENESS), "go", "build", "-trimpath", "-ldflags", ldflags]
    run([*argv, "-o", str(draft), package], env=env, cwd=source, timeout=BUILD_SECONDS)
    draft.replace(output)


def machine_architecture() -> str:
    """This machine's architecture as image archives name it."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
