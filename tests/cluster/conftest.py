"""The real cluster: a namespace of its own for each run, and everything in it gone afterwards.

Asked for without a cluster these tests fail and say how to get one; they never skip.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from host_client.config import Settings
from tests import canaries

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("KUBECONFIG", "PODPIPE_CONTEXT", "PODPIPE_KUBECTL")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


class Cluster:
    """A namespace on a real cluster, and the product run against it as a person would."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.namespace = f"podpipe-test-{secrets.token_hex(4)}"
        self.environment = environment | {"NAMESPACE": self.namespace, "PODPIPE_USER": "alice"}

    def settings(self, **environment: str) -> Settings:
        return Settings.from_env(os.environ | self.environment | environment, cwd=Path("/"))

    def kubectl(self, *argv: str, stdin: str | None = None) -> str:
        """kubectl as the administrator, in the namespace."""
        result = subprocess.run(
            [
                self.environment["PODPIPE_KUBECTL"],
                f"--context={self.environment['PODPIPE_CONTEXT']}",
                f"--namespace={self.namespace}",
                *argv,
            ],
            env=os.environ | self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def get(self, *argv: str) -> Any:
        return json.loads(self.kubectl("get", *argv, "-o", "json"))

    def apply(self, *objects: dict[str, Any]) -> None:
        bundle = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(bundle))

    def left(self) -> list[str]:
        """Everything of ours in the namespace, as kind/name."""
        items = self.get("pods,configmaps,persistentvolumeclaims,services,secrets")["items"]
        return sorted(
            f"{item['kind']}/{item['metadata']['name']}"
            for item in items
            if item["metadata"]["name"] != "kube-root-ca.crt"
        )

    def podpipe(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.podpipe_fed(b"", *argv, **environment)

    def podpipe_fed(
        self, stdin: bytes, /, *argv: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            [sys.executable, "-m", "host_client", *argv],
            env=os.environ | self.environment | {"PYTHONPATH": str(ROOT)} | environment,
            input=stdin,
            capture_output=True,
            timeout=180,
            cwd="/",
            check=False,
        )
        return subprocess.CompletedProcess(
            argv, ran.returncode, ran.stdout.decode(), ran.stderr.decode()
        )


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """How to reach the cluster, as `scripts/cluster env` exports it."""
    if missing := [name for name in NEEDED if not os.environ.get(name)]:
        pytest.fail(
            f"cluster tests need {', '.join(missing)}; run `scripts/cluster up`, "
            '`scripts/image build`, `scripts/image load`, then eval "$(scripts/cluster env)"'
        )
    return {name: os.environ[name] for name in NEEDED}


@pytest.fixture(scope="session")
def cluster(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    state = tmp_path_factory.mktemp("state")
    files = {
        "PODPIPE_LOG_FILE": str(state / "serve.log"),
        "PODPIPE_AUDIT_FILE": str(state / "audit.jsonl"),
    }
    found = Cluster(environment | files | canaries.ENVIRONMENT)
    yield found
    found.kubectl("delete", "namespace", found.namespace, "--ignore-not-found", "--timeout=90s")


@pytest.fixture
def user(cluster: Cluster) -> Iterator[str]:
    """A user that no other test has; what is his is gone afterwards."""
    name = f"user-{secrets.token_hex(4)}"
    cluster.environment["PODPIPE_USER"] = name
    yield name
    selector = f"podpipe/user={name}"
    if cluster.kubectl("get", "namespace", cluster.namespace, "--ignore-not-found"):
        cluster.kubectl("delete", "configmaps,pods", "-l", selector, "--timeout=60s")
        cluster.kubectl("delete", "persistentvolumeclaims", "-l", selector, "--timeout=60s")
