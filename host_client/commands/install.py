"""`podpipe install`: into Claude Desktop, Claude Code, Codex, or as an agent skill."""

from __future__ import annotations

import argparse

from host_client.commands.output import show, warn
from host_client.config import Settings
from host_client.errors import EXIT_DONE
from host_client.install import clients
from host_client.install.entry import Entry, checked_name, client_entry
from host_client.install.files import Change


async def install(settings: Settings, arguments: argparse.Namespace) -> int:
    """Put podpipe into a client's configuration, take it out, or print what would be put."""
    name = checked_name(arguments.server)
    entry = None if arguments.uninstall else client_entry(settings, arguments.bound)
    if entry:
        warn(entry.warnings)
        if arguments.only_print:
            text = clients.snippet(arguments.client, name, entry)
            show(arguments, text, {"name": name, **entry.to_json()})
            return EXIT_DONE
    scope: clients.Scope = getattr(arguments, "scope", "user")
    path = arguments.config or clients.config_file(arguments.client, settings, scope)
    by_claude = arguments.client == "claude-code" and scope == "user" and not arguments.config
    change = clients.put_in(
        arguments.client,
        name,
        entry,
        path,
        write=not arguments.dry_run,
        claude=clients.find_claude(settings) if by_claude else "",
    )
    text = _told(change, name, dry_run=arguments.dry_run)
    if entry:
        text += f"\n  {_starts(entry, settings)}"
    if change.state != "unchanged" and not arguments.dry_run:
        text += f"\nnext: {clients.NEXT_STEPS[arguments.client]}"
    facts = _facts(change, arguments.dry_run) | {"client": arguments.client, "name": name}
    show(arguments, text, facts | {"warnings": list(entry.warnings) if entry else []})
    return EXIT_DONE


async def install_skill(settings: Settings, arguments: argparse.Namespace) -> int:
    """Write an agent skill for this server."""
    from host_client.host import Host
    from host_client.install.skill import write_skill
    from host_client.server import build_server

    name = checked_name(arguments.server)
    entry = client_entry(settings, arguments.bound)
    warn(entry.warnings)
    server = build_server(Host(settings, bound=arguments.bound))
    changes = write_skill(
        arguments.folder,
        name,
        entry,
        server.instructions or "",
        await server.list_tools(),
        write=not arguments.dry_run,
    )
    text = "\n".join(_told(change, name, dry_run=arguments.dry_run) for change in changes)
    show(arguments, text, {"name": name, "files": [_facts(c, arguments.dry_run) for c in changes]})
    return EXIT_DONE


def _told(change: Change, name: str, *, dry_run: bool) -> str:
    if change.state == "unchanged":
        return f"unchanged: {change.path}"
    if dry_run:
        return f"would be {change.state}: {name} in {change.path}\n{change.diff}"
    kept = f"\n  what was there is kept in {change.backup}" if change.backup else ""
    return f"{change.state}: {name} in {change.path}{kept}"


def _starts(entry: Entry, settings: Settings) -> str:
    context = entry.env.get("PODPIPE_CONTEXT", "the cluster that it runs in")
    return f"starts {entry.command} {' '.join(entry.args)} for {settings.user}, context {context}"


def _facts(change: Change, dry_run: bool) -> dict[str, object]:
    return {
        "file": str(change.path),
        "change": change.state,
        "written": change.state != "unchanged" and not dry_run,
        "backup": str(change.backup) if change.backup else "",
    }
