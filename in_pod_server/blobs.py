"""The agent-sandbox example's three tools, with its names, arguments and results.

They run in two places: as the stdio server that the example starts in the pod (`mcp_server`), and
beside the daemon's own tools. Blobs are plain files of one folder, and no name leads out of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Annotated, Any, Final

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ContentBlock, TextContent, ToolAnnotations
from pydantic import Field

from in_pod_server.errors import ArgumentError
from in_pod_server.files import Home
from in_pod_server.results import REPLY_BYTES
from in_pod_server.text import json_size, name_to_bytes

MAX_BLOB_BYTES: Final = 64 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024
BLOCK_BYTES: Final = 30
"""What a text block takes of a message besides its text."""

_Name = Annotated[str, Field(description="A plain file name in the workspace.")]


def add_blob_tools(server: MCPServer[Any], workspace: Home) -> None:
    """Register list_blobs, write_random_blob and read_blob, in the example's order."""

    @server.tool(
        title="List blobs",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    def list_blobs() -> CallToolResult:
        """List the names of the files in the workspace."""
        listing = workspace.entries("", recursive=False, max_entries=100_000)
        blocks: list[ContentBlock] = []
        names: list[str] = []
        room = REPLY_BYTES
        found = [entry.path for entry in listing.entries if entry.type == "file"]
        for name in found:
            room -= json_size(name) + BLOCK_BYTES
            if room < 0:
                note = (
                    f"[{len(names)} of {len(found)} names; list_files with a glob shows the rest]"
                )
                blocks.append(TextContent(type="text", text=note))
                break
            names.append(name)
            blocks.append(TextContent(type="text", text=name))
        cut = {"truncated": True, "total": len(found)} if room < 0 else {}
        return CallToolResult(content=blocks, structured_content={"result": names, **cut})

    @server.tool(
        title="Write a random blob",
        annotations=ToolAnnotations(
            read_only_hint=False,
            destructive_hint=True,
            idempotent_hint=False,
            open_world_hint=False,
        ),
    )
    def write_random_blob(
        name: _Name,
        size_bytes: Annotated[
            int, Field(ge=0, le=MAX_BLOB_BYTES, description="How many random bytes to write.")
        ] = 256,
    ) -> CallToolResult:
        """Write random bytes to a file of the workspace and return their sha256."""
        data = os.urandom(size_bytes)
        written = workspace.write(_plain(name), data, mode=None, create_only=False)
        return _as_example(
            path=written.path, bytes_written=len(data), sha256=hashlib.sha256(data).hexdigest()
        )

    @server.tool(
        title="Read a blob",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    def read_blob(name: _Name) -> CallToolResult:
        """Return a file's size and sha256, which proves what is stored in the workspace."""
        digest = hashlib.sha256()
        offset = 0
        while True:
            data, _ = workspace.read(_plain(name), offset, READ_BYTES)
            if not data:
                break
            digest.update(data)
            offset += len(data)
        path = workspace.shown(workspace.relative(name))
        return _as_example(path=path, size_bytes=offset, sha256=digest.hexdigest())


def _plain(name: str) -> str:
    if not name or "/" in name or name in (".", "..", "~") or b"/" in name_to_bytes(name):
        raise ArgumentError(f"{name!r} is no plain file name: give a name without any folder")
    return name


def _as_example(**data: Any) -> CallToolResult:
    text = json.dumps(data, indent=2, ensure_ascii=False)
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=data)
