"""The real cluster: namespaces of their own for each run, and everything in them gone afterwards.

The administrator's part is applied first, and the product runs as a user of it does: with the
launcher's Role and no more, and as the reaper where it reaps. Only the tests' own kubectl is the
administrator. Asked for without a cluster these tests fail and say how to get one; they never skip.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from host_client import manifest
from host_client.clock import utc_now
from host_client.config import Settings
from host_client.sandbox import draft_sandbox
from tests import canaries

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("KUBECONFIG", "PODPIPE_CONTEXT", "PODPIPE_KUBECTL")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


ALLOWED = (
    *("--max-sandboxes", "6000", "--allow-purge"),
    # Images that are to fail in other ways than being refused.
    *("--image", "nonesuch.invalid/*", "--image", "Not//An:Image:", "--image", "127.0.0.1:*"),
    *("--image", "localhost/podpipe/*"),
)
"""What the administrator of these tests decides, beside the image under test."""
POLICY_SECONDS = 30.0
"""An API server notices a policy a moment after it was written."""


class Cluster:
    """A namespace on a real cluster, and the product run against it as a person would."""

    def __init__(
        self, environment: dict[str, str], folder: Path, allowed: Sequence[str] = ALLOWED
    ) -> None:
        self._allowed = allowed
        self.namespace = f"podpipe-test-{secrets.token_hex(4)}"
        self.administrator = environment
        self._folder = folder
        self.environment = environment | {"NAMESPACE": self.namespace, "PODPIPE_USER": "alice"}
        self.reaper = self.environment

    def rendered(self, *options: str) -> str:
        """`podpipe render admin` for these tests."""
        done = self.podpipe(
            "render", "admin", "--image", self.settings().image, *self._allowed, *options,
            MAX_CPU_LIMIT="1024", MAX_MEMORY_LIMIT="16Ti",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def administer(self, *options: str) -> str:
        """Apply what is rendered, and return it."""
        rendered = self.rendered(*options)
        self.kubectl("apply", "--server-side", "-f", "-", stdin=rendered, everywhere=True)
        return rendered

    def take_roles(self) -> None:
        """From now on be what the administrator's manifests let a launcher and a reaper be."""
        self.reaper = self.environment | {"KUBECONFIG": self.kubeconfig("podpipe-reaper")}
        self.environment |= {"KUBECONFIG": self.kubeconfig("podpipe-launcher")}
        weak = self.pod()
        weak["spec"]["enableServiceLinks"] = True
        deadline = time.monotonic() + POLICY_SECONDS
        while not (refusal := self.refusal(weak)):
            assert time.monotonic() < deadline, "the admission policy does not come into force"
            time.sleep(0.2)
        assert "ValidatingAdmissionPolicy" in refusal, refusal

    def pod(self) -> dict[str, Any]:
        """The pod of a sandbox as the launcher makes it."""
        settings = self.settings()
        sandbox = replace(draft_sandbox(settings, utc_now(), "work"), uid=str(uuid.uuid4()))
        return manifest.pod(sandbox, settings, "", [settings.storage_access_mode])

    def refusal(self, pod: dict[str, Any]) -> str:
        """Why the API server does not let the administrator make a pod; empty where it does."""
        argv = ("create", "--dry-run=server", "-o", "name", "-f", "-")
        tried = self.attempt(*argv, stdin=json.dumps(pod))
        said = ("Error from server", "is invalid: ")
        assert tried.returncode == 0 or any(word in tried.stderr for word in said), tried.stderr
        return tried.stderr if tried.returncode else ""

    def kubeconfig(self, account: str) -> str:
        """The path of a kubeconfig of one of the administrator's service accounts."""
        token = self.kubectl(
            "create", "token", account, "-n", f"{self.namespace}-admin", "--duration=24h",
            everywhere=True,
        )  # fmt: skip
        config = json.loads(
            self.kubectl("config", "view", "--minify", "--raw", "--flatten", "-o", "json")
        )
        for user in config["users"]:
            user["user"] = {"token": token.strip()}
        path = self._folder / f"{account}.kubeconfig"
        path.write_text(json.dumps(config), encoding="utf-8")
        path.chmod(0o600)
        return str(path)

    def settings(self, **environment: str) -> Settings:
        return Settings.from_env(os.environ | self.environment | environment, cwd=Path("/"))

    def administrator_settings(self) -> Settings:
        return Settings.from_env(os.environ | self.environment | self.administrator, cwd=Path("/"))

    def reaper_settings(self) -> Settings:
        return Settings.from_env(os.environ | self.reaper, cwd=Path("/"))

    def attempt(
        self, *argv: str, stdin: str | None = None, everywhere: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """kubectl as the administrator, in the namespace unless `everywhere`."""
        return subprocess.run(
            [
                self.environment["PODPIPE_KUBECTL"],
                f"--context={self.environment['PODPIPE_CONTEXT']}",
                *([] if everywhere else [f"--namespace={self.namespace}"]),
                *argv,
            ],
            env=os.environ | self.administrator,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def kubectl(self, *argv: str, stdin: str | None = None, everywhere: bool = False) -> str:
        """As `attempt`, which has to succeed; what it printed."""
        result = self.attempt(*argv, stdin=stdin, everywhere=everywhere)
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
            env=os.environ
            | (self.reaper if argv[0] == "reap" else self.environment)
            | {"PYTHONPATH": str(ROOT), "PODPIPE_USER": self.environment["PODPIPE_USER"]}
            | environment,
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


@contextmanager
def administered(
    environment: dict[str, str], folder: Path, *options: str, **settings: str
) -> Iterator[Cluster]:
    """A namespace and what its administrator applies by these settings and options; all goes again."""
    files = {
        "PODPIPE_LOG_FILE": str(folder / "serve.log"),
        "PODPIPE_AUDIT_FILE": str(folder / "audit.jsonl"),
    }
    found = Cluster(
        environment | files | canaries.ENVIRONMENT | settings, folder, (*ALLOWED, *options)
    )
    applied = found.rendered()
    try:
        found.administer()
        found.take_roles()
        yield found
    finally:
        found.kubectl(
            "delete", "--ignore-not-found", "--timeout=90s", "-f", "-",
            stdin=applied, everywhere=True,
        )  # fmt: skip


@pytest.fixture(scope="session")
def cluster(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with administered(environment, tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def user(cluster: Cluster) -> Iterator[str]:
    """A user that no other test has; what is his is gone afterwards."""
    name = f"user-{secrets.token_hex(4)}"
    cluster.environment["PODPIPE_USER"] = name
    yield name
    selector = f"podpipe/user={name}"
    cluster.kubectl("delete", "configmaps,pods", "-l", selector, "--timeout=60s")
    cluster.kubectl("delete", "persistentvolumeclaims", "-l", selector, "--timeout=60s")


@pytest.fixture(scope="module")
def sandbox(cluster: Cluster) -> Iterator[str]:
    """A sandbox that the tests of this file share."""
    user = cluster.environment["PODPIPE_USER"] = f"user-{secrets.token_hex(4)}"
    made = cluster.podpipe("create", "--name", "work")
    assert made.returncode == 0, made.stderr
    yield "work"
    cluster.environment["PODPIPE_USER"] = user
    assert cluster.podpipe("destroy", "work", "--purge-home", "--yes").returncode == 0


async def does_the_main_job(server: StdioServerParameters) -> None:
    """Have a client start a server and make a sandbox, run a command in it, and destroy it."""
    async with Client(server) as client:
        assert len((await client.list_tools()).tools) > 15
        made = await client.call_tool("create_sandbox", {"name": "work"})
        assert not made.is_error, made.content
        asked = {"sandbox_id": "work", "command": "echo hello"}
        ran = await client.call_tool("run_command", asked)
        assert ran.structured_content
        assert ran.structured_content["stdout"] == "hello\n"
        gone = await client.call_tool("destroy_sandbox", {"sandbox_id": "work"})
        assert not gone.is_error
