"""Apps of a sandbox: publish, list and close them, and make tokens that open them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from host_client.apps import (
    EXPOSE,
    LIST,
    UNEXPOSE,
    apps_of,
    out_of_reach,
    told_with_addresses,
)
from host_client.commands.arguments import Add
from host_client.commands.lifecycle import opened, patiently
from host_client.commands.output import show, table, warn, watched
from host_client.config import MAX_TTL_LIMIT, Settings
from host_client.errors import EXIT_DONE, PodpipeError, UsageError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


async def list_apps(settings: Settings, arguments: argparse.Namespace) -> int:
    """List what is published; a sandbox that does not run is not resumed for that."""
    async with opened(settings, arguments) as host:
        status = await host.launcher.status(arguments.sandbox)
        sandbox = status.sandbox
        if status.phase == "running":
            found = await _call(settings, host.sessions.call, sandbox.id, LIST, {})
            apps = found["apps"]
        else:
            apps = [
                {
                    "name": name,
                    "internal_port": port,
                    "answers": False,
                    "url": settings.gateway.address(sandbox.id, name),
                }
                for name, port in apps_of(sandbox.apps).items()
            ]
    facts = {"sandbox_id": sandbox.id, "phase": status.phase, "apps": apps}
    waits = "answers" if status.phase == "running" else status.phase
    rows = [
        [app["name"], str(app["internal_port"]), waits if app["answers"] else _not(status.phase),
         app["url"]]
        for app in apps
    ]  # fmt: skip
    head = ["APP", "PORT", "STATE", "ADDRESS"]
    show(arguments, table([head, *rows]) if rows else "no app is published", facts)
    return EXIT_DONE


def _not(phase: str) -> str:
    return "does not answer" if phase == "running" else phase


async def expose(settings: Settings, arguments: argparse.Namespace) -> int:
    """Publish a port by a name."""
    asked = {"internal_port": arguments.port, "name": arguments.app}
    facts = await _changed(settings, arguments, EXPOSE, asked)
    state = "" if facts["answers"] else "  (nothing listens there yet)"
    show(arguments, f"{facts['url']}{state}", facts)
    tell_what_serves(settings, f"{arguments.sandbox}/{arguments.app}")
    return EXIT_DONE


def tell_what_serves(settings: Settings, target: str) -> None:
    """Say on stderr what has to run for a local address to answer; a cluster's needs nothing."""
    if not settings.gateway.in_cluster:
        print(f"podpipe: served here while `podpipe open {target}` runs", file=sys.stderr)


async def unexpose(settings: Settings, arguments: argparse.Namespace) -> int:
    """Publish an app no longer."""
    facts = await _changed(settings, arguments, UNEXPOSE, {"name": arguments.app})
    show(arguments, f"{arguments.app}  is not published any more", facts)
    return EXIT_DONE


async def _changed(
    settings: Settings, arguments: argparse.Namespace, tool: str, asked: Mapping[str, Any]
) -> dict[str, Any]:
    async with opened(settings, arguments) as host:
        with watched() as progress:
            session = await patiently(host, arguments.sandbox, progress)
        if why := out_of_reach(settings.gateway, session.sandbox.id, session.pod):
            warn([why])
        return await _call(settings, host.sessions.call, session.sandbox.id, tool, asked)


async def _call(
    settings: Settings, call: Callable[..., Any], ref: str, tool: str, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts of a call of one of the daemon's app tools.

    Raises:
        PodpipeError: the sandbox refused it.
    """
    result = await call(ref, tool, dict(asked), reads_only=tool == LIST)
    if result.get("isError"):
        raise PodpipeError("\n".join(block.get("text", "") for block in result["content"]))
    facts: dict[str, Any] = told_with_addresses(result, settings.gateway)["structuredContent"]
    return facts


async def access(settings: Settings, arguments: argparse.Namespace) -> int:
    """Make a token, and show it this once."""
    seconds = seconds_of(arguments.lifetime) if arguments.lifetime else 0
    async with opened(settings, arguments) as host:
        with watched() as progress:
            progress("telling the sandbox")
            made = await host.apps.grant(
                arguments.sandbox, app=arguments.app, seconds=seconds, rotate=arguments.rotate
            )
    names = [made.app] if made.app else ["", *apps_of(made.sandbox.apps)]
    links = {
        name or "page": settings.gateway.address(made.sandbox.id, name, made.token)
        for name in names
    }
    facts = {
        "sandbox_id": made.sandbox.id,
        "token": made.token,
        "app": made.app,
        "until": made.until,
        "links": links,
    }
    rows = [("token", made.token), *links.items()]
    if made.until:
        rows.append(("until", made.until))
    show(arguments, table(rows), facts)
    tell_what_serves(settings, f"{arguments.sandbox}/{made.app}".rstrip("/"))
    return EXIT_DONE


def seconds_of(text: str) -> int:
    """The seconds of a time such as 30m. Raises `UsageError` if it is none, or too long."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_TTL_LIMIT * 60:
        raise UsageError(f"--for {text!r} is no time of a year at most, such as 30m, 1h or 7d")
    return seconds


def add_to(add: Add) -> None:
    """Add the commands to the command line."""
    add("apps", list_apps, "List the published apps of a sandbox.", "apps work")
    sub = add(
        "expose",
        expose,
        "Publish a port of a sandbox as an app at an address of its own.",
        "expose work 3000 web",
    )
    sub.add_argument("port", type=int, metavar="PORT", help="where the app listens in the sandbox")
    sub.add_argument("app", metavar="NAME", help="a part of its address: a-z, 0-9 and -")
    sub = add("unexpose", unexpose, "Publish an app no longer.", "unexpose work web")
    sub.add_argument("app", metavar="NAME", help="as `podpipe apps` lists it")
    sub = add(
        "access",
        access,
        "Make a token that opens the apps of a sandbox, and show it this once.",
        "access work --app web --for 1h",
    )
    sub.add_argument("--app", default="", metavar="NAME", help="let it open this one only")
    sub.add_argument(
        "--for",
        dest="lifetime",
        default="",
        metavar="TIME",
        help="until when it opens something, such as 30m, 1h or 7d; default: as long as the sandbox",
    )
    sub.add_argument(
        "--rotate",
        action="store_true",
        help="clear all earlier tokens, and end what they have opened",
    )
