"""One user's podpipe in one process: kubectl, launcher and sessions, wired together.

Nothing of it is made before it is needed, so that `serve` answers a client that only looks, and a
missing kubectl is an answer to a call, not a server that does not start.
"""

from __future__ import annotations

import logging
from typing import Self

import anyio

from host_client.audit import Audit
from host_client.backends.pod import PodBackend
from host_client.clock import Clock
from host_client.config import Settings
from host_client.errors import (
    LaunchFailed,
    PrerequisiteError,
    SandboxExpired,
    SandboxNotFound,
)
from host_client.identity import is_random_id, is_sandbox_id, named_sandbox_id
from host_client.kubectl import Kubectl
from host_client.launcher import START_WAIT_SECONDS, Launcher
from host_client.pipes import Pipes
from host_client.published import Apps
from host_client.session import SandboxSession
from host_client.sessions import Sessions
from host_client.status import Progress, silent
from host_client.transfer import Transfers

log = logging.getLogger(__name__)


class Host:
    """An async context manager; leaving it closes all pipes.

    Args:
        settings: whose podpipe it is.
        bound: name of a lasting sandbox that is made whenever it is wanted and not there.

    Raises:
        UsageError: no sandbox can have the name `bound`.
    """

    def __init__(self, settings: Settings, *, bound: str = "") -> None:
        self.settings = settings
        self.bound = bound
        self.clock = Clock()
        """What expiry is judged by."""
        if bound and not is_sandbox_id(bound):
            named_sandbox_id(settings.user_key, bound)
        self.audit = Audit(settings, lambda: self.context)
        self.tasks = anyio.create_task_group()
        """What lives as long as it."""
        self._kubectl: Kubectl | None = None
        self._pipes: Pipes | None = None
        self._backend: PodBackend | None = None
        self._launcher: Launcher | None = None
        self._apps: Apps | None = None
        self._sessions: Sessions | None = None
        self._transfers: Transfers | None = None

    async def __aenter__(self) -> Self:
        await self.tasks.__aenter__()
        try:
            # Reads files only: a context that is switched later must not redirect this process.
            self._kubectl = Kubectl(self.settings)
        except PrerequisiteError as error:
            log.info("not ready yet: %s", error)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._pipes:
            await self._pipes.aclose()
        self.tasks.cancel_scope.cancel()
        await self.tasks.__aexit__(None, None, None)

    @property
    def kubectl(self) -> Kubectl:
        """The pinned cluster.

        Raises:
            PrerequisiteError: kubectl or the kubeconfig is missing; asking again looks again.
        """
        self._kubectl = self._kubectl or Kubectl(self.settings)
        return self._kubectl

    @property
    def context(self) -> str:
        """The kubeconfig context: the pinned one, or while there is none what the settings say."""
        return self._kubectl.target.context if self._kubectl else self.settings.context

    @property
    def pipes(self) -> Pipes:
        """The live pipes into them. Raises as `kubectl`."""
        self._pipes = self._pipes or Pipes(
            self.kubectl, self.tasks, idle_seconds=self.settings.idle_seconds, clock=self.clock
        )
        return self._pipes

    @property
    def launcher(self) -> Launcher:
        """The user's sandboxes. Raises as `kubectl`."""
        self._launcher = self._launcher or Launcher(
            self.backend, self.settings, self.pipes.connect, self.clock
        )
        return self._launcher

    @property
    def backend(self) -> PodBackend:
        """Their objects. Raises as `kubectl`."""
        self._backend = self._backend or PodBackend(self.kubectl, self.settings)
        return self._backend

    @property
    def apps(self) -> Apps:
        """Their published apps. Raises as `kubectl`."""
        self._apps = self._apps or Apps(self.launcher, self.backend, self.pipes, self.clock)
        return self._apps

    @property
    def sessions(self) -> Sessions:
        """Calls on them. Raises as `kubectl`."""
        self._sessions = self._sessions or Sessions(
            self.launcher, self.pipes, self.apps, resumes=self.settings.resumes
        )
        return self._sessions

    async def open(
        self, ref: str, *, progress: Progress = silent, resume: bool = False
    ) -> SandboxSession:
        """The session of a sandbox, started or resumed if need be; the bound one is also made.

        Args:
            ref: id or name.
            progress: told what is being waited for.
            resume: whether a suspended one is though PODPIPE_RESUME says manual.

        Raises:
            PodpipeError: as `Sessions.open`, and for the bound one as `Launcher.ensure`.
        """
        deadline = anyio.current_time() + START_WAIT_SECONDS
        while True:
            left = deadline - anyio.current_time()
            try:
                return await self.sessions.open(
                    ref, wait=max(1.0, left), progress=progress, resume=resume
                )
            except (SandboxNotFound, SandboxExpired, LaunchFailed) as error:
                gone = not isinstance(error, LaunchFailed) or error.reason == "Deleted"
                if ref != self.bound or is_random_id(ref) or not gone or left <= 0:
                    raise
            await self.launcher.ensure(ref, progress=progress)

    @property
    def transfers(self) -> Transfers:
        """Files to and from them. Raises as `kubectl`."""
        self._transfers = self._transfers or Transfers(self.kubectl, self.sessions, self.tasks)
        return self._transfers
