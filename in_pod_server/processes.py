"""The daemon's one process table: watch commands, end them, keep what they wrote.

A command lives on a task of the table, so no connection's end touches it. It is done when its
leader ends, whoever still holds its pipes; those are read on until they close. `launch` starts
commands, `tree` knows what belongs to one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import anyio

from in_pod_server import contract
from in_pod_server.errors import NoSuchProcessError, StartFailedError
from in_pod_server.inputs import Input
from in_pod_server.memory import OomCounter
from in_pod_server.output import OutputBuffer, OutputFile
from in_pod_server.process import Bell, Pipe, Process
from in_pod_server.tree import (
    Census,
    Leader,
    Stat,
    members,
    population,
    read_stat,
    send_signal,
)

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from in_pod_server.launch import Launcher

DRAIN_SECONDS: Final = 0.2
"""How long a command that has ended may keep its caller waiting for a pipe to close."""
SHUTDOWN_GRACE_SECONDS: Final = 1.0
KILL_SECONDS: Final = 5.0
"""How long KILL is repeated before we say that a process does not die."""
MANY: Final = 64
"""Of one command: what has more processes may be one that forks for as long as it lives."""
FREEZE_SECONDS: Final = 3.0
"""How long such a one is given to stand still, all of it, before it is killed."""
POLL_SECONDS: Final = 0.02
KEPT_FINISHED: Final = 256
KEPT_OUTPUT_BYTES: Final = 16 * 1024 * 1024
"""What finished commands' output may take together; the oldest lose theirs first."""

KEPT_COMMAND_CHARS: Final = 1000
"""How much of a command's text is kept to tell what it was."""
LOG_CHECK_SECONDS: Final = 1.0
LEFT_LIMIT: Final = 128
"""A finished command that has left more processes than that is a fork bomb, and they are ended."""
COUNT_SECONDS: Final = 1.0
"""Between two looks at how many processes commands have."""

logger = logging.getLogger(__name__)


class ProcessTable:
    """All commands of one daemon. An async context manager: leaving it ends every command."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        log_dir: Path,
        oom: OomCounter | None = None,
    ) -> None:
        self._launcher = launcher
        self._oom = oom or OomCounter()
        self._log_dir = log_dir
        self._boot = secrets.token_hex(3)
        self._count = 0
        self._processes: dict[str, Process] = {}
        self._unkept = 0
        """Bytes of output in memory, as far as was counted; what runs on may have added to it."""
        self._closing = False
        self.started = Bell()
        """Rings when a command starts."""
        self.census = Census()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._trim_logs)
        self._tasks.start_soon(self._look_after_the_many)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        assert self._tasks is not None
        with anyio.CancelScope(shield=True):
            await self.stop_all()
        self._tasks.cancel_scope.cancel()
        for process in self:
            self._forget(process)
        return await self._tasks.__aexit__(exc_type, exc_val, exc_tb)

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._processes.values()))

    def get(self, process_id: str) -> Process:
        """Return the command of that id.

        Raises:
            NoSuchProcessError: There is none, or it ended so long ago that it was forgotten.
        """
        try:
            return self._processes[process_id]
        except KeyError:
            raise NoSuchProcessError(
                f"no process {process_id!r} is known: list_processes shows those that are "
                "(a restart of the sandbox ends and forgets all of them)"
            ) from None

    def run(
        self, command: str, *, workdir: str, env: Mapping[str, str], stdin: bytes, timeout: float
    ) -> Process:
        """Start a command whose output is kept in memory.

        Raises:
            ArgumentError: Command, folder or environment cannot be used.
            StartFailedError: The system did not give another process.
        """
        process_id = self._next_id()
        oom_kills = self._oom.kills()
        with contextlib.ExitStack() as ends:
            fds = [_pipe(ends) for _ in range(2)]
            child = self._launcher.start(
                process_id,
                command,
                workdir=workdir,
                env=env,
                stdin=stdin,
                stdout=fds[0][1],
                stderr=fds[1][1],
            )
        outputs = OutputBuffer(), OutputBuffer()
        shown = command[:KEPT_COMMAND_CHARS]
        process = Process(process_id, shown, _leader(process_id, child), *outputs, timeout=timeout)
        process.oom_kills_before = oom_kills
        process.pipes = [
            Pipe(fd, output, process.changed.ring)
            for (fd, _), output in zip(fds, outputs, strict=True)
        ]
        self._watch_soon(process, child)
        return process

    def start_background(
        self,
        command: str,
        *,
        workdir: str,
        env: Mapping[str, str],
        log: tuple[str, int] | None = None,
        stdin_open: bool = False,
    ) -> Process:
        """Start a command that writes both its streams to one log file.

        `log` is the name and descriptor of a file already open; the descriptor is ours from now on.

        Raises:
            ArgumentError: Command, folder or environment cannot be used.
            StartFailedError: The system did not give another process, or no log file.
        """
        process_id = self._next_id()
        oom_kills = self._oom.kills()
        name, fd = log or self._own_log(process_id)
        # Before the start: from then on the command may have written.
        output = OutputFile(fd)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as ends:
            undo.callback(output.close)
            source: bytes | int = b""
            if stdin_open:
                source, write = os.pipe()
                ends.callback(os.close, source)
                given = Input(write, terminal=False)
                undo.callback(given.close)
            child = self._launcher.start(
                process_id,
                command,
                workdir=workdir,
                env=env,
                stdin=source,
                stdout=fd,
                stderr=subprocess.STDOUT,
            )
            undo.pop_all()
        process = Process(
            process_id,
            command[:KEPT_COMMAND_CHARS],
            _leader(process_id, child),
            output,
            OutputBuffer(),
            log_file=name,
            input=given if stdin_open else None,
            oom_kills_before=oom_kills,
        )
        self._watch_soon(process, child)
        return process

    def start_on_terminal(
        self, command: str, *, workdir: str, env: Mapping[str, str], columns: int, rows: int
    ) -> Process:
        """Start a command on a pseudo-terminal of its own; what the terminal shows is kept in memory.

        Raises:
            ArgumentError: Command, folder or environment cannot be used.
            StartFailedError: The system did not give another process, or no terminal.
        """
        process_id = self._next_id()
        oom_kills = self._oom.kills()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as ends:
            try:
                ours, theirs = os.openpty()
            except OSError as exc:
                raise StartFailedError(f"no terminal can be had: {exc.strerror}") from exc
            ends.callback(os.close, theirs)
            undo.callback(os.close, ours)
            # Closed apart from the reading side, whose loop has its own idea of when.
            keyboard = Input(os.dup(ours), terminal=True)
            undo.callback(keyboard.close)
            keyboard.resize(columns, rows)
            child = self._launcher.start(
                process_id,
                command,
                workdir=workdir,
                env=env,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                terminal=os.ttyname(theirs),
            )
            undo.pop_all()
        screen = OutputBuffer()
        process = Process(
            process_id,
            command[:KEPT_COMMAND_CHARS],
            _leader(process_id, child),
            screen,
            OutputBuffer(),
            input=keyboard,
            oom_kills_before=oom_kills,
        )
        process.pipes = [Pipe(ours, screen, process.changed.ring)]
        self._watch_soon(process, child)
        return process

    async def stop(self, process: Process, number: int, grace: float) -> None:
        """End a command's whole tree, or what a finished one left running."""
        process.stop(number, grace)
        await process.done.wait()
        if process.left_running:
            # Counted anew: an earlier stop's time may be long over.
            process.kill_at = time.monotonic() + grace
            await self._end(process)
            process.left_running = len(await self._members(process))

    async def stop_all(self, grace: float = SHUTDOWN_GRACE_SECONDS) -> None:
        """End every command, those left running by finished ones included, and start no more."""
        self._closing = True
        with anyio.move_on_after(grace + KILL_SECONDS):
            async with anyio.create_task_group() as tasks:
                for process in self:
                    if not process.done.is_set() or process.left_running:
                        process.sandbox_ended = True
                        tasks.start_soon(self.stop, process, SIGTERM, grace)

    # --- one command's life ----------------------------------------------------------------------

    def _next_id(self) -> str:
        if self._closing:
            raise StartFailedError("the sandbox is ending: no command is started any more")
        self._count += 1
        return f"p{self._count}-{self._boot}"

    def _own_log(self, process_id: str) -> tuple[str, int]:
        path = self._log_dir / f"{process_id}.log"
        try:
            return str(path), os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as exc:
            raise StartFailedError(f"no log file can be made at {path}: {exc.strerror}") from exc

    def _watch_soon(self, process: Process, child: subprocess.Popen[bytes]) -> None:
        assert self._tasks is not None
        self._processes[process.id] = process
        self.started.ring()
        self._tasks.start_soon(self._watch, process, child)
        try:
            fd = os.pidfd_open(child.pid)
        except OSError:
            self._tasks.start_soon(_reap, process, child)
        else:
            # No task of its own: that would be one more turn of the loop in each answer.
            asyncio.get_running_loop().add_reader(fd, _reap_now, process, child, fd)

    async def _watch(self, process: Process, child: subprocess.Popen[bytes]) -> None:
        with anyio.move_on_after(process.timeout) as limit:
            await process.attention.wait()
        timed_out = limit.cancelled_caught and not process.reaped.is_set()
        if timed_out:
            process.stop()
        if not process.reaped.is_set():
            await self._end(process)
            with anyio.move_on_after(KILL_SECONDS):
                await process.reaped.wait()
        for pipe in process.pipes:
            pipe.drain()
        with anyio.move_on_after(DRAIN_SECONDS):
            for pipe in process.pipes:
                if not pipe.closed.is_set():
                    await pipe.closed.wait()
        left = len(await self._members(process))
        if process.input is not None:
            process.input.close()
        after = self._oom.kills()
        if after is None or process.oom_kills_before is None:
            process.oom_kills = None
        else:
            process.oom_kills = after - process.oom_kills_before
        process.finish(child.returncode, timed_out=timed_out, left_running=left)
        self._launcher.forget(process.id)
        self._make_room(process)

    async def _members(self, process: Process) -> list[Stat]:
        return members(process.leader, await self.census.take())

    async def _end(self, process: Process) -> None:
        """Signal the whole tree until nothing of it is left: as asked at first, then with KILL."""
        told: set[tuple[int, int, int]] = set()
        while targets := await self._members(process):
            now = time.monotonic()
            number = process.stop_signal if now < process.kill_at else SIGKILL
            if now > process.kill_at + KILL_SECONDS:
                logger.error("%s: %d processes do not die", process.id, len(targets))
                return
            many = number == SIGKILL and len(targets) > MANY
            freezes = many and now < process.kill_at + FREEZE_SECONDS
            news = [_tell(target, SIGSTOP if freezes else number, told) for target in targets]
            if freezes and not any(news):
                # All stand still. Before, each that died would have made room for another fork.
                news = [_tell(target, SIGKILL, told) for target in targets]
            # What forks all the time is caught up with only by not pausing.
            await anyio.sleep(0 if number == SIGKILL and any(news) else POLL_SECONDS)

    async def _look_after_the_many(self) -> None:
        """Count what finished commands left, end it where it only multiplies, and what runs too much."""
        while True:
            await anyio.sleep(COUNT_SECONDS)
            crowded = await population() > contract.COMMAND_PROCESSES
            watched = [
                process
                for process in self
                if (process.left_running if process.done.is_set() else crowded)
            ]
            if not watched:
                continue
            census = await self.census.take()
            for process in watched:
                count = len(members(process.leader, census))
                if not process.done.is_set():
                    if count > contract.COMMAND_PROCESSES:
                        logger.warning("%s has %d processes", process.id, count)
                        process.ended_many = count
                        process.stop(SIGKILL, 0)
                    continue
                process.left_running = count
                if count > LEFT_LIMIT:
                    logger.warning("%s left %d processes", process.id, count)
                    process.ended_left = count
                    await self.stop(process, SIGKILL, 0)

    async def _trim_logs(self) -> None:
        while True:
            await anyio.sleep(LOG_CHECK_SECONDS)
            for process in self:
                if isinstance(process.stdout, OutputFile) and self._is_own_log(process):
                    try:
                        process.stdout.trim()
                    except OSError as exc:
                        logger.warning("the log of %s cannot be cut: %s", process.id, exc)

    def _is_own_log(self, process: Process) -> bool:
        return process.log_file == str(self._log_dir / f"{process.id}.log")

    def _make_room(self, process: Process) -> None:
        """Keep the finished commands within their bounds, the newest first.

        Looked at one by one only when there is something to let go: it is on the way of each answer.
        """
        outputs = (process.stdout, process.stderr)
        self._unkept += sum(each.kept for each in outputs if isinstance(each, OutputBuffer))
        spare = KEPT_FINISHED // 8
        if self._unkept <= KEPT_OUTPUT_BYTES and len(self._processes) <= KEPT_FINISHED + spare:
            return
        kept = count = 0
        for finished in reversed(list(self)):
            if not finished.done.is_set():
                continue
            count += 1
            for output in (finished.stdout, finished.stderr):
                if isinstance(output, OutputBuffer):
                    if kept + output.kept > KEPT_OUTPUT_BYTES:
                        output.release()
                    kept += output.kept
            # What still runs must stay in reach of stop_process.
            if count > KEPT_FINISHED and not finished.left_running:
                del self._processes[finished.id]
                self._forget(finished)
        self._unkept = kept

    def _forget(self, process: Process) -> None:
        if process.input is not None:
            process.input.close()
        for pipe in process.pipes:
            pipe.close()
        if isinstance(process.stdout, OutputFile):
            process.stdout.close()
            if self._is_own_log(process):
                Path(process.log_file).unlink(missing_ok=True)


def _pipe(ends: contextlib.ExitStack) -> tuple[int, int]:
    """Make a pipe whose write end is closed with `ends`, and its read end too if they fail."""
    read, write = os.pipe()
    ends.callback(os.close, write)
    ends.push(lambda kind, _exc, _tb: os.close(read) if kind else None)
    return read, write


def _leader(process_id: str, child: subprocess.Popen[bytes]) -> Leader:
    # Not yet reaped, so it is there, be it as a zombie.
    stat = read_stat(child.pid)
    return Leader(process_id, child.pid, stat.started if stat else 0)


def _reap_now(process: Process, child: subprocess.Popen[bytes], fd: int) -> None:
    """Take the exit code of a command whose pidfd says that it has ended."""
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)
    child.wait()
    process.reaped.set()
    process.attention.set()


async def _reap(process: Process, child: subprocess.Popen[bytes]) -> None:
    """Wait for a command on a kernel without pidfds, which tells nobody."""
    while child.poll() is None:  # noqa: ASYNC110
        await anyio.sleep(POLL_SECONDS)
    process.reaped.set()
    process.attention.set()


def _tell(target: Stat, number: int, told: set[tuple[int, int, int]]) -> bool:
    """Signal a process, with KILL as often as it is asked; return whether that is new to it."""
    key = (target.pid, target.started, number)
    new = key not in told
    if number == SIGKILL or new:
        told.add(key)
        send_signal(target, number)
        if target.state == "T" and number not in (SIGKILL, SIGSTOP):
            send_signal(target, SIGCONT)
    return new
