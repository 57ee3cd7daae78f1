"""Pods that go: asked to end, and waited for until nothing of them can write to the home."""

from __future__ import annotations

import anyio

from host_client.backends.backend import Backend
from host_client.errors import LaunchFailed, StillStarting
from host_client.pod_view import PodView
from host_client.rising import POLL_SECONDS
from host_client.sandbox import Sandbox
from host_client.status import Progress
from in_pod_server.contract import STOP_GRACE_SECONDS

STOP_WAIT_SECONDS = STOP_GRACE_SECONDS + 20.0
"""A pod is gone a moment after its grace; much longer means a node that does not answer."""
STATUS_LAG_SECONDS = 5.0
"""A pod's status tells a second late that its container runs; this is surely enough."""


async def stop_all(backend: Backend, sandbox: Sandbox) -> list[PodView]:
    """Ask every pod of a sandbox to end; those that exist, asked or not."""
    pods = await backend.pods_left(sandbox)
    for pod in pods:
        if not pod.deleting:
            await backend.stop(pod)
    return pods


async def gone(backend: Backend, sandbox: Sandbox) -> None:
    """Wait until no pod of the sandbox runs or could still write to its home.

    One that is being deleted and never ran is not waited for long: the kubelet may keep it until
    an image is pulled that nobody wants any more. Its status lags, so it is given a moment to
    show that it did run.
    """
    began = anyio.current_time()
    deadline = began + STOP_WAIT_SECONDS
    while left := await stop_all(backend, sandbox):
        settled = anyio.current_time() - began >= STATUS_LAG_SECONDS
        if settled and all(pod.deleting and not pod.has_run for pod in left):
            return
        if anyio.current_time() >= deadline:
            raise StillStarting(
                f"pod {', '.join(pod.name for pod in left)} of sandbox {sandbox.id} is still ending after "
                f"{STOP_WAIT_SECONDS:.0f} s; its node may not answer",
                detail="its pod is still ending",
            )
        await anyio.sleep(POLL_SECONDS)


async def outlive_predecessors(
    backend: Backend, sandbox: Sandbox, *, deadline: float, progress: Progress
) -> None:
    """Wait for the pods of a destroyed sandbox of this name: two must not write to one home."""
    began = anyio.current_time()
    while left := await backend.predecessors(sandbox):
        settled = anyio.current_time() - began >= STATUS_LAG_SECONDS
        if settled and all(pod.deleting and not pod.has_run for pod in left):
            return
        progress(f"waiting for pod {left[0].name} to end")
        if anyio.current_time() >= deadline:
            raise LaunchFailed(
                f"sandbox {sandbox.id} cannot start: pod {left[0].name} of the sandbox that had "
                "this name before is still ending. Try again in a minute",
                reason="Predecessor",
            )
        await anyio.sleep(POLL_SECONDS)
