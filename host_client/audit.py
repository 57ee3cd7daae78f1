"""The audit: one JSON line for each call of a tool and each command on sandboxes, never its content.

What a call was given appears as the SHA-256 of its arguments, so that a known call can be proved and
an unknown one not be read. What happens deep within a call (bytes, reconnects, which sandbox a name
meant) is noted on whatever call the present task belongs to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import anyio

from host_client.config import Settings
from host_client.errors import code_of
from host_client.identity import is_sandbox_id
from host_client.shared_file import SharedFile

MAX_BYTES = 8 * 1024 * 1024
"""Of the file; about twenty thousand calls."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Entry:
    """One call, while it runs.

    Args:
        outcome: `ok`, or what went wrong; empty to have it told from the exception.
        sandbox_id: which sandbox it was about.
        bytes_in: sent into the sandbox.
        bytes_out: that came out of it.
        reconnects: pipes and channels that broke under it.
    """

    outcome: str = ""
    sandbox_id: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    reconnects: int = 0


_current: ContextVar[Entry | None] = ContextVar("podpipe_audit_entry", default=None)


def count(*, bytes_in: int = 0, bytes_out: int = 0, reconnects: int = 0) -> None:
    """Add to the present call; outside of one nothing is counted."""
    if entry := _current.get():
        entry.bytes_in += bytes_in
        entry.bytes_out += bytes_out
        entry.reconnects += reconnects


def concerns(sandbox_id: str) -> None:
    """Note which sandbox the present call is about."""
    if entry := _current.get():
        entry.sandbox_id = sandbox_id


def digest(arguments: Mapping[str, Any]) -> str:
    """SHA-256, in hexadecimal, of the arguments as canonical JSON: sorted, compact, ASCII."""
    canonical = json.dumps(arguments, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class Audit:
    """The audit of one user's calls in one process.

    Args:
        settings: whose, in which session, and the file.
        context: tells the kubeconfig context, once that is known.
    """

    def __init__(self, settings: Settings, context: Callable[[], str]) -> None:
        self._settings = settings
        self._context = context
        path = settings.audit_file
        self._file = SharedFile(path, "PODPIPE_AUDIT_FILE", MAX_BYTES) if path else None

    @contextlib.contextmanager
    def call(self, tool: str, sandbox: object, arguments: Mapping[str, Any]) -> Iterator[Entry]:
        """Record a call when it ends, however it does.

        Args:
            tool: its name, one that is served, or the command's.
            sandbox: what was given as the id; recorded only where it has the form of one.
            arguments: what the call was given; only their digest is recorded.
        """
        entry = Entry()
        before = _current.set(entry)
        when, began = datetime.now(UTC), time.monotonic()
        try:
            yield entry
        except anyio.get_cancelled_exc_class():
            entry.outcome = "cancelled"
            raise
        except BaseException as error:
            entry.outcome = entry.outcome or code_of(error)
            raise
        else:
            entry.outcome = entry.outcome or "ok"
        finally:
            _current.reset(before)
            ref = sandbox if isinstance(sandbox, str) and is_sandbox_id(sandbox) else ""
            ms = round((time.monotonic() - began) * 1000)
            log.info(
                "call tool=%s sandbox=%s outcome=%s ms=%d", tool, ref or "-", entry.outcome, ms
            )
            if self._file:
                self._file.append(self._line(when, tool, ref, arguments, entry, ms))

    def _line(
        self,
        when: datetime,
        tool: str,
        ref: str,
        arguments: Mapping[str, Any],
        entry: Entry,
        ms: int,
    ) -> bytes:
        facts = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "user": self._settings.user,
            "session": self._settings.session,
            "context": self._context(),
            "sandbox": ref,
            "sandbox_id": entry.sandbox_id,
            "tool": tool,
            "arguments_sha256": digest(arguments),
            "outcome": entry.outcome,
            "bytes_in": entry.bytes_in,
            "bytes_out": entry.bytes_out,
            "ms": ms,
            "reconnects": entry.reconnects,
        }
        return json.dumps(facts).encode("ascii")
