"""How often the kernel killed a process of this sandbox because its memory was used up.

The count is the cgroup's: it tells that it happened meanwhile, not to whom. Where it cannot be read
(gVisor has none) that is said, too. With memory.oom.group, Kubernetes' default on cgroup v2, the whole
container dies, and the host tells.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_COUNT: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_READ_BYTES: Final = 4096


class OomCounter:
    """Reads the count of the cgroup that this process is in."""

    def __init__(
        self, *, proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._file = next((path for path in _candidates(proc, mount) if path.is_file()), None)

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


def _candidates(proc: Path, mount: Path) -> Iterator[Path]:
    """Give the places of the count: version 2, then 1; as the host sees it, then as a container."""
    try:
        lines = proc.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if not controllers:
            yield mount / below / "memory.events"
            yield mount / "memory.events"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield mount / "memory" / path.lstrip("/") / "memory.oom_control"
            yield mount / "memory" / "memory.oom_control"
