"""The log of `serve`: stderr for the client that shows it, and a bounded file that stays.

A client may throw stderr away, and starts several copies of a server at once, so the file is
written by all of them: each record is one append, and whoever finds the file full moves it aside.
What only libraries say stays out of the file, for it may quote what a model sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio

from host_client.config import Settings
from host_client.identity import is_sandbox_id

MAX_BYTES = 1024 * 1024
"""Of the file; about ten thousand calls."""
KEPT_FILES = 3
"""Earlier files, as serve.log.1 and so on."""
FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s[%(process)d]: %(message)s"

log = logging.getLogger(__name__)

Outcome = Literal["ok", "error", "cancelled"]


class SharedFile(logging.Handler):
    """A log file that several processes write; it is never waited for and never fails a call.

    Args:
        path: the file; its folder is made, and both are for the user alone.
        max_bytes: size at which it is moved aside.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        self._path = path
        self._max_bytes = max_bytes
        self._failed = False
        self.addFilter(logging.Filter("host_client"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record; the first failure of a row is told on stderr."""
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
            self._append(line)
        except OSError as error:
            if not self._failed and sys.stderr:
                reason = error.strerror or error
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(
                        f"podpipe: warning: the log file {self._path} cannot be written ({reason}); "
                        "going on without it. PODPIPE_LOG_FILE names another\n"
                    )
            self._failed = True
        else:
            self._failed = False

    def _append(self, line: bytes) -> None:
        if not self._path.parent.is_dir():
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A fifo or a terminal without a reader would hold every call up.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise OSError(0, "not a regular file")
            if facts.st_size and facts.st_size + len(line) > self._max_bytes:
                self._move_aside(fd)
                os.close(fd)
                fd = os.open(self._path, flags, 0o600)
            os.write(fd, line)
        finally:
            os.close(fd)

    def _move_aside(self, fd: int) -> None:
        """Shift the kept files by one, unless another process is doing it or has done it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        with contextlib.suppress(FileNotFoundError):
            if not os.path.samestat(os.fstat(fd), self._path.stat()):
                return
            for number in range(KEPT_FILES - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    self._kept(number).replace(self._kept(number + 1))
            self._path.replace(self._kept(1))

    def _kept(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def configure(settings: Settings) -> None:
    """Send what this process logs to stderr and to the log file, each at its level.

    Args:
        settings: the levels, and which file.
    """
    formatter = logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setLevel(settings.log_level)
    handlers: list[logging.Handler] = [stderr]
    if settings.log_file:
        file = SharedFile(settings.log_file)
        file.setLevel(settings.log_file_level)
        handlers.append(file)
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=min(handler.level for handler in handlers), handlers=handlers)


@dataclass(slots=True)
class Call:
    """One call of a tool, while it runs.

    Args:
        outcome: how it has ended; set by whoever sees its result.
    """

    outcome: Outcome = "error"


@contextlib.contextmanager
def call(tool: str, sandbox: object) -> Iterator[Call]:
    """Log a call when it ends: tool, sandbox, outcome, milliseconds, and nothing that was in it.

    Args:
        tool: its name, one that is served.
        sandbox: what the client gave as the id; logged only where it has the form of one.
    """
    began = time.monotonic()
    running = Call()
    try:
        yield running
    except anyio.get_cancelled_exc_class():
        running.outcome = "cancelled"
        raise
    finally:
        ref = sandbox if isinstance(sandbox, str) and is_sandbox_id(sandbox) else "-"
        ms = (time.monotonic() - began) * 1000
        log.info("call tool=%s sandbox=%s outcome=%s ms=%.0f", tool, ref, running.outcome, ms)
