"""What rows work with: the cluster, throw-away users in it, and kubectl as a person would type it."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import replace
from typing import Any, TypeVar

import anyio

from host_client.config import Settings
from host_client.errors import LaunchFailed, PodpipeError
from host_client.host import Host
from host_client.identity import home_claim
from host_client.kubectl import Kubectl
from host_client.session import SandboxSession
from in_pod_server.contract import CONTAINER

TTL_MINUTES = 60
"""Twice the longest soak: what expires under a call is no fault of the pipe."""
MAX_TTL_MINUTES = 90
"""If even the cleaning up is killed, pods end themselves by then."""
CLEANUP_SECONDS = 120.0
WAIT = "60s"
"""How long kubectl waits for something to be ready or gone."""
KUBECTL_SECONDS = 75.0
"""One kubectl call of a baseline, a `wait` included."""
LABEL = "podpipe-bench"
"""On whatever a baseline makes; the value tells one run from another."""

PLAIN_CALL: tuple[str, dict[str, Any]] = ("list_blobs", {})
"""A first call that costs next to nothing, and that both kinds of server have."""

Shared = TypeVar("Shared")


class Lab:
    """One run's share of a cluster, cleaned up when left.

    Args:
        settings: the cluster and how sandboxes are made; its user is replaced.
        tell: told what is being set up.
    """

    def __init__(self, settings: Settings, tell: Callable[[str], None]) -> None:
        self.run = secrets.token_hex(4)
        self.settings = replace(
            settings,
            user=f"bench-{self.run}",
            session="bench",
            ttl_minutes=TTL_MINUTES,
            max_ttl_minutes=MAX_TTL_MINUTES,
            # So little that rows with many sandboxes fit a laptop's node.
            cpu_request="10m",
            memory_request="32Mi",
            environment=dict(settings.environment),
        )
        self.tell = tell
        self._shared = ""
        self._stack = AsyncExitStack()
        self._entered: dict[object, Any] = {}

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[Lab]:
        """The lab, for as long as the block lasts.

        Raises:
            PrerequisiteError: kubectl or the kubeconfig is missing.
            ApiUnreachable: no cluster answers.
        """
        self.kubectl = Kubectl(self.settings)
        asked = await self.kubectl.json("version", "-o", "json")
        self.versions = {
            "kubectl": asked["clientVersion"]["gitVersion"],
            "kubernetes": asked["serverVersion"]["gitVersion"],
        }
        async with cleaned(Host(self.settings), self.tell) as host, self._stack:
            self.host = host
            yield self

    async def once(self, make: Callable[[Lab], AbstractAsyncContextManager[Shared]]) -> Shared:
        """What rows share that takes long to make: entered for the first, left with the lab."""
        if make not in self._entered:
            self._entered[make] = await self._stack.enter_async_context(make(self))
        shared: Shared = self._entered[make]
        return shared

    async def sandbox(self) -> SandboxSession:
        """The sandbox that rows share, answering; made by the first row that asks."""
        if not self._shared:
            self.tell("making a sandbox")
            self._shared = (await self.host.launcher.create()).sandbox.id
        return await self.host.sessions.open(self._shared)

    async def type(self, *args: str, stdin: str = "") -> str:
        """As `typed`, on the lab's cluster."""
        return await typed(self.kubectl, *args, stdin=stdin)

    async def exec_true(self, pod: str) -> None:
        """The baseline of all calls: `kubectl exec POD -- true`."""
        await self.type("exec", pod, "-c", CONTAINER, "--", "true")

    async def volume_gone(self, claim: str, volume: str) -> None:
        """Wait until a deleted claim and its volume are gone, so that the next sample is alone."""
        await self.type("wait", "--for=delete", f"pvc/{claim}", f"--timeout={WAIT}")
        if volume:
            try:
                await self.type("wait", "--for=delete", f"pv/{volume}", f"--timeout={WAIT}")
            except PodpipeError as error:
                # Volumes belong to the cluster; not every user may look at them.
                self.tell(f"volume {volume} was not seen to go: {error}")

    async def volume_of(self, claim: str) -> str:
        """Name of the volume that a claim is bound to; empty where there is none."""
        found = await self.kubectl.get("persistentvolumeclaims", claim)
        return str(found["spec"].get("volumeName", "")) if found else ""


async def typed(kubectl: Kubectl, *args: str, stdin: str = "") -> str:
    """kubectl as a person would type it, as a process of its own.

    Raises:
        PodpipeError: it failed.
        TimeoutError: no answer within `KUBECTL_SECONDS`.
    """
    argv = kubectl.argv(*args)
    try:
        with anyio.fail_after(KUBECTL_SECONDS):
            done = await anyio.run_process(
                argv,
                input=stdin.encode(),
                env=kubectl.environment,
                # ctrl-C is for the bench alone: what cleans up has to live on.
                start_new_session=True,
            )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()
        raise PodpipeError(f"{' '.join(argv)} failed: {said[-500:]}") from error
    return done.stdout.decode("utf-8", "replace")


def checked(result: dict[str, Any]) -> dict[str, Any]:
    """The structured content of a raw tool result.

    Raises:
        PodpipeError: the tool failed; a bench of failures measures nothing.
    """
    if result.get("isError"):
        raise PodpipeError("\n".join(c.get("text", "") for c in result["content"]))
    return dict(result.get("structuredContent") or {})


@asynccontextmanager
async def cleaned(host: Host, tell: Callable[[str], None]) -> AsyncIterator[Host]:
    """A throw-away user's host; at the end nothing of the user is left in the cluster."""
    async with host:
        try:
            yield host
        finally:
            tell("cleaning up")
            with anyio.fail_after(CLEANUP_SECONDS, shield=True):
                await _clean_up(host)


async def _clean_up(host: Host) -> None:
    for status in await host.launcher.list_all():
        await host.sessions.forget(status.sandbox.id)
        await host.launcher.destroy(status.sandbox.id)
    with suppress(LaunchFailed):  # it is going already
        await host.launcher.purge_home()
    claim = home_claim(host.settings.user_key)
    await typed(host.kubectl, "wait", "--for=delete", f"pvc/{claim}", f"--timeout={WAIT}")
