"""At most once: the calls that a client named by an id, so that it may ask again after a lost pipe.

A named call runs in a task of the daemon, not of the connection that brought it: whoever asks for
the same id joins it while it runs, and gets the kept result afterwards. Starts and results are also
journaled on the memory-backed run volume, which outlives the container: after a restart a finished
call is still answered, one that never arrived is run, and whatever had begun is said to be unknown.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final, Self

import anyio
import anyio.abc
from mcp.types import CallToolResult, TextContent

from in_pod_server.contract import FATE_NOT_STARTED, FATE_UNKNOWN, META_FATE

KEPT_CALLS: Final = 4096
"""Calls that are remembered. One that is asked for again, and may be older than all of them, is said to
be unknown: it is not run, for it may have been."""
CLOCK_SECONDS: Final = 60.0
"""By how much a call may be older than its age says: that is from when it was asked for again, and
the question takes its time."""
KEPT_RESULT_BYTES: Final = 16 * 1024 * 1024
"""Results that wait for a client that might ask again; older ones are told as no longer kept."""
JOURNALED_RESULT_BYTES: Final = 64 * 1024
JOURNAL_BYTES: Final = 8 * 1024 * 1024
"""The journal is written anew when it is longer: the run volume is small."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    began: float
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    result: CallToolResult | None = None
    size: int = 0
    waiting: int = 0


class Ledger:
    """The named calls of one daemon; as a context manager it closes its journal.

    Args:
        journal: where starts and results are written down.
        boot_id: this start of the daemon.
        tasks: where calls run; cancelled when the daemon ends.
    """

    def __init__(self, journal: Path, boot_id: str, tasks: anyio.abc.TaskGroup) -> None:
        self._path = journal
        self._boot_id = boot_id
        self._tasks = tasks
        self._calls: dict[str, _Call] = {}
        self._bytes = 0
        self._past_boots: set[str] = set()
        self._past: dict[str, CallToolResult | None] = {}
        self._ending = False
        self._forgot: float | None = None
        """When the newest call began of which nothing is known any more; this machine's clock."""
        self._file = self._opened()
        self._write({"boot": boot_id})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def end(self) -> None:
        """Begin no more calls. Those under way go on, and finished ones are still answered."""
        self._ending = True

    async def call(
        self,
        call_id: str,
        boot_id: str,
        run: Callable[[], Awaitable[CallToolResult]],
        cancelled_by_client: Callable[[], bool],
        age: float = 0.0,
    ) -> CallToolResult:
        """Run a call, or join it, or give its kept result.

        Args:
            call_id: names the call for good.
            boot_id: of the daemon that it was first sent to.
            run: runs it; never raises but for cancellation.
            cancelled_by_client: whether a cancelled wait means that the call shall stop. The end of
                a connection does not.
            age: seconds since it was first sent; 0 where this is the first time.

        Returns:
            The call's result, or one whose meta says that its fate is unknown, or that it was not
            started because the daemon is ending.
        """
        call = self._calls.get(call_id)
        if call is None:
            if boot_id != self._boot_id and (past := self._from_before(call_id, boot_id)):
                return past
            if age and self._may_have_forgotten(age):
                return _unknown("it was sent so many calls ago that it is not known whether it ran")
            if self._ending:
                return _stands_for(
                    "the sandbox is ending: this call was not started", FATE_NOT_STARTED
                )
            call = self._begin(call_id, run)
        call.waiting += 1
        try:
            await call.done.wait()
        except anyio.get_cancelled_exc_class():
            if cancelled_by_client() and call.waiting == 1:
                call.scope.cancel()
            raise
        finally:
            call.waiting -= 1
        return call.result or _unknown("its result is no longer kept; it did run")

    def cancel(self, call_id: str) -> None:
        """End a call, whoever waits for it; one that has not arrived yet will never begin.

        For a client whose pipe broke: the daemon may not have noticed yet, and still reads from it.

        Args:
            call_id: names the call; one that has ended stays as it is.
        """
        call = self._calls.get(call_id)
        if call:
            call.scope.cancel()
            return
        call = self._calls[call_id] = _Call(time.monotonic())
        call.result = _unknown("it was cancelled before it began")
        self._write({"start": call_id})
        self._finish(call_id, call, call.result)

    def _begin(self, call_id: str, run: Callable[[], Awaitable[CallToolResult]]) -> _Call:
        call = self._calls[call_id] = _Call(time.monotonic())
        # Before it runs: what is not in the journal has not begun.
        self._write({"start": call_id})

        async def owned() -> None:
            with call.scope:
                call.result = await run()
            if call.result is None:
                call.result = _unknown("it was cancelled; what it had done by then is not undone")
            self._finish(call_id, call, call.result)

        self._tasks.start_soon(owned)
        return call

    def _finish(self, call_id: str, call: _Call, result: CallToolResult) -> None:
        entry: dict[str, object] = {"end": call_id}
        try:
            text = result.model_dump_json(by_alias=True, exclude_none=True)
            if len(text) <= JOURNALED_RESULT_BYTES:
                entry["result"] = text
        except ValueError:
            # A lone surrogate, which its connection escapes; no reader of the journal would take it.
            text = json.dumps(result.model_dump(by_alias=True, exclude_none=True))
        call.size = len(text)
        self._bytes += call.size
        self._write(entry)
        call.done.set()
        self._prune()

    def _prune(self) -> None:
        if self._bytes <= KEPT_RESULT_BYTES and len(self._calls) <= KEPT_CALLS:
            return
        for call_id, call in list(self._calls.items()):
            if self._bytes <= KEPT_RESULT_BYTES and len(self._calls) <= KEPT_CALLS:
                return
            if call.done.is_set() and not call.waiting:
                self._bytes -= call.size
                call.size, call.result = 0, None
                if len(self._calls) > KEPT_CALLS:
                    del self._calls[call_id]
                    self._forgot = max(call.began, self._forgot or call.began)

    def _may_have_forgotten(self, age: float) -> bool:
        """Whether a call of that age that is not known may be one that was forgotten."""
        return self._forgot is not None and time.monotonic() - age - CLOCK_SECONDS <= self._forgot

    # --- the journal -----------------------------------------------------------------------------

    def _from_before(self, call_id: str, boot_id: str) -> CallToolResult | None:
        """What is known of a call that was sent to an earlier daemon; None if it never began."""
        if call_id in self._past:
            return self._past[call_id] or _unknown("the container was restarted while it ran")
        if boot_id in self._past_boots:
            return None
        return _unknown("the container was restarted and its journal is gone")

    def _opened(self) -> FileIO:
        """The journal, to be continued, when all that it holds has been read."""
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            whole = data.rfind(b"\n") + 1
            for line in data[:whole].splitlines():
                self._read(line)
            file = self._path.open("ab", buffering=0)
            if whole < len(data):
                # A dying daemon did not finish its last line, and what it was about had not begun.
                file.truncate(whole)
            return file
        except OSError as error:
            logger.warning("there will be no journal of calls: %s", error)
            return Path(os.devnull).open("ab", buffering=0)

    def _read(self, line: bytes) -> None:
        try:
            match json.loads(line):
                case {"boot": str(boot_id)}:
                    self._past_boots.add(boot_id)
                case {"forgot": int() | float() as began}:
                    self._forgot = float(began)
                case {"start": str(call_id)}:
                    self._past.setdefault(call_id, None)
                case {"end": str(call_id), "result": str(text)}:
                    result = CallToolResult.model_validate_json(text, by_name=False)
                    self._past[call_id] = result
                case {"end": str()}:
                    pass
                case _:
                    raise ValueError("no entry of a journal")
        except (ValueError, RecursionError):
            # It may have told of a call's beginning, of those that were sent to any daemon so far.
            self._past_boots.clear()

    def _write(self, entry: dict[str, object]) -> None:
        line = _line(entry)
        try:
            if self._file.tell() + len(line) > JOURNAL_BYTES:
                self._rewrite()
            _write_whole(self._file, line)
        except OSError as error:
            # A full volume must not stop the sandbox. Without this daemon's name in the journal,
            # a later one says "unknown" instead of taking a missing entry for "never began".
            logger.warning("the journal of calls cannot be written, and is given up: %s", error)
            self._file.truncate(0)

    def _rewrite(self) -> None:
        """Keep what a client could still ask for: that this daemon was, and the newest calls."""
        entries: list[dict[str, object]] = [{"boot": self._boot_id}]
        if self._forgot is not None:
            entries.append({"forgot": self._forgot})
        entries += [{"start": call_id} for call_id in self._calls]
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        file = fresh.open("ab", buffering=0)
        try:
            _write_whole(file, b"".join(map(_line, entries)))
            fresh.replace(self._path)
        except OSError:
            file.close()
            fresh.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = file


def _line(entry: dict[str, object]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _write_whole(file: FileIO, data: bytes) -> None:
    """Write all of it; a volume that is nearly full takes a part, and says so in a number only."""
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _unknown(why: str) -> CallToolResult:
    return _stands_for(f"the answer to this call is lost: {why}", FATE_UNKNOWN)


def _stands_for(text: str, fate: str) -> CallToolResult:
    """What is answered in place of a call's own result."""
    block = TextContent(type="text", text=text)
    return CallToolResult(content=[block], is_error=True, _meta={META_FATE: fate})
