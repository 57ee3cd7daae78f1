"""Long-running processes that this project starts, and stops by recorded identity only.

A process is its pid, its start time and the boot it belongs to: a reused pid, or a record from
before a reboot, never names somebody else's process. Linux only.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STOP_SECONDS: Final = 8.0
"""From TERM to KILL: etcd and containerd need a second or two, an API server drains for longer."""
KILL_SECONDS: Final = 5.0
"""How long a killed process may take to be gone before that is reported."""
POLL_SECONDS: Final = 0.1
LISTEN_STATE: Final = "0A"
"""TCP_LISTEN as /proc/net/tcp spells it."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that cannot be mistaken for another one."""

    pid: int
    started: int
    boot: str

    @property
    def alive(self) -> bool:
        """Whether exactly this process still runs; a zombie does not."""
        return self.boot == boot_id() and start_time(self.pid) == self.started


def boot_id() -> str:
    """The kernel's name for the present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid`; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold spaces and parentheses itself: fields count from its end.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def identify(pid: int) -> Process | None:
    """The process that has this pid now."""
    started = start_time(pid)
    return None if started is None else Process(pid, started, boot_id())


class Records:
    """The processes of one node: a file for each in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str) -> Process | None:
        """The recorded process, dead or alive; None when there is no readable record."""
        try:
            pid, started, boot = self._path(name).read_text(encoding="ascii").split()
            return Process(int(pid), int(started), boot)
        except (FileNotFoundError, ValueError):
            return None

    def alive(self, name: str) -> bool:
        """Whether the recorded process runs."""
        process = self.load(name)
        return process is not None and process.alive

    def save(self, name: str, process: Process) -> None:
        """Record a process that was just started."""
        self._folder.mkdir(parents=True, exist_ok=True)
        text = f"{process.pid} {process.started} {process.boot}\n"
        self._path(name).write_text(text, encoding="ascii")

    def forget(self, name: str) -> None:
        """Drop a record."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.pid"


def spawn(argv: Sequence[str], *, log: Path, cwd: Path) -> Process | None:
    """Start a process that outlives this one; None when it ended at once.

    The log of the run before is kept beside the new one: it says why a node died.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(f"{log.name}.1"))
    with log.open("wb") as stream:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            start_new_session=True,
        )
    # It is meant to outlive us; without this Python warns that nobody waited for it.
    child.returncode = 0
    return identify(child.pid)


def stop(process: Process, *, grace: float = STOP_SECONDS) -> bool:
    """TERM, wait, KILL, wait; True when the process is gone (or was not there).

    A pidfd is opened before the identity is checked, so that no signal can reach a process that
    took over the pid in between.
    """
    assert sys.platform == "linux"
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not process.alive:
            return True
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_SECONDS)):
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                return True
            if select.select([handle], [], [], seconds)[0]:
                return True
        return False
    finally:
        os.close(handle)


def port_is_free(port: int) -> bool:
    """Whether a server can listen on this loopback port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


def comes_free(port: int) -> bool:
    """Whether a server can listen on this loopback port, now or once a killed one's is closed.

    A process of many threads counts as dead a moment before the last of them lets go of its sockets.
    """
    until = time.monotonic() + KILL_SECONDS
    while not port_is_free(port):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def choose_port(preferred: int, taken: Sequence[int] = ()) -> int:
    """The usual port if it is free, else one that the kernel picks."""
    if preferred not in taken and port_is_free(preferred):
        return preferred
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def holder_of(port: int) -> str:
    """Who listens on a port, for an error message."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:
            continue
        for fields in map(str.split, rows):
            if fields[3] == LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in inodes for link in (folder / "fd").iterdir()):
                name = (folder / "comm").read_text(encoding="utf-8").strip()
                return f"{name} (pid {folder.name})"
        except OSError:
            continue  # it ended, or belongs to somebody whose descriptors we may not read
    return "a process that cannot be seen from here"
