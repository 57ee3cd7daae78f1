"""A cluster by Kind, for machines with a Docker engine; the user's own kubeconfig is not touched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from host_client.local.console import Console
from host_client.local.existing import image_on_a_node, server_version
from host_client.local.provider import Access, Status
from host_client.local.tools import MissingPrerequisite, NotFound, absolute_tool, run

CLUSTER: Final = "podpipe"
CREATE_SECONDS: Final = 900.0
"""Kind pulls a node image of several hundred megabytes the first time."""
READY_WAIT: Final = "120s"


class Kind:
    """The Kind cluster `podpipe`."""

    name = "kind"

    def __init__(self, state: Path, console: Console) -> None:
        self._kubeconfig = state / "kubeconfig"
        self._console = console

    @staticmethod
    def is_possible() -> bool:
        """Whether kind is installed and a Docker engine answers."""
        return shutil.which("kind") is not None and docker_answers()

    def up(self) -> None:
        """Create the cluster, or start the stopped containers of the one that is there."""
        self._require()
        self._kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        where = ["--name", CLUSTER, "--kubeconfig", str(self._kubeconfig)]
        if not self._created():
            with self._console.step("creating the Kind cluster (it pulls its node image once)"):
                argv = ["kind", "create", "cluster", *where, "--wait", READY_WAIT]
                run(argv, timeout=CREATE_SECONDS)
            return
        with self._console.step("starting the Kind cluster"):
            run(["docker", "start", *self._containers()])
            run(["kind", "export", "kubeconfig", *where])
            wait = self.access().argv(
                "wait", "--for=condition=Ready", "nodes", "--all", f"--timeout={READY_WAIT}"
            )
            run(wait, timeout=150)

    def down(self, *, purge: bool) -> None:
        """Stop the cluster's containers; with `purge` delete it."""
        self._require()
        if not self._created():
            shutil.rmtree(self._kubeconfig.parent, ignore_errors=True)
            return
        if purge:
            with self._console.step("deleting the Kind cluster"):
                where = ["--name", CLUSTER, "--kubeconfig", str(self._kubeconfig)]
                run(["kind", "delete", "cluster", *where], timeout=CREATE_SECONDS)
            shutil.rmtree(self._kubeconfig.parent, ignore_errors=True)
            return
        with self._console.step("stopping the Kind cluster"):
            run(["docker", "stop", *self._containers()], timeout=CREATE_SECONDS)

    def status(self, image: str) -> Status:
        """Whether the cluster is created and answers."""
        self._require()
        created = self._created() and self._kubeconfig.exists()
        version = server_version(self.access()) if created else "unknown"
        up = version != "unknown"
        loaded = image_on_a_node(self.access(), image) if up else None
        components = {"cluster created": created, "API server": up}
        return Status(self.name, version, components, image, loaded)

    def access(self) -> Access:
        """The cluster's own kubeconfig, by the kubectl on PATH."""
        if not self._kubeconfig.exists():
            raise NotFound("there is no Kind cluster yet: run `scripts/cluster up --provider kind`")
        return Access(str(self._kubeconfig), f"kind-{CLUSTER}", absolute_tool("kubectl"))

    def _created(self) -> bool:
        return CLUSTER in run(["kind", "get", "clusters"]).stdout.split()

    def _containers(self) -> list[str]:
        return run(["kind", "get", "nodes", "--name", CLUSTER]).stdout.split()

    def _require(self) -> None:
        absolute_tool("kubectl")
        if shutil.which("kind") is None:
            raise MissingPrerequisite("kind is not on PATH: see https://kind.sigs.k8s.io/")
        if not docker_answers():
            raise MissingPrerequisite("`docker info` does not answer: start a Docker engine first")


def docker_answers() -> bool:
    """Whether a Docker engine is there and answers."""
    if shutil.which("docker") is None:
        return False
    return run(["docker", "info"], check=False, timeout=20).returncode == 0
