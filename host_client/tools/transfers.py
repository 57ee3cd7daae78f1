"""The tools that copy between the user's machine and a sandbox."""

# No `from __future__ import annotations` here: the SDK evaluates the tools' annotations, and some
# hold a setting that only the enclosing function knows.
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import anyio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from host_client.errors import StillStarting
from host_client.host import Host
from host_client.outcome import Meter, Outcome
from host_client.paths import allowed
from host_client.refusals import refusals
from host_client.tools.common import SandboxId, answer, fitting, progress_of
from in_pod_server.contract import CALL_LIMIT_SECONDS

REFUSED_LISTED = 200
REFUSED_TOLD = 20
"""Of what a transfer left out, so much is in the data and so much in the text."""


def transfer_tools(host: Host) -> list[Tool]:
    """The tools, for the sandboxes of a host."""
    folders = host.settings.allowed_dirs
    host_path_type = Annotated[
        str,
        Field(
            description="Absolute path on the user's machine, below a folder that the user allows: "
            + (", ".join(folders) or "none so far (PODPIPE_ALLOWED_DIRS)"),
        ),
    ]
    pod_path_type = Annotated[
        str, Field(description="In the sandbox's home; relative to it or absolute")
    ]

    async def transfer(
        context: Context[Any, Any],
        direction: str,
        ref: str,
        here: str,
        there: str,
        begin: Callable[[Meter], Coroutine[Any, Any, Outcome]],
    ) -> CallToolResult:
        async with refusals(), progress_of(context) as progress:
            began = anyio.current_time()
            await host.open(ref, progress=progress)
            progress("copying")
            left = max(1.0, CALL_LIMIT_SECONDS - (anyio.current_time() - began))
            try:
                outcome = await host.transfers.within(left, (direction, ref, here, there), begin)
            except StillStarting as waiting:
                return answer(str(waiting), {"done": False, "detail": str(waiting)})
        facts = outcome.to_json()
        text = outcome.text()
        listed = fitting(facts["refused"][:REFUSED_LISTED])
        facts["refused_unlisted"] += len(facts["refused"]) - len(listed)
        for entry in listed[:REFUSED_TOLD]:
            text += f"\nleft out: {entry['path']}: {entry['reason']}"
        if more := len(listed[REFUSED_TOLD:]) + facts["refused_unlisted"]:
            text += f"\nleft out: {more} more"
        return answer(text, {"done": True, **facts, "refused": listed})

    async def upload_file(
        context: Context[Any, Any],
        sandbox_id: SandboxId,
        host_path: host_path_type,
        path: pod_path_type = ".",
    ) -> CallToolResult:
        async with refusals():
            real = allowed(host_path, folders)
        return await transfer(
            context, "up", sandbox_id, host_path, path,
            lambda meter: host.transfers.put(sandbox_id, [real], path, meter),
        )  # fmt: skip

    async def download_file(
        context: Context[Any, Any],
        sandbox_id: SandboxId,
        path: pod_path_type,
        host_path: host_path_type,
    ) -> CallToolResult:
        async with refusals():
            # `get` asks by its end whether it is a folder to copy into; realpath takes that off.
            real = allowed(host_path, folders) + ("/" if host_path.endswith("/") else "")
        return await transfer(
            context, "down", sandbox_id, host_path, path,
            lambda meter: host.transfers.get(sandbox_id, path, real, meter),
        )  # fmt: skip

    hints = ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
    )
    common = (
        " Files and whole folders of any size, each file verified by SHA-256; modes, times and "
        "links that stay inside are kept. Where that is a folder that exists, or ends with /, it is "
        "copied into. Says so if it takes longer than a call may: call again with the same "
        "arguments."
    )
    return [
        Tool.from_function(
            upload_file,
            title="Upload from the user's machine",
            description="Copy a file or a folder from the user's machine into a sandbox." + common,
            annotations=hints,
            structured_output=False,
        ),
        Tool.from_function(
            download_file,
            title="Download to the user's machine",
            description="Copy a file or a folder from a sandbox to the user's machine." + common,
            annotations=hints,
            structured_output=False,
        ),
    ]
