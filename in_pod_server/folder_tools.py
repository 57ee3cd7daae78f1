"""The tools for folders and whole entries: list, look at, move, delete."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from in_pod_server.arguments import HomePath
from in_pod_server.files import Home
from in_pod_server.globs import matcher
from in_pod_server.listing import Entry
from in_pod_server.results import REPLY_BYTES, result
from in_pod_server.text import json_size, on_one_line


def add_list_tool(server: MCPServer[Any], home: Home) -> None:
    """Register list_files."""

    @server.tool(
        title="List files",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    def list_files(
        *,
        path: Annotated[str, Field(description="Folder of the home. Empty: the home itself.")] = "",
        recursive: Annotated[bool, Field(description="Also what is in its folders.")] = False,
        glob: Annotated[
            str,
            Field(
                max_length=1000,
                description="Only what matches: *.py by name, src/**/*.{js,ts} by path below the folder.",
            ),
        ] = "",
        max_entries: Annotated[
            int, Field(ge=1, le=10000, description="Most entries to return.")
        ] = 1000,
    ) -> CallToolResult:
        r"""List a folder of the home with type, size and time of each entry; links are not followed.

        To find files by name anywhere give recursive=true and a glob; by content: search_files.

        Names are relative to the home and can be given to the other file tools as they are (a byte
        that is not UTF-8 is written \xNN). total counts all entries, also when truncated.
        """
        wanted = matcher(glob) if glob else None
        # A pattern that names folders is meant for what is below.
        deep = recursive or "/" in glob.strip("/")
        listing = home.entries(path, recursive=deep, max_entries=max_entries, wanted=wanted)
        rows: list[dict[str, Any]] = []
        lines: list[str] = []
        room = REPLY_BYTES
        for entry in listing.entries:
            row, line = _row(entry), _line(entry)
            room -= max(json_size(line), json_size(row))
            if room < 0:
                break
            rows.append(row)
            lines.append(line)
        truncated = len(rows) < listing.total
        count = f"{listing.total}" if listing.complete else f"at least {listing.total}"
        note = f"[{len(rows)} of {count} entries; a glob or a folder below shows the rest]"
        return result(
            "\n".join(lines) or (f"nothing matches {glob}" if glob else "the folder is empty"),
            note if truncated else "",
            entries=rows,
            total=listing.total,
            total_is_complete=listing.complete,
            truncated=truncated,
        )


def add_entry_tools(server: MCPServer[Any], home: Home) -> None:
    """Register file_info and move_file."""

    @server.tool(
        title="Look at a file",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    def file_info(
        *,
        path: HomePath,
        sha256: Annotated[bool, Field(description="Also a regular file's SHA-256.")] = False,
    ) -> CallToolResult:
        """Tell what is at a path of the home: type, size, time, permissions, where a link points.

        Use it to see whether a file is there, or with sha256 whether two files are the same,
        without reading them. A link is not followed.
        """
        info = home.info(path, sha256=sha256)
        mode, when = f"{info.mode:03o}", _when(info.mtime)
        points = f" -> {info.link_target}" if info.link_target is not None else ""
        digest = f"\nsha256 {info.sha256}" if info.sha256 else ""
        return result(
            f"{info.type} {info.path}{points}, {info.size} bytes, mode {mode}, {when} UTC{digest}",
            path=info.path,
            type=info.type,
            size=info.size,
            mode=mode,
            mtime=info.mtime,
            link_target=info.link_target,
            sha256=info.sha256,
        )

    @server.tool(
        title="Move a file",
        annotations=ToolAnnotations(
            read_only_hint=False,
            destructive_hint=True,
            idempotent_hint=False,
            open_world_hint=False,
        ),
    )
    def move_file(
        *,
        path: HomePath,
        new_path: Annotated[
            str,
            Field(
                min_length=1,
                description="The whole new path, also when it is in a folder that exists.",
            ),
        ],
        overwrite: Annotated[
            bool, Field(description="Replace a file that is there already.")
        ] = False,
    ) -> CallToolResult:
        """Move or rename a file, a folder or a link within the home; missing folders are made.

        What is at new_path already is never touched unless overwrite is set.
        """
        old, new, kind = home.move(path, new_path, overwrite=overwrite)
        return result(f"moved {kind} {old} to {new}", path=new, old_path=old, type=kind)


def add_delete_tool(server: MCPServer[Any], home: Home) -> None:
    """Register delete_file."""

    @server.tool(
        title="Delete a file",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        ),
    )
    def delete_file(
        *,
        path: HomePath,
        recursive: Annotated[
            bool, Field(description="Delete a folder with all that is in it.")
        ] = False,
    ) -> CallToolResult:
        """Delete a file, a link (not what it points to), an empty folder, or a folder with recursive.

        It cannot be undone.
        """
        shown = home.shown(home.relative(path))
        kind = home.delete(path, recursive=recursive)
        return result(f"deleted {kind} {shown}", path=shown, type=kind)


def _when(mtime: float) -> str:
    return datetime.fromtimestamp(mtime, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _row(entry: Entry) -> dict[str, Any]:
    return {"path": entry.path, "type": entry.type, "size": entry.size, "mtime": entry.mtime}


def _line(entry: Entry) -> str:
    slash = "/" if entry.type == "directory" else ""
    name = on_one_line(entry.path + slash)
    return f"{entry.type:<9} {entry.size:>12} {_when(entry.mtime)} {name}"
