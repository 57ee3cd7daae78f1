"""`podpipe run`: a command in a sandbox, followed until it ends."""

from __future__ import annotations

import argparse
import base64
import json
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import anyio

from host_client.commands.arguments import Add
from host_client.commands.lifecycle import START_PATIENCE_SECONDS, opened, patiently
from host_client.commands.output import watched
from host_client.commands.pipes import command_of
from host_client.config import Settings
from host_client.errors import EXIT_DONE, EXIT_FAILED, PodpipeError, UsageError
from host_client.losses import NEWS
from in_pod_server.contract import MAX_STAGED_BYTES

if TYPE_CHECKING:
    from host_client.host import Host

EXIT_TIMED_OUT = 124
"""As timeout(1) ends."""
FOLLOW_SECONDS = 1.0
"""How long one look at a command's output waits for more of it, or for the command's end."""
MAX_STDIN_BYTES = MAX_STAGED_BYTES // 4 * 3
"""Bytes that are no text travel as base64."""
OPTIONS = {"--timeout": True, "--workdir": True, "--json": False, "-i": False, "--stdin": False}
"""The command's own, and whether a value follows."""
STOP_SECONDS = 10.0
TIMEOUT_SECONDS = 300.0
"""How long a command may take unless it is said."""


async def run(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run a command and end with its exit code."""
    command = command_of(arguments.argv, _in_order(arguments))
    if not command:
        raise UsageError("run needs a command, for example: podpipe run work -- ls -la")
    script = command[0] if len(command) == 1 else shlex.join(command)
    async with opened(settings, arguments) as host:
        with watched() as progress:
            await patiently(host, arguments.sandbox, progress)
        result = await host.sessions.call(
            arguments.sandbox,
            "run_command",
            {
                "command": script,
                "workdir": arguments.workdir,
                "timeout_seconds": arguments.timeout,
                **(_stdin() if arguments.stdin else {}),
                "wait_seconds": 0,
            },
            within=START_PATIENCE_SECONDS,
        )
        facts = _facts(result)
        if news := facts.get(NEWS):
            print(f"podpipe: before this {news}", file=sys.stderr)
        return await _follow(host, arguments, facts["process_id"])


def _in_order(arguments: argparse.Namespace) -> str:
    """What was typed, with the options that stand after the sandbox in front of it."""
    options = []
    if arguments.timeout != TIMEOUT_SECONDS:
        options += ["--timeout", f"{arguments.timeout:g}"]
    if arguments.json:
        options.append("--json")
    if arguments.stdin:
        options.append("-i")
    if arguments.workdir:
        options += ["--workdir", arguments.workdir]
    rest = list(arguments.argv)
    while rest and (name := rest[0].partition("=")[0]) in OPTIONS:
        count = 2 if OPTIONS[name] and name == rest[0] else 1
        options += rest[:count]
        del rest[:count]
    command = rest[1:] if rest[:1] == ["--"] else rest
    return shlex.join(["podpipe", "run", *options, arguments.sandbox, "--", *(command or ["ls"])])


async def _follow(host: Host, arguments: argparse.Namespace, process_id: str) -> int:
    """Print what a process writes, as it writes it, until it ends.

    Returns:
        The command's exit code, 128 + n where signal n ended it, 124 where its time ran out.
    """
    kept = {"stdout": bytearray(), "stderr": bytearray()}
    last: dict[str, Any] = {}
    dropped = 0

    async def stream(name: str, out: BinaryIO) -> None:
        nonlocal dropped
        cursor = 0
        while True:
            answer = await host.sessions.call(
                arguments.sandbox,
                "read_output",
                {
                    "process_id": process_id,
                    "stream": name,
                    "cursor": cursor,
                    "wait_seconds": FOLLOW_SECONDS,
                    "max_bytes": 262_144,
                    "encoding": "base64",
                },
                reads_only=True,
            )
            facts = _facts(answer)
            data = base64.b64decode(facts["data"])
            dropped += facts["dropped_bytes"]
            cursor = facts["cursor"]
            if arguments.json:
                kept[name] += data
            elif data:
                out.write(data)
                out.flush()
            # A command is done when it has ended itself; what it left running may hold its pipes.
            if facts["eof"] or (facts["state"] != "running" and not data):
                last.update(facts)
                return

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream, "stdout", sys.stdout.buffer)
            tasks.start_soon(stream, "stderr", sys.stderr.buffer)
    except BaseException:
        # Interrupted, or nobody reads what it writes: it would run on for nobody.
        with anyio.move_on_after(STOP_SECONDS, shield=True):
            await host.sessions.call(arguments.sandbox, "stop_process", {"process_id": process_id})
        raise
    facts = {
        "process_id": process_id,
        "state": last["state"],
        "exit_code": last["exit_code"],
        "signal": last.get("signal"),
        "dropped_bytes": dropped,
        **{name: part.decode("utf-8", "backslashreplace") for name, part in kept.items()},
    }
    if arguments.json:
        print(json.dumps(facts, indent=2))
    if dropped:
        print(
            f"podpipe: {dropped} bytes of output were too much to keep and are missing; let the "
            "command write to a file and get that",
            file=sys.stderr,
        )
    if last["exit_code"] is not None:
        return int(last["exit_code"]) or (EXIT_FAILED if dropped else EXIT_DONE)
    if last["state"] == "timed_out":
        print(f"podpipe: timed out after {arguments.timeout:g} s", file=sys.stderr)
        return EXIT_TIMED_OUT
    name = str(last.get("signal") or "SIGKILL")
    print(f"podpipe: ended by {name}", file=sys.stderr)
    if last.get("note"):
        print(f"podpipe: {last['note']}", file=sys.stderr)
    return 128 + getattr(signal, name, signal.SIGKILL)


def _facts(answer: dict[str, Any]) -> dict[str, Any]:
    """The structured content of a tool's result.

    Raises:
        PodpipeError: the tool failed; the message is its own.
    """
    if answer.get("isError"):
        raise PodpipeError("\n".join(c.get("text", "") for c in answer.get("content", [])))
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


def _stdin() -> dict[str, str]:
    """All of stdin, as run_command takes it.

    Raises:
        UsageError: it is too much for one call.
    """
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise UsageError(
            f"stdin is longer than {MAX_STDIN_BYTES} bytes; `podpipe put` it and let the command "
            "read the file"
        )
    try:
        return {"stdin": data.decode()}
    except UnicodeDecodeError:
        return {"stdin": base64.b64encode(data).decode("ascii"), "stdin_encoding": "base64"}


def add_to(add: Add) -> None:
    """Add the command to the command line."""
    sub = add("run", run, "Run a command in a sandbox.", "run work -- ls -la")
    sub.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_SECONDS,
        metavar="SECONDS",
        help=f"default {TIMEOUT_SECONDS:.0f}",
    )
    sub.add_argument("-i", "--stdin", action="store_true", help="give it what is on stdin")
    sub.add_argument("--workdir", default="", metavar="DIR", help="default: the home")
    sub.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND …")
