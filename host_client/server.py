"""The MCP server that a client starts: its tools, and stdio to serve them on.

A `PodpipeError` becomes the text that a model reads in `refusals`, which each tool is wrapped in.
"""

from __future__ import annotations

import logging
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.tools import Tool

from host_client import __version__, logs, stdio
from host_client.bound import BoundServer, bound_instructions
from host_client.config import Settings
from host_client.host import Host
from host_client.listener import OnDemand
from host_client.tools.forwarded import forwarded_tools
from host_client.tools.lifecycle import lifecycle_tools
from host_client.tools.transfers import transfer_tools

log = logging.getLogger(__name__)

INSTRUCTIONS = """\
Isolated Linux sandboxes on Kubernetes. create_sandbox gives a sandbox_id; pass it to every other
tool. The home, /home/sandbox (also /workspace), is durable: it outlives suspend, destroy and expiry,
and all sandboxes of a user share it. Everything else in a sandbox is scratch. run_command is for
commands that end; start_background and read_output for servers and long jobs. No call takes longer
than 45 seconds: what still runs then goes on, under a process_id. {suspended}
destroy_sandbox when the work is done.
"""


def _instructions(host: Host) -> str:
    resumes = (
        "is resumed by the next call" if host.settings.resumes else "needs resume_sandbox first"
    )
    return INSTRUCTIONS.format(suspended=f"A suspended sandbox {resumes}.") + bound_instructions(
        host.bound
    )


def build_server(host: Host) -> MCPServer[Any]:
    """The server with the toolsets that the settings name; touches no cluster.

    Args:
        host: entered by whoever runs the server.
    """

    settings = host.settings
    tools: list[Tool] = []
    if "default" in settings.toolsets:
        tools += lifecycle_tools(host) + transfer_tools(host)
    local = OnDemand(host)
    for toolset in settings.toolsets:
        tools += forwarded_tools(host, local, toolset)
    return BoundServer(
        host.bound,
        host.audit,
        "podpipe",
        title="Kubernetes sandboxes",
        instructions=_instructions(host),
        version=__version__,
        tools=tools,
        log_level=settings.log_level,
        subscriptions=False,
    )


async def serve_stdio(settings: Settings, sandbox: str = "") -> None:
    """Serve MCP on stdin and stdout until stdin ends; logs go to stderr and the log file.

    Args:
        settings: whose podpipe it is.
        sandbox: name of the sandbox to work in where a call names none, made when first used.

    Raises:
        UsageError: no sandbox can have that name.
    """
    logs.configure(settings)
    log.info("podpipe %s serves %s", __version__, f"sandbox {sandbox}" if sandbox else "a client")
    # Before anything else: what prints while the server is made would be its first line.
    with stdio.claimed() as (source, sink):
        async with Host(settings, bound=sandbox) as host:
            await stdio.serve(build_server(host), source, sink)
