"""Sweeping what is over: once, for cron, or again and again."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import anyio

from host_client.audit import Audit
from host_client.commands.arguments import Add, default_of
from host_client.commands.lifecycle import audited
from host_client.commands.output import show, warn, watched
from host_client.config import Settings
from host_client.errors import EXIT_DONE, EXIT_FAILED, KubectlError, UsageError
from host_client.kubectl import Kubectl
from host_client.sandbox import ORPHAN_GRACE_SECONDS
from host_client.status import silent

if TYPE_CHECKING:
    from host_client.reaper import Report


async def reap(settings: Settings, arguments: argparse.Namespace) -> int:
    """Delete what is over; 1 where something could not be deleted or looked at."""
    every = settings.reaper_interval_seconds if arguments.every is None else arguments.every
    if every < 0 or arguments.grace < 0:
        raise UsageError("--every and --grace take seconds, which are not below zero")
    kubectl = Kubectl(settings)
    audit = Audit(settings, lambda: kubectl.target.context)
    if not every:
        with audited(audit, arguments):
            return await _once(kubectl, arguments)
    while True:
        began = anyio.current_time()
        try:
            with audited(audit, arguments):
                await _once(kubectl, arguments)
        except KubectlError as error:  # the next sweep may find the API server again
            warn([str(error)])
        await anyio.sleep(max(0.0, every - (anyio.current_time() - began)))


async def _once(kubectl: Kubectl, arguments: argparse.Namespace) -> int:
    from host_client.reaper import sweep  # httpx2, which no other command needs

    # Cron would mail it.
    with watched() if sys.stderr.isatty() else nullcontext(silent) as progress:
        report = await sweep(
            kubectl,
            grace_seconds=arguments.grace,
            dry_run=arguments.dry_run,
            progress=progress,
        )
    if arguments.json and arguments.every != 0:
        print(json.dumps(report.to_json()), flush=True)  # a line for each sweep
    else:
        show(arguments, _text(report), report.to_json())
    warn(f"kept {found.name}: {found.detail}" for found in report.unreadable)
    warn(f"{ref} was not deleted: {why}" for ref, why in report.failed.items())
    return EXIT_FAILED if report.failed else EXIT_DONE


def _text(report: Report) -> str:
    done = "to be deleted" if report.dry_run else "deleted"
    lines = [f"{each.ref} {done}: {each.detail}" for each in report.deleted]
    lines += [f"{ref} kept: it was changed meanwhile" for ref in report.kept]
    lines.append(f"{done}: {len(report.deleted)}, sandboxes seen: {report.sandboxes}")
    return "\n".join(lines)


def add_to(add: Add) -> None:
    """Add the command to the command line."""
    sub = add(
        "reap",
        reap,
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
        help=f"again and again; {default_of('REAPER_INTERVAL_SECONDS')}",
    )
    sub.add_argument(
        "--grace",
        type=float,
        default=ORPHAN_GRACE_SECONDS,
        metavar="SECONDS",
        help="keep what looks left behind and is younger: it may be a create under way; "
        f"default {ORPHAN_GRACE_SECONDS}",
    )
