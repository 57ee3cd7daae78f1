"""A pod that comes up: waited for until its daemon answers, or until it is known that it never will."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime

import anyio

from host_client.backends.backend import Backend
from host_client.backoff import pauses
from host_client.errors import LaunchFailed, SessionLost, StillStarting, root_cause
from host_client.pod_view import PodView
from host_client.sandbox import Sandbox
from host_client.status import Progress

log = logging.getLogger(__name__)

POLL_SECONDS = 0.3
"""Pause between two looks at a pod: its status lags a second behind anyhow."""
DIAL_SECONDS = (0.03, 0.5)
"""Pause between two tries to reach a daemon: at first, and at most. A container answers most of a
second before its status says that it runs, so trying is what finds out first."""

Connect = Callable[[Sandbox, PodView], Awaitable[None]]
"""Returns once the daemon of this very pod has answered, which is what ready means; raises
SessionLost while it does not."""


async def answering(
    backend: Backend,
    connect: Connect,
    sandbox: Sandbox,
    pod: PodView,
    *,
    wait: float,
    progress: Progress,
    now: Callable[[], datetime],
) -> PodView:
    """Wait until the daemon of this very pod answers.

    Tries to reach it, and beside that looks at the pod for a reason why it never will.

    Args:
        backend: where it is.
        connect: reaches it.
        sandbox: its record.
        pod: as it was when it was made or found.
        wait: seconds.
        progress: told what is being waited for.
        now: the API server's time, which says how long a pod has been waiting.

    Returns:
        The newest view of the pod.

    Raises:
        LaunchFailed: Kubernetes says that it will not, or the pod was replaced or deleted.
        StillStarting: not within `wait` seconds.
        PodpipeError: it answered, and cannot be talked to.
    """
    latest = pod
    unanswered = ""

    async def watch() -> None:
        nonlocal latest
        deadline = anyio.current_time() + wait
        while True:
            progress("connecting" if latest.container_running else latest.progress)
            await anyio.sleep(max(0.0, min(POLL_SECONDS, deadline - anyio.current_time())))
            _, pods = await backend.observe(sandbox.id)
            latest = await _still_rising(backend, sandbox, pod, pods, now())
            if anyio.current_time() >= deadline:
                detail = latest.progress
                hint = ""
                if latest.container_running:
                    detail = f"its container runs but does not answer: {unanswered}"
                    hint = ". If it stays so, suspend and resume it: files in the home are kept"
                raise StillStarting(
                    f"sandbox {sandbox.id} is still starting ({detail}). "
                    f"Call again to go on waiting{hint}",
                    detail=detail,
                )

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            for pause in pauses(*DIAL_SECONDS):
                try:
                    await connect(sandbox, pod)
                    break
                except SessionLost as error:
                    unanswered = str(error)
                    log.debug("not yet: %s", error)
                await anyio.sleep(pause)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise root_cause(group) from None
    return replace(latest, container_running=True)


async def _still_rising(
    backend: Backend, sandbox: Sandbox, pod: PodView, pods: list[PodView], now: datetime
) -> PodView:
    """The newest view of a pod that is coming up.

    Raises:
        LaunchFailed: it will not come up.
    """
    latest = next((p for p in pods if p.uid == pod.uid), None)
    if latest is None or latest.deleting:
        raise LaunchFailed(
            f"sandbox {sandbox.id}: pod {pod.name} was deleted while starting",
            reason="Deleted",
        )
    if failure := latest.failure(now):
        reason, message = failure
        if reason == "CrashLoopBackOff":
            said = await backend.last_words(latest)
            message += f"; it said: {said}" if said else ""
        raise LaunchFailed(
            f"sandbox {sandbox.id} cannot start, {reason}: {message}. "
            f"{_next_step(reason, message, sandbox)}",
            reason=reason,
        )
    if latest.ended:
        raise LaunchFailed(
            f"sandbox {sandbox.id}: pod {pod.name} ended while starting "
            f"({'; '.join(filter(None, (latest.ended_reason or latest.phase, latest.last_exit)))})",
            reason="Ended",
        )
    return latest


def _next_step(reason: str, message: str, sandbox: Sandbox) -> str:
    """What to do about a launch failure."""
    if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        return (
            f"Check the image {sandbox.spec.image!r} (setting SANDBOX_IMAGE) and that the nodes can "
            "pull it; `scripts/image load` puts a local one there"
        )
    if "PersistentVolumeClaim" in message:
        return (
            "The home has no volume: check the storage class (setting DEFAULT_STORAGE_CLASS; "
            "`kubectl get storageclass` lists them)"
        )
    if "pod affinity" in message:
        return (
            "Its home is on the node where other sandboxes of yours run, and there is no room left: "
            "suspend or destroy one of them, or ask for less"
        )
    if "untolerated taint" in message:
        return "Nodes are not ready or kept for others (`kubectl get nodes`): try again when one is"
    if reason == "Unschedulable":
        return (
            f"It asks for cpu {sandbox.spec.cpu_request} and memory {sandbox.spec.memory_request}; "
            "ask for less, destroy other sandboxes, or add a node"
        )
    if reason in ("CrashLoopBackOff", "RunContainerError", "CreateContainerError", "StartError"):
        return f"Is {sandbox.spec.image!r} (setting SANDBOX_IMAGE) a podpipe image, and of this version?"
    return "Nothing of it was left behind"
