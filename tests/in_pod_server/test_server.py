"""The server: its tools as clients see them, its failures as words, and the example's blobs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, TextContent

from in_pod_server import contract
from in_pod_server.results import result
from in_pod_server.server import SandboxServer
from tests.in_pod_server.support import PATIENCE, ROOT, Daemon, Sandbox, data_of, text_of

TOOLSETS = json.loads((ROOT / "in_pod_server" / "tools.json").read_text())
TOOLS = {tool["name"]: tool for tool in TOOLSETS["default"] + TOOLSETS["blobs"]}


def test_the_tools_have_the_names_that_the_host_forwards() -> None:
    assert [tool["name"] for tool in TOOLSETS["default"]] == [
        "run_command",
        "start_background",
        "list_processes",
        "read_output",
        "send_input",
        "stop_process",
        "write_file",
        "read_file",
        "edit_file",
        "list_files",
        "search_files",
        "file_info",
        "move_file",
        "delete_file",
        "expose_port",
        "list_apps",
        "unexpose_port",
    ]
    assert [tool["name"] for tool in TOOLSETS["blobs"]] == [
        "list_blobs",
        "write_random_blob",
        "read_blob",
    ]


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_is_described_flat_and_hinted(name: str) -> None:
    tool = TOOLS[name]
    assert re.fullmatch(r"[a-z_]{3,40}", name)
    assert tool["title"]
    assert len(tool["description"]) > 40
    assert "\n  " not in tool["description"]
    assert "outputSchema" not in tool
    assert set(tool["annotations"]) == {
        "readOnlyHint",
        "destructiveHint",
        "idempotentHint",
        "openWorldHint",
    }
    assert "sandbox_id" not in tool["inputSchema"]["properties"], "the host adds it"
    for argument, schema in tool["inputSchema"]["properties"].items():
        assert schema["type"] in ("string", "integer", "number", "boolean", "object"), argument
        assert schema["description"], argument
        assert not {"anyOf", "oneOf", "allOf", "$ref"} & set(schema), argument
    assert "$defs" not in tool["inputSchema"]


def test_reading_tools_say_so_and_running_tools_warn() -> None:
    reading = {n for n, t in TOOLS.items() if t["annotations"]["readOnlyHint"]}
    assert reading == {
        "list_processes",
        "read_output",
        "read_file",
        "list_files",
        "search_files",
        "file_info",
        "list_apps",
        "list_blobs",
        "read_blob",
    }
    for name in set(TOOLS) - reading:
        assert TOOLS[name]["annotations"]["destructiveHint"]


def test_no_call_may_wait_longer_than_clients_do() -> None:
    for tool in ("run_command", "read_output"):
        wait = TOOLS[tool]["inputSchema"]["properties"]["wait_seconds"]
        assert wait["maximum"] == contract.CALL_LIMIT_SECONDS
    assert TOOLS["run_command"]["inputSchema"]["properties"]["wait_seconds"]["default"] == 45
    assert TOOLS["run_command"]["inputSchema"]["required"] == ["command"]
    grace = TOOLS["stop_process"]["inputSchema"]["properties"]["grace_seconds"]["maximum"]
    assert grace < contract.CALL_LIMIT_SECONDS


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("nope", {}, "there is no tool 'nope'; there are: run_command, "),
        ("run_command", {}, "run_command cannot be called so: command: field required"),
        ("run_command", {"command": ""}, "command: string should have at least 1 character"),
        (
            "run_command",
            {"command": "x", "timeout": 3},
            "takes no argument 'timeout'; it takes: command",
        ),
        (
            "run_command",
            {"command": "x", "timeout_seconds": 0},
            "timeout_seconds: input should be greater",
        ),
        ("run_command", {"command": "x", "timeout_seconds": 86401}, "less than or equal to 86400"),
        ("run_command", {"command": "x", "wait_seconds": 46}, "less than or equal to 45"),
        ("run_command", {"command": "x", "env": {"A": 1}}, "env.A: input should be a valid string"),
        ("run_command", {"command": "x", "ctx": {}}, "takes no argument 'ctx'"),
        (
            "read_output",
            {"process_id": "p", "cursor": -1},
            "cursor: input should be greater than or",
        ),
        (
            "read_output",
            {"process_id": "p", "stream": "log"},
            "stream: input should be 'stdout' or 'stderr'",
        ),
        (
            "stop_process",
            {"process_id": "p", "signal": "SEGV"},
            "signal: input should be 'TERM', 'INT'",
        ),
        (
            "list_files",
            {"max_entries": 0},
            "max_entries: input should be greater than or equal to 1",
        ),
        ("list_blobs", {"x": 1}, "takes no argument 'x'; it takes: none"),
    ],
)
async def test_a_wrong_call_is_told_in_one_line(
    sandbox: Sandbox, tool: str, arguments: dict[str, Any], said: str
) -> None:
    text = await sandbox.refused(tool, **arguments)
    assert said in text
    assert "\n" not in text
    assert "pydantic" not in text
    assert list(sandbox.processes) == []


async def test_a_fault_of_ours_is_named_and_logged_but_not_quoted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = SandboxServer("test")

    @server.tool()
    def breaks() -> CallToolResult:
        """Break."""
        raise KeyError("private detail")

    async with Client(server, mode="legacy") as client:
        broken = await client.call_tool("breaks", {})
    assert broken.is_error
    assert text_of(broken).startswith("internal error in breaks: KeyError; ")
    assert "private detail" not in text_of(broken)
    assert any(r.levelno == logging.ERROR and r.exc_info for r in caplog.records)


async def test_a_sandbox_full_of_processes_says_so_and_not_internal_error() -> None:
    server = SandboxServer("test")

    @server.tool()
    def reads() -> CallToolResult:
        """Read."""
        raise RuntimeError("can't start new thread")

    async with Client(server, mode="legacy") as client:
        text = text_of(await client.call_tool("reads", {}))
    assert "limit of processes; stop some first" in text


def test_a_result_leaves_out_empty_text_and_keeps_all_data() -> None:
    made = result("", "a", "", n=None, empty="")
    assert made.content == [TextContent(type="text", text="a")]
    assert made.structured_content == {"n": None, "empty": ""}


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_both_protocol_eras_are_served(tmp_path: Path, mode: Any) -> None:
    server = SandboxServer("test")

    @server.tool()
    def hello() -> CallToolResult:
        """Say hello."""
        return result("hi", said="hi")

    async with Client(server, mode=mode) as client:
        assert data_of(await client.call_tool("hello", {})) == {"said": "hi"}


# --- the example's blobs -------------------------------------------------------------------------------


async def prove(client: Client, workspace: Path, *, tools: list[str]) -> None:
    """The example's client: list, write, list, read, and the same bytes on disk."""
    assert [tool.name for tool in (await client.list_tools()).tools][-3:] == tools
    empty = await client.call_tool("list_blobs", {})
    assert empty.structured_content == {"result": []}
    wrote = await client.call_tool("write_random_blob", {"name": "random.bin", "size_bytes": 256})
    written = data_of(wrote)
    assert list(written) == ["path", "bytes_written", "sha256"]
    assert written["path"] == f"{workspace}/random.bin"
    assert written["bytes_written"] == 256
    assert json.loads(text_of(wrote)) == written
    data = (workspace / "random.bin").read_bytes()
    assert hashlib.sha256(data).hexdigest() == written["sha256"]
    listed = await client.call_tool("list_blobs", {})
    assert listed.structured_content == {"result": ["random.bin"]}
    assert text_of(listed) == "random.bin"
    read = data_of(await client.call_tool("read_blob", {"name": "random.bin"}))
    assert read == {"path": written["path"], "size_bytes": 256, "sha256": written["sha256"]}
    for name in ("../x", "/etc/passwd", "a/b", "", ".", "..", "~"):
        for tool in ("read_blob", "write_random_blob"):
            assert (await client.call_tool(tool, {"name": name})).is_error
    assert sorted(p.name for p in workspace.parent.iterdir() if p.name == "x") == []
    (workspace / "link").symlink_to("/etc/passwd")
    assert (await client.call_tool("read_blob", {"name": "link"})).is_error


BLOBS = ["list_blobs", "write_random_blob", "read_blob"]


async def test_the_example_s_tools_run_as_a_stdio_server(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-u", "-m", "in_pod_server.mcp_server"],
        cwd=ROOT,
        env={**os.environ, "MCP_WORKSPACE": str(workspace)},
    )
    with anyio.fail_after(PATIENCE):
        async with Client(parameters, mode="legacy") as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == BLOBS
            await prove(client, workspace, tools=BLOBS)


async def test_the_daemon_serves_the_example_s_tools_too(daemon: Daemon) -> None:
    with anyio.fail_after(PATIENCE):
        async with Client(daemon.parameters(), mode="legacy") as client:
            await prove(client, daemon.home, tools=BLOBS)
