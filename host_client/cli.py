"""The `podpipe` command: its arguments, and how each command ends.

Answers go to stdout, as text or with `--json` as one JSON document; progress and errors go to
stderr. With `--json` an error is the document: {"error": {"code", "message"}}. Exit codes: 0 done,
1 failed, 2 usage, 3 not found, 4 prerequisite missing. `run` ends with the command's own code.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

import anyio

from host_client import __version__
from host_client.commands import admin, apps, files, forward, lifecycle, look, pipes, reap
from host_client.commands import install as installs
from host_client.commands import open as opens
from host_client.commands import run as runs
from host_client.commands import ssh as shells
from host_client.config import SETTINGS_HELP, Settings
from host_client.errors import EXIT_FAILED, EXIT_USAGE, PodpipeError, code_of, root_cause
from host_client.interrupts import EXIT_INTERRUPTED, interruptible
from host_client.sandbox import ORPHAN_GRACE_SECONDS

EXAMPLES = """\
examples:
  podpipe create --name work --ttl 120      a sandbox that lives two hours, found again as "work"
  podpipe run work -- python3 --version     run a command in it; ends with the command's exit code
  podpipe put work src notes.md in/         copy into its home; get and sync are the other ways
  podpipe expose work 3000 web              publish what listens there; `podpipe open web` shows it
  podpipe suspend work                      free its resources; the next call resumes it
  podpipe list --json
  podpipe connect work                      raw MCP pipe to the daemon, for any MCP client
  podpipe install claude-desktop            let the app on this machine use podpipe
  podpipe doctor                            what is missing, and how to mend it

Settings come from the environment or a .env file; `podpipe settings` lists them with their defaults.
Exit codes: 0 done, 1 failed, 2 usage, 3 no such sandbox, 4 prerequisite missing.
"""

Command = Callable[[Settings, argparse.Namespace], Awaitable[int]]


class _Misused(Exception):
    """The arguments are not what a command takes.

    Args:
        usage: how the command is used.
        message: what is wrong.
    """

    def __init__(self, usage: str, message: str) -> None:
        super().__init__(message)
        self.usage = usage


class _Parser(argparse.ArgumentParser):
    """A parser that leaves it to `main` to tell what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise _Misused(
            f"{self.format_usage()}{self.prog}: ", f"{message}; see `{self.prog} --help`"
        )

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what is unknown here, where the command's own usage can be told."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, []


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; the process's own by default.

    Returns:
        The exit code.
    """
    _settle()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser().parse_args(words)
    except _Misused as misused:
        # Up to `--` only: what follows is somebody else's command.
        as_json = "--json" in (words[: words.index("--")] if "--" in words else words)
        return _fail("usage_error", str(misused), EXIT_USAGE, as_json, misused.usage)

    def fail(code: str, message: str, exit_code: int) -> int:
        as_json = getattr(arguments, "json", False) and not arguments.answered
        return _fail(code, message, exit_code, as_json)

    command = arguments.command
    try:
        settings = Settings.from_env()
        # serve too: a kubectl that hangs on a dead network does not notice that we have gone.
        code: int = anyio.run(interruptible, lambda: command(settings, arguments))
    except* PodpipeError as group:
        error = root_cause(group)
        assert isinstance(error, PodpipeError)
        code = fail(code_of(error), str(error), error.exit_code)
    except* KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except* BrokenPipeError:
        # The reader of our stdout went away; it does not want to hear more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    except* OSError as unwritable:
        code = fail("os_error", str(root_cause(unwritable)), EXIT_FAILED)
    except* Exception as group:
        defect = root_cause(group)
        print("".join(traceback.format_tb(defect.__traceback__)), end="", file=sys.stderr)
        message = (
            f"internal error ({type(defect).__name__}: {defect}); that is a defect of podpipe: "
            "please report it, with the lines on stderr"
        )
        code = fail(code_of(defect), message, EXIT_FAILED)
    if code == EXIT_INTERRUPTED and getattr(arguments, "json", False) and not arguments.answered:
        fail("interrupted", "interrupted", code)
    return code


def _settle() -> None:
    """Take back what a parent may have left to us that no program can work with."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: what is opened next would pass for it
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))
    # Ignored there, it is ignored here: every child's end would be lost, and each call with it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _fail(code: str, message: str, exit_code: int, as_json: bool, before: str = "podpipe: ") -> int:
    """Tell an error where it is looked for; the exit code."""
    if as_json:
        print(json.dumps({"error": {"code": code, "message": message}}, indent=2))
    else:
        print(f"{before}{message}", file=sys.stderr)
    return exit_code


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _default(setting: str) -> str:
    return f"default: {setting}, which is {SETTINGS_HELP[setting][0]} unless set"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="podpipe",
        description="Isolated Linux sandboxes for an agent, on any Kubernetes that kubectl reaches.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"podpipe {__version__}")
    parser.set_defaults(answered=False)
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    def add(
        name: str,
        command: Command,
        text: str,
        example: str,
        *,
        sandbox: bool = True,
        json: bool = True,
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  podpipe {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command, called=name)
        if sandbox:
            sub.add_argument("sandbox", help="id or name of the sandbox")
        if json:
            sub.add_argument("--json", action="store_true", help="print one JSON document")
        return sub

    serve = add(
        "serve",
        pipes.serve,
        "Serve MCP on stdin and stdout, for an MCP client.",
        "serve --sandbox work",
        sandbox=False,
        json=False,
    )
    serve.add_argument(
        "--sandbox",
        dest="bound",
        default="",
        metavar="NAME",
        help="work in this lasting sandbox where a call names none; it is made when first used",
    )
    create = add("create", lifecycle.create, "Make a sandbox.", "create --name work", sandbox=False)
    create.add_argument("--name", default="", help="to find it again by; default: none")
    create.add_argument(
        "--ttl",
        type=int,
        metavar="MINUTES",
        help=f"lifetime; {_default('DEFAULT_TTL_MINUTES')}",
    )
    create.add_argument(
        "--cpu",
        default="",
        metavar="QUANTITY",
        help=f"CPU limit, such as 500m; {_default('DEFAULT_CPU_LIMIT')}",
    )
    create.add_argument(
        "--memory",
        default="",
        metavar="QUANTITY",
        help=f"memory limit, such as 1Gi; {_default('DEFAULT_MEMORY_LIMIT')}",
    )
    listing = add("list", lifecycle.list_all, "List your sandboxes.", "list", sandbox=False)
    listing.add_argument(
        "--all-users",
        action="store_true",
        help="those of all users in the namespace, for an administrator; to work in them stays theirs",
    )
    add("status", lifecycle.status, "Show one sandbox.", "status work")
    run = add("run", runs.run, "Run a command in a sandbox.", "run work -- ls -la")
    run.add_argument(
        "--timeout",
        type=float,
        default=runs.TIMEOUT_SECONDS,
        metavar="SECONDS",
        help=f"default {runs.TIMEOUT_SECONDS:.0f}",
    )
    run.add_argument("-i", "--stdin", action="store_true", help="give it what is on stdin")
    run.add_argument("--workdir", default="", metavar="DIR", help="default: the home")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND …")
    put = add(
        "put",
        files.put,
        "Copy files and folders into a sandbox, verified.",
        "put work data/ notes.md in/",
    )
    put.usage = "%(prog)s [-h] [--json] sandbox LOCAL [LOCAL ...] [REMOTE]"
    put.add_argument(
        "paths",
        nargs="+",
        metavar="LOCAL",
        help="what to copy; the last of several is REMOTE, where to in the home: a folder that "
        "exists, or ends with /, is copied into; default: the home",
    )
    get = add(
        "get", files.get, "Copy a file or folder from a sandbox, verified.", "get work out/ ."
    )
    get.add_argument("remote", metavar="REMOTE", help="what to copy, in the home")
    get.add_argument(
        "local", metavar="LOCAL", nargs="?", default=".", help="where to; default: here"
    )
    sync = add(
        "sync", files.sync, "Make a folder in a sandbox like one here, or the reverse.",
        "sync work src src --delete",
    )  # fmt: skip
    sync.add_argument("local", metavar="LOCAL", help="the folder on this machine")
    sync.add_argument("remote", metavar="REMOTE", help="the folder in the home")
    sync.add_argument("--delete", action="store_true", help="remove what only the copy has")
    sync.add_argument("--from-sandbox", action="store_true", help="the one here is the copy")
    add("suspend", lifecycle.suspend, "End a sandbox's pod; keep sandbox and home.", "suspend work")
    add("resume", lifecycle.resume, "Start a suspended sandbox again.", "resume work")
    extend = add(
        "extend",
        lifecycle.extend,
        "Let a sandbox live longer: at least so many minutes from now.",
        "extend work 120",
    )
    extend.add_argument("minutes", type=int, help="minutes from now; never shortens its life")
    destroy = add("destroy", lifecycle.destroy, "End a sandbox for good.", "destroy work")
    destroy.add_argument("--purge-home", action="store_true", help="delete the home too; asks")
    destroy.add_argument("--yes", action="store_true", help="do not ask")
    _add_reap(add)
    apps.add_to(add)
    connect = add(
        "connect",
        pipes.connect,
        "Become a raw pipe to the MCP daemon of a sandbox, made if absent, or to another command "
        "in it.",
        "connect work -- python3 -u /app/mcp_server.py",
        json=False,
    )
    connect.add_argument("argv", nargs=argparse.REMAINDER, metavar="[-- COMMAND …]")
    shells.add_to(add)
    forward.add_to(add)
    opens.add_to(add)
    render = add(
        "render",
        look.render,
        "Print the manifests of a sandbox, or with `admin` those that an administrator applies once.",
        "render --name work",
        sandbox=False,
    )
    render.add_argument("--name", default="example", help="name of the sandbox")
    admin.add_to(render)
    doctor = add(
        "doctor",
        look.doctor,
        "Look for what is missing, and say the fix.",
        "doctor --deep",
        sandbox=False,
    )
    doctor.add_argument(
        "--deep",
        action="store_true",
        help="make two sandboxes too, and see whether one reaches the other; they go again",
    )
    add(
        "settings",
        look.list_settings,
        "List all settings: what holds, and where it comes from.",
        "settings",
        sandbox=False,
    )
    _add_install(commands)
    return parser


def _add_reap(add: Callable[..., argparse.ArgumentParser]) -> None:
    sub = add(
        "reap",
        reap.reap,
        "Delete expired sandboxes of all users, and what they left behind; homes are kept.",
        "reap --every 60",
        sandbox=False,
    )
    sub.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    sub.add_argument(
        "--every",
        type=float,
        nargs="?",
        default=0,
        const=None,
        metavar="SECONDS",
        help=f"again and again; {_default('REAPER_INTERVAL_SECONDS')}",
    )
    sub.add_argument(
        "--grace",
        type=float,
        default=ORPHAN_GRACE_SECONDS,
        metavar="SECONDS",
        help="keep what looks left behind and is younger: it may be a create under way; "
        f"default {ORPHAN_GRACE_SECONDS}",
    )


def _add_install(commands: argparse._SubParsersAction[_Parser]) -> None:
    """`install` has a command for each client."""
    text = "Let an MCP client on this machine use podpipe."
    install = commands.add_parser(
        "install",
        help=text,
        description=text,
        epilog="example:\n  podpipe install claude-desktop",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    install.add_argument("--json", action="store_true", help="print one JSON document")
    kinds = install.add_subparsers(dest="client", required=True, metavar="CLIENT")
    for name, text, example in (
        ("claude-desktop", "Add podpipe to Claude Desktop's configuration.", ""),
        ("claude-code", "Add podpipe to Claude Code, for all your projects.", " --scope project"),
        ("codex", "Add podpipe to Codex' configuration.", " --sandbox work"),
        ("skill", "Write an agent skill for podpipe into a skills folder.", " ~/.claude/skills"),
    ):
        kind = kinds.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  podpipe install {name}{example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        kind.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document"
        )
        kind.add_argument(
            "--name",
            dest="server",
            default="podpipe",
            help="what the client calls it; default: podpipe",
        )
        kind.add_argument(
            "--sandbox",
            dest="bound",
            default="",
            metavar="NAME",
            help="bind it to this lasting sandbox; default: none",
        )
        what = kind.add_mutually_exclusive_group()
        what.add_argument("--dry-run", action="store_true", help="only say what would change")
        if name == "skill":
            kind.add_argument(
                "folder", type=_path, metavar="DIR", help="the skills folder; DIR/NAME is written"
            )
            kind.set_defaults(command=installs.install_skill)
            continue
        what.add_argument(
            "--print",
            dest="only_print",
            action="store_true",
            help="only print the entry, to be pasted",
        )
        what.add_argument("--uninstall", action="store_true", help="take the entry out again")
        kind.add_argument(
            "--config",
            default="",
            metavar="PATH",
            help="the file; default: where the client has it",
        )
        if name == "claude-code":
            kind.add_argument(
                "--scope",
                choices=("user", "project"),
                default="user",
                help="all your projects, or .mcp.json in this folder; default: user",
            )
        kind.set_defaults(command=installs.install)
