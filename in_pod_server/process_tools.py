"""The tools for commands. They translate between MCP and the process table, and nothing more."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from in_pod_server import contract
from in_pod_server.connection import Connection
from in_pod_server.excerpts import excerpts
from in_pod_server.files import Home
from in_pod_server.output import Output
from in_pod_server.process import Process
from in_pod_server.processes import ProcessTable
from in_pod_server.results import REPLY_BYTES, result
from in_pod_server.text import decode_within, json_size

WAIT_LIMIT: Final = contract.CALL_LIMIT_SECONDS
LOG_POLL_SECONDS: Final = 0.1
COMMAND_SHOWN: Final = 200


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
_ProcessId = Annotated[
    str, Field(description="The process_id that run_command or start_background gave.")
]


def add_process_tools(server: MCPServer[Any], processes: ProcessTable, home: Home) -> None:
    """Register run_command, start_background, list_processes, read_output and stop_process."""

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
            stdin=stdin.encode("utf-8", "surrogateescape"),
            timeout=timeout_seconds,
        )
        try:
            await process.wait(wait_seconds)
        except anyio.get_cancelled_exc_class():
            if _cancelled_by_client(ctx):
                process.stop()
            raise
        return _command_result(process)

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
    ) -> CallToolResult:
        """Start a server or another long-running command and return at once with its process_id.

        Its stdout and stderr go to one log; read it with read_output. It runs until it ends by
        itself, stop_process ends it, or the sandbox ends. For commands that finish use run_command.
        """
        log = await anyio.to_thread.run_sync(home.open_log, log_file) if log_file else None
        process = processes.start_background(command, workdir=workdir, env=env, log=log)
        return result(
            f"started: process_id {process.id}, pid {process.leader.pid}, output in {process.log_file}",
            process_id=process.id,
            pid=process.leader.pid,
            log_file=process.log_file,
        )

    @server.tool(
        title="List processes",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def list_processes() -> CallToolResult:
        """List the commands of this sandbox, running and recently ended, newest last.

        Use it to find a process_id again; read_output shows what a command wrote.
        """
        rows: list[dict[str, Any]] = []
        lines: list[str] = []
        room = REPLY_BYTES
        # The newest matter most, so they are the ones that surely fit.
        for process in reversed(list(processes)):
            row, line = _row(process), _line(process)
            room -= max(json_size(line), 300 + json_size(row["command"]))
            if room < 0:
                break
            rows.insert(0, row)
            lines.insert(0, line)
        return result("\n".join(lines) or "no commands were started yet", processes=rows)

    @server.tool(
        title="Read a command's output",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def read_output(
        *,
        process_id: _ProcessId,
        stream: Annotated[
            Literal["stdout", "stderr"],
            Field(description="A background command writes both to stdout."),
        ] = "stdout",
        cursor: Annotated[
            int,
            Field(
                ge=0, description="Byte position to read from; the last result's cursor goes on."
            ),
        ] = 0,
        wait_seconds: Annotated[
            float,
            Field(ge=0, le=WAIT_LIMIT, description="Wait up to this for new output or the end."),
        ] = 0,
        max_bytes: Annotated[
            int, Field(ge=16, le=1048576, description="Most bytes to return.")
        ] = 65536,
    ) -> CallToolResult:
        """Read what a command has written so far, from a byte cursor; works after its end too.

        Call it again with the cursor it returned to follow a running command; eof says that no
        more will come. dropped_bytes counts output that was too much to keep.
        """
        process = processes.get(process_id)
        output = process.stdout if stream == "stdout" else process.stderr
        await _wait_for_output(process, output, cursor, wait_seconds)
        at_end = process.at_end
        piece = output.read(cursor, max_bytes)
        final = at_end and piece.end >= output.total
        decoded = decode_within(piece.data, REPLY_BYTES, final=final)
        after = piece.start + decoded.used
        eof = at_end and after >= output.total
        lost = f"{piece.dropped} bytes before this were not kept; " if piece.dropped else ""
        more = "end of output" if eof else f"go on with cursor={after}"
        return result(
            decoded.text,
            f"[{stream} bytes {piece.start} to {after}; {lost}{_state_line(process)}; {more}]",
            data=decoded.text,
            encoding="utf-8" if decoded.exact else "utf-8, invalid bytes as \\xNN",
            cursor=after,
            eof=eof,
            state=process.state,
            exit_code=process.exit_code,
            dropped_bytes=piece.dropped,
        )

    @server.tool(
        title="Stop a process",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def stop_process(
        *,
        process_id: _ProcessId,
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
            f"{_state_line(process)}{_left_line(process)}",
            process_id=process.id,
            state=process.state,
            exit_code=process.exit_code,
            signal=process.signal,
            left_running=process.left_running,
            duration_seconds=round(process.seconds, 3),
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


async def _wait_for_output(process: Process, output: Output, cursor: int, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        while output.total <= cursor and not process.at_end:
            # A log file is written by the command itself: nobody rings for it.
            with anyio.move_on_after(LOG_POLL_SECONDS if process.log_file else None):
                await process.changed.wait()


def _command_result(process: Process) -> CallToolResult:
    stdout, stderr = excerpts(process)
    lines = [_state_line(process) + _left_line(process)]
    if process.state == "running":
        lines.append(
            f"[it goes on: read_output(process_id={process.id!r}) follows it, stop_process ends it]"
        )
    lines += [stdout.text] if stdout.text else []
    lines += ["[stderr]", stderr.text] if stderr.text else []
    return result(
        "\n".join(lines),
        process_id=process.id,
        state=process.state,
        exit_code=process.exit_code,
        signal=process.signal,
        stdout=stdout.text,
        stderr=stderr.text,
        stdout_bytes=process.stdout.total,
        stderr_bytes=process.stderr.total,
        stdout_truncated=stdout.cut,
        stderr_truncated=stderr.cut,
        duration_seconds=round(process.seconds, 3),
        left_running=process.left_running,
    )


def _state_line(process: Process) -> str:
    """Return the line that says how a command stands: the first one a reader sees."""
    match process.state:
        case "exited":
            return f"exit code {process.exit_code}"
        case "killed":
            return f"killed by {process.signal}"
        case "timed_out":
            return f"timed out after {process.timeout:g} s"
        case "running":
            return f"still running: process_id {process.id}"


def _left_line(process: Process) -> str:
    if not process.left_running:
        return ""
    count = "1 process" if process.left_running == 1 else f"{process.left_running} processes"
    return (
        f"\n[{count} that it started still run; stop_process(process_id={process.id!r}) ends them]"
    )


def _line(process: Process) -> str:
    command = process.command[:COMMAND_SHOWN].replace("\n", "\\n")
    return f"{process.id}  {_state_line(process)}  {process.seconds:.1f} s  {command}"


def _row(process: Process) -> dict[str, Any]:
    return {
        "process_id": process.id,
        "pid": process.leader.pid,
        "command": process.command[:COMMAND_SHOWN],
        "state": process.state,
        "exit_code": process.exit_code,
        "signal": process.signal,
        "started_at": datetime.fromtimestamp(process.started_at, UTC).isoformat(timespec="seconds"),
        "duration_seconds": round(process.seconds, 3),
        "left_running": process.left_running,
        "stdout_bytes": process.stdout.total,
        "stderr_bytes": process.stderr.total,
        "log_file": process.log_file,
    }
