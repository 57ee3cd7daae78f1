"""What is, and what would be: render, doctor, settings."""

from __future__ import annotations

import argparse
import json

import yaml

from host_client import manifest
from host_client.clock import utc_now
from host_client.commands import admin
from host_client.commands.arguments import Add
from host_client.commands.output import show, table, told
from host_client.config import SETTINGS_HELP, Settings
from host_client.errors import EXIT_DONE, EXIT_FAILED
from host_client.sandbox import draft_sandbox


async def render(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the manifests that `create` would apply."""
    sandbox = draft_sandbox(settings, utc_now(), arguments.name)
    documents = manifest.everything(sandbox, settings)
    show(arguments, yaml.safe_dump_all(documents, sort_keys=False).rstrip(), documents)
    return EXIT_DONE


async def doctor(settings: Settings, arguments: argparse.Namespace) -> int:
    """Look for what is missing; 1 where something is."""
    from host_client.doctor import examine

    findings = []
    async for finding in examine(settings, deep=arguments.deep, progress=told):
        findings.append(finding)
        if not arguments.json:
            fix = f"\n         fix: {finding.fix}" if finding.fix else ""
            print(f"{finding.result:8} {finding.check}: {finding.detail}{fix}", flush=True)
    if arguments.json:
        print(json.dumps([finding.to_json() for finding in findings], indent=2))
    return EXIT_FAILED if any(f.result == "failure" for f in findings) else EXIT_DONE


async def list_settings(settings: Settings, arguments: argparse.Namespace) -> int:
    """List all settings: what holds, where it comes from, the default, the meaning."""
    resolved = {
        "PODPIPE_USER": settings.user,
        "PODPIPE_LOG_FILE": str(settings.log_file or "none"),
        "PODPIPE_AUDIT_FILE": str(settings.audit_file or "none"),
    }
    facts = []
    for name, (default, meaning) in SETTINGS_HELP.items():
        given = settings.given.get(name)
        facts.append(
            {
                "name": name,
                "value": given.value if given else resolved.get(name, default),
                "source": given.source if given else "default",
                "default": default,
                "meaning": meaning,
            }
        )
    head = ("SETTING", "VALUE", "FROM", "DEFAULT", "MEANING")
    rows = [
        [fact[key] for key in ("name", "value", "source", "default", "meaning")] for fact in facts
    ]
    show(arguments, table([head, *rows]), facts)
    return EXIT_DONE


def add_to(add: Add) -> None:
    """Add the commands to the command line."""
    sub = add(
        "render",
        render,
        "Print the manifests of a sandbox, or with `admin` those that an administrator applies once.",
        "render --name work",
        sandbox=False,
    )
    sub.add_argument("--name", default="example", help="name of the sandbox")
    admin.add_to(sub)
    sub = add(
        "doctor",
        doctor,
        "Look for what is missing, and say the fix.",
        "doctor --deep",
        sandbox=False,
    )
    sub.add_argument(
        "--deep",
        action="store_true",
        help="make two sandboxes too, and see whether one reaches the other; they go again",
    )
    add(
        "settings",
        list_settings,
        "List all settings: what holds, and where it comes from.",
        "settings",
        sandbox=False,
    )
