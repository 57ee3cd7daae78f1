"""Files and folders of any size between this machine and a sandbox's home, both ways, verified.

Each transfer has a `kubectl exec -i` of its own, with one end here and the other in the pod
(`host_client.ends`). A transfer is done when every file was read back where it arrived and has the
SHA-256 of what was read where it came from; kubectl's exit code says nothing. A channel that broke is
opened again, and goes on where it was: what is there already is compared by its sum, not sent again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

from host_client import audit
from host_client.ends import receiver, sender, wire
from host_client.ends.target import Target
from host_client.errors import StillStarting, TransferFailed, UsageError, root_cause
from host_client.kubectl import SPDY, Kubectl
from host_client.line import END_SECONDS, POD_ARGV, Line
from host_client.outcome import Meter, Outcome, files_text, kept_text, shown
from host_client.paths import existing, existing_folder, in_home, name_of, resolved
from host_client.sessions import Sessions

log = logging.getLogger(__name__)

TRIES = 5
"""Channels that one transfer may lose before it is given up."""
RETRY_SECONDS = 0.5
"""Before the second try; twice as long before each further one."""
KEEP_SECONDS = 600.0
"""How long the outcome of a transfer that a tool began waits for the call that asks for it."""


class _Up:
    """From here to the pod."""

    def __init__(self, sources: Sequence[sender.Source], target: Mapping[str, Any]) -> None:
        self._sources = sources
        self._target = target

    def count(self, size: int) -> None:
        """Note bytes that have arrived."""
        audit.count(bytes_in=size)

    def job(self) -> dict[str, Any]:
        """What the pod's end has to do."""
        return {"role": "receive", **self._target}

    def attempt(self, channel: wire.Channel, meter: Meter) -> _Found:
        end = sender.Sender(channel, meter.add, meter.expect, on_lost=lambda: None)
        found = _Found()
        results = end.run(self._sources)
        left = set(end.sums)
        for result in results:
            match result:
                case ["file", int(number), str(digest)] if number in left:
                    left.remove(number)
                    mine = end.sums[number]
                    if digest == mine:
                        found.files += 1
                        found.bytes += end.sizes[number]
                    else:
                        why = f"its SHA-256 is {digest[:64]} in the sandbox and {mine} here"
                        found.failed.append((end.paths[number], why))
                case ["refused", str(path), str(why)]:
                    found.refused.append((path, why))
                case ["failed", str(path), str(why)]:
                    found.failed.append((path, why))
                case ["count", "unlisted", int(count)]:
                    found.unlisted = count
                case ["count", "removed", int(count)]:
                    found.removed = count
                case _:
                    raise wire.Broken("a result is none")
        if left and not found.failed:
            found.failed += [
                (end.paths[number], "its arrival was not confirmed") for number in left
            ]
        found.unchanged = end.unchanged
        return found


class _Down:
    """From the pod to here."""

    def __init__(self, sources: Sequence[tuple[str, str]], target: Target) -> None:
        self._sources = sources
        self._target = target

    def count(self, size: int) -> None:
        """Note bytes that have arrived."""
        audit.count(bytes_out=size)

    def job(self) -> dict[str, Any]:
        """What the pod's end has to do; all the faster if nothing is here yet."""
        fresh = all(self._target.lacks(name) for name, _ in self._sources)
        return {"role": "send", "sources": self._sources, "eager": fresh}

    def attempt(self, channel: wire.Channel, meter: Meter) -> _Found:
        end = receiver.Receiver(channel, self._target, meter.add, meter.expect)
        try:
            end.run()
        finally:
            meter.kept = end.kept
        # Everything is here and compared; the pod's end may hear of it or not.
        with contextlib.suppress(wire.Lost):
            channel.send(wire.RESULTS_END)
            channel.flush()
        return _Found(
            len(end.sums),
            end.bytes,
            end.unchanged,
            end.removed,
            end.refused,
            end.failed,
            end.unlisted,
        )


@dataclass(slots=True)
class _Found:
    """What one attempt that came to its end has found."""

    files: int = 0
    bytes: int = 0
    unchanged: int = 0
    removed: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    unlisted: int = 0


class Transfers:
    """All transfers of one process.

    Args:
        kubectl: makes their channels.
        sessions: start the sandbox if need be, and know its pod.
        tasks: where transfers live that outlast the call that began them.
    """

    def __init__(self, kubectl: Kubectl, sessions: Sessions, tasks: anyio.abc.TaskGroup) -> None:
        self._kubectl = kubectl
        self._sessions = sessions
        self._tasks = tasks
        self._running: dict[tuple[str, ...], _Running] = {}
        self._carrier = SPDY

    async def put(
        self, ref: str, local: Sequence[str], remote: str = "", meter: Meter | None = None
    ) -> Outcome:
        """Copy files and folders from here into a sandbox.

        Args:
            ref: id or name of the sandbox.
            local: what to copy; a link that is named here itself is followed.
            remote: where to; a folder that exists, or ends with `/`, is copied into.
            meter: shows how far it is.

        Raises:
            UsageError: something of it is not there, or not to be reached.
            TransferFailed: not everything arrived as it was.
            PodpipeError: as `Sessions.open`.
        """
        sources = [sender.Source(name_of(path), existing(path)) for path in local]
        if len({source.name for source in sources}) < len(sources):
            raise UsageError("two of these have the same name, and would be one in the sandbox")
        target = {
            "path": in_home(remote),
            "contents": False,
            "into": len(sources) != 1 or remote.endswith("/"),
            "delete": False,
        }
        return await self._run(ref, _Up(sources, target), meter)

    async def get(
        self, ref: str, remote: str, local: str = ".", meter: Meter | None = None
    ) -> Outcome:
        """Copy a file or a folder from a sandbox to here; arguments and errors as `put`."""
        plain = in_home(remote)
        target = Target(
            resolved(local),
            contents=plain == ".",
            into=local.endswith("/"),
            delete=False,
        )
        name = "" if plain == "." else os.path.basename(plain)
        return await self._run(ref, _Down([(name, plain)], target), meter)

    async def sync(
        self,
        ref: str,
        local: str,
        remote: str,
        *,
        delete: bool = False,
        from_sandbox: bool = False,
        meter: Meter | None = None,
    ) -> Outcome:
        """Make one folder like the other.

        Args:
            ref: id or name of the sandbox.
            local: the folder here.
            remote: the folder there.
            delete: also remove what only the copy has, unless anything failed.
            from_sandbox: the one here is the copy.
            meter: shows how far it is.

        Raises:
            PodpipeError: as `put`.
        """
        plain = in_home(remote)
        if from_sandbox:
            target = Target(resolved(local), contents=True, into=True, delete=delete)
            return await self._run(ref, _Down([("", plain)], target), meter)
        source = sender.Source("", existing_folder(local))
        there = {"path": plain, "contents": True, "into": True, "delete": delete}
        return await self._run(ref, _Up([source], there), meter)

    async def _run(self, ref: str, way: _Up | _Down, meter: Meter | None) -> Outcome:
        meter = meter or Meter()
        began = time.monotonic()
        for number in range(1, TRIES + 1):
            session = await self._sessions.open(ref)
            line = Line(
                self._kubectl.exec_argv(session.pod.name, POD_ARGV),
                {**self._carrier, **self._kubectl.environment},
            )
            try:
                found = await self._attempt(line, way, meter)
            except wire.Lost as lost:
                said = line.stderr.decode("utf-8", "replace").strip()[-500:]
                log.info("transfer with %s, try %d: %s %s", ref, number, lost, said)
                if number == TRIES:
                    raise TransferFailed(
                        f"the channel into sandbox {ref} broke {TRIES} times ({lost}"
                        f"{'; kubectl said: ' + shown(said) if said else ''}). What is complete is in "
                        "its place; the same command goes on from there" + kept_text(meter)
                    ) from lost
                audit.count(reconnects=1)
                if self._carrier and not line.heard:
                    # Not every proxy on the way knows SPDY.
                    self._carrier = {}
                    continue
                meter.verb = "reconnecting"
                await anyio.sleep(RETRY_SECONDS * 2 ** (number - 1))
                continue
            except wire.Refused as refused:
                raise TransferFailed(f"nothing was transferred: {shown(str(refused))}") from refused
            except wire.Broken as broken:
                raise TransferFailed(
                    f"what answers in sandbox {ref} is not podpipe's end of a transfer: {broken}. "
                    "Nothing was written but complete files in the target"
                ) from broken
            except OSError as error:
                raise TransferFailed(f"{error.filename or 'transfer'}: {error.strerror}") from error
            if found.failed:
                raise _failure(found)
            way.count(found.bytes)
            return Outcome(
                found.files,
                found.bytes,
                found.unchanged,
                time.monotonic() - began,
                tuple(found.refused),
                found.unlisted,
                found.removed,
                number,
            )
        raise AssertionError("the last try either succeeds or raises")

    async def _attempt(self, line: Line, way: _Up | _Down, meter: Meter) -> _Found:
        """One channel; whatever ends us ends kubectl, and with it the pod's end."""
        self._kubectl.target.check()
        outcome: list[_Found | Exception] = []
        ended = anyio.Event()

        def work() -> None:
            try:
                line.talk(way.job(), lambda channel: outcome.append(way.attempt(channel, meter)))
            except Exception as error:  # raised below, where it cannot hide a cancellation
                outcome[:] = [error]

        async def wait() -> None:
            await anyio.to_thread.run_sync(work)
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            try:
                await ended.wait()
            finally:
                if not ended.is_set():
                    line.kill()
                with anyio.move_on_after(END_SECONDS * 2, shield=True):
                    await ended.wait()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    # --- transfers that tools begin ----------------------------------------------------------

    async def within(
        self,
        seconds: float,
        key: tuple[str, ...],
        begin: Callable[[Meter], Any],
    ) -> Outcome:
        """A transfer that a call begins, or joins if one with its key is under way.

        Args:
            seconds: how long this call waits.
            key: which transfer it is.
            begin: what makes the coroutine that does it.

        Raises:
            StillStarting: it is not done yet; a call with the same key joins it.
            PodpipeError: it failed.
        """
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = _Running()
            self._tasks.start_soon(self._own, key, running, begin)
        running.waiting += 1
        try:
            with anyio.move_on_after(seconds):
                await running.ended.wait()
        except anyio.get_cancelled_exc_class():
            # What another call waits for is not this one's to end.
            if running.waiting == 1:
                running.scope.cancel()
            raise
        finally:
            running.waiting -= 1
        if not running.ended.is_set():
            raise StillStarting(
                f"still {running.meter.text()}. It goes on; call again with the same arguments to "
                "wait for its end",
                detail=running.meter.text(),
            )
        self._running.pop(key, None)
        if running.error:
            raise running.error
        assert running.outcome
        return running.outcome

    async def _own(
        self, key: tuple[str, ...], running: _Running, begin: Callable[[Meter], Any]
    ) -> None:
        try:
            with running.scope:
                running.outcome = await begin(running.meter)
            if running.outcome is None:
                running.error = TransferFailed(
                    "the transfer was cancelled" + kept_text(running.meter)
                )
        except Exception as error:  # whoever waits for it gets it
            cause = root_cause(error)
            running.error = cause if isinstance(cause, Exception) else error
        finally:
            running.ended.set()
        await anyio.sleep(KEEP_SECONDS)
        if self._running.get(key) is running:
            del self._running[key]


class _Running:
    """A transfer under way, and what came of it."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.ended = anyio.Event()
        self.scope = anyio.CancelScope()
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self.waiting = 0
        """Calls that wait for it now."""


def _failure(found: _Found) -> TransferFailed:
    lines = [f"{shown(path)}: {shown(why)}" for path, why in found.failed[:20]]
    more = len(found.failed) - len(lines) + found.unlisted
    return TransferFailed(
        f"{files_text(found.files)} arrived and were verified, {len(found.failed) + found.unlisted} did not: "
        + "; ".join(lines)
        + (f"; and {more} more" if more else "")
    )
