"""How long the sandbox goes on: until it expires, or until it has been idle for too long.

The expiry is an annotation of the pod, which the kubelet keeps current in a file, and which a host
that has moved it tells over its pipe at once. It is only ever moved later, so the latest that was
said holds. A daemon that ends by this ends with code 0: Kubernetes starts no container again that
ended well, and the next call makes another pod if the sandbox may still live.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio

from in_pod_server import contract
from in_pod_server.podinfo import read_annotations
from in_pod_server.process import Process
from in_pod_server.processes import ProcessTable
from in_pod_server.tree import read_stat

LOOK_SECONDS: Final = 1.0
"""Between two looks at what may end the sandbox."""

logger = logging.getLogger(__name__)


class Lifetime:
    """When this sandbox is over.

    Args:
        annotations: the pod's, as a downwardAPI file; one that is not there tells nothing.
        idle_seconds: after which an unused sandbox ends; 0 for never.
        processes: what runs in it.
        attended: whether a client is connected that may be silent for as long as it likes.
    """

    def __init__(
        self,
        annotations: Path,
        *,
        idle_seconds: float,
        processes: ProcessTable,
        attended: Callable[[], bool],
    ) -> None:
        self._annotations = annotations
        self._idle_seconds = idle_seconds
        self._processes = processes
        self._attended = attended
        self._told: datetime | None = None
        self._calls = 0
        self._used = time.monotonic()

    def told(self, expires_at: object) -> None:
        """Take up an expiry that a host told; what is no time is left."""
        told = _time(expires_at)
        if told and (self._told is None or told > self._told):
            self._told = told

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """For the time of one call, which is use of the sandbox."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._used = time.monotonic()

    def used(self) -> None:
        """Note use of the sandbox that is no call: a request to one of its apps."""
        self._used = time.monotonic()

    async def watch(self, end: Callable[[str], None]) -> None:
        """Call `end` with the reason as soon as the sandbox is over.

        Nothing runs between the last look and `end`: a call comes before both or after them.
        """
        while True:
            if reason := self._over():
                end(reason)
                return
            await anyio.sleep(LOOK_SECONDS)

    def _over(self) -> str:
        """Why it is; empty while it is not."""
        expires_at = self.expires_at()
        if expires_at and datetime.now(UTC) >= expires_at:
            return f"it expired at {expires_at:%Y-%m-%dT%H:%M:%SZ}"
        if not self._idle_seconds:
            return ""
        if self._calls or self._attended() or any(map(_runs, self._processes)):
            self._used = time.monotonic()
        if time.monotonic() - self._used < self._idle_seconds:
            return ""
        if _others():
            self._used = time.monotonic()
            return ""
        return f"it was idle for {self._idle_seconds / 60:g} minutes"

    def expires_at(self) -> datetime | None:
        """The latest expiry that is known."""
        annotated = _time(read_annotations(self._annotations).get(contract.ANNOTATION_EXPIRES_AT))
        known = [t for t in (annotated, self._told) if t]
        return max(known, default=None)


def _runs(process: Process) -> bool:
    """Whether a command, or what it left, still runs."""
    return not process.done.is_set() or process.left_running > 0


def _time(text: object) -> datetime | None:
    """The time that RFC 3339 text gives; None where it gives none, or no zone."""
    if not isinstance(text, str):
        return None
    try:
        when = datetime.fromisoformat(text)
        return when.astimezone(UTC) if when.tzinfo else None
    except (ValueError, OverflowError):
        return None


def _others() -> bool:
    """Whether something runs here that the daemon did not start: a transfer, ssh, another server.

    What `kubectl exec` starts has no parent in the container. A dial is not meant: what it connects
    is known by its connection.
    """
    try:
        entries = list(Path("/proc").iterdir())
    except OSError:
        return True  # somebody has every descriptor
    for entry in entries:
        pid = int(entry.name) if entry.name.isdecimal() else 1
        if pid == 1 or not (stat := read_stat(pid)) or stat.parent or not stat.alive:
            continue
        with contextlib.suppress(OSError):
            argv = tuple((entry / "cmdline").read_bytes().decode(errors="replace").split("\0"))
            # A kernel thread has no arguments; where those are seen we are not in a pod.
            if argv[0] and argv[:-1] != contract.DIAL_ARGV:
                return True
    return False


def say(reason: str) -> None:
    """Let the pod's status tell why its container ended."""
    with contextlib.suppress(OSError):
        # Never made: the runtime has put it there, or nobody reads it.
        fd = os.open(contract.TERMINATION_LOG, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        with os.fdopen(fd, "w") as file:
            file.write(reason)
