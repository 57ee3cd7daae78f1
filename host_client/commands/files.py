"""Files between this machine and a sandbox: put, get, sync."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from host_client.commands.arguments import Add
from host_client.commands.lifecycle import opened, patiently
from host_client.commands.output import show, watched
from host_client.config import Settings
from host_client.errors import EXIT_DONE, UsageError
from host_client.paths import in_home

if TYPE_CHECKING:
    from host_client.host import Host
    from host_client.outcome import Meter, Outcome

QUIET_SECONDS = 2.0
"""What takes no longer needs no progress."""
LINE_SECONDS = 10.0
BAR_SECONDS = 0.1


async def put(settings: Settings, arguments: argparse.Namespace) -> int:
    """Copy files and folders into a sandbox."""
    *local, remote = arguments.paths if len(arguments.paths) > 1 else (*arguments.paths, "")
    _refuse_local_target(arguments.sandbox, local, remote)
    return await _transfer(
        settings,
        arguments,
        lambda host, meter: host.transfers.put(arguments.sandbox, local, remote, meter),
    )


def _refuse_local_target(sandbox: str, local: Sequence[str], remote: str) -> None:
    """Refuse a target that can only be meant as one more thing to copy.

    Raises:
        UsageError: it is a file here and several are copied, or it is here and not in the home.
    """
    otherwise = ""
    try:
        in_home(remote)
        if len(local) == 1 or remote.endswith("/") or Path(remote).is_dir():
            return
        otherwise = f"; {remote}/ is a folder of that name there"
    except UsageError:
        pass
    if os.path.lexists(remote):
        words = shlex.join([sandbox, *local, remote])
        raise UsageError(
            f"the last argument is the target in the sandbox, and {remote!r} is here. To copy it too, "
            f"say where to after it, for example: podpipe put {words} in/{otherwise}"
        )


async def get(settings: Settings, arguments: argparse.Namespace) -> int:
    """Copy a file or folder from a sandbox."""
    return await _transfer(
        settings,
        arguments,
        lambda host, meter: host.transfers.get(
            arguments.sandbox, arguments.remote, arguments.local, meter
        ),
    )


async def sync(settings: Settings, arguments: argparse.Namespace) -> int:
    """Make a folder like another."""
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
    from host_client.outcome import Meter, kept_text, shown

    async with opened(settings, arguments) as host:
        with watched() as progress:
            await patiently(host, arguments.sandbox, progress)
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
    show(arguments, outcome.text(), outcome.to_json())
    return EXIT_DONE


async def _show_meter(meter: Meter) -> None:
    """A bar on a terminal; elsewhere a line now and then for what takes longer."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        from host_client.outcome import files_text

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(meter.verb, total=None)
            while True:
                await anyio.sleep(BAR_SECONDS)
                text = f"{meter.verb} {files_text(meter.files)}" if meter.files else meter.verb
                bar.update(task, description=text, total=meter.total, completed=meter.done)
    pause = QUIET_SECONDS
    while True:
        await anyio.sleep(pause)
        print(f"podpipe: {meter.text()}", file=sys.stderr, flush=True)
        pause = LINE_SECONDS


def add_to(add: Add) -> None:
    """Add the commands to the command line."""
    sub = add(
        "put",
        put,
        "Copy files and folders into a sandbox, verified.",
        "put work data/ notes.md in/",
    )
    sub.usage = "%(prog)s [-h] [--json] sandbox LOCAL [LOCAL ...] [REMOTE]"
    sub.add_argument(
        "paths",
        nargs="+",
        metavar="LOCAL",
        help="what to copy; the last of several is REMOTE, where to in the home: a folder that "
        "exists, or ends with /, is copied into; default: the home",
    )
    sub = add("get", get, "Copy a file or folder from a sandbox, verified.", "get work out/ .")
    sub.add_argument("remote", metavar="REMOTE", help="what to copy, in the home")
    sub.add_argument(
        "local", metavar="LOCAL", nargs="?", default=".", help="where to; default: here"
    )
    sub = add(
        "sync", sync, "Make a folder in a sandbox like one here, or the reverse.",
        "sync work src src --delete",
    )  # fmt: skip
    sub.add_argument("local", metavar="LOCAL", help="the folder on this machine")
    sub.add_argument("remote", metavar="REMOTE", help="the folder in the home")
    sub.add_argument("--delete", action="store_true", help="remove what only the copy has")
    sub.add_argument("--from-sandbox", action="store_true", help="the one here is the copy")
