"""Which kubectl, and which cluster it is for: found once, and held to.

A context that is edited to point to another server is refused from then on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from host_client.config import Settings
from host_client.errors import PrerequisiteError

_COMMON_DIRS = (
    "/usr/local/bin",
    "/opt/homebrew/bin",
    "/usr/bin",
    "/snap/bin",
    "~/.rd/bin",
    "~/bin",
)
"""Where kubectl is looked for beside PATH: desktop programs start us with a short one."""


def find_kubectl(settings: Settings) -> str:
    """The absolute path of the kubectl to use.

    Raises:
        PrerequisiteError: none was found, or the one that was named is not executable.
    """
    path = settings.environment.get("PATH", os.defpath)
    if settings.kubectl:
        if found := shutil.which(Path(settings.kubectl).expanduser(), path=path):
            return str(Path(found).absolute())
        raise PrerequisiteError(
            f"PODPIPE_KUBECTL={settings.kubectl!r} is not an executable file; "
            "give the absolute path of kubectl"
        )
    places = os.pathsep.join([path, *(str(Path(d).expanduser()) for d in _COMMON_DIRS)])
    if found := shutil.which("kubectl", path=places):
        return str(Path(found).absolute())
    raise PrerequisiteError(
        "kubectl was not found on PATH or in the usual folders; install it "
        "(https://kubernetes.io/docs/tasks/tools/) or set PODPIPE_KUBECTL to its absolute path"
    )


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster that this process talks to, for its whole life.

    Args:
        kubeconfig: absolute paths, merged as kubectl does; empty inside a pod without one.
        context: name of the kubeconfig context; empty inside a pod without a kubeconfig.
        server: URL of the API server that the context named when it was resolved.
    """

    kubeconfig: tuple[Path, ...]
    context: str
    server: str
    stamps: tuple[tuple[int, int] | None, ...] = field(default=(), compare=False)

    @classmethod
    def resolve(cls, settings: Settings) -> Target:
        """Read the kubeconfig files and pin context and server. Touches no network.

        Raises:
            PrerequisiteError: there is no kubeconfig, it does not parse, it names no current
                context, or the context or its cluster does not exist.
        """
        named = settings.environment.get("KUBECONFIG", "")
        home = Path(settings.environment.get("HOME", "~")).expanduser()
        files = [Path(p).absolute() for p in named.split(os.pathsep) if p] or [
            home / ".kube" / "config"
        ]
        if not any(path.is_file() for path in files):
            if not named and settings.environment.get("KUBERNETES_SERVICE_HOST"):
                return cls((), "", "in-cluster")
            raise PrerequisiteError(
                f"no kubeconfig: {', '.join(map(str, files))} does not exist; set KUBECONFIG to the "
                "file that reaches your cluster, or make one with `scripts/cluster up`"
            )
        context, server = _context_and_server(files, settings.context)
        return cls(tuple(files), context, server, tuple(_stamp(path) for path in files))

    def check(self) -> None:
        """Refuse to go on if the pinned context now points to another server.

        Raises:
            PrerequisiteError: it does, or it is gone.
        """
        if self.stamps == tuple(_stamp(path) for path in self.kubeconfig):
            return
        _, server = _context_and_server(self.kubeconfig, self.context)
        if server != self.server:
            raise PrerequisiteError(
                f"kubeconfig context {self.context!r} pointed to {self.server} when podpipe started "
                f"and now points to {server}; nothing was sent. Restart podpipe to use the new one"
            )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _context_and_server(files: Sequence[Path], wanted: str) -> tuple[str, str]:
    """Merge kubeconfig files as kubectl does: the first to set a value or a name wins."""
    current = ""
    contexts: dict[str, str] = {}
    clusters: dict[str, str] = {}
    for path in files:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise PrerequisiteError(
                f"kubeconfig {path} cannot be read: {_unreadable(error)}"
            ) from error
        if not isinstance(content, dict):
            continue
        current = current or str(content.get("current-context") or "")
        for entry in _entries(content, "contexts", "context"):
            contexts.setdefault(entry[0], str(entry[1].get("cluster", "")))
        for entry in _entries(content, "clusters", "cluster"):
            clusters.setdefault(entry[0], str(entry[1].get("server", "")))
    known = ", ".join(sorted(contexts)) or "none"
    where = ", ".join(map(str, files))
    name = wanted or current
    if not name:
        raise PrerequisiteError(
            f"kubeconfig {where} has no current context; set PODPIPE_CONTEXT (known: {known})"
        )
    if name not in contexts:
        raise PrerequisiteError(
            f"context {name!r} does not exist in kubeconfig {where} (known: {known}); "
            "set PODPIPE_CONTEXT to one of them"
        )
    if not clusters.get(contexts[name]):
        raise PrerequisiteError(
            f"context {name!r} in kubeconfig {where} names cluster {contexts[name]!r}, "
            "which has no server"
        )
    return name, clusters[contexts[name]]


def _unreadable(error: Exception) -> str:
    """Why a kubeconfig cannot be read; what stands in it is not repeated, for it holds tokens."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1} is not valid YAML" if mark else "it is not valid YAML"


def _entries(
    content: Mapping[str, Any], plural: str, singular: str
) -> list[tuple[str, Mapping[str, Any]]]:
    found = content.get(plural)
    return [
        (str(item.get("name", "")), inner if isinstance(inner, dict) else {})
        for item in (found if isinstance(found, list) else [])
        if isinstance(item, dict)
        for inner in [item.get(singular)]
    ]
