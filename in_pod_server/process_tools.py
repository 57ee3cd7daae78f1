"""The tools for commands. They translate between MCP and the process table, and nothing more."""

from __future__ import annotations

import signal
from typing import Annotated, Any, Final, Literal

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from in_pod_server import contract
from in_pod_server.arguments import ProcessId, to_bytes
from in_pod_server.connection import Connection
from in_pod_server.dialogue_tools import add_dialogue_tools
from in_pod_server.errors import ArgumentError
from in_pod_server.files import Home
from in_pod_server.process import Process
from in_pod_server.processes import ProcessTable
from in_pod_server.results import REPLY_BYTES, result
from in_pod_server.telling import command_result, line, note, row, standing
from in_pod_server.text import json_size

WAIT_LIMIT: Final = contract.CALL_LIMIT_SECONDS

_Workdir = Annotated[
    str,
    Field(description="Folder to run in: absolute, or relative to the home. Empty: the home."),
]
_Env = Annotated[
    dict[str, str],
    Field(
        default_factory=dict,
        description='Environment variables to add, e.g. {"CI": "1"}.',
    ),
]


def add_process_tools(server: MCPServer[Any], processes: ProcessTable, home: Home) -> None:
    """Register all tools for commands, in the order in which they are listed."""
    _add_starting_tools(server, processes, home)
    _add_list_tool(server, processes)
    add_dialogue_tools(server, processes)
    _add_stop_tool(server, processes)


def _add_starting_tools(server: MCPServer[Any], processes: ProcessTable, home: Home) -> None:

    @server.tool(
        title="Run a command",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        ),
    )
    async def run_command(
        ctx: Context[Any, Any],
        *,
        command: Annotated[
            str,
            Field(
                min_length=1, description="A bash script: one line or many, pipes and heredocs too."
            ),
        ],
        workdir: _Workdir = "",
        timeout_seconds: Annotated[
            float,
            Field(
                gt=0,
                le=86400,
                description="If it still runs after this, it and all it started are ended.",
            ),
        ] = 300,
        stdin: Annotated[
            str, Field(description="Text for its standard input; else it is empty.")
        ] = "",
        stdin_encoding: Annotated[
            Literal["text", "base64"],
            Field(description="base64 if stdin is bytes that are not UTF-8 text."),
        ] = "text",
        env: _Env,
        wait_seconds: Annotated[
            float,
            Field(
                ge=0,
                le=WAIT_LIMIT,
                description="Answer after this at the latest; a longer command goes on running.",
            ),
        ] = WAIT_LIMIT,
    ) -> CallToolResult:
        """Run a bash command in the sandbox and return its exit code, stdout and stderr.

        Each call is a fresh shell in the home (no state is kept but files); no terminal, no prompts.
        A command that is still running when the call must answer goes on: follow it with
        read_output, end it with stop_process. For servers and other long-lived programs use
        start_background.
        """
        process = processes.run(
            command,
            workdir=workdir,
            env=env,
            stdin=to_bytes(stdin, stdin_encoding, name="stdin"),
            timeout=timeout_seconds,
        )
        try:
            await process.wait(wait_seconds)
        except anyio.get_cancelled_exc_class():
            if _cancelled_by_client(ctx):
                process.stop()
            raise
        return command_result(process)

    @server.tool(
        title="Start a background command",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        ),
    )
    async def start_background(
        *,
        command: Annotated[str, Field(min_length=1, description="A bash script to keep running.")],
        log_file: Annotated[
            str,
            Field(
                description="File in the home for its output (appended). Empty: a log outside the home."
            ),
        ] = "",
        workdir: _Workdir = "",
        env: _Env,
        stdin: Annotated[
            Literal["closed", "open"],
            Field(description="open: send_input gives it input, as it asks for it."),
        ] = "closed",
        terminal: Annotated[
            bool,
            Field(
                description="Run it on a terminal: for REPLs, debuggers and what asks for a password."
            ),
        ] = False,
        columns: Annotated[int, Field(ge=1, le=1000, description="Width of its terminal.")] = 120,
        rows: Annotated[int, Field(ge=1, le=1000, description="Height of its terminal.")] = 40,
    ) -> CallToolResult:
        """Start a server or another long-running command and return at once with its process_id.

        Its stdout and stderr go to one log; read it with read_output. It runs until it ends by
        itself, stop_process ends it, or the sandbox ends. For commands that finish use run_command.
        For a dialogue give stdin=open, or terminal=true if it needs a terminal (output is then
        what the terminal shows, with echo and escape sequences): send_input types, read_output
        waits for the prompt.
        """
        if terminal and log_file:
            raise ArgumentError("a terminal's output has no log file: leave log_file empty")
        if terminal:
            process = processes.start_on_terminal(
                command, workdir=workdir, env=env, columns=columns, rows=rows
            )
        else:
            log = await anyio.to_thread.run_sync(home.open_log, log_file) if log_file else None
            process = processes.start_background(
                command, workdir=workdir, env=env, log=log, stdin_open=stdin == "open"
            )
        where = f"output in {process.log_file}" if process.log_file else "on a terminal"
        return result(
            f"started: process_id {process.id}, pid {process.leader.pid}, {where}",
            process_id=process.id,
            pid=process.leader.pid,
            log_file=process.log_file,
        )


def _add_list_tool(server: MCPServer[Any], processes: ProcessTable) -> None:
    @server.tool(
        title="List processes",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def list_processes(
        *,
        running_only: Annotated[
            bool, Field(description="Only those that still run, or left something running.")
        ] = False,
        max_entries: Annotated[
            int,
            Field(
                ge=1, le=1000, description="Most commands to return: what runs, then the newest."
            ),
        ] = 50,
    ) -> CallToolResult:
        """List the commands of this sandbox, running and recently ended, newest last.

        Use it to find a process_id again; read_output shows what a command wrote.
        """
        found = list(processes)
        running = [p for p in found if not p.done.is_set() or p.left_running]
        ended = [] if running_only else [p for p in found if p.done.is_set() and not p.left_running]
        # What runs matters most, and then the newest: those are the ones that surely fit.
        chosen = [*reversed(running), *reversed(ended)][:max_entries]
        room = REPLY_BYTES
        fitting: list[Process] = []
        for process in chosen:
            room -= max(json_size(line(process)), json_size(row(process)))
            if room < 0:
                break
            fitting.append(process)
        fitting.sort(key=lambda process: process.started_at)
        rows = [row(process) for process in fitting]
        lines = [line(process) for process in fitting]
        total = len(running) + len(ended)
        truncated = len(rows) < total
        more = f"[the newest {len(rows)} of {total}; max_entries gives more]"
        none = "no command is running" if running_only else "no commands were started yet"
        return result(
            "\n".join(lines) or none,
            more if truncated else "",
            processes=rows,
            total=total,
            truncated=truncated,
        )


def _add_stop_tool(server: MCPServer[Any], processes: ProcessTable) -> None:
    @server.tool(
        title="Stop a process",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def stop_process(
        *,
        process_id: ProcessId,
        signal: Annotated[
            Literal["TERM", "INT", "HUP", "QUIT", "KILL"],
            Field(description="The signal to try first."),
        ] = "TERM",
        grace_seconds: Annotated[
            float, Field(ge=0, le=40, description="Time to end by itself before it is killed.")
        ] = 5,
    ) -> CallToolResult:
        """End a command and every process it started, also those that a finished one left running.

        What it wrote stays readable with read_output.
        """
        process = processes.get(process_id)
        await processes.stop(process, _signal_number(signal), grace_seconds)
        return result(
            standing(process),
            process_id=process.id,
            state=process.state,
            exit_code=process.exit_code,
            signal=process.signal,
            left_running=process.left_running,
            duration_seconds=round(process.seconds, 3),
            note=note(process),
        )


def _signal_number(name: str) -> int:
    return signal.Signals[f"SIG{name}"]


def _cancelled_by_client(ctx: Context[Any, Any]) -> bool:
    """Whether the client asked for the cancel; the end of its connection stops no command."""
    request = ctx.request_context
    connection = request.request
    return not isinstance(connection, Connection) or connection.cancelled_by_client(
        request.request_id
    )
