"""The memory of this sandbox: how much there is, and how often the kernel killed for want of it.

The count is the cgroup's: it tells that it happened meanwhile, not to whom. Where it cannot be read
(gVisor has none) that is said, too. With memory.oom.group, Kubernetes' default on cgroup v2, the whole
container dies, and the host tells.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_COUNT: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_READ_BYTES: Final = 4096
_NO_LIMIT: Final = 1 << 60


class OomCounter:
    """Reads the count of the cgroup that this process is in."""

    def __init__(
        self, *, proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
    ) -> None:
        places = _candidates(proc, mount, "memory.events", "memory.oom_control")
        self._file = next((path for path in places if path.is_file()), None)

    def kills(self) -> int | None:
        """Return the count so far; None where nobody counts."""
        if self._file is None:
            return None
        try:
            fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = _COUNT.search(os.read(fd, _READ_BYTES))
        except OSError:
            return None
        finally:
            os.close(fd)
        return int(found[1]) if found else None


def memory_limit(
    *, proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return how many bytes the cgroup of this process may take; None where nobody limits or tells."""
    for path in _candidates(proc, mount, "memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(path.read_text("ascii"))
            # Version 1 has a number for "no limit", which is more than any machine has.
            return limit if limit < _NO_LIMIT else None
    return None


def _candidates(proc: Path, mount: Path, v2: str, v1: str) -> Iterator[Path]:
    """Give the places of a file: version 2, then 1; as the host sees it, then as a container."""
    try:
        lines = proc.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if not controllers:
            yield mount / below / v2
            yield mount / v2
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield mount / "memory" / path.lstrip("/") / v1
            yield mount / "memory" / v1
