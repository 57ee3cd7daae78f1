"""One command: what was started, what it writes, and what became of it. The table is `processes`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import SIGKILL, SIGTERM, Signals
from typing import Final, Literal

import anyio

from in_pod_server.inputs import Input
from in_pod_server.output import Output, OutputBuffer
from in_pod_server.tree import Leader

READ_BYTES: Final = 65536
DRAIN_READS: Final = 32
"""As many reads empty any pipe, however fast somebody writes on."""
TIMEOUT_GRACE_SECONDS: Final = 2.0

State = Literal["running", "exited", "killed", "timed_out"]


class Bell:
    """Wakes whoever waits for the next change; nothing is remembered between rings."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None

    async def wait(self) -> None:
        """Return at the next ring."""
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()

    def ring(self) -> None:
        """Wake all who wait now."""
        if self._event is not None:
            self._event.set()
            self._event = None


class Pipe:
    """Reads one pipe of a command into its buffer whenever the loop finds bytes in it."""

    def __init__(self, fd: int, output: OutputBuffer, on_change: Callable[[], None]) -> None:
        self._fd = fd
        self._output = output
        self._on_change = on_change
        self.closed = asyncio.Event()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._readable)

    def _readable(self) -> bool:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._output.append(data)
        else:
            self.close()
        self._on_change()
        return bool(data)

    def drain(self) -> None:
        """Read what is there now: at most what a pipe holds, however fast somebody writes."""
        for _ in range(DRAIN_READS):
            if self.closed.is_set() or not self._readable():
                return

    def close(self) -> None:
        """Stop reading; who still writes gets SIGPIPE."""
        if not self.closed.is_set():
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self.closed.set()


@dataclass(slots=True, eq=False)
class Process:
    """One command: what was started, what became of it, and what it wrote."""

    id: str
    command: str
    leader: Leader
    stdout: Output
    stderr: Output
    timeout: float | None = None
    log_file: str = ""
    pipes: list[Pipe] = field(default_factory=list)
    input: Input | None = None
    """Its standard input, if that was asked to stay open."""
    oom_kills_before: int | None = None
    started_at: float = field(default_factory=time.time)
    state: State = "running"
    exit_code: int | None = None
    signal: str | None = None
    left_running: int = 0
    ended_left: int = 0
    """Processes that it left running and that were ended because they were too many."""
    ended_many: int = 0
    """Processes that it ran when it was ended because they were too many."""
    ended_for_memory: bool = False
    """Whether it was ended because no more memory was left, and it used most."""
    memory_astray: bool = False
    """Whether memory was short meanwhile, and most of it was no command's."""
    sandbox_ended: bool = False
    """Whether it was ended because the whole sandbox was."""
    killed_by_others: bool = False
    """Whether it got KILL, and not from us."""
    oom_kills: int | None = 0
    """Processes of the sandbox that were killed for want of memory meanwhile; None: nobody counts."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    changed: Bell = field(default_factory=Bell)
    attention: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the leader has ended or somebody wants it to end."""
    reaped: asyncio.Event = field(default_factory=asyncio.Event)
    stop_signal: int = SIGTERM
    kill_at: float = float("inf")
    _started: float = field(default_factory=time.monotonic)
    _seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it ran, or has been running."""
        return self._seconds if self.done.is_set() else time.monotonic() - self._started

    @property
    def at_end(self) -> bool:
        """Whether nothing more will be written to what it writes to."""
        return self.done.is_set() and all(pipe.closed.is_set() for pipe in self.pipes)

    def stop(self, number: int = SIGTERM, grace: float = TIMEOUT_GRACE_SECONDS) -> None:
        """Ask for the end of the whole tree; `done` is set when it has come."""
        self.stop_signal = number
        self.kill_at = min(self.kill_at, time.monotonic() + grace)
        self.attention.set()

    async def wait(self, seconds: float) -> None:
        """Wait for the end, but no longer than this."""
        with anyio.move_on_after(seconds):
            await self.done.wait()

    def finish(self, returncode: int | None, *, timed_out: bool, left_running: int) -> None:
        """Write down how it ended."""
        self._seconds = time.monotonic() - self._started
        self.left_running = left_running
        if returncode is not None and returncode < 0:
            self.state, self.signal = "killed", _signal_name(-returncode)
            self.killed_by_others = -returncode == SIGKILL and self.kill_at == float("inf")
        else:
            self.state, self.exit_code = "exited", returncode
        if timed_out:
            self.state, self.exit_code = "timed_out", None
        self.done.set()
        self.changed.ring()


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"SIG{number}"
