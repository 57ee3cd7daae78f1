"""Start one command: its shell, folder, environment and descriptors. Nothing is kept here.

The environment is a short list and what the caller gives. No file that the home could hold is read
by the shell, nothing prompts, pages or opens an editor, and no descriptor of the daemon is passed.

The limit on a command's processes is the table's: RLIMIT_NPROC would count all that the kernel runs
for the uid, which other sandboxes of the node have too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final, cast

from in_pod_server.errors import ArgumentError, StartFailedError
from in_pod_server.tree import MARKER

SHELL: Final = "/bin/bash"
QUICK_SHELL: Final = "/bin/bash-static"
"""The same bash without shared libraries to look up, where the image has it: a quarter of its start.
It runs by the other's name, which is what scripts see."""
OOM_SCORE: Final = b"1000"
"""The most there is: Kubernetes gives the daemon up to 999, and it is by size that the kernel chooses
among equals."""
NICENESS: Final = 10
"""Of commands, so that the daemon has its turn among a hundred of them that want all there is."""
ARGV_SCRIPT_BYTES: Final = 96 * 1024
"""A longer script goes through a file: the kernel takes at most 128 KiB in one argument."""

_ON_TERMINAL: Final = b'exec 0<>"$0" 1>&0 2>&0; exec "$@"'
"""A session's first open of a terminal makes it the session's own: so ctrl-C and job control work."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FIXED_ENV: Final = {
    "SHELL": SHELL,
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TERM": "dumb",
    "NO_COLOR": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "EDITOR": "true",
    "GIT_EDITOR": "true",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
}


class Launcher:
    """Starts commands for one home; scripts too long for an argument lie in `run_dir`.

    `open_files` is how many a command may have open unless it asks for more; 0: as many as we.
    """

    def __init__(
        self, *, home: Path, run_dir: Path, user: str, tmp_dir: Path, open_files: int = 0
    ) -> None:
        self._open_files = open_files
        self._home = home
        self._run_dir = run_dir
        self._user = user
        self._tmp_dir = tmp_dir
        self._program = QUICK_SHELL if os.access(QUICK_SHELL, os.X_OK) else SHELL

    def start(
        self,
        process_id: str,
        command: str,
        *,
        workdir: str,
        env: Mapping[str, str],
        stdin: bytes | int,
        stdout: int,
        stderr: int,
        terminal: str = "",
    ) -> subprocess.Popen[bytes]:
        """Start `command` under bash in a session of its own.

        `stdin` is all there is to read, or a descriptor; `terminal` is a device to run on instead.

        Raises:
            ArgumentError: Command, folder or environment cannot be used.
            StartFailedError: The system did not give another process.
        """
        if "\0" in command:
            raise ArgumentError("the command holds a NUL character, which no program can be given")
        cwd = self.folder(workdir)
        environment = self.environment(process_id, env)
        script = os.fsencode(command)
        with contextlib.ExitStack() as stack:
            try:
                if len(script) <= ARGV_SCRIPT_BYTES:
                    what: list[bytes] = [b"-c", b"--", script]
                else:
                    path = self.script_path(process_id)
                    path.write_bytes(script)
                    what = [os.fsencode(path)]
                if isinstance(stdin, int):
                    source = stdin
                elif stdin:
                    source = stack.enter_context(memory_file(stdin)).fileno()
                else:
                    source = subprocess.DEVNULL
                shell = [os.fsencode(SHELL), b"--noprofile", b"--norc"]
                on_terminal = [*shell, b"-c", _ON_TERMINAL, os.fsencode(terminal)]
                child = subprocess.Popen(
                    [*(on_terminal if terminal else []), *shell, *what],
                    executable=self._program,
                    stdin=source,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=cwd,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as exc:
                self.forget(process_id)
                raise _refused(exc, cwd) from exc
        # It runs already: first what a program asks when it begins.
        if self._open_files:
            _limit(child.pid, resource.RLIMIT_NOFILE, self._open_files)
        _offer_to_oom_killer(child.pid)
        _limit(child.pid, resource.RLIMIT_CORE, 0)  # crashes are not to fill the home
        with contextlib.suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, child.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
            )
        return child

    def forget(self, process_id: str) -> None:
        """Remove what a finished command's start left behind."""
        self.script_path(process_id).unlink(missing_ok=True)

    def script_path(self, process_id: str) -> Path:
        """Where a script goes that is too long for an argument."""
        return self._run_dir / f"{process_id}.sh"

    def folder(self, workdir: str) -> Path:
        """Return the folder to start in: absolute, or relative to the home.

        Raises:
            ArgumentError: It is no folder that can be entered.
        """
        if "\0" in workdir:
            raise ArgumentError("workdir holds a NUL character")
        if workdir == "~" or workdir.startswith("~/"):
            workdir = workdir[2:]
        path = self._home / workdir
        try:
            if path.is_dir() and os.access(path, os.X_OK):
                return path
            reason = "it is not a folder" if path.exists() else "there is no such folder"
            if path.is_dir():
                reason = "it may not be entered"
        except OSError as exc:
            reason = exc.strerror or str(exc)
        raise ArgumentError(
            f"workdir {workdir!r} cannot be used ({path}: {reason}); "
            "create it first, or leave workdir empty for the home"
        )

    def environment(self, process_id: str, env: Mapping[str, str]) -> dict[str, str]:
        """Return a command's whole environment.

        Raises:
            ArgumentError: A name or value that no environment can hold, or the marker's own name.
        """
        for name, value in env.items():
            if not _ENV_NAME.fullmatch(name):
                raise ArgumentError(f"env: {name!r} is no name of an environment variable")
            if name == MARKER:
                raise ArgumentError(f"env: {MARKER} is set by the sandbox itself")
            if "\0" in value:
                raise ArgumentError(f"env: the value of {name} holds a NUL character")
        home = str(self._home)
        tmp_dir = self._scratch()
        return {
            "PATH": f"{home}/.local/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "USER": self._user,
            "LOGNAME": self._user,
            "XDG_CACHE_HOME": f"{home}/.cache",
            **({"TMPDIR": str(tmp_dir)} if tmp_dir else {}),
            **_FIXED_ENV,
            **env,
            MARKER: process_id,
        }

    def _scratch(self) -> Path | None:
        """Return what TMPDIR must name because /tmp does not work (it was removed, say)."""
        if os.access(self._tmp_dir, os.W_OK | os.X_OK):
            return None
        fallback = self._home / ".cache" / "tmp"
        with contextlib.suppress(OSError):
            fallback.mkdir(parents=True, exist_ok=True)
            return fallback
        return None


def _offer_to_oom_killer(pid: int) -> None:
    """Where memory runs out and one process has to die, let it be the command's and not ours."""
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, OOM_SCORE)
        finally:
            os.close(fd)


def _limit(pid: int, what: int, soft: int) -> None:
    """Limit what a command has unless it asks for more by `ulimit`."""
    with contextlib.suppress(OSError):
        _, hard = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (soft, hard))


def memory_file(data: bytes) -> BinaryIO:
    """Hold a program's input in a memory file: nothing has to be fed, and nothing can block on it."""
    file = cast("BinaryIO", os.fdopen(os.memfd_create("podpipe"), "r+b"))
    file.write(data)
    file.seek(0)
    return file


def _refused(exc: OSError, cwd: Path) -> StartFailedError:
    if exc.errno == errno.E2BIG:
        return StartFailedError(
            "the environment is too large: one variable may take 128 KiB at most"
        )
    if exc.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return StartFailedError(
            f"the sandbox cannot start another process now ({exc.strerror}): "
            "stop some first (list_processes, stop_process)"
        )
    if exc.errno == errno.ENOSPC:
        return StartFailedError("the sandbox has no space left for a script of this length")
    return StartFailedError(f"the command could not be started in {cwd}: {exc.strerror}")
