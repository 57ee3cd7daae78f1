"""The node's containerd, spoken to through `ctr` on its own socket."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from host_client.local.tools import Failure, run

NAMESPACE: Final = "k8s.io"
IMPORT_SECONDS: Final = 600.0
"""A full image on a slow disk."""
POLL_SECONDS: Final = 0.1
HELD: Final = "podpipe.local/held:latest"
"""The name under which an image stays while another takes its own."""
KILL_SECONDS: Final = 5.0
"""A killed container is gone at once; its shim needs a moment to say so."""


def canonical(image: str) -> str:
    """The name as containerd and the kubelet store it: registry, path and tag written out."""
    name, _, digest = image.partition("@")
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif not ("." in first or ":" in first or first == "localhost"):
        name = f"docker.io/{name}"
    elif first == "docker.io" and name.count("/") == 1:
        name = f"docker.io/library/{name.partition('/')[2]}"
    if digest:
        return f"{name}@{digest}"
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def replaced(before: Mapping[str, str], after: Mapping[str, str], name: str) -> list[str]:
    """The `sha256:` names of what `name` no longer means and no other name does.

    The kubelet's side of containerd keeps such a name beside every tag, and never drops it.
    """
    old = before.get(name)
    if old is None or after.get(name) == old:
        return []
    users = [other for other, digest in after.items() if digest == old]
    return users if all(user.startswith("sha256:") for user in users) else []


class Containerd:
    """One containerd by its socket."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def argv(self, *arguments: str) -> list[str]:
        """A `ctr` command line for this containerd."""
        return ["ctr", "-a", str(self._socket), "-n", NAMESPACE, *arguments]

    def answers(self) -> bool:
        """Whether it serves requests."""
        return run(self.argv("version"), check=False, timeout=10).returncode == 0

    def images(self) -> dict[str, str]:
        """Image names and the digests that they point to."""
        rows = run(self.argv("images", "ls")).stdout.splitlines()[1:]
        fields = (row.split() for row in rows)
        return {row[0]: row[2] for row in fields if len(row) > 2}

    def load(self, archive: Path, image: str) -> None:
        """Import an image archive, and drop the content that the name pointed to before.

        Only then: the import gives the name away first and unpacks afterwards, passing over the
        layers that it finds. What they belonged to is collected meanwhile, and they with it
        ("parent snapshot does not exist"), unless another name holds it. Raises Failure where the
        import fails; the name then means what it meant before.
        """
        name = canonical(image)
        before = self.images()
        if name in before:
            run(self.argv("images", "tag", "--force", name, HELD))
        try:
            run(self.argv("images", "import", str(archive)), timeout=IMPORT_SECONDS)
        except Failure:
            if name in before:
                run(self.argv("images", "tag", "--force", HELD, name), check=False)
            raise
        finally:
            run(self.argv("images", "rm", HELD), check=False)
        stale = replaced(before, self.images(), name)
        if stale:
            run(self.argv("images", "rm", *stale), check=False)

    def stop_everything(self, grace: float) -> list[str]:
        """TERM every container, wait, KILL what is left; the ids that would not go."""
        for signal, seconds in (("SIGTERM", grace), ("SIGKILL", KILL_SECONDS)):
            for task in self._tasks():
                run(self.argv("tasks", "kill", "-s", signal, task), check=False)
            if self._wait_for_none(seconds):
                return []
        for task in self._tasks():
            run(self.argv("tasks", "rm", "--force", task), check=False)
        return self._tasks()

    def _tasks(self) -> list[str]:
        return run(self.argv("tasks", "ls", "-q"), check=False).stdout.split()

    def _wait_for_none(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._tasks():
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True
