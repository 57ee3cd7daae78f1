"""The `podpipe` command: the only place on the host that writes to stdout.

Answers go to stdout, as text or with `--json` as one JSON document; progress and errors go to
stderr. Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 prerequisite missing. `run` ends with
the command's own code.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import anyio
import anyio.to_thread
import yaml

from host_client import __version__, manifest
from host_client.config import SETTINGS_HELP, Settings
from host_client.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    PodpipeError,
    StillStarting,
    UsageError,
    root_cause,
)
from host_client.interrupts import EXIT_INTERRUPTED, interruptible
from host_client.launcher import Progress, Status, utc_now
from host_client.sandbox import draft_sandbox
from in_pod_server.contract import DIAL_ARGV, MAX_STAGED_BYTES

if TYPE_CHECKING:
    from host_client.host import Host
    from host_client.session import SandboxSession
    from host_client.transfer import Meter, Outcome

EXIT_TIMED_OUT = 124
"""As timeout(1) ends."""
FOLLOW_SECONDS = 1.0
"""How long one look at a command's output waits for more of it, or for the command's end."""
MAX_STDIN_BYTES = MAX_STAGED_BYTES // 4 * 3
"""Bytes that are no text travel as base64."""
STOP_SECONDS = 10.0
QUIET_SECONDS = 2.0
"""What takes no longer needs no progress."""
LINE_SECONDS = 10.0
BAR_SECONDS = 0.1
START_PATIENCE_SECONDS = 600.0
"""How long the command line waits for an image to be pulled; a person can interrupt it."""

EXAMPLES = """\
examples:
  podpipe create --name work --ttl 120      a sandbox that lives two hours, found again as "work"
  podpipe run work -- python3 --version     run a command in it; ends with the command's exit code
  podpipe put work src notes.md in/         copy into its home; get and sync are the other ways
  podpipe suspend work                      free its resources; the next call resumes it
  podpipe list --json
  podpipe connect work                      raw MCP pipe to the daemon, for any MCP client
  podpipe doctor                            what is missing, and how to mend it

Settings come from the environment or a .env file; `podpipe settings` lists them with their defaults.
Exit codes: 0 done, 1 failed, 2 usage, 3 no such sandbox, 4 prerequisite missing.
"""

Command = Callable[[Settings, argparse.Namespace], Awaitable[int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; the process's own by default.

    Returns:
        The exit code.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us: nobody wants to hear
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    arguments = _parser().parse_args(argv)
    command = arguments.command
    try:
        settings = Settings.from_env()
        if command is _serve:
            # It just goes when it is told to; its pipes end with it.
            code: int = anyio.run(command, settings, arguments)
        else:
            code = anyio.run(interruptible, lambda: command(settings, arguments))
    except* PodpipeError as group:
        error = root_cause(group)
        print(f"podpipe: {error}", file=sys.stderr)
        assert isinstance(error, PodpipeError)
        code = error.exit_code
    except* KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except* BrokenPipeError:
        # The reader of our stdout went away; it does not want to hear more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    except* OSError as unwritable:
        print(f"podpipe: {root_cause(unwritable)}", file=sys.stderr)
        code = EXIT_FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="podpipe",
        description="Isolated Linux sandboxes for an agent, on any Kubernetes that kubectl reaches.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"podpipe {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    def add(
        name: str, command: Command, text: str, example: str, *, sandbox: bool = True
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  podpipe {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command)
        if sandbox:
            sub.add_argument("sandbox", help="id or name of the sandbox")
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        return sub

    add(
        "serve", _serve, "Serve MCP on stdin and stdout, for an MCP client.", "serve", sandbox=False
    )
    create = add("create", _create, "Make a sandbox.", "create --name work", sandbox=False)
    create.add_argument("--name", default="", help="to find it again by; default: none")
    create.add_argument("--ttl", type=int, default=0, metavar="MINUTES", help="lifetime")
    create.add_argument("--cpu", default="", metavar="QUANTITY", help="CPU limit, e.g. 500m")
    create.add_argument("--memory", default="", metavar="QUANTITY", help="memory limit, e.g. 1Gi")
    add("list", _list, "List your sandboxes.", "list", sandbox=False)
    add("status", _status, "Show one sandbox.", "status work")
    run = add("run", _run, "Run a command in a sandbox.", "run work -- ls -la")
    run.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="default 300")
    run.add_argument("-i", "--stdin", action="store_true", help="give it what is on stdin")
    run.add_argument("--workdir", default="", help="default: the home")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND …")
    put = add(
        "put",
        _put,
        "Copy files and folders into a sandbox, verified.",
        "put work data/ notes.md in/",
    )
    put.add_argument("paths", nargs="+", metavar="LOCAL", help="what to copy, and last where to")
    get = add("get", _get, "Copy a file or folder from a sandbox, verified.", "get work out/ .")
    get.add_argument("remote", help="what to copy, in the home")
    get.add_argument("local", nargs="?", default=".", help="where to; default: here")
    sync = add(
        "sync", _sync, "Make a folder in a sandbox like one here, or the reverse.",
        "sync work src src --delete",
    )  # fmt: skip
    sync.add_argument("local", help="the folder on this machine")
    sync.add_argument("remote", help="the folder in the home")
    sync.add_argument("--delete", action="store_true", help="remove what only the copy has")
    sync.add_argument("--from-sandbox", action="store_true", help="the one here is the copy")
    add("suspend", _suspend, "End a sandbox's pod; keep sandbox and home.", "suspend work")
    add("resume", _resume, "Start a suspended sandbox again.", "resume work")
    extend = add(
        "extend",
        _extend,
        "Let a sandbox live longer: at least so many minutes from now.",
        "extend work 120",
    )
    extend.add_argument("minutes", type=int, help="minutes from now; never shortens its life")
    destroy = add("destroy", _destroy, "End a sandbox for good.", "destroy work")
    destroy.add_argument("--purge-home", action="store_true", help="delete the home too; asks")
    destroy.add_argument("--yes", action="store_true", help="do not ask")
    connect = add(
        "connect",
        _connect,
        "Become a raw pipe to the sandbox's MCP daemon, or to another command in it.",
        "connect work -- python3 -u /app/mcp_server.py",
    )
    connect.add_argument("argv", nargs=argparse.REMAINDER, metavar="[-- COMMAND …]")
    render = add(
        "render", _render, "Print the manifests of a sandbox.", "render --name work", sandbox=False
    )
    render.add_argument("--name", default="example", help="name of the sandbox")
    add("doctor", _doctor, "Look for what is missing, and say the fix.", "doctor", sandbox=False)
    add("settings", _settings, "List all settings.", "settings", sandbox=False)
    return parser


# --- output ------------------------------------------------------------------------------------


def _print(arguments: argparse.Namespace, text: str, facts: Any) -> None:
    print(json.dumps(facts, indent=2) if arguments.json else text)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


@contextmanager
def _watched() -> Iterator[Progress]:
    """Progress on stderr: a spinner on a terminal, a line for each change elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console  # 60 ms that `connect` need not pay

        with Console(stderr=True).status("…") as status:
            yield status.update
        return
    last = ""

    def line(text: str) -> None:
        nonlocal last
        if text != last:
            print(f"podpipe: {text} …", file=sys.stderr, flush=True)
            last = text

    yield line


# --- commands ----------------------------------------------------------------------------------


async def _serve(settings: Settings, _: argparse.Namespace) -> int:
    from host_client.server import serve_stdio  # only serve needs a server

    await serve_stdio(settings)
    return EXIT_DONE


async def _create(settings: Settings, arguments: argparse.Namespace) -> int:
    async with _host(settings) as host:
        with _watched() as progress:
            status = await host.launcher.create(
                name=arguments.name,
                ttl_minutes=arguments.ttl,
                cpu_limit=arguments.cpu,
                memory_limit=arguments.memory,
                progress=progress,
            )
            session = await _patiently(host, status.sandbox.id, progress)
        # It has answered, whatever its status in the cluster says yet.
        facts = Status(session.sandbox, "running", session.pod, "").to_json()
        facts["warnings"] = host.launcher.warnings
    for warning in facts["warnings"]:
        print(f"podpipe: warning: {warning}", file=sys.stderr)
    _print(
        arguments,
        f"{facts['name'] or facts['sandbox_id']}  {facts['phase']}, expires {facts['expires_at']}",
        facts,
    )
    return EXIT_DONE


async def _patiently(host: Host, ref: str, progress: Progress) -> SandboxSession:
    """The session of a sandbox, waited for as long as a person would."""
    with anyio.move_on_after(START_PATIENCE_SECONDS):
        while True:
            try:
                return await host.sessions.open(ref, progress=progress)
            except StillStarting as waiting:
                progress(waiting.detail)
    raise StillStarting(
        f"sandbox {ref} is still starting after {START_PATIENCE_SECONDS:.0f} s; "
        f"`podpipe status {ref}` shows why",
        detail="",
    )


async def _list(settings: Settings, arguments: argparse.Namespace) -> int:
    async with _host(settings) as host:
        found = [status.to_json() for status in await host.launcher.list_all()]
        for warning in host.launcher.warnings:
            print(f"podpipe: warning: {warning}", file=sys.stderr)
    head = ("SANDBOX", "NAME", "PHASE", "EXPIRES", "DETAIL")
    rows = [
        (f["sandbox_id"], f["name"], f["phase"], f["expires_at"], f["detail"][:60]) for f in found
    ]
    _print(arguments, _table([head, *rows]) if rows else "no sandboxes", found)
    return EXIT_DONE


async def _status(settings: Settings, arguments: argparse.Namespace) -> int:
    async with _host(settings) as host:
        facts = (await host.launcher.status(arguments.sandbox)).to_json()
    _print(arguments, _table([(key, str(value)) for key, value in facts.items()]), facts)
    return EXIT_DONE


async def _run(settings: Settings, arguments: argparse.Namespace) -> int:
    command = _after_dashes(arguments.argv)
    if arguments.argv[:1] != ["--"] and command and command[0].startswith("-"):
        raise UsageError(
            f"{command[0]} stands after the sandbox: podpipe's own options go before it, and a "
            "command that begins with '-' after '--', for example: podpipe run --json work -- ls"
        )
    if not command:
        raise UsageError("run needs a command, for example: podpipe run work -- ls -la")
    script = command[0] if len(command) == 1 else shlex.join(command)
    async with _host(settings) as host:
        with _watched() as progress:
            await _patiently(host, arguments.sandbox, progress)
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
        return await _follow(host, arguments, _facts(result)["process_id"])


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


async def _put(settings: Settings, arguments: argparse.Namespace) -> int:
    *local, remote = arguments.paths if len(arguments.paths) > 1 else (*arguments.paths, "")
    return await _transfer(
        settings,
        arguments,
        lambda host, meter: host.transfers.put(arguments.sandbox, local, remote, meter),
    )


async def _get(settings: Settings, arguments: argparse.Namespace) -> int:
    return await _transfer(
        settings,
        arguments,
        lambda host, meter: host.transfers.get(
            arguments.sandbox, arguments.remote, arguments.local, meter
        ),
    )


async def _sync(settings: Settings, arguments: argparse.Namespace) -> int:
    return await _transfer(
        settings,
        arguments,
        lambda host, meter: host.transfers.sync(
            arguments.sandbox,
            arguments.local,
            arguments.remote,
            delete=arguments.delete,
            from_sandbox=arguments.from_sandbox,
            meter=meter,
        ),
    )


async def _transfer(
    settings: Settings,
    arguments: argparse.Namespace,
    begin: Callable[[Host, Meter], Awaitable[Outcome]],
) -> int:
    """Copy, show how far it is, and list what was left out."""
    from host_client.transfer import Meter, kept_text, shown

    async with _host(settings) as host:
        with _watched() as progress:
            await _patiently(host, arguments.sandbox, progress)
        meter = Meter()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_show_meter, meter)
                outcome = await begin(host, meter)
                tasks.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            print(
                "podpipe: interrupted. Complete files are in place, what there is of an unfinished large "
                f"one is kept beside it; the same command goes on from there{kept_text(meter)}",
                file=sys.stderr,
            )
            raise
    for path, why in outcome.refused:
        print(f"podpipe: left out: {shown(path)}: {shown(why)}", file=sys.stderr)
    if outcome.unlisted:
        print(f"podpipe: left out: {outcome.unlisted} more", file=sys.stderr)
    _print(arguments, outcome.text(), outcome.to_json())
    return EXIT_DONE


async def _show_meter(meter: Meter) -> None:
    """A bar on a terminal; elsewhere a line now and then for what takes longer."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(meter.verb, total=None)
            while True:
                await anyio.sleep(BAR_SECONDS)
                text = f"{meter.verb} {meter.files} files" if meter.files else meter.verb
                bar.update(task, description=text, total=meter.total, completed=meter.done)
    pause = QUIET_SECONDS
    while True:
        await anyio.sleep(pause)
        print(f"podpipe: {meter.text()}", file=sys.stderr, flush=True)
        pause = LINE_SECONDS


async def _suspend(settings: Settings, arguments: argparse.Namespace) -> int:
    async with _host(settings) as host:
        with _watched() as progress:
            status = await host.launcher.suspend(arguments.sandbox, progress=progress)
    _print(arguments, f"{arguments.sandbox}  suspended; its home is kept", status.to_json())
    return EXIT_DONE


async def _resume(settings: Settings, arguments: argparse.Namespace) -> int:
    async with _host(settings) as host:
        with _watched() as progress:
            await _patiently(host, arguments.sandbox, progress)
        status = await host.launcher.status(arguments.sandbox)
    facts = status.to_json()
    _print(arguments, f"{arguments.sandbox}  {facts['phase']}", facts)
    return EXIT_DONE


async def _extend(settings: Settings, arguments: argparse.Namespace) -> int:
    async with _host(settings) as host:
        facts = (await host.launcher.extend(arguments.sandbox, arguments.minutes)).to_json()
    _print(arguments, f"{arguments.sandbox}  expires {facts['expires_at']}", facts)
    return EXIT_DONE


async def _destroy(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.purge_home and not arguments.yes:
        question = f"Delete the home of user {settings.user!r} and all its files? [y/N] "
        answer = ""
        if sys.stdin.isatty():
            answer = await anyio.to_thread.run_sync(input, question, abandon_on_cancel=True)
        if answer.strip().lower() not in ("y", "yes"):
            raise UsageError("the home was not deleted; say --yes to delete it without being asked")
    async with _host(settings) as host:
        if arguments.purge_home:
            target, _ = await host.launcher.find(arguments.sandbox)
            if others := [
                status.sandbox.name or status.sandbox.id
                for status in await host.launcher.list_all()
                if status.sandbox.id != target.id
            ]:
                raise PodpipeError(
                    f"the home is also used by {', '.join(others)}: destroy them first. Nothing was "
                    "destroyed"
                )
        with _watched() as progress:
            sandbox = await host.launcher.destroy(arguments.sandbox, progress=progress)
            purged = await host.launcher.purge_home() if arguments.purge_home else False
    facts = {"sandbox_id": sandbox.id, "destroyed": True, "home": "purged" if purged else "kept"}
    _print(arguments, f"{arguments.sandbox}  destroyed; its home is {facts['home']}", facts)
    return EXIT_DONE


async def _connect(settings: Settings, arguments: argparse.Namespace) -> int:
    async with _host(settings) as host:
        session = await _patiently(host, arguments.sandbox, _silent)
        argv = host.kubectl.exec_argv(
            session.pod.name, _after_dashes(arguments.argv) or list(DIAL_ARGV)
        )
        environment = host.kubectl.environment
    sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # Byte-exact: nothing of ours stays in between.
    os.execve(argv[0], argv, environment)  # noqa: S606


async def _render(settings: Settings, arguments: argparse.Namespace) -> int:
    sandbox = draft_sandbox(settings, utc_now(), arguments.name)
    documents = manifest.everything(sandbox, settings)
    _print(arguments, yaml.safe_dump_all(documents, sort_keys=False).rstrip(), documents)
    return EXIT_DONE


async def _doctor(settings: Settings, arguments: argparse.Namespace) -> int:
    from host_client.doctor import examine

    findings = []
    async for finding in examine(settings):
        findings.append(finding)
        if not arguments.json:
            fix = f"\n         fix: {finding.fix}" if finding.fix else ""
            print(f"{finding.result:8} {finding.check}: {finding.detail}{fix}", flush=True)
    if arguments.json:
        print(json.dumps([finding.to_json() for finding in findings], indent=2))
    return EXIT_FAILED if any(f.result == "failure" for f in findings) else EXIT_DONE


async def _settings(settings: Settings, arguments: argparse.Namespace) -> int:
    rows = [(name, default, text) for name, (default, text) in SETTINGS_HELP.items()]
    facts = [{"name": n, "default": d, "meaning": t} for n, d, t in rows]
    _print(arguments, _table([("SETTING", "DEFAULT", "MEANING"), *rows]), facts)
    return EXIT_DONE


# --- helpers -----------------------------------------------------------------------------------


def _host(settings: Settings) -> Host:
    from host_client.host import Host  # mcp takes a second to import

    return Host(settings)


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


def _after_dashes(words: Sequence[str]) -> list[str]:
    return list(words[1:] if words[:1] == ["--"] else words)


def _silent(_: str) -> None:
    """Nobody watches."""
