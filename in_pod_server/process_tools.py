"""The tools for commands. They translate between MCP and the process table, and nothing more."""

from __future__ import annotations

import signal
from typing import Annotated, Any, Final, Literal

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from in_pod_server import contract
from in_pod_server.arguments import to_bytes
from in_pod_server.connection import Connection
from in_pod_server.errors import ArgumentError, InputRefusedError
from in_pod_server.files import Home
from in_pod_server.output import Output
from in_pod_server.process import Process
from in_pod_server.processes import ProcessTable
from in_pod_server.results import REPLY_BYTES, result
from in_pod_server.search import matches
from in_pod_server.telling import command_result, line, row, standing, state_line
from in_pod_server.text import decode_within, json_size

WAIT_LIMIT: Final = contract.CALL_LIMIT_SECONDS
LOG_POLL_SECONDS: Final = 0.1
PATTERN_POLL_SECONDS: Final = 0.1
"""Output is looked through no more often than this, however fast it comes."""
PATTERN_BYTES: Final = 1024 * 1024
"""A pattern is looked for in so much of the newest output."""
SEND_SECONDS: Final = 10.0
"""How long a command may take to read what is sent to it."""


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
    """Register all tools for commands, in the order in which they are listed."""

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
            int, Field(ge=1, le=1000, description="Most commands to return, the newest.")
        ] = 50,
    ) -> CallToolResult:
        """List the commands of this sandbox, running and recently ended, newest last.

        Use it to find a process_id again; read_output shows what a command wrote.
        """
        wanted = [
            process
            for process in processes
            if not (running_only and process.done.is_set() and not process.left_running)
        ]
        rows: list[dict[str, Any]] = []
        lines: list[str] = []
        room = REPLY_BYTES
        # The newest matter most, so they are the ones that surely fit.
        for process in reversed(wanted[-max_entries:]):
            entry, shown = row(process), line(process)
            room -= max(json_size(shown), 300 + json_size(entry["command"]))
            if room < 0:
                break
            rows.insert(0, entry)
            lines.insert(0, shown)
        truncated = len(rows) < len(wanted)
        note = (
            f"[the newest {len(rows)} of {len(wanted)}; running_only or max_entries shows others]"
        )
        none = "no command is running" if running_only else "no commands were started yet"
        return result(
            "\n".join(lines) or none,
            note if truncated else "",
            processes=rows,
            total=len(wanted),
            truncated=truncated,
        )

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
        pattern: Annotated[
            str,
            Field(
                max_length=10000,
                description='Wait until this regular expression is in the output, e.g. "listening on".',
            ),
        ] = "",
        until_end: Annotated[
            bool, Field(description="Wait for the command's end, not only for new output.")
        ] = False,
    ) -> CallToolResult:
        r"""Read what a command has written so far, from a byte cursor; works after its end too.

        Call it again with the cursor it returned to follow a running command; eof says that no
        more will come. dropped_bytes counts output that was too much to keep. Instead of asking
        again and again give wait_seconds: alone for any new output, with pattern for a server's
        or a prompt's line, with until_end for the result. It returns sooner when the command ends.
        (Lines of a terminal end in \r\n.)
        """
        process = processes.get(process_id)
        output = process.stdout if stream == "stdout" else process.stderr
        match_end = None
        if pattern:
            match_end = await _wait_for_pattern(process, output, cursor, pattern, wait_seconds)
        elif until_end:
            await process.wait(wait_seconds)
        else:
            await _wait_for_output(process, output, cursor, wait_seconds)
        at_end = process.at_end
        piece = output.read(cursor, max_bytes)
        final = at_end and piece.end >= output.total
        decoded = decode_within(piece.data, REPLY_BYTES, final=final)
        after = piece.start + decoded.used
        eof = at_end and after >= output.total
        lost = f"{piece.dropped} bytes before this were not kept; " if piece.dropped else ""
        more = "end of output" if eof else f"go on with cursor={after}"
        if pattern:
            found = f"the pattern is there, up to byte {match_end}"
            more = f"{found if match_end is not None else 'the pattern is not there'}; {more}"
        return result(
            decoded.text,
            f"[{stream} bytes {piece.start} to {after}; {lost}{state_line(process)}; {more}]",
            data=decoded.text,
            encoding="utf-8" if decoded.exact else "utf-8, invalid bytes as \\xNN",
            cursor=after,
            eof=eof,
            state=process.state,
            exit_code=process.exit_code,
            dropped_bytes=piece.dropped,
            **({"matched": match_end is not None, "match_end": match_end} if pattern else {}),
        )

    @server.tool(
        title="Send input",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        ),
    )
    async def send_input(
        *,
        process_id: _ProcessId,
        content: Annotated[
            str,
            Field(
                description="What to type; end a line with \\n. On a terminal \\u0003 is ctrl-C, \\u0004 ctrl-D."
            ),
        ] = "",
        encoding: Annotated[
            Literal["text", "base64"],
            Field(description="base64 for bytes that are not UTF-8 text."),
        ] = "text",
        close: Annotated[
            bool, Field(description="Then let it find the end of its input (a terminal: ctrl-D).")
        ] = False,
        columns: Annotated[
            int, Field(ge=0, le=1000, description="New width of its terminal; 0: as it is.")
        ] = 0,
        rows: Annotated[
            int, Field(ge=0, le=1000, description="New height of its terminal; 0: as it is.")
        ] = 0,
    ) -> CallToolResult:
        """Give input to a command that start_background started with stdin=open or terminal=true.

        Read its answer with read_output, best with a pattern for its next prompt. A command that
        needs all its input at once is simpler as run_command with stdin. Input of any length is
        sent in parts of up to about 500 kB, in order; the last one with close=true.
        """
        process = processes.get(process_id)
        given = process.input
        if given is None:
            raise InputRefusedError(
                f"{process_id} was started without open input: start it anew by start_background "
                "with stdin=open or terminal=true"
            )
        if process.done.is_set():
            raise InputRefusedError(f"{process_id} has ended ({state_line(process)})")
        data = to_bytes(content, encoding, name="content")
        if columns or rows:
            given.resize(columns, rows)
        taken = await given.write(data, SEND_SECONDS)
        whole = taken == len(data)
        if close and whole:
            await given.end(SEND_SECONDS)
        closed = close and whole
        note = "" if whole else f" of {len(data)}: it does not read; send the rest later"
        resized = ", terminal resized" if columns or rows else ""
        return result(
            f"sent {taken} bytes{note}{resized}{', then the end of input' if closed else ''}",
            process_id=process.id,
            bytes_sent=taken,
            complete=whole,
            closed=closed,
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
            standing(process),
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


async def _wait_for_pattern(
    process: Process, output: Output, cursor: int, pattern: str, seconds: float
) -> int | None:
    """Return where the first match in the output from `cursor` on ends, or None."""
    until = anyio.current_time() + seconds
    seen = -1
    while True:
        # In this order: what was written before the end is then looked at.
        at_end, total = process.at_end, output.total
        if total != seen:
            seen = total
            piece = output.read(max(cursor, total - PATTERN_BYTES), PATTERN_BYTES)
            found = await matches(piece.data, pattern)
            if found is not None:
                return piece.start + found
        left = until - anyio.current_time()
        if at_end or left <= 0:
            return None
        pause = min(left, PATTERN_POLL_SECONDS)
        await anyio.sleep(pause)
        await _wait_for_output(process, output, seen, left - pause)
