"""The `podpipe` command: how it is typed, and how it ends.

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
from collections.abc import Sequence
from typing import NoReturn

import anyio

from host_client import __version__
from host_client.commands import (
    apps,
    files,
    forward,
    install,
    lifecycle,
    look,
    pipes,
    reap,
    run,
    ssh,
)
from host_client.commands import open as opens
from host_client.commands.arguments import Command
from host_client.config import Settings
from host_client.errors import EXIT_FAILED, EXIT_USAGE, PodpipeError, code_of, root_cause
from host_client.interrupts import EXIT_INTERRUPTED, interruptible

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

COMMANDS = (pipes, lifecycle, run, files, apps, opens, ssh, forward, reap, look, install)
"""In the order of the help."""


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
        arguments = _parsed(words)
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


def _parsed(words: list[str]) -> argparse.Namespace:
    """The arguments; where they end in somebody else's command, with the `--` that stands before it.

    argparse takes that away, and with it whether an option behind it is ours.
    """
    parser = _parser()
    arguments = parser.parse_args(words)
    if "--" in words and hasattr(arguments, "argv"):
        dashes = words.index("--")
        arguments = parser.parse_args(words[:dashes])
        arguments.argv += words[dashes:]
    return arguments


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

    for module in COMMANDS:
        module.add_to(add)
    return parser
