"""The cluster that the current kubectl context names: it is somebody else's, and is only asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from host_client.local.containerd import canonical
from host_client.local.provider import Access, Status
from host_client.local.tools import Failure, NotFound, absolute_tool, run
from in_pod_server.contract import LABEL_MANAGED_BY, PREFIX


class Existing:
    """Whatever kubectl reaches by default."""

    name = "existing"

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def up(self) -> None:
        """Check that it answers; nothing is started."""
        access = self.access()
        if not self._answers(access):
            raise Failure(
                f"the cluster of context {access.context} does not answer: try "
                f"`{' '.join(access.argv('get', 'nodes'))}`"
            )

    def down(self, *, purge: bool) -> None:
        """Do nothing: who did not start a cluster does not stop it."""

    def status(self, image: str) -> Status:
        """Whether it answers, its version, and whether a node lists the image."""
        access = self.access()
        up = self._answers(access)
        version = server_version(access) if up else "unknown"
        loaded = image_on_a_node(access, image) if up else None
        return Status(self.name, version, {"API server": up}, image, loaded)

    def access(self) -> Access:
        """The current context, by the kubectl on PATH."""
        kubectl = absolute_tool("kubectl")
        found = run([kubectl, "config", "current-context"], env=dict(self._env), check=False)
        context = found.stdout.strip()
        if found.returncode != 0 or not context:
            raise NotFound("kubectl has no current context: choose one with `kubectl config`")
        return Access(kubeconfig(self._env), context, kubectl)

    def carries_podpipe(self) -> bool:
        """Whether podpipe's namespace is there, labelled as podpipe's own; never an error."""
        if not any(Path(path).exists() for path in kubeconfig(self._env).split(os.pathsep)):
            return False
        namespace = self._env.get("NAMESPACE") or "sandbox-system"
        try:
            argv = self.access().argv("--request-timeout=5s", "get", "namespace", namespace)
            found = run([*argv, "-o", "json"], check=False, timeout=10)
        except Failure:
            return False
        if found.returncode != 0:
            return False
        labels = json.loads(found.stdout)["metadata"].get("labels", {})
        return bool(labels.get(LABEL_MANAGED_BY) == PREFIX)

    def _answers(self, access: Access) -> bool:
        argv = access.argv("--request-timeout=10s", "get", "--raw", "/readyz")
        return run(argv, check=False, timeout=20).returncode == 0


def kubeconfig(env: Mapping[str, str]) -> str:
    """Where kubectl looks; a list in KUBECONFIG stays a list."""
    return env.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def server_version(access: Access) -> str:
    """The API server's version."""
    found = run(access.argv("version", "-o", "json"), check=False)
    try:
        return str(json.loads(found.stdout)["serverVersion"]["gitVersion"])
    except (ValueError, KeyError):
        return "unknown"


def image_on_a_node(access: Access, image: str) -> bool | None:
    """True when a node says that it has the image; a node lists fifty, so absence proves nothing."""
    path = "jsonpath={.items[*].status.images[*].names[*]}"
    found = run(access.argv("get", "nodes", "-o", path), check=False)
    names = {canonical(name) for name in found.stdout.split()}
    return True if canonical(image) in names else None
