"""`scripts/cluster`: a Kubernetes to work with, from whatever this machine has.

Three providers, in this order: a cluster that the current kubectl context names and that carries
podpipe already; Kind, where a Docker engine answers; a real single node on bare Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from host_client.local import machine
from host_client.local.console import Console
from host_client.local.existing import Existing
from host_client.local.kind import Kind
from host_client.local.node import Node
from host_client.local.provider import Access, Status
from host_client.local.tools import (
    Failure,
    NotFound,
    cache_home,
    exclusive,
    image_name,
    state_home,
    write_private,
)

PROVIDERS: Final = ("existing", "kind", "node")
NOTHING_UP: Final = "no cluster has been brought up: run `scripts/cluster up`"

EPILOG: Final = """\
example:
  scripts/cluster up                   # a cluster from whatever this machine has
  eval "$(scripts/cluster env)"        # KUBECONFIG, PODPIPE_CONTEXT, PODPIPE_KUBECTL
  "$PODPIPE_KUBECTL" get nodes
  scripts/cluster down                 # objects and homes stay; --purge removes everything

exit codes: 0 done, 1 failed (status: not up), 2 usage, 3 not found, 4 prerequisite missing
"""


class Provider(Protocol):
    """A way to have a cluster."""

    @property
    def name(self) -> str:
        """As `--provider` spells it."""

    def up(self) -> None:
        """Bring it up; quick and harmless when it is up."""

    def down(self, *, purge: bool) -> None:
        """Stop it; with `purge` remove all of it."""

    def status(self, image: str) -> Status:
        """What is up, and whether this image is there."""

    def access(self) -> Access:
        """How to reach it."""


class Choice:
    """Which provider is meant, and which was brought up last."""

    def __init__(self, env: Mapping[str, str], console: Console) -> None:
        self._env = env
        self._console = console
        self._record = state_home(env) / "provider"

    def make(self, name: str) -> Provider:
        """The provider of this name."""
        if name == "existing":
            return Existing(self._env)
        if name == "kind":
            return Kind(state_home(self._env) / "kind", self._console)
        return self.node()

    def node(self) -> Node:
        """The single node of this user."""
        return Node(state_home(self._env) / "node", cache_home(self._env), self._console)

    def current(self) -> Provider | None:
        """The provider that was brought up last; None when there is none."""
        try:
            name = self._record.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            name = ""
        if name in PROVIDERS:
            return self.make(name)
        existing = Existing(self._env)
        return existing if existing.carries_podpipe() else None

    def for_up(self) -> Provider:
        """The one to bring up when nobody says which."""
        current = self.current()
        if current is not None:
            return current
        return self.make("kind" if Kind.is_possible() else "node")

    def remember(self, name: str) -> None:
        """Let later commands mean this provider."""
        write_private(self._record, f"{name}\n")

    def forget(self, name: str) -> None:
        """Drop the record of a provider that was removed."""
        if self._record.exists() and self._record.read_text(encoding="utf-8").strip() == name:
            self._record.unlink()

    def remove_caches(self) -> None:
        """Remove binaries and images, and our state folder where nothing else is in it."""
        cache = cache_home(self._env)
        if cache.exists():
            with self._console.step(f"removing {cache}"), exclusive(cache / "image.lock"):
                if sys.platform == "linux":
                    machine.unmount_below(cache)
                    machine.remove_builder_strays()
                shutil.rmtree(cache)
        try:
            state_home(self._env).rmdir()
        except OSError:
            return  # another provider's state is there


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="scripts/cluster",
        description="A Kubernetes to work with, from whatever this machine has.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, text in {
        "up": "bring a cluster up and wait until it is ready",
        "down": "stop it and undo what it did to this machine",
        "status": "provider, version, what is up, image loaded or not",
        "policies": "have the node enforce NetworkPolicies, by kube-router",
        "env": "print the variables that point podpipe and kubectl at it",
    }.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--provider", choices=PROVIDERS, help="default: see above")
        command.add_argument("--json", action="store_true", help="the answer as JSON")
        if name == "policies":
            command.add_argument("enforce", choices=("on", "off"), help="enforce them, or do not")
        if name == "down":
            command.add_argument(
                "--purge", action="store_true", help="remove objects, homes and caches as well"
            )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = parser().parse_args(argv)
    console = Console()
    try:
        return _run(options, Choice(os.environ, console))
    except Failure as failure:
        if options.json:
            print(json.dumps({"error": str(failure)}))
        print(f"scripts/cluster {options.command}: {failure}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, choice: Choice) -> int:
    if options.provider is not None:
        provider: Provider | None = choice.make(options.provider)
    else:
        provider = choice.for_up() if options.command == "up" else choice.current()
    if options.command == "down":
        return _down(options, choice, provider)
    if provider is None:
        if options.command == "status":
            return _nothing_up(as_json=options.json)
        raise NotFound(NOTHING_UP)
    if options.command == "up":
        provider.up()
        choice.remember(provider.name)
        return _status(provider, as_json=options.json)
    if options.command == "status":
        return _status(provider, as_json=options.json)
    if options.command == "policies":
        if not isinstance(provider, Node):
            raise Failure(
                f"whether NetworkPolicies are enforced is up to the network plugin of the "
                f"{provider.name} cluster; `podpipe doctor --deep` finds out"
            )
        provider.enforce_policies(on=options.enforce == "on")
        return _status(provider, as_json=options.json)
    return _env(provider.access(), as_json=options.json)


def _down(options: argparse.Namespace, choice: Choice, provider: Provider | None) -> int:
    if provider is not None:
        provider.down(purge=options.purge)
        if options.purge:
            choice.forget(provider.name)
    if options.purge:
        choice.remove_caches()
    name = None if provider is None else provider.name
    if options.json:
        print(json.dumps({"provider": name, "purged": options.purge}))
    elif provider is None:
        print(NOTHING_UP)
    elif name == "existing":
        print("nothing was stopped: this cluster was not started here")
    return 0


def _nothing_up(*, as_json: bool) -> int:
    print(json.dumps({"provider": None, "up": False}) if as_json else NOTHING_UP)
    return 1


def _status(provider: Provider, *, as_json: bool) -> int:
    status = provider.status(image_name())
    if as_json:
        print(json.dumps(status.as_json()))
    else:
        print(describe(status))
    return 0 if status.up else 1


def describe(status: Status) -> str:
    """The status for people."""
    loaded = {True: "loaded", False: "not loaded (scripts/image build, then load)"}
    lines = [
        f"provider   {status.provider}",
        f"version    {status.version}",
        *(f"{'up  ' if up else 'DOWN'}       {name}" for name, up in status.components.items()),
        f"image      {status.image}: {loaded.get(status.image_loaded or False)}"
        if status.image_loaded is not None
        else f"image      {status.image}: unknown",
    ]
    return "\n".join(lines)


def _env(access: Access, *, as_json: bool) -> int:
    variables = access.environment()
    if as_json:
        print(json.dumps(variables))
    else:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
