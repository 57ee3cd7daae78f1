"""The live pipes of one process: at most one into each sandbox."""

from __future__ import annotations

import logging

import anyio
import anyio.abc

from host_client.clock import Clock
from host_client.config import IDLE_SECONDS
from host_client.errors import PodpipeError
from host_client.kubectl import Kubectl
from host_client.pod_view import PodView
from host_client.sandbox import Sandbox
from host_client.session import SandboxSession

log = logging.getLogger(__name__)

REDIAL_SECONDS = 2.0
TELL_SECONDS = 3.0


class Pipes:
    """The live sessions of one process: at most one per sandbox, each owned by a task of its own.

    Args:
        kubectl: makes the pipes.
        tasks: where the owning tasks live; whoever has it calls `aclose` before leaving it.
        idle_seconds: after which an unused one closes itself.
        clock: what expiry is judged by.
    """

    def __init__(
        self,
        kubectl: Kubectl,
        tasks: anyio.abc.TaskGroup,
        *,
        idle_seconds: float = IDLE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._clock = clock or Clock()
        self._kubectl = kubectl
        self._tasks = tasks
        self._sessions: dict[str, SandboxSession] = {}
        self._locks: dict[str, anyio.Lock] = {}

    def get(self, sandbox_id: str) -> SandboxSession | None:
        """The session of a sandbox if calls may be sent on it."""
        session = self._sessions.get(sandbox_id)
        return session if session and session.alive else None

    async def connect(self, sandbox: Sandbox, pod: PodView) -> None:
        """Open a pipe into this very pod, unless there is one.

        Raises:
            SessionLost: there was no hello; nothing has run.
            VersionMismatch: the pod speaks another contract version.
            Forbidden: this user may not exec into it.
        """
        async with self._locks.setdefault(sandbox.id, anyio.Lock()):
            await self._connect(sandbox, pod)

    async def tell(self, sandbox: Sandbox, pod: PodView) -> bool:
        """Tell a pod's daemon its expiry and who may open its apps, by the pipe into it or a new one.

        Returns:
            Whether it knows; otherwise the kubelet tells it within a minute or two.
        """
        with anyio.move_on_after(TELL_SECONDS):
            try:
                await self.connect(sandbox, pod)
            except PodpipeError as error:
                log.info("%s", error)
                return False
            session = self._sessions[sandbox.id]
            session.sandbox = sandbox
            return await session.answers(TELL_SECONDS)
        return False

    async def redial(self, sandbox_id: str) -> SandboxSession | None:
        """Another pipe into the pod whose pipe has just broken, without looking the pod up.

        The hello proves that it is the same one; a lookup would take as long as the pipe itself.

        Returns:
            The session; None where there was no such pod, or it does not answer at once.
        """
        broken = self._sessions.get(sandbox_id)
        if broken is None or not broken.fresh:
            return None
        with anyio.move_on_after(REDIAL_SECONDS):
            try:
                await self.connect(broken.sandbox, broken.pod)
            except PodpipeError as error:
                log.info("%s", error)
        return self.get(sandbox_id)

    async def _connect(self, sandbox: Sandbox, pod: PodView) -> None:
        known = self._sessions.get(sandbox.id)
        if known and known.connected and not known.ending and known.pod.uid == pod.uid:
            known.sandbox = sandbox  # extended by another host, say
            return
        session = SandboxSession(
            sandbox, pod, idle_seconds=self._idle_seconds, now=lambda: self._clock.now()
        )

        self._tasks.start_soon(session.own, self._kubectl)
        await session.opened()
        self._sessions[sandbox.id] = session
        if known:  # its pod has ended, or its pipe was broken
            self._tasks.start_soon(known.aclose)

    async def forget(self, sandbox_id: str) -> None:
        """Close the pipe into a sandbox, if there is one."""
        if session := self._sessions.pop(sandbox_id, None):
            await session.aclose()

    async def aclose(self) -> None:
        """Close all pipes, at once and within `CLOSE_SECONDS`."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as closing:
                for session in self._sessions.values():
                    closing.start_soon(session.aclose)
