"""The tool that finds text and names. It translates between MCP and ripgrep, and nothing more."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from anyio import to_thread
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from in_pod_server.errors import ArgumentError
from in_pod_server.files import Home
from in_pod_server.kinds import expect_file
from in_pod_server.results import REPLY_BYTES, result
from in_pod_server.root import explained
from in_pod_server.search import Found, Line, Query, search_content, search_names
from in_pod_server.text import json_size, name_to_text, on_one_line


def add_search_tool(server: MCPServer[Any], home: Home) -> None:
    """Register search_files."""

    @server.tool(
        title="Search files",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def search_files(
        *,
        pattern: Annotated[
            str,
            Field(
                min_length=1,
                max_length=10000,
                description="A regular expression (ripgrep's: no look-around, no back-references).",
            ),
        ],
        path: Annotated[
            str, Field(description="Folder or file of the home. Empty: the whole home.")
        ] = "",
        kind: Annotated[
            Literal["content", "name"],
            Field(description="Search the lines of files, or their paths below the folder."),
        ] = "content",
        glob: Annotated[
            str,
            Field(
                max_length=1000,
                description="Only in files that match: *.py, src/**, *.{js,ts}; !*.min.js leaves out.",
            ),
        ] = "",
        literal: Annotated[
            bool, Field(description="The pattern is plain text, no regular expression.")
        ] = False,
        ignore_case: Annotated[
            bool, Field(description="Upper and lower case are the same.")
        ] = False,
        all_files: Annotated[
            bool,
            Field(description="Also hidden files and those that .gitignore or .ignore name."),
        ] = False,
        context_lines: Annotated[
            int, Field(ge=0, le=20, description="Lines to show before and after each match.")
        ] = 0,
        max_results: Annotated[
            int, Field(ge=1, le=2000, description="Most matches to return.")
        ] = 100,
    ) -> CallToolResult:
        """Find text in the files of the home, or files by their names, fast and in order of paths.

        Prefer it to grep and find in run_command. Binary files and links are skipped, and so are
        hidden and ignored files unless all_files is set. total counts all matches, also when
        truncated: then narrow path, glob or pattern. To list a folder use list_files.
        """
        query = Query(pattern, literal, ignore_case, glob, all_files, context_lines)
        place = await to_thread.run_sync(_open, home, path)
        try:
            if kind == "content":
                found = await search_content(place.folder, query, max_results, file=place.file)
            elif place.file is None:
                found = await search_names(place.folder, query, max_results)
            else:
                raise ArgumentError(f"{path} is a file: to search names give a folder as path")
        finally:
            place.close()
        return _found(found, place.prefix, kind)


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder, or a file and the folder to be in meanwhile (descriptors), and its path's start."""

    folder: int
    file: int | None
    prefix: str

    def close(self) -> None:
        os.close(self.folder)
        if self.file is not None:
            os.close(self.file)


def _open(home: Home, path: str) -> _Place:
    relative = home.relative(path)
    with explained("search", path):
        with home.root.fd(relative, os.O_PATH) as fd:
            is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            if not is_folder:
                expect_file(fd, path)
        if is_folder:
            prefix = "" if relative == b"." else name_to_text(relative) + "/"
            folder = home.root.open(relative, os.O_PATH | os.O_DIRECTORY)
            return _Place(folder, None, prefix)
        with home.root.fd(relative, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY) as fd:
            expect_file(fd, path)
            folder = home.root.open(b".", os.O_PATH | os.O_DIRECTORY)
            return _Place(folder, os.dup(fd), name_to_text(relative))


def _found(found: Found, prefix: str, kind: Literal["content", "name"]) -> CallToolResult:
    rows: list[dict[str, Any]] = []
    text: list[str] = []
    room = REPLY_BYTES
    heading = ""
    for line in found.lines:
        path = prefix + line.path
        row = {"path": path, "line": line.number, "text": line.text, "is_match": line.is_match}
        shown = _shown(line)
        room -= max(json_size(row), json_size(shown) + 2)
        if path != heading:
            room -= json_size(path)
        if room < 0:
            break
        text += ([""] if text else []) + [on_one_line(path)] if path != heading else []
        heading = path
        rows.append(row)
        text.append(shown)
    for name in found.paths:
        path = prefix + name
        room -= json_size(path) + 16
        if room < 0:
            break
        rows.append({"path": path})
        text.append(on_one_line(path))
    matches = sum(row.get("is_match", True) for row in rows)
    truncated = matches < found.total or not found.complete
    count = f"{found.total}" if found.complete else f"at least {found.total}"
    what = "files" if kind == "name" else f"matches in {found.files} files"
    why = "" if found.complete else "; the search was ended before it had seen everything"
    note = f"[{matches} of {count} {what}{why}; narrow path, glob or pattern to see the rest]"
    if not rows:
        text = ["nothing was found"]
    return result(
        "\n".join(text),
        note if truncated else "",
        results=rows,
        total=found.total,
        files=found.files,
        total_is_complete=found.complete,
        truncated=truncated,
    )


def _shown(line: Line) -> str:
    return f"{line.number}{':' if line.is_match else '-'}{line.text}"
