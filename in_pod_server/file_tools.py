"""The tools for files. They translate between MCP and the home, and nothing more."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from in_pod_server.errors import ArgumentError
from in_pod_server.files import Entry, Home
from in_pod_server.results import REPLY_BYTES, result
from in_pod_server.text import decode_within, json_size

_Path = Annotated[
    str,
    Field(
        min_length=1,
        description="Relative to the home, or absolute under it. Bytes that are not UTF-8: \\xNN.",
    ),
]


def add_file_tools(server: MCPServer[Any], home: Home, *, max_file_bytes: int) -> None:
    """Register write_file, read_file, list_files and delete_file."""

    @server.tool(
        title="Write a file",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        ),
    )
    def write_file(
        *,
        path: _Path,
        content: Annotated[str, Field(description="The text, or the bytes in base64.")],
        encoding: Annotated[
            Literal["text", "base64"],
            Field(description="base64 for anything that is not UTF-8 text."),
        ] = "text",
        append: Annotated[bool, Field(description="Add to the end instead of replacing.")] = False,
        create_only: Annotated[bool, Field(description="Fail if the file exists already.")] = False,
        mode: Annotated[
            str,
            Field(
                pattern="^(0?[0-7]{3})?$",
                description="Octal permissions, e.g. 755. Empty: as before, 644 for a new file.",
            ),
        ] = "",
    ) -> CallToolResult:
        """Write a whole file in the home, or append to one; missing folders are made.

        The write happens completely or not at all. Prefer it to echo or heredocs in run_command:
        nothing has to be quoted. For more than about 500 kB write parts with append=true.
        """
        data = _to_bytes(content, encoding)
        if len(data) > max_file_bytes:
            raise ArgumentError(
                f"the content has {len(data)} bytes, the limit is {max_file_bytes} (MAX_FILE_BYTES): "
                "write it in parts with append=true, or transfer it as a file"
            )
        if append and create_only:
            raise ArgumentError("append and create_only exclude each other: give one of them")
        bits = int(mode, 8) if mode else None
        if append:
            written = home.append(path, data, mode=bits)
        else:
            written = home.write(path, data, mode=bits, create_only=create_only)
        verb = "appended" if append else "wrote"
        made = "a new file" if written.created else f"{written.size} bytes now"
        return result(
            f"{verb} {written.bytes_written} bytes to {written.path} ({made})",
            path=written.path,
            bytes_written=written.bytes_written,
            size=written.size,
            created=written.created,
        )

    @server.tool(
        title="Read a file",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    def read_file(
        *,
        path: _Path,
        offset: Annotated[int, Field(ge=0, description="Byte to start at.")] = 0,
        max_bytes: Annotated[int, Field(ge=16, description="Most bytes to return.")] = 262144,
        encoding: Annotated[
            Literal["text", "base64"],
            Field(description="base64 gives the exact bytes of any file."),
        ] = "text",
    ) -> CallToolResult:
        r"""Read a file of the home, whole or a part of it.

        When truncated is true, call it again with offset=next_offset. As text, bytes that are not
        UTF-8 are shown as \xNN and the result says so: read such files with encoding=base64.
        """
        asked = min(max_bytes, max_file_bytes)
        data, size = home.read(path, offset, asked)
        if encoding == "base64":
            data = data[: REPLY_BYTES // 4 * 3]
            content, used, exact = base64.b64encode(data).decode(), len(data), True
        else:
            at_end = offset + len(data) >= size
            decoded = decode_within(data, REPLY_BYTES, final=at_end)
            content, used, exact = decoded.text, decoded.used, decoded.exact
        after = offset + used
        truncated = after < size
        notes = (
            [f"bytes {offset} to {after} of {size}; go on with offset={after}"] if truncated else []
        )
        notes += (
            []
            if exact
            else ["bytes that are not UTF-8 are shown as \\xNN: encoding=base64 is exact"]
        )
        notes += (
            []
            if content or notes
            else [f"nothing at offset {offset} of {size}" if size else "empty"]
        )
        return result(
            content,
            f"[{'; '.join(notes)}]" if notes else "",
            path=home.shown(home.relative(path)),
            content=content,
            encoding="base64" if encoding == "base64" else "utf-8" if exact else "utf-8, escaped",
            size=size,
            offset=offset,
            bytes_read=used,
            truncated=truncated,
            next_offset=after,
        )

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
        max_entries: Annotated[
            int, Field(ge=1, le=10000, description="Most entries to return.")
        ] = 1000,
    ) -> CallToolResult:
        r"""List a folder of the home with type, size and time of each entry; links are not followed.

        Names are relative to the home and can be given to the other file tools as they are (a byte
        that is not UTF-8 is written \xNN). total counts all entries, also when truncated.
        """
        listing = home.entries(path, recursive=recursive, max_entries=max_entries)
        rows: list[dict[str, Any]] = []
        lines: list[str] = []
        room = REPLY_BYTES
        for entry in listing.entries:
            row, line = _row(entry), _line(entry)
            room -= max(json_size(line), 80 + json_size(entry.path))
            if room < 0:
                break
            rows.append(row)
            lines.append(line)
        truncated = len(rows) < listing.total
        count = f"{listing.total}" if listing.complete else f"at least {listing.total}"
        note = f"[{len(rows)} of {count} entries; list a folder below to see the rest]"
        return result(
            "\n".join(lines) or "the folder is empty",
            note if truncated else "",
            entries=rows,
            total=listing.total,
            total_is_complete=listing.complete,
            truncated=truncated,
        )

    @server.tool(
        title="Delete a file",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        ),
    )
    def delete_file(
        *,
        path: _Path,
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


def _to_bytes(content: str, encoding: Literal["text", "base64"]) -> bytes:
    if encoding == "base64":
        try:
            return base64.b64decode(content, validate=True)
        except ValueError as exc:
            reason = f"content is not base64 ({exc}): send text with encoding=text"
            raise ArgumentError(reason) from None
    try:
        return content.encode()
    except UnicodeEncodeError:
        raise ArgumentError("content is not Unicode text: send it with encoding=base64") from None


def _row(entry: Entry) -> dict[str, Any]:
    return {"path": entry.path, "type": entry.type, "size": entry.size, "mtime": entry.mtime}


def _line(entry: Entry) -> str:
    when = datetime.fromtimestamp(entry.mtime, UTC).strftime("%Y-%m-%d %H:%M:%S")
    slash = "/" if entry.type == "directory" else ""
    # A name may hold a newline; one entry stays one line.
    name = (entry.path + slash).replace("\n", "\\n").replace("\r", "\\r")
    return f"{entry.type:<9} {entry.size:>12} {when} {name}"
