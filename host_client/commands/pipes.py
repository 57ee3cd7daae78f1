"""podpipe as a pipe: `serve` for an MCP client, `connect` to what runs in a sandbox."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from host_client.commands.arguments import Add
from host_client.commands.attend import attended
from host_client.commands.lifecycle import opened, patiently
from host_client.commands.output import watched
from host_client.config import Settings
from host_client.errors import EXIT_DONE, UsageError
from in_pod_server.contract import DIAL_ARGV


async def serve(settings: Settings, arguments: argparse.Namespace) -> int:
    """Serve MCP until stdin ends."""
    from host_client.server import serve_stdio  # only serve needs a server

    await serve_stdio(settings, arguments.bound)
    return EXIT_DONE


async def connect(settings: Settings, arguments: argparse.Namespace) -> int:
    """Be a pipe to the daemon, or to another command until that ends.

    Returns:
        The command's exit code.
    """
    command = command_of(arguments.argv, f"podpipe connect {arguments.sandbox} -- cat")
    async with opened(settings, arguments, bound=arguments.sandbox) as host:
        with watched() as progress:
            session = await patiently(host, arguments.sandbox, progress)
        kubectl, pod = host.kubectl, session.pod.name
    sys.stdout.flush()
    if not command:
        argv = kubectl.exec_argv(pod, DIAL_ARGV)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # Byte-exact: nothing of ours stays in between.
        os.execve(argv[0], argv, kubectl.environment)  # noqa: S606
    return await attended(kubectl, pod, command)


def command_of(words: Sequence[str], instead: str) -> list[str]:
    """A command without the `--` that stands before it.

    Args:
        words: what stands after the sandbox.
        instead: how it is to be typed where it begins with an option.

    Raises:
        UsageError: it does, and nothing says that the option is the command's.
    """
    if words[:1] == ["--"]:
        return list(words[1:])
    if words and words[0].startswith("-"):
        raise UsageError(
            f"{words[0]} stands after the sandbox: podpipe's own options go before it, and a "
            f"command that begins with '-' after '--', for example: {instead}"
        )
    return list(words)


def add_to(add: Add) -> None:
    """Add the commands to the command line."""
    sub = add(
        "serve",
        serve,
        "Serve MCP on stdin and stdout, for an MCP client.",
        "serve --sandbox work",
        sandbox=False,
        json=False,
    )
    sub.add_argument(
        "--sandbox",
        dest="bound",
        default="",
        metavar="NAME",
        help="work in this lasting sandbox where a call names none; it is made when first used",
    )
    sub = add(
        "connect",
        connect,
        "Become a raw pipe to the MCP daemon of a sandbox, made if absent, or to another command "
        "in it.",
        "connect work -- python3 -u /app/mcp_server.py",
        json=False,
    )
    sub.add_argument("argv", nargs=argparse.REMAINDER, metavar="[-- COMMAND …]")
