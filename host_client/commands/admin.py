"""`podpipe render admin`: what an administrator applies once."""

from __future__ import annotations

import argparse
from dataclasses import fields

import yaml

from host_client.admin import Administration, documents
from host_client.commands.output import show
from host_client.config import Settings
from host_client.errors import EXIT_DONE

_SUBJECTS = "User:NAME, Group:NAME or ServiceAccount:NAMESPACE/NAME"
_IMAGES = "what sandboxes may be made of, a last * for anything; default: SANDBOX_IMAGE"
_SOURCES = "of the proxies that lead to apps, or their CIDR; needs GATEWAY=ingress or httproute"
EPILOG = """\
example:
  podpipe render admin --launcher Group:developers | kubectl apply --server-side -f -

Without --launcher a service account is made; this is a token of it, for a kubeconfig:
  kubectl create token podpipe-launcher -n sandbox-system-admin --duration 24h
"""


def add_to(render: argparse.ArgumentParser) -> None:
    """Add the command below `podpipe render`."""
    text = "Print what an administrator applies once: roles, policies, limits, the reaper."
    sub = render.add_subparsers(metavar="[admin]").add_parser(
        "admin",
        help=text,
        description=text,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(command=render_admin)
    sub.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document"
    )
    for name, metavar, dest, meaning in (
        ("--launcher", "SUBJECT", "launchers", f"who may make sandboxes: {_SUBJECTS}"),
        ("--image", "IMAGE", "images", _IMAGES),
        ("--egress", "CIDR", "egress", "what sandboxes reach although it is not the internet"),
        ("--ingress-from", "NAMESPACE", "ingress_from", _SOURCES),
    ):  # fmt: skip
        sub.add_argument(
            name, action="append", default=[], metavar=metavar, dest=dest,
            help=f"{meaning}; may be given again",
        )  # fmt: skip
    standard = Administration()
    for name, dest, meaning in (
        ("--max-sandboxes", "max_sandboxes", "running at once"),
        ("--max-homes", "max_homes", "volumes"),
    ):
        number = getattr(standard, dest)
        sub.add_argument(
            name, type=int, default=number, metavar="N", help=f"{meaning}; default {number}"
        )
    sub.add_argument(
        "--reaper-image", default="", metavar="IMAGE",
        help="a CronJob with this image, from `scripts/image build --target reaper`; default: none",
    )  # fmt: skip
    for name, dest, meaning in (
        ("--require-isolation", "isolation", "refuse sandboxes without gVisor or user namespace"),
        ("--allow-purge", "purge", "launchers may delete homes"),
        ("--cluster-reads", "cluster_reads", "launchers may read classes and nodes"),
    ):
        sub.add_argument(name, dest=dest, action="store_true", help=meaning)


async def render_admin(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print all that is applied."""
    decided = {field.name: getattr(arguments, field.name) for field in fields(Administration)}
    decided |= {name: tuple(value) for name, value in decided.items() if isinstance(value, list)}
    found = documents(settings, Administration(**decided))
    show(arguments, yaml.safe_dump_all(found, sort_keys=False).rstrip(), found)
    return EXIT_DONE
