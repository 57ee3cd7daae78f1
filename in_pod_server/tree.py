"""Which processes belong to a command, and signals to exactly those.

A command is the leader of its own session, and every process it starts inherits a marker in its
environment. A process belongs to the command if it is in that session, carries the marker, or has
a parent that belongs. A pid is only ever signalled through a pidfd, or at least after its start
time was seen to be unchanged, so a number that the kernel has given away again is never hit.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.lowlevel

MARKER: Final = "PODPIPE_PROCESS_ID"
READ_BYTES: Final = 65536
PAUSE_SECONDS: Final = 0.001
STARTING_SECONDS: Final = 0.1
"""How long one look waits for processes that are just becoming another program."""
RETRY_SECONDS: Final = 0.5
SCAN_BATCH: Final = 64
"""Processes looked at before others get their turn: a fork bomb must not stall the daemon."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/PID/stat says of one process."""

    pid: int
    state: str
    parent: int
    session: int
    started: int
    environment: tuple[int, int] = (0, 0)
    """Where its environment lies; two zeros while it starts a program, or if that is hidden."""

    @property
    def has_empty_environment(self) -> bool:
        """Whether it was started with one that has nothing in it."""
        return self.environment[0] == self.environment[1] != 0

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


@dataclass(frozen=True, slots=True)
class Seen:
    """One process as a census found it."""

    stat: Stat
    marker: str | None


def read_stat(pid: int) -> Stat | None:
    """Return the process's state, or None if there is no such process."""
    raw = _read(f"/proc/{pid}/stat")
    if not raw:
        return None
    fields = raw[raw.rindex(b")") + 2 :].split()
    state, parent, session, started = fields[0].decode(), fields[1], fields[3], fields[19]
    environment = (int(fields[47]), int(fields[48]))
    return Stat(pid, state, int(parent), int(session), int(started), environment)


def members(leader: Leader, census: Iterable[Seen]) -> list[Stat]:
    """Return the live processes that belong to the command."""
    everyone = {seen.stat.pid: seen for seen in census}
    first = everyone.get(leader.pid)
    leader_there = first is not None and first.stat.started == leader.started
    belongs: set[int] = set()
    for pid, seen in everyone.items():
        # A session's number may be given away again once the session is empty: then its processes
        # are another command's, and carry that one's marker.
        in_session = seen.stat.session == leader.pid and (leader_there or seen.marker is None)
        # What started before the command cannot be of it.
        if seen.stat.started >= leader.started and (seen.marker == leader.marker or in_session):
            belongs.add(pid)
    grown = bool(belongs)
    while grown:
        children = {p for p, seen in everyone.items() if seen.stat.parent in belongs} - belongs
        belongs |= children
        grown = bool(children)
    return [everyone[pid].stat for pid in belongs if everyone[pid].stat.alive]


class Census:
    """Looks at all processes that can belong to a command: those that are younger than we are.

    A look begins after it was asked for; whoever asks before it has begun shares it, so that many
    commands that end at once cost one look.
    """

    def __init__(self) -> None:
        self._own = os.getpid()
        own = read_stat(self._own)
        self._since = own.started if own else 0
        self._known: dict[tuple[int, int], str] = {}
        self._lock = anyio.Lock(fast_acquire=True)
        self._next: _Look | None = None
        self._patience = 0.0

    async def take(self) -> list[Seen]:
        """Return every process that is there now, zombies included."""
        while True:
            if self._next is None:
                self._next = look = _Look()
                try:
                    async with self._lock:
                        self._next = None
                        look.found = await self._look()
                finally:
                    if self._next is look:
                        self._next = None
                    look.done.set()
            else:
                look = self._next
                await look.done.wait()
            if look.found is not None:  # else the one who looked was cancelled
                return look.found

    async def _look(self) -> list[Seen]:
        found = []
        known = {}
        self._patience = STARTING_SECONDS
        for count, pid in enumerate(await _listed(), 1):
            if count % SCAN_BATCH == 0:
                await anyio.lowlevel.checkpoint()
            if pid in (1, self._own):
                continue
            stat = read_stat(pid)
            if stat is None or stat.started < self._since:
                continue
            # Once marked, always ours: a process may start anew with an empty environment.
            key = (pid, stat.started)
            marker = self._known.get(key) or await self._marker_of(stat)
            if marker is not None:
                known[key] = marker
            found.append(Seen(stat, marker))
        self._known = known
        return found

    async def _marker_of(self, stat: Stat) -> str | None:
        """The marker in a process's environment, which is not there while it starts a program.

        Linux shows none from when the old program's memory is gone until the new one's is filled.
        """
        environment = _read(f"/proc/{stat.pid}/environ")
        while environment == b"" and stat.alive and self._patience > 0:
            now = read_stat(stat.pid)
            if now is None or now.started != stat.started or now.has_empty_environment:
                return None
            await anyio.sleep(PAUSE_SECONDS)
            self._patience -= PAUSE_SECONDS
            environment = _read(f"/proc/{stat.pid}/environ")
        return _marker_in(environment or b"")


class _Look:
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.found: list[Seen] | None = None


def _marker_in(environment: bytes) -> str | None:
    prefix = f"{MARKER}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode("utf-8", "replace")
    return None


async def population() -> int:
    """How many processes there are, of whomever."""
    return len(await _listed())


async def _listed() -> list[int]:
    """Every process; waits while there is no descriptor left to look with, for that is not to end us."""
    while True:
        try:
            return _pids()
        except OSError as error:
            logger.warning("the processes cannot be looked at for now: %s", error.strerror)
            await anyio.sleep(RETRY_SECONDS)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - names only


def _read(path: str) -> bytes | None:
    """Read a file of /proc; None if the process is gone or not ours to look into."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = piece = os.read(fd, READ_BYTES)
        while len(piece) == READ_BYTES:
            piece = os.read(fd, READ_BYTES)
            data += piece
        return data
    except OSError:
        return None
    finally:
        os.close(fd)


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
