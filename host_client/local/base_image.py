"""The image that the Dockerfile starts from, also where no registry can be reached.

`debian:trixie-slim` is pulled; where that fails on a Linux machine with root, debootstrap makes the
same contents from Debian's archive, once.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from host_client.local.binaries import NICENESS, install
from host_client.local.console import Console
from host_client.local.engines import Engine
from host_client.local.machine import mounts_below
from host_client.local.tools import Failure, run

OFFICIAL: Final = "debian:trixie-slim"
OWN: Final = "localhost/podpipe/debian:trixie-slim"
SUITE: Final = "trixie"
DEBOOTSTRAP_SECONDS: Final = 1800.0
UNNEEDED: Final = (
    "usr/share/doc",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/linda",
    "usr/share/locale",
    "usr/share/man",
)
"""What Debian's slim images leave out."""
DPKG_EXCLUDES: Final = "".join(f"path-exclude /{folder}/*\n" for folder in UNNEEDED)


def resolve(engine: Engine, asked: str | None, cache: Path, console: Console) -> str:
    """The base image to build on, which the engine has when this returns."""
    if asked is not None:
        if engine.id_of(asked) is None:
            with console.step(f"pulling {asked}"):
                engine.pull(asked)
        return asked
    for image in (OFFICIAL, OWN):
        if engine.id_of(image) is not None:
            console.say(f"base image: {image}, as it is in {engine.name}'s store")
            return image
    reason = _pull(engine, console)
    if reason is None:
        return OFFICIAL
    console.say(f"{OFFICIAL} cannot be pulled ({reason}); making it with debootstrap instead")
    _bootstrap(engine, cache, console)
    return OWN


def _pull(engine: Engine, console: Console) -> str | None:
    """Pull OFFICIAL; why that failed, where there is another way."""
    try:
        with console.step(f"pulling {OFFICIAL}"):
            engine.pull(OFFICIAL)
    except Failure as failure:
        if sys.platform != "linux" or os.geteuid() != 0:
            raise
        return str(failure).splitlines()[-1]
    return None


def _bootstrap(engine: Engine, cache: Path, console: Console) -> None:
    """Make OWN. The archive is kept: another engine, or an emptied store, starts from it."""
    folder = cache / "base" / SUITE
    archive = folder / "rootfs.tar"
    if not archive.exists():
        install({"debootstrap": "debootstrap"}, console)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            root, draft = Path(name) / "root", Path(name) / "rootfs.tar"
            with console.step(f"debootstrap of Debian {SUITE} (one to two minutes, once)"):
                nice = ["nice", "-n", str(NICENESS)]
                argv = ["debootstrap", "--variant=minbase", SUITE, str(root)]
                run([*nice, *argv], timeout=DEBOOTSTRAP_SECONDS)
            if mounts_below(root):
                raise Failure(f"debootstrap left mounts below {root}: unmount them by hand")
            _slim_down(root)
            run(["tar", "--numeric-owner", "-C", str(root), "-cf", str(draft), "."])
            (folder / "Dockerfile").write_text(
                'FROM scratch\nADD rootfs.tar /\nCMD ["bash"]\n', encoding="ascii"
            )
            draft.replace(archive)
    with console.step(f"importing {OWN}"):
        engine.build(folder, image=OWN, on_step=lambda line: None)


def _slim_down(root: Path) -> None:
    for folder in UNNEEDED:
        shutil.rmtree(root / folder, ignore_errors=True)
        (root / folder).mkdir()
    for folder in ("var/cache/apt", "var/lib/apt/lists", "var/log", "dev"):
        shutil.rmtree(root / folder)
        (root / folder).mkdir()
    (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(DPKG_EXCLUDES, encoding="ascii")
    # debootstrap copies these two from the machine.
    (root / "etc/hostname").unlink(missing_ok=True)
    (root / "etc/resolv.conf").unlink(missing_ok=True)
