"""The log of `serve`: stderr for the client that shows it, and a bounded file that stays.

A client may throw stderr away, and starts several copies of a server at once, so the file is shared
by all of them. What only libraries say stays out of it, for it may quote what a model sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from pathlib import Path

from host_client.config import Settings
from host_client.shared_file import SharedFile

MAX_BYTES = 1024 * 1024
"""Of the file; about ten thousand calls."""
_STDERR = 2
FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s[%(process)d]: %(message)s"


class FileHandler(logging.Handler):
    """Writes records into the log file; it is never waited for and never fails a call.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = SharedFile(path, "PODPIPE_LOG_FILE", MAX_BYTES)
        self.addFilter(logging.Filter("host_client"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record."""
        self._file.append(self.format(record).encode("utf-8", "backslashreplace"))


class StderrHandler(logging.Handler):
    """Writes records to stderr, which is never waited for: not every client reads it.

    Whether another takes something now is asked before each piece, for the descriptor is not ours
    alone and so cannot be told not to wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._missed = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, or as much of it as is taken; the next one says what was not."""
        text = f"{self.format(record)}\n"
        if self._missed:
            text = f"\n[{self._missed} records before this were not read here]\n{text}"
        rest = text.encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while rest and select.select([], [_STDERR], [], 0)[1]:
                rest = rest[os.write(_STDERR, rest[: select.PIPE_BUF]) :]
        self._missed = self._missed + 1 if rest else 0


def _is_ours_or_matters(record: logging.LogRecord) -> bool:
    """Whether a record is podpipe's, or a library's warning: below that they repeat messages whole."""
    return record.name.startswith("host_client") or record.levelno >= logging.WARNING


def configure(settings: Settings) -> None:
    """Send what this process logs to stderr and to the log file, each at its level.

    Args:
        settings: the levels, and which file.
    """
    formatter = logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    stderr = StderrHandler()
    stderr.setLevel(settings.log_level)
    stderr.addFilter(_is_ours_or_matters)
    handlers: list[logging.Handler] = [stderr]
    if settings.log_file:
        file = FileHandler(settings.log_file)
        file.setLevel(settings.log_file_level)
        handlers.append(file)
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=min(handler.level for handler in handlers), handlers=handlers)
