"""The tools to follow a command and to talk to it: what it writes, and what it is given."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Final, Literal

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from in_pod_server import contract
from in_pod_server.arguments import ProcessId, to_bytes
from in_pod_server.errors import InputRefusedError
from in_pod_server.output import Output
from in_pod_server.process import Process
from in_pod_server.processes import ProcessTable
from in_pod_server.results import REPLY_BYTES, result
from in_pod_server.search import matches
from in_pod_server.telling import note, standing, state_line
from in_pod_server.text import Decoded, decode_within

LOG_POLL_SECONDS: Final = 0.1
PATTERN_POLL_SECONDS: Final = 0.1
"""Output is looked through no more often than this, however fast it comes."""
PATTERN_BYTES: Final = 1024 * 1024
"""A pattern is looked for in so much of the newest output."""
SEND_SECONDS: Final = 10.0
"""How long a command may take to read what is sent to it."""


def add_dialogue_tools(server: MCPServer[Any], processes: ProcessTable) -> None:
    """Register read_output and send_input."""

    @server.tool(
        title="Read a command's output",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def read_output(
        *,
        process_id: ProcessId,
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
            Field(
                ge=0,
                le=contract.CALL_LIMIT_SECONDS,
                description="Wait up to this for new output or the end.",
            ),
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
        encoding: Annotated[
            Literal["text", "base64"],
            Field(description="base64 gives binary output as it is."),
        ] = "text",
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
        if encoding == "base64":
            data = piece.data[: REPLY_BYTES // 4 * 3]
            decoded = Decoded(base64.b64encode(data).decode("ascii"), len(data), exact=True)
            form = "base64"
        else:
            decoded = decode_within(piece.data, REPLY_BYTES, final=final)
            form = "utf-8" if decoded.exact else "utf-8, invalid bytes as \\xNN"
        after = piece.start + decoded.used
        eof = at_end and after >= output.total
        said = [f"{stream} bytes {piece.start} to {after}"]
        if piece.dropped:
            said.append(f"{piece.dropped} bytes before this were not kept")
        if not decoded.exact:
            said.append("bytes that are not UTF-8 are shown as \\xNN: encoding=base64 is exact")
        if pattern and match_end is None:
            said.append("the pattern is not there")
        elif pattern:
            said.append(f"the pattern is there, up to byte {match_end}")
        said.append("end of output" if eof else f"go on with cursor={after}")
        return result(
            f"{standing(process)}\n[{'; '.join(said)}]",
            decoded.text,
            data=decoded.text,
            encoding=form,
            start=piece.start,
            cursor=after,
            eof=eof,
            state=process.state,
            exit_code=process.exit_code,
            signal=process.signal,
            dropped_bytes=piece.dropped,
            sandbox_ended=process.sandbox_ended,
            note=note(process),
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
        process_id: ProcessId,
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
        needs all its input at once is simpler as run_command with stdin. Long input is sent in
        parts, in order, the last one with close=true.
        """
        process = processes.get(process_id)
        given = process.input
        if given is None:
            raise InputRefusedError(
                f"{process_id} was started without open input: start it anew by start_background "
                "with stdin=open or terminal=true"
            )
        if process.done.is_set():
            raise InputRefusedError(
                f"{process_id} has ended ({state_line(process)}): read_output shows what it wrote, "
                "start_background starts it anew"
            )
        data = to_bytes(content, encoding, name="content")
        if columns or rows:
            given.resize(columns, rows)
        taken = await given.write(data, SEND_SECONDS)
        whole = taken == len(data)
        if close and whole:
            await given.end(SEND_SECONDS)
        closed = close and whole
        rest = "" if whole else f" of {len(data)}: it does not read; send the rest later"
        resized = ", terminal resized" if columns or rows else ""
        return result(
            f"sent {taken} bytes{rest}{resized}{', then the end of input' if closed else ''}",
            process_id=process.id,
            bytes_sent=taken,
            complete=whole,
            closed=closed,
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
