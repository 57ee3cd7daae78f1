"""What an MCP client's configuration says to start podpipe.

Clients start servers with a short PATH, from another folder and without the shell's environment, so
every path is absolute and every setting that holds now is written out. Secrets never are: what is
written is named here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from host_client.config import SETTINGS_HELP, Settings
from host_client.errors import PrerequisiteError, UsageError
from host_client.identity import is_sandbox_id, named_sandbox_id
from host_client.kubectl import Kubectl
from host_client.target import Target

PLUGINS = (
    "aws",
    "aws-iam-authenticator",
    "az",
    "doctl",
    "gcloud",
    "gke-gcloud-auth-plugin",
    "kubectl-oidc_login",
    "kubelogin",
    "oci",
    "tsh",
)
"""Credential plugins, and the tools that they call in turn."""

STANDARD_DIRS = ("/usr/local/bin", "/opt/homebrew/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")

PLUGIN_SETTINGS = (
    "AWS_CONFIG_FILE",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_REGION",
    "AZURE_CONFIG_DIR",
    "CLOUDSDK_ACTIVE_CONFIG_NAME",
    "CLOUDSDK_CONFIG",
    "HTTPS_PROXY",
    "NO_PROXY",
)
"""What kubectl and its plugins go by and is no secret: names, folders, addresses."""

PLUGIN_SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AAD_SERVICE_PRINCIPAL_CLIENT_SECRET",
)
"""What a plugin may have from the shell alone; it is told of, never written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How podpipe is started.

    Args:
        command: absolute path of the program.
        args: its arguments.
        env: the environment that it needs.
        warnings: what may not work from a client although it does from here.
    """

    command: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The form that `mcpServers` holds."""
        return {"command": self.command, "args": list(self.args), "env": dict(self.env)}


def client_entry(settings: Settings, sandbox: str = "") -> Entry:
    """The entry that serves these settings.

    Args:
        settings: what the entry shall hold; those that are not at their defaults are written out.
        sandbox: name of the sandbox to bind it to; empty for none.

    Raises:
        PrerequisiteError: there is no kubectl or no kubeconfig to point at, or podpipe's own
            command is not installed.
        UsageError: no sandbox can have that name.
    """
    if sandbox and not is_sandbox_id(sandbox):
        named_sandbox_id(settings.user_key, sandbox)
    kubectl = Kubectl(settings)
    given = {
        name: value.value
        for name, value in settings.given.items()
        if name not in ("KUBECONFIG", "PODPIPE_ENV_FILE")  # as pinned, and what it says is here
    }
    environment = given | {
        "NAMESPACE": settings.namespace,
        "PODPIPE_USER": settings.user,
        "PODPIPE_KUBECTL": kubectl.path,
    }
    if kubectl.target.kubeconfig:
        environment["KUBECONFIG"] = os.pathsep.join(map(str, kubectl.target.kubeconfig))
        environment["PODPIPE_CONTEXT"] = kubectl.target.context
    plugin = _credential_plugin(kubectl.target)
    path = [p for p in settings.environment.get("PATH", "").split(os.pathsep) if p]
    environment["PATH"] = os.pathsep.join(
        _folders([kubectl.path], [plugin, *PLUGINS] if plugin else PLUGINS, path)
    )
    settable, warnings = _plugin_settings(settings.environment, plugin, path)
    return Entry(
        command=_own_command(),
        args=("serve", *(("--sandbox", sandbox) if sandbox else ())),
        env=dict(sorted((settable | environment).items())),
        warnings=tuple(warnings),
    )


def _own_command() -> str:
    # A venv's python is a link; what it links to does not know the venv.
    command = Path(sys.executable).parent.absolute() / "podpipe"
    if not os.access(command, os.X_OK):
        raise PrerequisiteError(
            f"{command} is missing: install podpipe into the Python that runs it "
            f"(`{sys.executable} -m pip install .` in the checkout)"
        )
    return str(command)


def _folders(files: Iterable[str], programs: Iterable[str], path: Sequence[str]) -> list[str]:
    """The folders of `files`, of what of `programs` is on `path`, in its order; then the usual."""
    wanted = {str(Path(file).parent) for file in files}
    for program in programs:
        if found := shutil.which(program, path=os.pathsep.join(path)):
            wanted.add(str(Path(found).parent.absolute()))
    usual = [folder for folder in STANDARD_DIRS if Path(folder).is_dir()]
    ours = [folder for folder in path if folder in wanted and folder not in usual]
    rest = sorted(wanted - set(ours) - set(usual))
    return list(dict.fromkeys([*ours, *rest, *usual]))


def _credential_plugin(target: Target) -> str:
    """The command that the kubeconfig has kubectl run for credentials; empty for none."""
    user = ""
    plugins: dict[str, str] = {}
    for file in target.kubeconfig:
        if not file.is_file():
            continue
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        for item in content.get("contexts") or []:
            if item.get("name") == target.context:
                user = user or str((item.get("context") or {}).get("user") or "")
        for item in content.get("users") or []:
            command = ((item.get("user") or {}).get("exec") or {}).get("command") or ""
            if command and os.sep in command:
                command = str((file.parent / command).absolute())  # as kubectl reads it
            plugins.setdefault(str(item.get("name")), str(command))
    return plugins.get(user, "")


def _plugin_settings(
    environment: Mapping[str, str], plugin: str, path: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """What kubectl and the plugin go by, and what a person should know of it."""
    warnings = []
    settable = {name: environment[name] for name in PLUGIN_SETTINGS if environment.get(name)}
    if "@" in settable.get("HTTPS_PROXY", ""):
        del settable["HTTPS_PROXY"]
        warnings.append("HTTPS_PROXY is not written, for it holds a password")
    if plugin and not shutil.which(plugin, path=os.pathsep.join(path)):
        warnings.append(
            f"the kubeconfig has kubectl run {plugin!r} for credentials, which is not on PATH: "
            "install it and run this again"
        )
    if plugin and (secrets := [name for name in PLUGIN_SECRETS if environment.get(name)]):
        warnings.append(
            f"{', '.join(secrets)} of this shell is a secret and is not written; {plugin} needs a "
            "profile or a login that it finds without it"
        )
    return settable, warnings


def checked_name(name: str) -> str:
    """A name that every client takes for a server.

    Raises:
        UsageError: it is none.
    """
    words = name.replace("_", "-").split("-")
    if not 1 <= len(name) <= 32 or not all(w.isascii() and w.isalnum() for w in words):
        raise UsageError(
            f"--name {name[:40]!r} is not usable: letters, digits, '-' and '_', at most 32, for "
            "example podpipe-work"
        )
    return name


def ours(env: Mapping[str, Any]) -> set[str]:
    """Those names of an entry's environment that an install decides about."""
    return {name for name in env if name in SETTINGS_HELP or name in (*PLUGIN_SETTINGS, "PATH")}
