"""`podpipe open`: published apps at their local address, in the browser."""

from __future__ import annotations

import argparse
import html
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from host_client.apps import apps_of, out_of_reach
from host_client.commands.apps import seconds_of, tell_what_serves
from host_client.commands.arguments import Add
from host_client.commands.forward import WITHOUT_SSH
from host_client.commands.lifecycle import opened, patiently
from host_client.commands.output import show, warn, watched
from host_client.config import Settings
from host_client.errors import EXIT_DONE, PodpipeError, SandboxNotFound, UsageError
from host_client.gateway import DOMAIN
from host_client.listener import Listener
from host_client.ssh import runtime_folder
from host_client.tunnel import has_ssh

if TYPE_CHECKING:
    from host_client.host import Host

LINK_LIFETIME = "8h"
BROWSER_SECONDS = 5.0
"""In which a browser has read the page that it was started with."""


async def open_app(settings: Settings, arguments: argparse.Namespace) -> int:
    """Serve the local address of all the user's sandboxes, until interrupted; or only make a link."""
    if arguments.app and "/" in arguments.target:
        raise UsageError("SANDBOX/APP names the app already: leave out the second name")
    seconds = seconds_of(arguments.lifetime)
    gateway = settings.gateway
    if gateway.in_cluster and not arguments.target:
        raise UsageError(
            f"with GATEWAY={gateway.kind} nothing is served here, for the cluster leads to "
            f"{gateway.address('SANDBOX_ID', 'APP')}: name the sandbox that is to be opened"
        )
    async with opened(settings, arguments) as host:
        facts: dict[str, Any] = {"port": gateway.port}
        ref, app = await _meant(host, arguments.target, arguments.app)
        if arguments.share and not app:
            raise UsageError("--share needs the app that the link is to open, and no other")
        if ref:
            with watched() as progress:
                session = await patiently(host, ref, progress)
                facts |= await _linked(host, ref, app, seconds)
            if why := out_of_reach(gateway, session.sandbox.id, session.pod):
                warn([why])
        if arguments.share:
            show(arguments, f"{facts['link']}  opens it for {arguments.lifetime}", facts)
            tell_what_serves(settings, f"{ref}/{app}")
            return EXIT_DONE
        if gateway.in_cluster:
            show(arguments, facts["link"], facts)
            sys.stdout.flush()
            if arguments.browser and not arguments.json:
                with _page(settings, facts["link"]) as page:
                    await anyio.to_thread.run_sync(webbrowser.open, page, abandon_on_cancel=True)
                    await anyio.sleep(BROWSER_SECONDS)
            return EXIT_DONE
        if not has_ssh(host):
            warn([WITHOUT_SSH])
        async with anyio.create_task_group() as tasks:
            listener = Listener(host, gateway.port, tasks)
            facts["listening"] = await tasks.start(listener.serve)
            where = facts.get("link") or listener.url("SANDBOX_ID", "APP")
            by = "until ctrl-C" if facts["listening"] else "by another podpipe, then by this one"
            show(arguments, f"{where}  served {by}", facts)
            sys.stdout.flush()
            if "link" in facts and arguments.browser and not arguments.json:
                with _page(settings, facts["link"]) as page:
                    await anyio.to_thread.run_sync(webbrowser.open, page, abandon_on_cancel=True)
                    await anyio.sleep_forever()
    return EXIT_DONE


async def _meant(host: Host, target: str, app: str) -> tuple[str, str]:
    """The sandbox and the app that a person means: no app is the sandbox's page, no sandbox all.

    Args:
        host: whose.
        target: a sandbox, an app, or SANDBOX/APP; empty for none.
        app: beside a sandbox.

    Raises:
        SandboxNotFound: nothing is called so.
        UsageError: more than one is.
    """
    ref, slash, name = target.partition("/")
    if slash and not ref:
        raise UsageError(f"{target[:80]!r} names no sandbox: SANDBOX/APP, or APP alone")
    if not target or app or slash:
        return ref, app or name
    boxes = [status.sandbox for status in await host.launcher.list_all()]
    found = [(box.name or box.id, "") for box in boxes if target in (box.id, box.name)]
    found += [(box.name or box.id, target) for box in boxes if target in apps_of(box.apps)]
    if not found:
        raise SandboxNotFound(
            f"no sandbox of user {host.settings.user!r} in namespace {host.settings.namespace} is "
            f"called {target[:80]!r} or publishes an app of that name; `podpipe list` shows the "
            "sandboxes, `podpipe apps SANDBOX` the apps of one"
        )
    if len(found) > 1:
        choices = ", ".join(f"`podpipe open {box}/{each}`" for box, each in found)
        raise UsageError(f"{target!r} is the name of {len(found)}; choose one: {choices}")
    return found[0]


async def _linked(host: Host, ref: str, app: str, seconds: int) -> dict[str, str]:
    """Where an app is, or the sandbox's own page, and a link that opens it for a while.

    Raises:
        PodpipeError: there is no such app.
    """
    sandbox, _ = await host.launcher.find(ref)
    apps = apps_of(sandbox.apps)
    if app and app not in apps:
        known = f"it publishes {', '.join(apps)}" if apps else "it publishes none"
        raise PodpipeError(
            f"sandbox {ref} publishes no app {app[:80]!r}; {known}. Publish one with "
            f"`podpipe expose {ref} PORT NAME`"
        )
    made = await host.apps.grant(ref, app=app, seconds=seconds)
    gateway = host.settings.gateway
    return {
        "url": gateway.address(sandbox.id, app),
        "link": gateway.address(sandbox.id, app, made.token),
    }


@contextmanager
def _page(settings: Settings, link: str) -> Iterator[str]:
    """A file that leads on to a link: what a browser is started with everybody here can see."""
    with tempfile.NamedTemporaryFile(
        "w", dir=runtime_folder(settings.environment), suffix=".html", encoding="utf-8"
    ) as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={html.escape(link)}">\n')
        file.flush()
        yield Path(file.name).as_uri()


def add_to(add: Add) -> None:
    """Add the command to the command line."""
    sub = add(
        "open",
        open_app,
        f"Serve the apps of all your sandboxes at http://APP.SANDBOX_ID.{DOMAIN}, until ctrl-C, and "
        "open one.",
        "open web",
        sandbox=False,
    )
    sub.add_argument(
        "target",
        nargs="?",
        default="",
        metavar="APP|SANDBOX[/APP]",
        help="an app, if one sandbox has it; or a sandbox, for its own page; default: only serve",
    )
    sub.add_argument("app", nargs="?", default="", metavar="APP", help="likewise SANDBOX APP")
    sub.add_argument(
        "--no-browser", dest="browser", action="store_false", help="only print the link"
    )
    sub.add_argument(
        "--share",
        action="store_true",
        help="only make a link that opens this app and no other, and serve nothing",
    )
    sub.add_argument(
        "--for",
        dest="lifetime",
        default=LINK_LIFETIME,
        metavar="TIME",
        help=f"until when the link opens something, such as 30m, 1h or 7d; default: {LINK_LIFETIME}",
    )
