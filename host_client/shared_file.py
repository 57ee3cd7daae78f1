"""A file of lines that several processes append to, bounded, for the user alone.

Each line is one append, so lines of several writers do not mix, and whoever finds the file full
moves it aside under a lock. What cannot be written is told once on stderr and fails nobody's call.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from pathlib import Path

KEPT_FILES = 3
"""Earlier files, as NAME.1 and so on."""


class SharedFile:
    """One such file.

    Args:
        path: the file; its folder is made, and both are for the user alone.
        setting: the setting that names it, for the warning.
        max_bytes: size at which it is moved aside.
    """

    def __init__(self, path: Path, setting: str, max_bytes: int) -> None:
        self._path = path
        self._setting = setting
        self._max_bytes = max_bytes
        self._failed = False
        self._torn = False

    def append(self, line: bytes) -> None:
        """Append one line; the first failure of a row is told on stderr.

        Args:
            line: without its end.
        """
        try:
            self._append(line + b"\n")
        except OSError as error:
            if not self._failed and sys.stderr:
                reason = error.strerror or error
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(
                        f"podpipe: warning: {self._path} cannot be written ({reason}); going on "
                        f"without it. {self._setting} names another file\n"
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
            if self._torn:  # half a line stands there: it must not spoil this one
                line = b"\n" + line
            written = os.write(fd, line)
            self._torn = written < len(line)
            if self._torn:
                raise OSError(0, "no space left for a whole line")
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
