"""What builds and pushes images: Docker, podman or buildah, whichever is there and answers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from host_client.local.binaries import install
from host_client.local.console import Console
from host_client.local.containerd import canonical
from host_client.local.kind import docker_answers
from host_client.local.machine import snapshotter_for
from host_client.local.processes import boot_id
from host_client.local.tools import Failure, MissingPrerequisite, run, stream, tail

TRANSFER_SECONDS: Final = 900.0
"""A full image over a slow line."""
STEP: Final = re.compile(r"^(?:\[\d+/\d+\] )?STEP \d+.*|^#\d+ \[.*\d+/\d+\] .*")
"""The lines in which buildah, podman and BuildKit say what they are doing."""
UNKNOWN_IMAGE: Final = re.compile(r"not known|no such (?:image|object)|not found", re.IGNORECASE)
"""How they say that they do not have an image; anything else is trouble with the engine."""
LOCAL: Final = re.compile(r"(?:localhost|127\.\d+\.\d+\.\d+)(?::\d+)?/")
STEP_WIDTH: Final = 100
FIX: Final = "install Docker (with buildx), podman or buildah, and start its engine if it has one"


@dataclass(frozen=True, slots=True)
class Engine:
    """One image builder: its program, and where it departs from Docker's command line."""

    name: str
    program: Sequence[str]
    build_words: Sequence[str] = ("build",)
    inspect_words: Sequence[str] = ("image", "inspect", "--format", "{{.Id}}")
    env: Mapping[str, str] = field(default_factory=dict)

    def build(
        self,
        folder: Path,
        *,
        image: str,
        on_step: Callable[[str], None],
        target: str | None = None,
        base: str | None = None,
        secrets: Mapping[str, Path] | None = None,
    ) -> None:
        """Build the Dockerfile of a folder."""
        argv = [*self.program, *self.build_words, "--tag", canonical(image)]
        if target is not None:
            argv += ["--target", target]
        if base is not None:
            argv += ["--build-arg", f"BASE_IMAGE={base}"]
        for name, source in (secrets or {}).items():
            argv += ["--secret", f"id={name},src={source}"]
        argv.append(str(folder))

        def show(line: str) -> None:
            if STEP.match(line):
                on_step(line if len(line) <= STEP_WIDTH else f"{line[:STEP_WIDTH]}...")

        try:
            stream(argv, show, env={**os.environ, **self.env}, cwd=folder)
        except Failure as failure:
            if "buildx" in str(failure) or "--mount option requires BuildKit" in str(failure):
                raise MissingPrerequisite(
                    "this Docker has no BuildKit: install its buildx plugin (Debian: docker-buildx, "
                    "Docker's own packages: docker-buildx-plugin)"
                ) from failure
            raise

    def id_of(self, image: str) -> str | None:
        """The image's id; None when the engine does not have it."""
        argv = [*self.program, *self.inspect_words, canonical(image)]
        done = run(argv, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
        if UNKNOWN_IMAGE.search(done.stderr):
            return None
        raise Failure(f"{shlex.join(argv)}: {tail(done.stderr)}")

    def pull(self, image: str) -> None:
        """Fetch an image from its registry."""
        run([*self.program, "pull", canonical(image)], timeout=TRANSFER_SECONDS)

    def save(self, image: str, archive: Path) -> None:
        """Write an image archive that containerd, Kind, minikube and k3d can read."""
        name = canonical(image)
        if self.name == "buildah":
            argv = [*self.program, "push", name, f"docker-archive:{archive}:{name}"]
        else:
            argv = [*self.program, "save", "--output", str(archive), name]
        run(argv, timeout=TRANSFER_SECONDS)

    def push(self, image: str) -> None:
        """Send an image to the registry that its name gives."""
        name = canonical(image)
        # Docker takes a registry on this machine without TLS; the others have to be told.
        plain = ["--tls-verify=false"] if self.name != "docker" and LOCAL.match(name) else []
        run([*self.program, "push", *plain, name], timeout=TRANSFER_SECONDS)


def docker() -> Engine:
    """Docker, with BuildKit also where it is not the default yet."""
    env = {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    return Engine("docker", ("docker",), env=env)


def podman() -> Engine:
    """Podman."""
    return Engine("podman", ("podman",), build_words=("build", "--layers"))


def buildah(cache: Path) -> Engine:
    """buildah with a store of its own; chroot isolation works where runc may not be used freely."""
    program = ["buildah"]
    if os.geteuid() == 0:
        folder = cache / "buildah"
        folder.mkdir(parents=True, exist_ok=True)
        # What is in the run folder means nothing after a reboot, and confuses buildah.
        program += ["--root", str(folder / "root"), "--runroot", str(folder / f"run-{boot_id()}")]
        if snapshotter_for(folder) == "overlayfs":
            program += ["--storage-driver", "overlay"]
            program += ["--storage-opt", "overlay.skip_mount_home=true"]
        else:
            program += ["--storage-driver", "vfs"]
    return Engine(
        "buildah",
        program,
        build_words=("bud", "--isolation", "chroot", "--layers", "--force-rm"),
        inspect_words=("inspect", "--type", "image", "--format", "{{.FromImageID}}"),
    )


def choose(cache: Path, console: Console) -> Engine:
    """The first engine that answers; on Debian as root buildah is installed if there is none."""
    if docker_answers():
        return docker()
    if shutil.which("podman") and run(["podman", "info"], check=False).returncode == 0:
        return podman()
    if sys.platform != "linux":
        raise MissingPrerequisite(f"no image builder answers: {FIX}")
    if shutil.which("buildah") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise MissingPrerequisite(f"no image builder answers: {FIX}")
        install({"buildah": "buildah"}, console)
    return buildah(cache)
