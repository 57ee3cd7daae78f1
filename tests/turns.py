"""Tests beside each other: their turns on the one node of a machine, and what they may expect."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOOR = "tests-door.lock"
NODE = "tests-node.lock"
SOON_SECONDS = 5.0
"""What is done at once is done within this, on a machine that is busy with other tests too."""


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Use the node, beside the other tests of all runs on this machine or alone.

    Args:
        folder: of the locks, the same for all who share a node.
        alone: wait until nobody uses it, and let nobody in meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / DOOR).open("a") as door, (folder / NODE).open("a") as node:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(node, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        yield
