"""Which processes belong to a command, and signals to exactly those.

A command is the leader of its own session, and every process it starts inherits a marker in its
environment. A process belongs to the command if it is in that session, carries the marker, or has
a parent that belongs. A pid is only ever signalled through a pidfd, or at least after its start
time was seen to be unchanged, so a number that the kernel has given away again is never hit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio.lowlevel

MARKER: Final = "PODPIPE_PROCESS_ID"
SCAN_BATCH: Final = 64
"""Processes looked at before others get their turn: a fork bomb must not stall the daemon."""

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/PID/stat says of one process."""

    pid: int
    state: str
    parent: int
    session: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it can still run: a zombie cannot."""
        return self.state not in ("Z", "X")


@dataclass(frozen=True, slots=True)
class Leader:
    """The process that a command was started as."""

    marker: str
    pid: int
    started: int


def read_stat(pid: int) -> Stat | None:
    """Return the process's state, or None if there is no such process."""
    try:
        raw = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = raw[raw.rindex(b")") + 2 :].split()
    return Stat(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def _marker_of(pid: int) -> str | None:
    try:
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    prefix = f"{MARKER}=".encode()
    for entry in environ.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode("utf-8", "replace")
    return None


def _pids() -> Iterator[int]:
    for name in os.listdir(_PROC):  # noqa: PTH208 - names only, and thousands of them
        if name.isdecimal():
            yield int(name)


async def members(leader: Leader) -> list[Stat]:
    """Return the live processes that belong to the command."""
    own = os.getpid()
    candidates: dict[int, Stat] = {}
    belongs: set[int] = set()
    for count, pid in enumerate(_pids(), 1):
        if count % SCAN_BATCH == 0:
            await anyio.lowlevel.checkpoint()
        stat = read_stat(pid)
        # What started before the command cannot be of it; that spares reading most environments.
        if stat is None or pid in (1, own) or stat.started < leader.started:
            continue
        candidates[pid] = stat
        marker = _marker_of(pid)
        # A session's number may be given away again once the session is empty: then its processes
        # are another command's and carry that one's marker.
        in_session = stat.session == leader.pid and (marker is None or _is(leader))
        if marker == leader.marker or in_session:
            belongs.add(pid)
    grown = True
    while grown:
        grown = False
        for pid, stat in candidates.items():
            if pid not in belongs and stat.parent in belongs:
                belongs.add(pid)
                grown = True
    return [candidates[pid] for pid in belongs if candidates[pid].alive]


def _is(leader: Leader) -> bool:
    stat = read_stat(leader.pid)
    return stat is not None and stat.started == leader.started


def send_signal(target: Stat, number: int) -> None:
    """Signal this very process; nothing happens if it is gone."""
    try:
        fd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return
    except OSError:
        fd = -1  # a kernel without pidfds: the start time alone has to do
    try:
        now = read_stat(target.pid)
        if now is None or now.started != target.started:
            return
        if fd >= 0:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(target.pid, number)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        if fd >= 0:
            os.close(fd)
