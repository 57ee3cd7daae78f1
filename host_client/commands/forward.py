"""`podpipe forward`: ports of this machine that lead to ports of a sandbox."""

from __future__ import annotations

import argparse
import re
import sys

import anyio
import anyio.abc

from host_client.commands.arguments import Add
from host_client.commands.lifecycle import opened, patiently
from host_client.commands.output import show, warn, watched
from host_client.config import Settings
from host_client.errors import EXIT_DONE, UsageError, root_cause
from host_client.host import Host
from host_client.loopback import listening
from host_client.tunnel import Tunnel, has_ssh
from in_pod_server.splice import End

WITHOUT_SSH = "there is no ssh here, so kubectl port-forward carries the connections"

_PAIR = re.compile(r"(?:(\d{1,5}):)?(\d{1,5})")


async def forward(settings: Settings, arguments: argparse.Namespace) -> int:
    """Lead ports of this machine to ports of a sandbox, until interrupted."""
    pairs = [_pair(text) for text in arguments.ports]
    async with opened(settings, arguments) as host:
        with watched() as progress:
            await patiently(host, arguments.sandbox, progress)
        if not has_ssh(host):
            warn([WITHOUT_SSH])
        await _carry(host, arguments, pairs)
    return EXIT_DONE


def _pair(text: str) -> tuple[int, int]:
    """The port here and the one there.

    Raises:
        UsageError: it names none.
    """
    found = _PAIR.fullmatch(text)
    there = int(found[2]) if found else 0
    here = int(found[1] or there) if found else 0
    if not 1 <= there <= 65535 or not 1 <= here <= 65535:
        raise UsageError(
            f"{text!r} is not LOCAL:REMOTE, two ports from 1 to 65535, or one for both"
        )
    return here, there


async def _carry(host: Host, arguments: argparse.Namespace, pairs: list[tuple[int, int]]) -> None:
    async with anyio.create_task_group() as tasks:
        tunnel = Tunnel(host, arguments.sandbox, [there for _, there in pairs], tasks)
        await tunnel.opened()
        for here, there in pairs:
            await tasks.start(_serve, here, tunnel, there, arguments.sandbox, tasks)
        _say(arguments, pairs)


async def _serve(
    here: int,
    tunnel: Tunnel,
    there: int,
    sandbox: str,
    tasks: anyio.abc.TaskGroup,
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    told = False

    async def handle(client: End) -> None:
        nonlocal told
        try:
            async with tunnel.connected(there) as server:
                await client.join(server)
            if client.unanswered and not told:
                warn([_nothing_at(there, sandbox)])
            told = client.unanswered  # once, until something has answered
        except Exception as caught:  # whatever it is, it is this one connection's
            print(f"podpipe: a connection was lost: {root_cause(caught)}", file=sys.stderr)

    async with listening(here, handle, tasks):
        task_status.started()
        await anyio.sleep_forever()


def _nothing_at(port: int, sandbox: str) -> str:
    return (
        f"port {port} of {sandbox} closed a connection without a word: if nothing listens there yet, "
        f"start it, at 127.0.0.1 or every address; `podpipe run {sandbox} -- ps x` shows what runs there"
    )


def _say(arguments: argparse.Namespace, pairs: list[tuple[int, int]]) -> None:
    lines = [
        f"127.0.0.1:{here} leads to port {there} of {arguments.sandbox}" for here, there in pairs
    ]
    facts = [{"local": here, "remote": there} for here, there in pairs]
    show(arguments, "\n".join([*lines, "ctrl-C ends it"]), facts)
    sys.stdout.flush()


def add_to(add: Add) -> None:
    """Add the command to the command line."""
    sub = add(
        "forward",
        forward,
        "Lead ports of this machine's loopback to ports of a sandbox, until ctrl-C.",
        "forward work 8000:3000",
    )
    sub.add_argument(
        "ports", nargs="+", metavar="LOCAL:REMOTE", help="two ports, or one that is both"
    )
