"""The tools for a file's content. They translate between MCP and the home, and nothing more.

Those for folders and whole entries are in `folder_tools`, the search is in `search_tools`.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from in_pod_server.arguments import HomePath, to_bytes
from in_pod_server.errors import ArgumentError
from in_pod_server.files import Home
from in_pod_server.folder_tools import add_delete_tool, add_entry_tools, add_list_tool
from in_pod_server.results import REPLY_BYTES, result
from in_pod_server.search_tools import add_search_tool
from in_pod_server.text import decode_end_within, decode_within


def add_file_tools(server: MCPServer[Any], home: Home, *, max_file_bytes: int) -> None:
    """Register all tools for files, in the order in which they are listed."""
    _add_content_tools(server, home, max_file_bytes=max_file_bytes)
    add_list_tool(server, home)
    add_search_tool(server, home)
    add_entry_tools(server, home)
    add_delete_tool(server, home)


def _add_content_tools(server: MCPServer[Any], home: Home, *, max_file_bytes: int) -> None:

    @server.tool(
        title="Write a file",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        ),
    )
    def write_file(
        *,
        path: HomePath,
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
        nothing has to be quoted. To change a part of a file use edit_file.
        """
        data = to_bytes(content, encoding, name="content")
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
        path: HomePath,
        offset: Annotated[int, Field(ge=0, description="Byte to start at.")] = 0,
        max_bytes: Annotated[int, Field(ge=16, description="Most bytes to return.")] = 262144,
        encoding: Annotated[
            Literal["text", "base64"],
            Field(description="base64 gives the exact bytes of any file."),
        ] = "text",
        tail_lines: Annotated[
            int, Field(ge=0, description="Only so many last lines, instead of from offset.")
        ] = 0,
    ) -> CallToolResult:
        r"""Read a file of the home, whole or a part of it; for logs its last lines (tail_lines).

        When truncated is true, call it again with offset=next_offset. As text, bytes that are not
        UTF-8 are shown as \xNN and the result says so: read such files with encoding=base64.
        To find something in many files use search_files.
        """
        asked = min(max_bytes, max_file_bytes)
        if tail_lines:
            if offset:
                raise ArgumentError("offset and tail_lines exclude each other: give one of them")
            return _tail(home, path, tail_lines, asked, encoding)
        # More never fits the reply, and would be looked through for nothing.
        data, size = home.read(path, offset, min(asked, REPLY_BYTES))
        if encoding == "base64":
            data = data[: REPLY_BYTES // 4 * 3]
            content, used, exact = base64.b64encode(data).decode(), len(data), True
        else:
            at_end = offset + len(data) >= size
            decoded = decode_within(data, REPLY_BYTES, final=at_end)
            content, used, exact = decoded.text, decoded.used, decoded.exact
        after = offset + used
        notes = (
            [f"bytes {offset} to {after} of {size}; go on with offset={after}"]
            if after < size
            else []
        )
        if not content and not notes:
            notes = [f"nothing at offset {offset} of {size}" if size else "empty"]
        return _content(
            home, path, content, notes, encoding, exact=exact, size=size, offset=offset, used=used
        )

    @server.tool(
        title="Edit a file",
        annotations=ToolAnnotations(
            read_only_hint=False,
            destructive_hint=True,
            idempotent_hint=False,
            open_world_hint=False,
        ),
    )
    def edit_file(
        *,
        path: HomePath,
        old_text: Annotated[
            str,
            Field(
                min_length=1,
                description="Exactly what is there now, with its spaces, tabs and line breaks.",
            ),
        ],
        new_text: Annotated[str, Field(description="What is to be there instead; may be empty.")],
        replace_all: Annotated[
            bool, Field(description="Replace it wherever it is, not only once.")
        ] = False,
    ) -> CallToolResult:
        """Change a part of a text file of the home: old_text is replaced by new_text.

        It must be there exactly once unless replace_all is set; else nothing is changed and the
        error says where it is, or what comes closest. Mode and line ends stay. Prefer it to sed,
        and to write_file for small changes of a longer file.
        """
        shown, edit = home.edit(
            path, old_text, new_text, replace_all=replace_all, max_bytes=max_file_bytes
        )
        times = "1 place" if edit.count == 1 else f"{edit.count} places"
        lines = ", ".join(map(str, edit.lines)) + (", ..." if edit.count > len(edit.lines) else "")
        return result(
            f"replaced in {times} of {shown} (line {lines}), {len(edit.data)} bytes now:",
            edit.snippet,
            path=shown,
            replacements=edit.count,
            lines=edit.lines,
            size=len(edit.data),
            snippet=edit.snippet,
        )


def _tail(
    home: Home, path: str, lines: int, max_bytes: int, encoding: Literal["text", "base64"]
) -> CallToolResult:
    data, size = home.read_tail(path, lines, max_bytes)
    found = len(data)
    if encoding == "base64":
        data = data[-(REPLY_BYTES // 4 * 3) :]
        content, used, exact = base64.b64encode(data).decode(), len(data), True
    else:
        decoded = decode_end_within(data, REPLY_BYTES)
        content, used, exact = decoded.text, decoded.used, decoded.exact
    offset = size - used
    cut = used < found or (offset > 0 and data.count(b"\n", 0, len(data) - 1) + 1 < lines)
    less = f"; not all of {lines} lines: max_bytes or the reply's limit cut them" if cut else ""
    notes = [f"bytes {offset} to {size} of {size}{less}"] if offset else []
    notes += [] if content or notes else ["empty"]
    return _content(
        home, path, content, notes, encoding, exact=exact, size=size, offset=offset, used=used
    )


def _content(
    home: Home,
    path: str,
    content: str,
    notes: list[str],
    encoding: Literal["text", "base64"],
    *,
    exact: bool,
    size: int,
    offset: int,
    used: int,
) -> CallToolResult:
    if not exact:
        notes = [*notes, "bytes that are not UTF-8 are shown as \\xNN: encoding=base64 is exact"]
    after = offset + used
    return result(
        content,
        f"[{'; '.join(notes)}]" if notes else "",
        path=home.shown(home.relative(path)),
        content=content,
        encoding="base64" if encoding == "base64" else "utf-8" if exact else "utf-8, escaped",
        size=size,
        offset=offset,
        bytes_read=used,
        truncated=after < size,
        next_offset=after,
    )
