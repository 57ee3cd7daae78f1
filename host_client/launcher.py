"""The life of sandboxes: create, find, start, suspend, resume, extend, destroy.

Policy lives here (whose sandbox, expired or not, wait or fail); objects live in the backend. A call
on a sandbox that is suspended, or whose pod ended, starts its next incarnation; a call on an
expired one is refused for good. All waiting is polling of JSON, so that a reason to fail shows at
once and a cancelled caller stops waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import anyio

from host_client import audit
from host_client.backends.backend import Backend
from host_client.clock import Clock, timestamp
from host_client.config import Settings
from host_client.ending import STOP_WAIT_SECONDS, gone, outlive_predecessors, stop_all
from host_client.errors import (
    Conflict,
    LaunchFailed,
    NameTaken,
    PodpipeError,
    SandboxExpired,
    SandboxNotFound,
    SandboxSuspended,
    StillStarting,
    root_cause,
)
from host_client.identity import MAX_NAME, is_sandbox_id, named_sandbox_id, user_key
from host_client.pod_view import PodView
from host_client.rising import POLL_SECONDS, Connect, answering
from host_client.room import Room
from host_client.sandbox import Sandbox, current_pod, draft_sandbox
from host_client.status import Progress, Status, silent, status_of
from in_pod_server.contract import CALL_LIMIT_SECONDS

log = logging.getLogger(__name__)

START_WAIT_SECONDS = CALL_LIMIT_SECONDS - 10.0
"""How long one call waits for a pod; the rest of a client's patience is for the call itself."""
_GONE = frozenset({"Deleted", "Ended"})
"""Reasons of a LaunchFailed that say nothing against another pod of the same sandbox."""

Found = TypeVar("Found")


class Launcher:
    """The sandboxes of one user.

    Args:
        backend: where they live.
        settings: whose they are and how they are made.
        connect: finds out whether a pod answers.
        clock: what expiry is judged by; shared with the pipes.
    """

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        connect: Connect,
        clock: Clock | None = None,
    ) -> None:
        self._backend = backend
        self._connect = connect
        self._settings = settings
        self._key = user_key(settings.user)
        self._clock = clock or Clock()
        self._room = Room(backend.records, settings, lambda: self._clock.now())
        self._ends: dict[str, tuple[str, str]] = {}

    @property
    def warnings(self) -> list[str]:
        """What a person should know about how sandboxes are made here."""
        return self._backend.warnings

    async def create(
        self,
        *,
        name: str = "",
        ttl_minutes: int | None = None,
        cpu_limit: str = "",
        memory_limit: str = "",
        access: str = "",
        lasting: bool = False,
        progress: Progress = silent,
    ) -> Status:
        """Make a sandbox and wait until it answers, at most `START_WAIT_SECONDS`.

        Args:
            name: for a lasting one, found again by this name; empty for a random id.
            ttl_minutes: lifetime; None for the setting's default.
            cpu_limit: Kubernetes quantity; empty for the default.
            memory_limit: likewise.
            access: who may open its apps, as ANNOTATION_ACCESS.
            lasting: whether it stays where the caller is cancelled, for others may wait for it.
            progress: told what is being waited for.

        Returns:
            Its status: running, or still starting with a detail.

        Raises:
            UsageError: an argument makes no sense; nothing was made.
            LimitReached: there are as many sandboxes as there may be; nothing was made.
            NameTaken: the name or the home's name is not free; nothing was made.
            LaunchFailed: the pod cannot start; what this call made was deleted again.
        """
        draft = draft_sandbox(
            self._settings, self._clock.now(), name, ttl_minutes, cpu_limit, memory_limit
        )
        draft = replace(draft, access=access)
        progress("asking the cluster")
        deadline = anyio.current_time() + START_WAIT_SECONDS
        claimed: list[Sandbox] = []
        homes: list[Mapping[str, Any] | None] = []
        pods: list[PodView] = []

        async def find_home() -> None:
            homes.append(await self._backend.home())

        async def start(sandbox: Sandbox) -> None:
            pod = await self._backend.start(sandbox, homes[0])
            wait = deadline - anyio.current_time()
            pods.append(await self._answering(sandbox, pod, wait, progress))

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._room.refuse_full)
                tasks.start_soon(find_home)
                tasks.start_soon(self._backend.cluster_classes)
                if cpu_limit or memory_limit:  # the defaults are fine on a laptop that has less
                    tasks.start_soon(self._backend.refuse_oversized, draft.spec)
            asked = self._clock.local()
            sandbox = await self._backend.claim(draft)
            claimed.append(sandbox)
            self._clock.hear(sandbox.created_at, asked)
            audit.concerns(sandbox.id)
            if name:
                await outlive_predecessors(
                    self._backend, sandbox, deadline=deadline, progress=progress
                )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._room.refuse_full, sandbox)
                tasks.start_soon(start, sandbox)
            sandbox = await self._made(sandbox)
        except BaseException as error:
            if isinstance(cause := root_cause(error), StillStarting):
                return Status(await self._made(claimed[0]), "starting", None, cause.detail)
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            if claimed and not (lasting and cancelled):
                with anyio.CancelScope(shield=True):
                    await self._undo(claimed[0], had_home=homes != [None])
            raise root_cause(error) from None
        return Status(sandbox, "running", pods[0], "")

    async def _answering(
        self, sandbox: Sandbox, pod: PodView, wait: float, progress: Progress
    ) -> PodView:
        return await answering(
            self._backend, self._connect, sandbox, pod,
            wait=wait, progress=progress, now=self._clock.now,
        )  # fmt: skip

    async def _made(self, sandbox: Sandbox) -> Sandbox:
        """Note that somebody is told of the sandbox now, so that it lives until it expires."""
        while sandbox.state == "Creating":
            try:
                return await self._backend.update(sandbox, replace(sandbox, state="Running"))
            except Conflict:
                sandbox, _ = await self._backend.observe(sandbox.id)
        return sandbox

    async def ensure(self, name: str, *, progress: Progress = silent) -> None:
        """Make the lasting sandbox `name` where there is none, or anew where it has expired.

        Expiry is final, but what has expired is only a record: its pod has ended, its home is
        kept. Whoever asks at the same time finds what was made.

        Args:
            name: as for `create`.
            progress: told what is being waited for.

        Raises:
            PodpipeError: as `create`.
        """
        try:
            sandbox, _ = await self.find(name)
        except SandboxNotFound:
            pass
        else:
            if not await self._expired(sandbox):
                return
            log.info("sandbox %s has expired and is made anew", sandbox.id)
            with anyio.CancelScope(shield=True):
                await self._backend.delete(sandbox)  # this very record, by its uid
                await stop_all(self._backend, sandbox)
            progress("waiting for the pod to end")
            await gone(self._backend, sandbox)
        try:
            await self.create(name=name, lasting=True, progress=progress)
        except NameTaken:
            try:
                await self.find(name)  # somebody else was first
            except SandboxNotFound:
                pass
            else:
                return
            raise

    async def _undo(self, sandbox: Sandbox, *, had_home: bool) -> None:
        """Remove what a failed create made; what cannot be removed is logged by name."""
        try:
            with anyio.fail_after(STOP_WAIT_SECONDS):
                await self._backend.delete(sandbox)
                await gone(self._backend, sandbox)
                if not had_home and not await self._backend.users_of_home():
                    await self.purge_home()
        except (PodpipeError, TimeoutError) as error:
            log.error("sandbox %s is not wholly cleaned up: %s", sandbox.id, error)  # noqa: TRY400

    async def find(self, ref: str) -> tuple[Sandbox, list[PodView]]:
        """This user's sandbox with the id or name `ref`, and its pods.

        Raises:
            SandboxNotFound: there is none, or it is somebody else's (which is not told).
        """
        missing = SandboxNotFound(
            f"no sandbox {ref[:80]!r} of user {self._settings.user!r} in namespace "
            f"{self._settings.namespace}; `podpipe list` (list_sandboxes) shows what there is"
        )
        if not is_sandbox_id(ref):
            raise missing
        candidates = [ref]
        if len(ref) <= MAX_NAME:
            candidates.append(named_sandbox_id(self._key, ref))
        for sandbox_id in candidates:
            try:
                sandbox, pods = await self._backend.observe(sandbox_id)
            except SandboxNotFound:
                continue
            if self._owns(sandbox):
                audit.concerns(sandbox.id)
                return sandbox, pods
        raise missing

    async def find_living(self, ref: str) -> tuple[Sandbox, list[PodView]]:
        """As `find`, with the clock set.

        Raises:
            SandboxNotFound: as `find`.
            SandboxExpired: its time is over.
        """
        sandbox, pods = await self._on_time(lambda: self.find(ref))
        await self._refuse_expired(sandbox)
        return sandbox, pods

    def _owns(self, sandbox: Sandbox) -> bool:
        """Whether it is this user's: a label can be chosen to look so, and the true id is long."""
        return sandbox.user_key == self._key and sandbox.user_id == self._settings.user

    async def list_all(self, *, of_all_users: bool = False) -> list[Status]:
        """All of this user's sandboxes, oldest first.

        Args:
            of_all_users: those of everybody too; whoever may list records in the namespace can.
        """
        owner = "" if of_all_users else self._key
        found = await self._on_time(lambda: self._backend.owned_by(owner))
        return [
            status_of(sandbox, pods, self._clock.now())
            for sandbox, pods in found
            if of_all_users or self._owns(sandbox)
        ]

    async def status(self, ref: str) -> Status:
        """One sandbox, as it is now."""
        sandbox, pods = await self._on_time(lambda: self.find(ref))
        return status_of(sandbox, pods, self._clock.now())

    async def _on_time(self, look: Callable[[], Awaitable[Found]]) -> Found:
        """What a look at the cluster gives, with the clock set beside it."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._set_clock)
                found = await look()
        except BaseExceptionGroup as group:
            raise root_cause(group) from None
        return found

    def why_ended(self, sandbox_id: str, uid: str = "") -> str:
        """Why the pod of a sandbox that did not end by request ended, as far as was seen here.

        Args:
            sandbox_id: the sandbox.
            uid: of the pod; empty for whichever was seen last.
        """
        seen, why = self._ends.get(sandbox_id, ("", ""))
        return why if uid in ("", seen) else ""

    async def running(
        self,
        ref: str,
        *,
        wait: float = START_WAIT_SECONDS,
        progress: Progress = silent,
        resume: bool = True,
    ) -> tuple[Sandbox, PodView]:
        """A sandbox that answers, started or resumed if need be.

        Args:
            ref: id or name.
            wait: seconds to wait for it.
            progress: told what is being waited for.
            resume: whether one that is suspended may be.

        Raises:
            SandboxNotFound: no such sandbox of this user.
            SandboxExpired: its time is over.
            SandboxSuspended: it is, and `resume` is false.
            StillStarting: not within `wait`.
            LaunchFailed: its pod cannot start. The record stays, suspended.
        """
        deadline = anyio.current_time() + wait
        sandbox, pods = await self.find(ref)
        while True:
            await self._refuse_expired(sandbox)
            pod = current_pod(sandbox, pods)
            slept = pod is not None and pod.phase == "Succeeded"
            if (sandbox.state == "Suspended" or slept) and not resume:
                raise SandboxSuspended(
                    f"sandbox {sandbox.id} is suspended: nothing was sent. Its files are kept, its "
                    f"processes are not. Resume it first (resume_sandbox, `podpipe resume "
                    f"{sandbox.id}`), or let calls do so with PODPIPE_RESUME=auto"
                )
            if pod and sandbox.state != "Suspended" and (pod.deleting or pod.ended):
                self._ends[sandbox.id] = (pod.uid, pod.why_ended)
            # A volume that one node writes: the new pod must not start beside an old one, and one
            # that nobody asked to end (its host died, say) has to be asked.
            wanted = pod if pod and sandbox.state != "Suspended" and not pod.deleting else None
            leaving = [p for p in pods if not p.ended and p is not wanted]
            for old in leaving:
                if not old.deleting:
                    await self._backend.stop(old)
            if leaving:
                progress(f"waiting for pod {leaving[0].name} to end")
                if anyio.current_time() >= deadline:
                    raise StillStarting(
                        f"sandbox {sandbox.id} cannot start yet: pod {leaving[0].name} is still "
                        f"ending after {wait:.0f} s. Call again to go on waiting",
                        detail=f"pod {leaving[0].name} is still ending",
                    )
                await anyio.sleep(POLL_SECONDS)
            elif sandbox.state == "Suspended" or (pod and pod.ended):
                await self._set_clock()
                await self._refuse_expired(sandbox)
                await self._next_incarnation(sandbox)
            else:
                made = pod is None
                if pod is None:
                    pod = await self._backend.start(sandbox, await self._backend.home())
                left = deadline - anyio.current_time()
                try:
                    risen = await self._answering(sandbox, pod, left, progress)
                except LaunchFailed as failed:
                    if made or failed.reason not in _GONE:
                        with anyio.CancelScope(shield=True):
                            await self._suspend_failed(sandbox, pod)
                        raise
                    # It was on its way out when we looked, which its status tells a second late.
                    log.info("%s", failed)
                else:
                    if not made:
                        return await self._made(sandbox), risen
                    # Somebody may have suspended it between our reading and our making.
                    current, _ = await self._backend.observe(sandbox.id)
                    if current.state != "Suspended" and current.incarnation == sandbox.incarnation:
                        return await self._made(current), risen
                    await self._backend.stop(risen)
            sandbox, pods = await self._backend.observe(sandbox.id)

    async def _expired(self, sandbox: Sandbox) -> bool:
        """Whether its time is over, which this machine's clock alone cannot tell."""
        if sandbox.expired(self._clock.now()):
            await self._set_clock()
        return sandbox.expired(self._clock.now())

    async def _set_clock(self) -> None:
        """Hear the API server's time, unless it was heard lately."""
        if self._clock.unsure:
            asked = self._clock.local()
            if theirs := await self._backend.server_time():
                self._clock.hear(theirs, asked)

    async def _refuse_expired(self, sandbox: Sandbox) -> None:
        if await self._expired(sandbox):
            raise SandboxExpired(
                f"sandbox {sandbox.id} expired at {timestamp(sandbox.expires_at)} and stays so; "
                "its home is kept. Create a new sandbox to go on with the same files"
            )

    async def _next_incarnation(self, sandbox: Sandbox) -> None:
        """Raise the incarnation by compare-and-swap; whoever loses goes by what the winner wrote."""
        wanted = sandbox.resumed(self._clock.now())
        try:
            await self._backend.update(sandbox, wanted)
        except Conflict:
            log.info("sandbox %s was changed by somebody else", sandbox.id)

    async def _suspend_failed(self, sandbox: Sandbox, pod: PodView) -> None:
        """A pod that cannot start is not left to retry for ever; the record stays."""
        try:
            await self._backend.update(sandbox, sandbox.suspended(self._clock.now()))
            await self._backend.stop(pod)
        except PodpipeError as error:
            log.warning("pod %s of a failed start was left: %s", pod.name, error)

    async def suspend(self, ref: str, *, progress: Progress = silent) -> Status:
        """End the pod and keep record and home; returns when the pod is gone.

        Raises:
            SandboxExpired: there is nothing to suspend any more.
            StillStarting: the pod is still ending after `STOP_WAIT_SECONDS`.
        """
        sandbox, _ = await self.find(ref)
        await self._refuse_expired(sandbox)
        # Once the record says so the pods have to go too, whoever has lost interest meanwhile.
        with anyio.CancelScope(shield=True):
            while sandbox.state != "Suspended":
                try:
                    wanted = sandbox.suspended(self._clock.now())
                    sandbox = await self._backend.update(sandbox, wanted)
                except Conflict:
                    sandbox, _ = await self._backend.observe(sandbox.id)
            await stop_all(self._backend, sandbox)
        progress("waiting for the pod to end")
        await gone(self._backend, sandbox)
        return Status(sandbox, "suspended", None, "")

    async def extend(self, ref: str, ttl_minutes: int) -> Status:
        """Let a sandbox live `ttl_minutes` from now, never shorter than it would have.

        Its pods cannot outlive created_at + the maximum; the answer's expires_at says what holds.

        Raises:
            UsageError: outside 1 to the maximum.
            SandboxExpired: too late.
        """
        sandbox, pods = await self._on_time(lambda: self.find(ref))
        while True:
            await self._refuse_expired(sandbox)
            sandbox = sandbox.counted(self._clock.now())
            wanted = sandbox.with_lifetime(self._clock.now(), ttl_minutes)
            if wanted.expires_at <= sandbox.expires_at:
                return status_of(sandbox, pods, self._clock.now())
            try:
                sandbox = await self._backend.update(sandbox, wanted)
            except Conflict:
                sandbox, pods = await self._backend.observe(sandbox.id)
                continue
            if pod := current_pod(sandbox, pods):
                await self._backend.announce(sandbox, pod)
            return status_of(sandbox, pods, self._clock.now())

    async def destroy(self, ref: str, *, progress: Progress = silent) -> Sandbox:
        """Delete a sandbox and wait until its pods are gone; the home is kept.

        Raises:
            StillStarting: a pod is still ending after `STOP_WAIT_SECONDS`; the record is gone.
        """
        sandbox, _ = await self.find(ref)
        with anyio.CancelScope(shield=True):
            await self._backend.delete(sandbox)
            # The garbage collector would come to them; asking directly saves its delay.
            await stop_all(self._backend, sandbox)
        progress("waiting for the pod to end")
        await gone(self._backend, sandbox)
        return sandbox

    async def purge_home(self) -> bool:
        """Delete this user's home for good; never offered to a model.

        Returns:
            Whether there was one.

        Raises:
            PodpipeError: a sandbox of this user still uses it.
        """
        if users := await self._backend.users_of_home():
            raise PodpipeError(f"the home is in use by {', '.join(users)}; destroy them first")
        home = await self._backend.home()
        if home is None:
            return False
        return await self._backend.delete_home(home["metadata"]["uid"])
