"""The life of sandboxes: create, list, status, suspend, resume, extend, destroy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from host_client.apps import REDACTED, first_grant, new_token
from host_client.commands.arguments import Add, default_of
from host_client.commands.output import show, table, warn, watched
from host_client.config import Settings
from host_client.errors import EXIT_DONE, PodpipeError, StillStarting, UsageError
from host_client.status import Progress, Status

if TYPE_CHECKING:
    from host_client.audit import Audit
    from host_client.host import Host
    from host_client.session import SandboxSession

START_PATIENCE_SECONDS = 600.0
"""How long the command line waits for an image to be pulled; a person can interrupt it."""


async def create(settings: Settings, arguments: argparse.Namespace) -> int:
    """Make a sandbox and wait until it answers."""
    token = new_token()
    async with opened(settings, arguments) as host:
        with watched() as progress:
            status = await host.launcher.create(
                access=first_grant(token, host.clock.now()),
                name=arguments.name,
                ttl_minutes=arguments.ttl,
                cpu_limit=arguments.cpu,
                memory_limit=arguments.memory,
                progress=progress,
            )
            session = await patiently(host, status.sandbox.id, progress)
        # It has answered, whatever its status in the cluster says yet.
        facts = Status(session.sandbox, "running", session.pod, "").to_json()
        facts["url"] = settings.gateway.address(session.sandbox.id)
        facts["token"] = token
        facts["warnings"] = host.launcher.warnings
    warn(facts["warnings"])
    show(
        arguments,
        f"{facts['name'] or facts['sandbox_id']}  {facts['phase']}, expires {facts['expires_at']}",
        facts,
    )
    return EXIT_DONE


async def patiently(
    host: Host, ref: str, progress: Progress, *, resume: bool = False
) -> SandboxSession:
    """The session of a sandbox, waited for as long as a person would.

    Args:
        host: whose sandbox it is.
        ref: id or name.
        progress: told what is being waited for.
        resume: as for `Host.open`.

    Raises:
        PodpipeError: as `Host.open`; StillStarting after `START_PATIENCE_SECONDS`.
    """
    with anyio.move_on_after(START_PATIENCE_SECONDS):
        while True:
            try:
                return await host.open(ref, progress=progress, resume=resume)
            except StillStarting as waiting:
                progress(waiting.detail)
    raise StillStarting(
        f"sandbox {ref} is still starting after {START_PATIENCE_SECONDS:.0f} s; "
        f"`podpipe status {ref}` shows why",
        detail="",
    )


async def list_all(settings: Settings, arguments: argparse.Namespace) -> int:
    """List the user's sandboxes, or those of all users."""
    everybody = arguments.all_users
    async with opened(settings, arguments) as host:
        listed = await host.launcher.list_all(of_all_users=everybody)
        warn(host.launcher.warnings)
    found = [status.to_json() for status in listed]
    keys = ["sandbox_id", "name", "phase", "expires_at", "detail"]
    if everybody:
        keys.insert(0, "user")
    head = [key.removesuffix("_id").removesuffix("_at").upper() for key in keys]
    rows = [[f[key][:60] for key in keys] for f in found]
    show(arguments, table([head, *rows]) if rows else "no sandboxes", found)
    return EXIT_DONE


async def status(settings: Settings, arguments: argparse.Namespace) -> int:
    """Show one sandbox."""
    async with opened(settings, arguments) as host:
        facts = (await host.sessions.status(arguments.sandbox)).to_json()
    facts["url"] = settings.gateway.address(facts["sandbox_id"])
    facts["token"] = REDACTED
    show(arguments, table([(key, str(value)) for key, value in facts.items()]), facts)
    return EXIT_DONE


async def suspend(settings: Settings, arguments: argparse.Namespace) -> int:
    """End a sandbox's pod."""
    async with opened(settings, arguments) as host:
        with watched() as progress:
            status = await host.launcher.suspend(arguments.sandbox, progress=progress)
    show(arguments, f"{arguments.sandbox}  suspended; its home is kept", status.to_json())
    return EXIT_DONE


async def resume(settings: Settings, arguments: argparse.Namespace) -> int:
    """Start a suspended sandbox."""
    async with opened(settings, arguments) as host:
        with watched() as progress:
            await patiently(host, arguments.sandbox, progress, resume=True)
        status = await host.launcher.status(arguments.sandbox)
    facts = status.to_json()
    show(arguments, f"{arguments.sandbox}  {facts['phase']}", facts)
    return EXIT_DONE


async def extend(settings: Settings, arguments: argparse.Namespace) -> int:
    """Let a sandbox live longer."""
    async with opened(settings, arguments) as host:
        facts = (await host.sessions.extend(arguments.sandbox, arguments.minutes)).to_json()
    show(arguments, f"{arguments.sandbox}  expires {facts['expires_at']}", facts)
    return EXIT_DONE


async def destroy(settings: Settings, arguments: argparse.Namespace) -> int:
    """End a sandbox for good, and the home if asked."""
    if arguments.purge_home and not arguments.yes:
        question = f"Delete the home of user {settings.user!r} and all its files? [y/N] "
        answer = ""
        if sys.stdin.isatty():
            answer = await anyio.to_thread.run_sync(input, question, abandon_on_cancel=True)
        if answer.strip().lower() not in ("y", "yes"):
            raise UsageError("nothing was deleted; say --yes to delete without being asked")
    async with opened(settings, arguments) as host:
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
        with watched() as progress:
            sandbox = await host.launcher.destroy(arguments.sandbox, progress=progress)
            purged = await host.launcher.purge_home() if arguments.purge_home else False
    facts = {"sandbox_id": sandbox.id, "destroyed": True, "home": "purged" if purged else "kept"}
    show(arguments, f"{arguments.sandbox}  destroyed; its home is {facts['home']}", facts)
    return EXIT_DONE


@asynccontextmanager
async def opened(
    settings: Settings, arguments: argparse.Namespace, *, bound: str = ""
) -> AsyncIterator[Host]:
    """A host for one command, whose end the audit records.

    Args:
        settings: whose podpipe it is.
        arguments: the command's.
        bound: name of a lasting sandbox that is made whenever it is wanted and not there.
    """
    from host_client.host import Host  # mcp takes a second to import

    async with Host(settings, bound=bound) as host:
        with audited(host.audit, arguments):
            yield host


@contextmanager
def audited(audit: Audit, arguments: argparse.Namespace) -> Iterator[None]:
    """Record a command when it ends."""
    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    with audit.call(f"podpipe {arguments.called}", given.get("sandbox"), given):
        yield


def add_to(add: Add) -> None:
    """Add the commands to the command line."""
    sub = add("create", create, "Make a sandbox.", "create --name work", sandbox=False)
    sub.add_argument("--name", default="", help="to find it again by; default: none")
    sub.add_argument(
        "--ttl",
        type=int,
        metavar="MINUTES",
        help=f"lifetime; {default_of('DEFAULT_TTL_MINUTES')}",
    )
    sub.add_argument(
        "--cpu",
        default="",
        metavar="QUANTITY",
        help=f"CPU limit, such as 500m; {default_of('DEFAULT_CPU_LIMIT')}",
    )
    sub.add_argument(
        "--memory",
        default="",
        metavar="QUANTITY",
        help=f"memory limit, such as 1Gi; {default_of('DEFAULT_MEMORY_LIMIT')}",
    )
    sub = add("list", list_all, "List your sandboxes.", "list", sandbox=False)
    sub.add_argument(
        "--all-users",
        action="store_true",
        help="those of all users in the namespace, for an administrator; to work in them stays theirs",
    )
    add("status", status, "Show one sandbox.", "status work")
    add("suspend", suspend, "End a sandbox's pod; keep sandbox and home.", "suspend work")
    add("resume", resume, "Start a suspended sandbox again.", "resume work")
    sub = add(
        "extend",
        extend,
        "Let a sandbox live longer: at least so many minutes from now.",
        "extend work 120",
    )
    sub.add_argument("minutes", type=int, help="minutes from now; never shortens its life")
    sub = add("destroy", destroy, "End a sandbox for good.", "destroy work")
    sub.add_argument("--purge-home", action="store_true", help="delete the home too; asks")
    sub.add_argument("--yes", action="store_true", help="do not ask")
