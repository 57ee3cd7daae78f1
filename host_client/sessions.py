"""Calls on sandboxes by id or name, over pipes that are opened when they are needed.

Opening is tried again freely, since before the hello nothing has run; a call that was sent and not
answered is asked for again by its id, which the daemon runs at most once.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import anyio

from host_client import audit
from host_client.apps import APP_TOOLS, TABLE, version_of
from host_client.backoff import pauses
from host_client.cancel import cancel
from host_client.errors import (
    ApiUnreachable,
    Forbidden,
    PodpipeError,
    PodReplaced,
    RequestRefused,
    SandboxExpired,
    SandboxNotFound,
    SessionLost,
    StillStarting,
    UsageError,
)
from host_client.launcher import START_WAIT_SECONDS, Launcher
from host_client.losses import Losses, ended, unknown, with_news
from host_client.pipe import OnProgress
from host_client.pipes import Pipes
from host_client.pod_view import PodView
from host_client.published import Apps
from host_client.sandbox import Sandbox
from host_client.session import ANSWER_MARGIN_SECONDS, SandboxSession
from host_client.status import Progress, Status, silent
from in_pod_server.contract import (
    CALL_LIMIT_SECONDS,
    FATE_UNKNOWN,
    META_BOOT_ID,
    META_CALL_AGE,
    META_CALL_ID,
    META_FATE,
)

log = logging.getLogger(__name__)

ANSWER_SECONDS = CALL_LIMIT_SECONDS + ANSWER_MARGIN_SECONDS
"""One call with all that it takes: starting the sandbox, connecting, asking again. The daemon answers
within CALL_LIMIT_SECONDS; what is longer is a frozen pipe, and clients give up at 60 s."""
RETRY_SECONDS = (0.05, 1.0)
"""Pause before a call is asked for again: at first, and at most."""
RECONNECT_SECONDS = 30.0
"""How long another pipe is tried for, after one broke under a call."""
UNREACHABLE_SECONDS = 15.0
"""How long a call waits for an API server that has answered before: one that restarts, say."""
PROBE_SECONDS = 3.0
"""For finding out whether a sandbox answers; a person waits for its status."""


class Sessions:
    """Calls on sandboxes by id or name, over pipes that are opened when they are needed.

    Args:
        launcher: starts what a call needs, and connects it.
        pipes: where the connected ones are.
        apps: keeps in the record what daemons say of their apps.
        resumes: whether a call on a suspended sandbox resumes it.
    """

    def __init__(
        self, launcher: Launcher, pipes: Pipes, apps: Apps, *, resumes: bool = True
    ) -> None:
        self._launcher = launcher
        self._pipes = pipes
        self._apps = apps
        self._resumes = resumes
        self._ids: dict[str, str] = {}
        self._losses = Losses(launcher)
        self._locks: dict[str, anyio.Lock] = {}

    def existing(self, ref: str) -> SandboxSession | None:
        """The live session of a sandbox, if there is one."""
        return self._pipes.get(self._ids.get(ref, ref))

    async def open(
        self,
        ref: str,
        *,
        wait: float = START_WAIT_SECONDS,
        progress: Progress | None = None,
        resume: bool = False,
    ) -> SandboxSession:
        """The session of a sandbox, which is started or resumed if need be.

        Args:
            ref: id or name.
            wait: seconds for the pod and the hello together.
            progress: told what is being waited for.
            resume: whether a suspended one is though calls on it do not resume it.

        Raises:
            PodpipeError: as `Launcher.running`.
        """
        if session := self.existing(ref):
            await self._compare(session)
            return session
        # Callers of one sandbox wait for one attempt; no other sandbox waits for it.
        async with self._locks.setdefault(ref, anyio.Lock()):
            session = self.existing(ref) or await self._pipes.redial(self._ids.get(ref, ref))
            if session is None:
                sandbox, pod = await self._started(
                    ref, wait, progress or silent, resume or self._resumes
                )
                self._ids[ref] = sandbox.id
                session = self.existing(ref)
            if session:
                await self._compare(session)
                return session
        raise SessionLost(f"the pipe into pod {pod.name} broke as soon as it was open", sent=False)

    async def _started(
        self, ref: str, wait: float, progress: Progress, resume: bool
    ) -> tuple[Sandbox, PodView]:
        """The sandbox and its connected pod; what was reached before is given time to come back.

        An API server that has just started answers before it has read the roles, and refuses all.
        """
        began = anyio.current_time()
        patience = min(wait, UNREACHABLE_SECONDS) if ref in self._ids else 0.0
        for pause in pauses(*RETRY_SECONDS):
            left = max(0.0, wait - (anyio.current_time() - began))
            try:
                return await self._launcher.running(
                    ref, wait=left, progress=progress, resume=resume
                )
            except (ApiUnreachable, Forbidden) as error:
                if anyio.current_time() - began >= patience:
                    raise
                log.info("%s", error)
                progress("waiting for the API server")
            await anyio.sleep(pause)
        raise AssertionError("pauses never end")

    async def call(
        self,
        ref: str,
        tool: str,
        arguments: dict[str, Any],
        *,
        reads_only: bool = False,
        on_progress: OnProgress | None = None,
        within: float = ANSWER_SECONDS,
        cancels: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        """Call a tool of a sandbox's daemon.

        Args:
            ref: id or name of the sandbox.
            tool: the daemon's tool.
            arguments: for the tool.
            reads_only: the call may be sent again if the pipe broke before its answer.
            on_progress: receives the tool's progress notifications.
            within: seconds for all of it.
            cancels: asked when this task is cancelled: whether the call is to be stopped too.

        Returns:
            The raw CallToolResult.

        A call whose pipe breaks is asked for again by its id: the daemon runs it once, and gives
        its result to whoever asks. What only reads is simply read again. One that is to be stopped
        is stopped by its id too, for a pipe that is broken or frozen tells its daemon nothing.

        Raises:
            PodReplaced, ContainerRestarted, SandboxEnded: what it ran in is gone; it may have run.
            SessionLost: its answer cannot be had; `sent` says whether it may have run.
            RequestRefused: the daemon answered with an error of the protocol.
            PodpipeError: as `open`; nothing was sent then.
        """
        audit.count(bytes_in=_size(tool, arguments))
        call_id = secrets.token_hex(16)
        first: SandboxSession | None = None
        asked: SandboxSession | None = None
        sent_at = 0.0
        patience = give_up = anyio.current_time() + within
        for pause in chain([0.0], pauses(*RETRY_SECONDS)):
            try:
                await anyio.sleep(pause)
                left = max(1.0, give_up - anyio.current_time())
                session = await self.open(ref, wait=min(left, START_WAIT_SECONDS))
                if first and first.pod.uid != session.pod.uid and not reads_only:
                    raise self._losses.replaced(tool, first, session)
                boot_id = first.boot_id if first else session.boot_id
                name: dict[str, Any] = {META_CALL_ID: call_id, META_BOOT_ID: boot_id}
                if first:
                    name[META_CALL_AGE] = round(anyio.current_time() - sent_at, 3)
                else:
                    sent_at = anyio.current_time()
                asked = session
                result = await session.request(
                    tool,
                    arguments,
                    on_progress,
                    meta=None if reads_only else name,
                    timeout=max(1.0, give_up - anyio.current_time()),
                    cancels=cancels,
                )
            except anyio.get_cancelled_exc_class():
                if asked and not reads_only and cancels():
                    await cancel(self._pipes, asked, call_id)
                raise
            except (PodReplaced, RequestRefused):
                raise
            except SessionLost as lost:
                log.info("%s: %s", tool, lost)
                audit.count(reconnects=1)
                if lost.sent:
                    first = first or session
                    # Anew after each pipe: a call that was joined has all the time it was given.
                    patience = min(give_up, anyio.current_time() + RECONNECT_SECONDS)
                if anyio.current_time() > patience:
                    raise (unknown(tool, str(lost)) if first else lost) from lost
            except UsageError:
                raise
            except PodpipeError as error:
                if first is None:
                    raise
                if isinstance(error, SandboxNotFound | SandboxExpired):
                    raise ended(tool, ref, error) from error
                passing = isinstance(error, ApiUnreachable | StillStarting | Forbidden)
                if not passing or anyio.current_time() > patience:
                    raise unknown(tool, str(error)) from error
            else:
                if (result.get("_meta") or {}).get(META_FATE) == FATE_UNKNOWN:
                    raise await self._losses.restarted(session, first or session, tool, result)
                if tool in APP_TOOLS:
                    session.apps = _table(result) or session.apps
                    await self._keep_apps(session)
                audit.count(bytes_out=_text_bytes(result))
                return with_news(result, self.news(session.sandbox.id))
        raise AssertionError("pauses never end")

    async def _keep_apps(self, session: SandboxSession) -> None:
        """Write down what apps the daemon has, if the record does not know: others' too.

        Where that fails they are published all the same, and written down with the next call.
        """
        if version_of(session.apps) <= version_of(session.sandbox.apps):
            return
        try:
            session.sandbox = await self._apps.keep(session.sandbox, session.apps)
        except PodpipeError as error:
            log.warning(
                "the apps of sandbox %s are not recorded yet: %s", session.sandbox.id, error
            )

    async def _compare(self, session: SandboxSession) -> None:
        """Note what was lost since the last call on a sandbox, and what its daemon has for us."""
        await self._keep_apps(session)
        audit.concerns(session.sandbox.id)
        await self._losses.compare(session)

    def news(self, sandbox_id: str) -> str:
        """What a sandbox has lost without being asked to since its last call; told once."""
        return self._losses.news(sandbox_id)

    async def status(self, ref: str) -> Status:
        """A sandbox as it is now; one that runs is asked whether it answers.

        A pod whose daemon hangs is running as far as Kubernetes knows.
        """
        status = await self._launcher.status(ref)
        if status.phase != "running" or status.pod is None:
            return status
        why = ""
        try:
            with anyio.fail_after(PROBE_SECONDS):
                session = self._pipes.get(status.sandbox.id)
                if session is None:
                    await self._pipes.connect(status.sandbox, status.pod)
                elif not await session.answers(PROBE_SECONDS):
                    why = f"not within {PROBE_SECONDS:g} s over its open pipe"
        except TimeoutError:
            why = f"not within {PROBE_SECONDS:g} s"
        except PodpipeError as error:
            why = str(error)
        if not why:
            return status
        hint = (
            "If it stays so, suspend and resume it: files in the home are kept, processes are not"
        )
        return replace(status, detail=f"not answering: {why}. {hint}")

    async def extend(self, ref: str, ttl_minutes: int) -> Status:
        """Let a sandbox live longer, and let its daemon know at once. As `Launcher.extend`."""
        status = await self._launcher.extend(ref, ttl_minutes)
        if status.phase == "running" and status.pod:
            await self._pipes.tell(status.sandbox, status.pod)
        return status

    async def forget(self, ref: str) -> None:
        """Close the pipe of a sandbox that is being suspended or destroyed, if there is one."""
        sandbox_id = self._ids.get(ref, ref)
        self._losses.meant(sandbox_id)
        await self._pipes.forget(sandbox_id)


def _size(tool: str, arguments: dict[str, Any]) -> int:
    """Bytes of the arguments.

    Raises:
        UsageError: something is no Unicode text; nothing was sent, so nothing is in doubt.
    """
    try:
        return len(json.dumps(arguments, ensure_ascii=False).encode())
    except (TypeError, ValueError):
        raise UsageError(
            f"an argument of {tool} holds text that is not valid Unicode; give bytes as base64 where "
            "the tool takes it"
        ) from None


def _table(result: dict[str, Any]) -> str:
    """The table of apps in a result; empty where it has none."""
    facts = result.get("structuredContent")
    return str(facts.get(TABLE, "")) if isinstance(facts, dict) else ""


def _text_bytes(result: dict[str, Any]) -> int:
    """Bytes of the text of a result; its data says the same once more."""
    texts = (block.get("text", "") for block in result.get("content", []))
    return sum(len(text.encode("utf-8", "replace")) for text in texts)
