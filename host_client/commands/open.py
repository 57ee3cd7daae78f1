"""`podpipe open`: published apps at their local address, in the browser."""

from __future__ import annotations

import argparse
import re
import sys
import webbrowser
from collections.abc import Callable

import anyio
import anyio.to_thread

from host_client.apps import DOMAIN
from host_client.commands.forward import WITHOUT_SSH
from host_client.commands.lifecycle import opened, patiently
from host_client.commands.output import show, warn, watched
from host_client.config import Settings
from host_client.errors import EXIT_DONE, UsageError
from host_client.listener import Listener
from host_client.tunnel import has_ssh
from in_pod_server.contract import APP_NAME


async def open_app(settings: Settings, arguments: argparse.Namespace) -> int:
    """Serve the local address of all the user's sandboxes, until interrupted."""
    if arguments.app and not re.fullmatch(APP_NAME, arguments.app):
        raise UsageError(
            f"{arguments.app[:80]!r} is no app's name: lower-case letters, digits and '-'"
        )
    async with opened(settings, arguments) as host:
        sandbox_id = ""
        if arguments.sandbox:
            with watched() as progress:
                session = await patiently(host, arguments.sandbox, progress)
            sandbox_id = session.sandbox.id
        if not has_ssh(host):
            warn([WITHOUT_SSH])
        async with anyio.create_task_group() as tasks:
            listener = Listener(host, settings.open_port, tasks)
            first = await tasks.start(listener.serve)
            url = listener.url(sandbox_id or "SANDBOX_ID", arguments.app if sandbox_id else "APP")
            note = "until ctrl-C" if first else "by another podpipe, and by this one after it"
            facts = {"url": url, "port": settings.open_port, "listening": first}
            show(arguments, f"{url}  served {note}", facts)
            sys.stdout.flush()
            if sandbox_id and arguments.browser and not arguments.json:
                await anyio.to_thread.run_sync(webbrowser.open, url, abandon_on_cancel=True)
    return EXIT_DONE


def add_to(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    sub = add(
        "open",
        open_app,
        f"Serve the apps of all your sandboxes at http://APP.SANDBOX_ID.{DOMAIN}, until ctrl-C, and "
        "open one.",
        "open work web",
        sandbox=False,
    )
    sub.add_argument("sandbox", nargs="?", default="", help="id or name; default: only serve")
    sub.add_argument("app", nargs="?", default="", help="default: the sandbox's own page")
    sub.add_argument(
        "--no-browser", dest="browser", action="store_false", help="only print the address"
    )
