"""`podpipe install`: into Claude Desktop, Claude Code, Codex, or as an agent skill."""

from __future__ import annotations

import argparse
from pathlib import Path

from host_client.commands.arguments import Add
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


def _path(text: str) -> Path:
    return Path(text).expanduser()


def add_to(add: Add) -> None:
    """Add the commands, one for each client, to the command line."""
    sub = add(
        "install",
        install,
        "Let an MCP client on this machine use podpipe.",
        "install claude-desktop",
        sandbox=False,
    )
    kinds = sub.add_subparsers(dest="client", required=True, metavar="CLIENT")
    for name, text, example in (
        ("claude-desktop", "Add podpipe to Claude Desktop's configuration.", ""),
        ("claude-code", "Add podpipe to Claude Code, for all your projects.", " --scope project"),
        ("codex", "Add podpipe to Codex' configuration.", " --sandbox work"),
        ("skill", "Write an agent skill for podpipe into a skills folder.", " ~/.claude/skills"),
    ):
        kind = kinds.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  podpipe install {name}{example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        kind.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document"
        )
        kind.add_argument(
            "--name",
            dest="server",
            default="podpipe",
            help="what the client calls it; default: podpipe",
        )
        kind.add_argument(
            "--sandbox",
            dest="bound",
            default="",
            metavar="NAME",
            help="bind it to this lasting sandbox; default: none",
        )
        what = kind.add_mutually_exclusive_group()
        what.add_argument("--dry-run", action="store_true", help="only say what would change")
        if name == "skill":
            kind.add_argument(
                "folder", type=_path, metavar="DIR", help="the skills folder; DIR/NAME is written"
            )
            kind.set_defaults(command=install_skill)
            continue
        what.add_argument(
            "--print",
            dest="only_print",
            action="store_true",
            help="only print the entry, to be pasted",
        )
        what.add_argument("--uninstall", action="store_true", help="take the entry out again")
        kind.add_argument(
            "--config",
            default="",
            metavar="PATH",
            help="the file; default: where the client has it",
        )
        if name == "claude-code":
            kind.add_argument(
                "--scope",
                choices=("user", "project"),
                default="user",
                help="all your projects, or .mcp.json in this folder; default: user",
            )
        kind.set_defaults(command=install)
