"""How a sandbox is told to a person: its status, and what is being waited for meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from host_client.clock import timestamp
from host_client.pod_view import PodView
from host_client.sandbox import Phase, Sandbox, current_pod, phase

ANEW = "The next call starts another; files in the home are kept, processes and /tmp are not"

Progress = Callable[[str], None]
"""Told what is being waited for, in a few words, whenever that changes."""


def silent(_: str) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class Status:
    """A sandbox as a person is told of it.

    Args:
        sandbox: its record.
        phase: what it is doing.
        pod: its present pod, if it has one.
        detail: why it is starting or has failed; empty otherwise.
    """

    sandbox: Sandbox
    phase: Phase
    pod: PodView | None
    detail: str

    def to_json(self) -> dict[str, Any]:
        """The form of `--json` and of structured tool results."""
        box = self.sandbox
        return {
            "sandbox_id": box.id,
            "name": box.name,
            "phase": self.phase,
            "detail": self.detail,
            "created_at": timestamp(box.created_at),
            "expires_at": timestamp(box.expires_at),
            "image": box.spec.image,
            "cpu_limit": box.spec.cpu_limit,
            "memory_limit": box.spec.memory_limit,
            "pod": self.pod.name if self.pod else "",
            "node": (self.pod.node or "") if self.pod else "",
            "restarts": self.pod.restarts if self.pod else 0,
            "user": box.user_id,
            "session": box.session_id,
        }


def status_of(sandbox: Sandbox, pods: Sequence[PodView], now: datetime) -> Status:
    """What a record and all its pods say together.

    Args:
        sandbox: the record.
        pods: every pod of it.
        now: for expiry.
    """
    pod = current_pod(sandbox, pods)
    shown = phase(sandbox, pods, now)
    detail = ""
    if pod and pod.deleting:
        detail = f"its pod is ending: {pod.why_ended}"
    elif shown == "starting":
        detail = pod.progress if pod else "its pod is not there yet"
    elif shown == "failed" and pod:
        if failure := pod.failure(now):
            detail = ": ".join(filter(None, failure))
        else:
            detail = f"its pod ended: {pod.why_ended or 'no reason is told'}. {ANEW}"
    elif shown == "suspended" and pod:
        detail = f"its pod ended by itself: {pod.why_ended}"
    elif shown == "running" and pod and pod.last_exit:
        detail = f"its container was restarted: {pod.last_exit}"
    return Status(sandbox.counted(now), shown, pod, detail)
