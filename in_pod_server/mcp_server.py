"""The agent-sandbox example's own server, as it starts it: `python3 -u /app/mcp_server.py`.

A stdio MCP server with just the three blob tools. Its workspace is MCP_WORKSPACE, /workspace if that
is not set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from in_pod_server import contract
from in_pod_server.blobs import add_blob_tools
from in_pod_server.files import Home
from in_pod_server.server import SandboxServer

ENV_WORKSPACE: Final = "MCP_WORKSPACE"


def main() -> None:
    """Serve the three tools over stdio until stdin ends."""
    workspace = Path(os.environ.get(ENV_WORKSPACE) or contract.WORKSPACE)
    workspace.mkdir(parents=True, exist_ok=True)
    with Home([workspace]) as home:
        server = SandboxServer("mcp-sandbox")
        add_blob_tools(server, home)
        server.run("stdio")


if __name__ == "__main__":
    main()
