"""`scripts/mcpb`: podpipe as one .mcpb file that Claude Desktop installs by a click.

The bundle holds podpipe's own sources and the pins of what they import, and is of the type `uv`: the
app's uv finds or fetches a Python and installs the pins on the machine where the bundle is opened.
Bundling the packages themselves would take one file for each platform and Python, for some of them are
compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anyio
from mcp.types import Tool

from host_client import __version__
from host_client.config import SETTINGS_HELP, Settings
from host_client.host import Host
from host_client.local.tools import CHECKOUT, Failure
from host_client.server import build_server

PACKAGES: Final = ("host_client", "in_pod_server", "manifests")
LEFT_OUT: Final = CHECKOUT / "host_client" / "local"
"""It makes clusters and images from a checkout."""
NOT_SERVED: Final = ("pytest", "iniconfig", "pluggy")
"""Pins that only tests need."""
EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""One time for all files: the same sources make the same bundle."""

LONG_DESCRIPTION: Final = """\
podpipe runs on your machine and reaches your cluster through `kubectl exec`; nothing has to be installed
in the cluster.

How it starts: Claude Desktop's own uv makes an environment in the folder of this extension, with a Python
of 3.11 or newer that it finds or fetches, and the exact versions of pyproject.toml; after that it starts
without a network. kubectl and credential plugins are looked up in the folders that you configure below.

Before the first use the sandbox image has to be where your nodes can pull it: see README.md of the
checkout, `scripts/image`.
"""

EPILOG: Final = """\
example:
  scripts/mcpb                       # build/podpipe.mcpb
  scripts/mcpb ~/Desktop/podpipe.mcpb

Open the file with Claude Desktop to install it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the bundle; the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/mcpb",
        description="Pack podpipe into one file that Claude Desktop installs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = CHECKOUT / "build" / "podpipe.mcpb"
    parser.add_argument("file", nargs="?", type=Path, default=default, help=f"default: {default}")
    target = parser.parse_args(argv).file.expanduser()
    try:
        write_bundle(target)
    except (Failure, OSError) as error:
        print(f"scripts/mcpb: {target}: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


def write_bundle(target: Path) -> None:
    """Write the bundle to `target`, in one step.

    Raises:
        Failure: the name does not end with .mcpb, so that no app would open it.
        OSError: it cannot be written; what was there is left.
    """
    if target.suffix != ".mcpb":
        raise Failure("the app opens files by their name: let it end with .mcpb")
    target.parent.mkdir(parents=True, exist_ok=True)
    contents = {
        "manifest.json": json.dumps(bundle_manifest(), indent=2) + "\n",
        "pyproject.toml": _pyproject(),
        "LICENSE": (CHECKOUT / "LICENSE").read_text(encoding="utf-8"),
    }
    for package in PACKAGES:
        for path in sorted((CHECKOUT / package).rglob("*")):
            if path.suffix in (".py", ".json", ".j2") and LEFT_OUT not in path.parents:
                name = path.relative_to(CHECKOUT).as_posix()
                contents[name] = path.read_text(encoding="utf-8")
    fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for name, text in contents.items():
                entry = zipfile.ZipInfo(name, EPOCH)
                entry.external_attr = 0o100644 << 16
                archive.writestr(entry, text, zipfile.ZIP_DEFLATED)
        temporary.chmod(0o644)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def bundle_manifest() -> dict[str, Any]:
    """What Claude Desktop reads of the bundle: how to start it, what to ask the user, its tools."""

    async def offered() -> list[Tool]:
        return await build_server(Host(Settings())).list_tools()

    tools = anyio.run(offered)
    home = "${HOME}/.local/bin:${HOME}/google-cloud-sdk/bin:${HOME}/.rd/bin"
    return {
        "manifest_version": "0.4",
        "name": "podpipe",
        "display_name": "Kubernetes sandboxes (podpipe)",
        "version": __version__,
        "description": "Isolated Linux sandboxes on any Kubernetes that your kubectl reaches",
        "long_description": LONG_DESCRIPTION,
        "author": {"name": "The podpipe authors"},
        "license": "Apache-2.0",
        "keywords": ["kubernetes", "sandbox", "shell", "code execution"],
        "server": {
            "type": "uv",
            "entry_point": "host_client/__main__.py",
            "mcp_config": {
                "command": "uv",
                "args": [
                    "run", "--no-dev", "--directory", "${__dirname}",
                    "python", "-m", "host_client", "serve",
                    # In one word: an argument that is only an empty value is left as it is here.
                    "--sandbox=${user_config.sandbox}",
                ],
                "env": {
                    "KUBECONFIG": "${user_config.kubeconfig}",
                    "NAMESPACE": "${user_config.namespace}",
                    "PATH": f"${{user_config.path}}:{home}",
                    "PODPIPE_ALLOWED_DIRS": "${user_config.folder}",
                    "PODPIPE_CONTEXT": "${user_config.context}",
                    "PODPIPE_USER": "${user_config.user}",
                    "SANDBOX_IMAGE": "${user_config.image}",
                },
            },
        },
        "tools": [
            {"name": tool.name, "description": (tool.description or "").split(". ")[0]}
            for tool in tools
        ],
        "user_config": _user_config(),
        "compatibility": {
            "platforms": ["darwin", "linux"],
            "runtimes": {"python": ">=3.11"},
        },
    }  # fmt: skip


def _user_config() -> dict[str, dict[str, Any]]:
    """What the app asks. A default that is empty stays empty: the app leaves no name unreplaced."""

    def ask(
        title: str, description: str, default: str = "", kind: str = "string"
    ) -> dict[str, Any]:
        return {"type": kind, "title": title, "description": description, "default": default}

    return {
        "user": {
            "type": "string",
            "title": "Your name in the cluster",
            "description": "Whose sandboxes and home these are, for example alice. Whoever gives "
            "the same name on the same cluster shares them.",
            "required": True,
        },
        "kubeconfig": ask(
            "Kubeconfig",
            "The file that reaches your cluster; empty for ~/.kube/config",
            kind="file",
        ),
        "context": ask("Context", "Of that kubeconfig; empty for its current one"),
        "namespace": ask("Namespace", "Where sandboxes live", SETTINGS_HELP["NAMESPACE"][0]),
        "image": ask("Sandbox image", "As your nodes pull it", SETTINGS_HELP["SANDBOX_IMAGE"][0]),
        "sandbox": ask(
            "Lasting sandbox", "A name, to work in one that is always there; empty for none"
        ),
        "folder": ask(
            "Folder for transfers",
            "Where the model may upload from and download to on this machine; empty for nowhere",
            kind="directory",
        ),
        "path": ask(
            "Folders of kubectl and credential plugins",
            "Such as aws, gke-gcloud-auth-plugin or kubelogin; separated by ':'",
            "/usr/local/bin:/opt/homebrew/bin:/usr/bin:/bin",
        ),
    }


def _pyproject() -> str:
    """What uv needs to make the environment: no package is built, the sources run as they lie."""
    pins = [
        line
        for line in (CHECKOUT / "requirements.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#") and line.split("==")[0] not in NOT_SERVED
    ]
    project = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    python = re.search(r'^requires-python = "(.*)"$', project, re.MULTILINE)
    if not python:
        raise Failure("pyproject.toml does not say which Python is required")
    wanted = "".join(f'    "{pin}",\n' for pin in pins)
    return (
        f'[project]\nname = "podpipe"\nversion = "{__version__}"\n'
        f'requires-python = "{python[1]}"\ndependencies = [\n{wanted}]\n\n'
        "[tool.uv]\npackage = false\n"
    )


if __name__ == "__main__":
    sys.exit(main())
