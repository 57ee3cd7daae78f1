"""Programs that stand in for docker, kind, kubectl and the like: each writes down how it was called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


class Machine:
    """A machine that has exactly the programs a test gives it, and folders of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.state = folder / "state"
        self.cache = folder / "cache"
        self.env = {
            "PATH": str(self._bin),
            "HOME": str(folder / "home"),
            "XDG_STATE_HOME": str(self.state),
            "XDG_CACHE_HOME": str(self.cache),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LC_ALL": "C.UTF-8",
        }

    def has(self, program: str, body: str = "exit 0") -> None:
        """Install a program: `body` is shell, and only the shell's own commands are there."""
        path = self._bin / program
        log = self._folder / "calls"
        path.write_text(f"#!/bin/sh\necho {program} \"$@\" >> '{log}'\n{body}\n", "utf-8")
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """Every call of a program, in order."""
        log = self._folder / "calls"
        return log.read_text("utf-8").splitlines() if log.exists() else []

    def run(self, tool: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `scripts/cluster` or `scripts/image` on this machine."""
        return subprocess.run(
            [sys.executable, "-m", f"host_client.local.{tool}", *arguments],
            env={**self.env, **env},
            cwd=CHECKOUT,
            capture_output=True,
            encoding="utf-8",
            timeout=50,
            check=False,
        )

    def bash(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a few lines of bash in a folder with a requirements.txt and a pyproject.toml."""
        project = self._folder / "project"
        project.mkdir()
        for name in ("requirements.txt", "pyproject.toml"):
            (project / name).write_text("", "utf-8")
        return subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", script],
            env={**self.env, "CHECKOUT": str(CHECKOUT)},
            cwd=project,
            capture_output=True,
            encoding="utf-8",
            timeout=50,
            check=False,
        )

    def has_kubectl(self, *, context: str, labelled: bool = False) -> None:
        """A kubectl whose cluster answers, and perhaps carries podpipe."""
        labels = {"app.kubernetes.io/managed-by": "podpipe"} if labelled else {}
        namespace = json.dumps({"metadata": {"name": "sandbox-system", "labels": labels}})
        version = json.dumps({"serverVersion": {"gitVersion": "v1.33.1"}})
        self.has(
            "kubectl",
            f"""case "$*" in
*current-context*) echo '{context}' ;;
*"get namespace"*) echo '{namespace}' ;;
*version*) echo '{version}' ;;
*readyz*) echo ok ;;
*"get nodes"*) echo 'docker.io/library/sandbox-base:latest' ;;
esac""",
        )
        kubeconfig = Path(self.env["HOME"]) / ".kube" / "config"
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        kubeconfig.write_text("{}", "utf-8")

    def has_kind(self) -> None:
        """A Docker engine that answers, and a kind that remembers its cluster in a file."""
        made = self._folder / "kind-cluster"
        self.has("docker")
        self.has(
            "kind",
            f"""case "$1 $2" in
"get clusters") [ ! -e '{made}' ] || echo podpipe ;;
"get nodes") echo podpipe-control-plane ;;
"create cluster") : > '{made}'; echo '{{}}' > "$6" ;;
esac""",
        )
