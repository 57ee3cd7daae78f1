"""What an MCP client's configuration says to start podpipe.

    python -m host_client.install      prints the entry for this machine, user and cluster

Clients start servers with a short PATH, from another folder and without the shell's environment, so
every path is absolute and everything that the cluster needs is written out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from host_client.config import SETTINGS_HELP, Settings
from host_client.errors import PodpipeError
from host_client.kubectl import Kubectl


def client_entry(settings: Settings) -> dict[str, Any]:
    """The `mcpServers` entry that serves these settings, as Claude Desktop reads it.

    Args:
        settings: what the entry shall hold; settings that were given are written out.

    Raises:
        PrerequisiteError: there is no kubectl or no kubeconfig to point at.
    """
    kubectl = Kubectl(settings)
    given = {
        name: settings.environment[name] for name in SETTINGS_HELP if name in settings.environment
    }
    environment = given | {
        "PODPIPE_USER": settings.user,
        "PODPIPE_KUBECTL": kubectl.path,
        # Credential plugins are looked up here.
        "PATH": os.pathsep.join(
            dict.fromkeys(settings.environment.get("PATH", os.defpath).split(os.pathsep))
        ),
    }
    if kubectl.target.kubeconfig:
        environment["KUBECONFIG"] = os.pathsep.join(map(str, kubectl.target.kubeconfig))
        environment["PODPIPE_CONTEXT"] = kubectl.target.context
    # A venv's python is a link; what it links to does not know the venv.
    command = Path(sys.executable).parent / "podpipe"
    return {
        "mcpServers": {
            "podpipe": {
                "command": str(command.absolute()),
                "args": ["serve"],
                "env": dict(sorted(environment.items())),
            }
        }
    }


def main() -> int:
    """Print the entry; the exit code."""
    try:
        entry = client_entry(Settings.from_env())
    except PodpipeError as error:
        print(f"podpipe: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(entry, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
