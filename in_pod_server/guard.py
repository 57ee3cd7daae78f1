"""End the command that uses most memory before the kernel has to choose.

When a sandbox has no memory left the kernel ends the process that looks largest to it, which may be the
daemon where many small ones took the memory, or the whole container. Just before that, the command with
all its processes that together use most is ended here, and told why. Nothing is looked at while no
command runs, and the less often the more room there is: what could be taken until the next look is
always less than what is left.

What is nobody's (files in memory, SysV segments: they outlive their commands) no command's end gives
back. Then those that hold little are let be, or not even an rm could run; that the kernel may have to
choose after all is the lesser evil.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import TYPE_CHECKING, Final, NamedTuple

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
_OWN: Final = re.compile(rb"^(?:RssAnon|VmPTE):\s+(\d+) kB$", re.MULTILINE)
_SHARED: Final = re.compile(rb"^RssShmem:\s+(\d+) kB$", re.MULTILINE)
_STATUS_BYTES: Final = 8192

logger = logging.getLogger(__name__)


class Held(NamedTuple):
    """How many bytes a command's processes hold, which is what their end gives back.

    What is shared is seen in each process that has it, and not whether it is the same: it is once what
    the largest has, or all of it together.
    """

    least: int
    most: int


def reserve(limit: int) -> int:
    """Return how many bytes of so much memory are kept free of commands."""
    return min(limit // RESERVE_PART, MOST_RESERVE_BYTES)


def worth(limit: int) -> int:
    """Return how many bytes of so much memory a command's end has to give back to be worth it."""
    return reserve(limit) // 2


async def watch(table: ProcessTable, gauge: Gauge) -> None:
    """End commands for want of memory, for as long as somebody can tell how much there is."""
    allowed = gauge.limit - reserve(gauge.limit)
    while (used := gauge.used()) is not None:
        running = [each for each in table if not each.done.is_set() or each.left_running]
        if not running:
            await table.started.wait()
            continue
        if used < allowed:
            await _pause(allowed - used)
            continue
        victim = await _chosen(table, running, used, gauge.limit)
        if victim is None:
            await _grown(gauge, used)
            continue
        logger.warning("%s is ended: %d of %d bytes are used", victim.id, used, gauge.limit)
        victim.ended_for_memory = True
        await table.stop(victim, SIGKILL, 0)


async def _pause(room: int) -> None:
    """Wait for as long as so many bytes cannot have been taken."""
    await anyio.sleep(min(max(room / BYTES_PER_SECOND, SHORTEST_SECONDS), LONGEST_SECONDS))


async def _grown(gauge: Gauge, used: int) -> None:
    """Wait until commands may have become worth their end: to look stops all of them."""
    step = worth(gauge.limit) // 4
    with anyio.move_on_after(LONGEST_SECONDS):
        while (now := gauge.used()) is not None and now < used + step:
            await _pause(used + step - now)
        # However fast it is taken, or the commands would stand still for most of the time.
        await anyio.sleep(SHORTEST_SECONDS)


async def _chosen(
    table: ProcessTable, running: Sequence[Process], used: int, limit: int
) -> Process | None:
    """Return the command that uses most, killed as far as it is one process group.

    None if that would give back too little. All stand still meanwhile: to find out takes a while, in
    which they would take the rest.
    """
    victim: Process | None = None
    try:
        for each in running:
            _tell_group(each, SIGSTOP)
        census = await table.census.take()
        held = {each: _held(members(each.leader, census)) for each in running}
        largest = max(running, key=held.__getitem__)
        together = sum(each.most for each in held.values())
        # Many small ones are worth it together.
        if held[largest].most >= worth(limit) or together >= reserve(limit):
            victim = largest
        if used - together >= limit // 2:
            for each in running if victim is None else [victim]:
                each.memory_astray = True
    finally:
        for each in running:
            _tell_group(each, SIGKILL if each is victim else SIGCONT)
    return victim


def _tell_group(process: Process, number: int) -> None:
    """Signal the process group that a command was started as, unless its number may be another's."""
    if not process.reaped.is_set():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.leader.pid, number)


def _held(processes: Iterable[Stat]) -> Held:
    """Return how much memory these processes hold, what the kernel needs to map it included."""
    own, shared = 0, [0]
    for each in processes:
        # Gone meanwhile, perhaps.
        with contextlib.suppress(OSError):
            fd = os.open(f"/proc/{each.pid}/status", os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = os.read(fd, _STATUS_BYTES)
            finally:
                os.close(fd)
            own += sum(map(int, _OWN.findall(status)))
            shared += map(int, _SHARED.findall(status))
    return Held((own + max(shared)) * 1024, (own + sum(shared)) * 1024)
