"""End the command that uses most memory before the kernel has to choose.

When a sandbox has no memory left the kernel ends the process that looks largest to it, which may be the
daemon where many small ones took the memory, or the whole container. Just before that, the command with
all its processes that together use most is ended here, and told why. Nothing is looked at while no
command runs, and the less often the more room there is: what could be taken until the next look is
always less than what is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import TYPE_CHECKING, Final

import anyio

from in_pod_server.tree import Stat, members

if TYPE_CHECKING:
    from in_pod_server.memory import Gauge
    from in_pod_server.process import Process
    from in_pod_server.processes import ProcessTable

RESERVE_PART: Final = 8
"""Commands are ended when less than this part of the memory is left,"""
MOST_RESERVE_BYTES: Final = 256 * 1024 * 1024
"""but never when more than this is."""
BYTES_PER_SECOND: Final = 3 * 1024**3
"""Faster than two processors can take memory."""
SHORTEST_SECONDS: Final = 0.005
LONGEST_SECONDS: Final = 0.25
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

logger = logging.getLogger(__name__)


def reserve(limit: int) -> int:
    """Return how many bytes of so much memory are kept free of commands."""
    return min(limit // RESERVE_PART, MOST_RESERVE_BYTES)


async def watch(table: ProcessTable, gauge: Gauge) -> None:
    """End commands for want of memory, for as long as somebody can tell how much there is."""
    allowed = gauge.limit - reserve(gauge.limit)
    while (used := gauge.used()) is not None:
        running = [each for each in table if not each.done.is_set() or each.left_running]
        if not running:
            await table.started.wait()
            continue
        if used < allowed:
            pause = (allowed - used) / BYTES_PER_SECOND
            await anyio.sleep(min(max(pause, SHORTEST_SECONDS), LONGEST_SECONDS))
            continue
        victim = await _chosen(table, running)
        logger.warning("%s is ended: %d of %d bytes are used", victim.id, used, gauge.limit)
        victim.ended_for_memory = True
        await table.stop(victim, SIGKILL, 0)


async def _chosen(table: ProcessTable, running: Sequence[Process]) -> Process:
    """Return the command that uses most, killed as far as it is one process group.

    All stand still meanwhile: to find out takes a while, in which they would take the rest.
    """
    victim: Process | None = None
    try:
        for each in running:
            _tell_group(each, SIGSTOP)
        victim = running[0] if len(running) == 1 else await _largest(table, running)
    finally:
        for each in running:
            _tell_group(each, SIGKILL if each is victim else SIGCONT)
    return victim


def _tell_group(process: Process, number: int) -> None:
    """Signal the process group that a command was started as, unless its number may be another's."""
    if not process.reaped.is_set():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.leader.pid, number)


async def _largest(table: ProcessTable, running: Iterable[Process]) -> Process:
    """Return the command whose processes use most memory."""
    census = await table.census.take()
    return max(running, key=lambda each: _size(members(each.leader, census)))


def _size(processes: Iterable[Stat]) -> int:
    """Return how much memory is these processes' own, which is what their end gives back."""
    size = 0
    for each in processes:
        # Gone meanwhile, perhaps.
        with contextlib.suppress(OSError, ValueError, IndexError):
            fd = os.open(f"/proc/{each.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _, resident, shared, *_ = os.read(fd, 256).split()
            finally:
                os.close(fd)
            size += (int(resident) - int(shared)) * _PAGE
    return size
