"""The memory of this sandbox: how much there is and is used, and how often the kernel killed for want
of it.

The count is the cgroup's: it tells that it happened meanwhile, not to whom. Where it cannot be read
(gVisor has none) that is said, too. With memory.oom.group, Kubernetes' default on cgroup v2, the whole
container dies, and the host tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

_RECLAIMABLE: Final = re.compile(
    rb"^(?:inactive_file|active_file|slab_reclaimable) (\d+)$", re.MULTILINE
)
"""What the kernel takes back by itself."""
_TOTALS: Final = re.compile(rb"^total_(?:inactive_file|active_file) (\d+)$", re.MULTILINE)
"""The same in version 1, where the plain names leave out the cgroups below."""
_COUNT: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_READ_BYTES: Final = 8192
_NO_LIMIT: Final = 1 << 60


def give_back() -> None:
    """Find what refers only to itself, and return all that is free to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's own; others return it by themselves
        ctypes.CDLL(None).malloc_trim(0)


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
            found = _COUNT.search(_read(self._file))
        except OSError:
            return None
        return int(found[1]) if found else None


class Gauge:
    """Tells how much memory is used, of how much, by the cgroup that this process is in.

    Args:
        limit: bytes that it may take.
        usage: the file that has how many it takes.
        statistics: the file that says what of these it could give back.
    """

    def __init__(self, limit: int, usage: Path, statistics: Path) -> None:
        self.limit = limit
        self._usage = usage
        self._statistics = statistics

    @classmethod
    def find(
        cls, *, proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
    ) -> Self | None:
        """Return the gauge of this process; None where nobody limits or tells."""
        limit = memory_limit(proc=proc, mount=mount)
        places = _candidates(proc, mount, "memory.current", "memory.usage_in_bytes")
        usage = next((path for path in places if path.is_file()), None)
        if limit is None or usage is None:
            return None
        return cls(limit, usage, usage.with_name("memory.stat"))

    def used(self) -> int | None:
        """Return how many bytes are used that nobody but their owner can give back.

        None where that cannot be told any more.
        """
        try:
            used = int(_read(self._usage))
            statistics = _read(self._statistics)
        except (OSError, ValueError):
            return None
        found = _TOTALS.findall(statistics) or _RECLAIMABLE.findall(statistics)
        return used - sum(map(int, found))


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


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _READ_BYTES)
    finally:
        os.close(fd)


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
