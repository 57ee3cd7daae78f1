"""`scripts/image`: build the sandbox image, load it into a local cluster, push it to a registry.

Whatever a build needs of this machine (certificates of an intercepting proxy, apt's settings) goes
in as a build secret and is in no layer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from host_client.local import base_image, engines
from host_client.local.cluster import Choice
from host_client.local.console import Console
from host_client.local.containerd import canonical
from host_client.local.engines import TRANSFER_SECONDS, Engine
from host_client.local.existing import Existing
from host_client.local.kind import CLUSTER
from host_client.local.tools import (
    CHECKOUT,
    Failure,
    NotFound,
    absolute_tool,
    cache_home,
    exclusive,
    image_name,
    run,
)

TARGETS: Final = ("slim", "full", "reaper")
DESTINATIONS: Final = ("node", "kind", "minikube", "k3d", "docker-desktop")
APT_SETTINGS: Final = re.compile(
    r'^Acquire::(?:Check-Valid-Until|Check-Date|Retries|https?::(?:Proxy|Timeout)) "[^"]+";$',
    re.MULTILINE,
)
"""Of the machine's apt configuration, what a build behind the same network needs."""

EPILOG: Final = """\
example:
  scripts/image build                          # sandbox-base:latest, target slim
  scripts/image load                           # into the cluster of scripts/cluster
  IMAGE=registry.example/team/sandbox:1 scripts/image build --target full
  IMAGE=registry.example/team/sandbox:1 scripts/image push
  IMAGE=registry.example/team/reaper:1 scripts/image build --target reaper

environment:
  IMAGE               the image's name (default sandbox-base:latest)
  PODPIPE_CA_BUNDLE   certificates for a build behind an intercepting proxy
                      (default: PIP_CERT or SSL_CERT_FILE); nothing of it stays in the image

exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 prerequisite missing
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="scripts/image",
        description="Build, load and push the sandbox image.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, text in {
        "build": "build the image with docker, podman or buildah",
        "load": "load the built image into a local cluster",
        "push": "push the built image to the registry in its name",
    }.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", action="store_true", help="the answer as JSON")
        if name == "build":
            command.add_argument("--target", choices=TARGETS, default="slim")
            command.add_argument("--base", metavar="IMAGE", help="instead of debian:trixie-slim")
        if name == "load":
            command.add_argument(
                "--to", choices=DESTINATIONS, help="default: what `scripts/cluster` brought up"
            )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = parser().parse_args(argv)
    console = Console()
    try:
        # Two buildahs in one store take each other's unfinished layers for rubbish.
        with exclusive(cache_home() / "image.lock"):
            answer = _run(options, console)
    except Failure as failure:
        if options.json:
            print(json.dumps({"error": str(failure)}))
        print(f"scripts/image {options.command}: {failure}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing half-made is used", file=sys.stderr)
        return 130
    print(json.dumps(answer) if options.json else " ".join(f"{k}={v}" for k, v in answer.items()))
    return 0


def _run(options: argparse.Namespace, console: Console) -> dict[str, str]:
    cache, image = cache_home(), image_name()
    engine = engines.choose(cache, console)
    if options.command == "build":
        base = base_image.resolve(engine, options.base, cache, console)
        what = f"building {image} ({options.target}) with {engine.name}"
        with console.step(what), build_secrets(os.environ) as secrets:
            engine.build(
                CHECKOUT,
                image=image,
                on_step=console.say,
                target=options.target,
                base=base,
                secrets=secrets,
            )
        built = engine.id_of(image) or "unknown"
        return {"image": image, "id": built, "target": options.target, "engine": engine.name}
    if engine.id_of(image) is None:
        raise NotFound(f"{engine.name} has no image {image}: run `scripts/image build` first")
    if options.command == "push":
        if "/" not in image:
            raise Failure(
                f"{image} names no registry: build and push as IMAGE=registry.example/team/{image}"
            )
        with console.step(f"pushing {image} with {engine.name}"):
            engine.push(image)
        return {"image": image, "pushed": canonical(image), "engine": engine.name}
    choice = Choice(os.environ, console)
    where, name = destination(options.to, choice)
    load(engine, image, where, name, choice, console)
    return {"image": image, "loaded": canonical(image), "into": where}


def destination(asked: str | None, choice: Choice) -> tuple[str, str]:
    """Where to load, and the cluster's name there."""
    current = choice.current()
    if asked is None and current is not None and current.name in {"node", "kind"}:
        return current.name, CLUSTER
    if asked == "node":
        return "node", CLUSTER
    try:
        context = Existing(os.environ).access().context
    except Failure:
        context = ""
    where, name = of_context(context)
    if asked is None:
        if where is None:
            raise NotFound(
                f"context {context or '(none)'} is no local cluster that images can be loaded into: "
                "push the image to a registry (scripts/image push), or say which with --to"
            )
        return where, name
    return asked, name if where == asked else {"minikube": "minikube"}.get(asked, CLUSTER)


def of_context(context: str) -> tuple[str | None, str]:
    """The kind of local cluster that a kubectl context names, and its name."""
    for prefix in ("kind", "k3d"):
        if context.startswith(f"{prefix}-"):
            return prefix, context.removeprefix(f"{prefix}-")
    if context in {"minikube", "docker-desktop"}:
        return context, context
    return None, context


def load(
    engine: Engine, image: str, where: str, name: str, choice: Choice, console: Console
) -> None:
    """Load an image into one local cluster."""
    if where == "docker-desktop":
        if engine.name != "docker":
            raise Failure("Docker Desktop runs what Docker built: build with docker")
        console.say("Docker Desktop's Kubernetes shares Docker's images: nothing to load")
        return
    into = {
        "kind": ["kind", "load", "image-archive", "{}", "--name", name],
        "minikube": ["minikube", "--profile", name, "image", "load", "{}"],
        "k3d": ["k3d", "image", "import", "{}", "--cluster", name],
    }
    if where in into:
        absolute_tool(where)
    else:
        node = choice.node()
        if not node.containerd.answers():
            raise NotFound("the node is not up: run `scripts/cluster up --provider node`")
    # Not in /tmp: that may be memory, and too small for an image.
    with tempfile.TemporaryDirectory(dir=cache_home()) as folder:
        archive = Path(folder) / "image.tar"
        with console.step(f"writing {image} as an archive"):
            engine.save(image, archive)
        with console.step(f"loading it into {where}"):
            if where in into:
                argv = [part.replace("{}", str(archive)) for part in into[where]]
                run(argv, timeout=TRANSFER_SECONDS)
            else:
                node.containerd.load(archive, image)


@contextmanager
def build_secrets(env: Mapping[str, str]) -> Iterator[dict[str, Path]]:
    """What the build may read of this machine, as files that exist only while it runs."""
    secrets: dict[str, Path] = {}
    bundle = env.get("PODPIPE_CA_BUNDLE") or env.get("PIP_CERT") or env.get("SSL_CERT_FILE")
    if bundle:
        if not Path(bundle).is_file():
            raise Failure(f"the CA bundle {bundle} is not a file: correct PODPIPE_CA_BUNDLE")
        secrets["ca_bundle"] = Path(bundle)
    with tempfile.TemporaryDirectory(dir=cache_home()) as folder:
        settings = apt_settings(bundle is not None)
        if settings:
            secrets["apt_conf"] = Path(folder) / "apt.conf"
            secrets["apt_conf"].write_text(settings, encoding="utf-8")
        yield secrets


def apt_settings(has_bundle: bool) -> str:
    """The machine's own apt settings that decide whether its network lets apt through."""
    lines = []
    if shutil.which("apt-config") is not None:
        dump = run(["apt-config", "dump"], check=False).stdout
        lines = [found[0] for found in APT_SETTINGS.finditer(dump)]
    if has_bundle:
        lines.append('Acquire::https::CaInfo "/run/secrets/ca_bundle";')
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
