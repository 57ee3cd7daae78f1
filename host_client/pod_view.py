"""What a Pod says of itself: whether it runs, why it does not, and why it ended. Pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from host_client.clock import parse_timestamp
from in_pod_server import contract as c

Object = Mapping[str, Any]

UNSCHEDULABLE_GRACE_SECONDS = 8.0
"""A new volume makes a pod unschedulable for a moment; longer than this it is the cluster's word."""

SCHEDULER_LAG_SECONDS = 30.0
"""After a restart of the API server the scheduler knows neither new claims nor their volumes for a
while, and says that they are not there; and a node that comes back is tainted until it is ready."""
_NOT_SEEN_YET = re.compile(
    r'persistentvolume(claim)? "[^"]*" not found|non-existent pv'
    r"|unbound immediate PersistentVolumeClaims|untolerated taint"
)

SERVED_SECONDS = 2.0
"""A daemon answers half a second after its start; a container that lived this long had served."""
TOLD_TO_END = frozenset({137, 143})
"""Exit codes of a container that did not end by itself: KILL and TERM."""

_NOT_PULLABLE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
_NOT_STARTABLE = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}
)


@dataclass(frozen=True, slots=True)
class PodView:
    """What podpipe reads of a Pod; None means "not published yet", not "empty"."""

    name: str
    uid: str
    phase: str
    deleting: bool
    created_at: datetime
    node: str | None
    container_running: bool
    waiting_reason: str | None
    waiting_message: str
    restarts: int
    last_exit: str | None
    """Why the container ended before, for example "OOMKilled, exit code 137"."""
    crashed: bool
    """Whether it ended by itself so soon that it cannot have been of use: a bad image, say."""
    unschedulable: str | None
    finished_at: datetime | None
    """When its container ended for the last time; the node's clock."""
    ended_reason: str
    """Why the whole pod ended or is being ended, as Kubernetes says it, for example "Evicted: Usage of
    EmptyDir volume "tmp" exceeds the limit"; empty where it does not say."""
    led_by: str = ""
    """What of the cluster leads to its gateway, as `Gateway.name`; empty for nothing."""

    @property
    def ended(self) -> bool:
        """Whether it will never run again."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def why_ended(self) -> str:
        """The best that is known of why it ended; empty while it lives."""
        if self.deleting:
            return self.ended_reason or "it was deleted"
        return (self.ended_reason or self.last_exit or "") if self.ended else ""

    @property
    def has_run(self) -> bool:
        """Whether its container was ever started."""
        return self.container_running or self.last_exit is not None or self.phase != "Pending"

    @classmethod
    def from_object(cls, pod: Object) -> Self:
        """Parse a Pod as the API gives it."""
        metadata, status = pod["metadata"], pod.get("status", {})
        container: Object = next(
            (s for s in status.get("containerStatuses", []) if s.get("name") == c.CONTAINER), {}
        )
        state = container.get("state", {})
        waiting = state.get("waiting", {})
        ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
        scheduled: Object = next(
            (s for s in status.get("conditions", []) if s.get("type") == "PodScheduled"), {}
        )
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            phase=status.get("phase", "Pending"),
            deleting="deletionTimestamp" in metadata,
            created_at=parse_timestamp(metadata["creationTimestamp"]),
            node=pod["spec"].get("nodeName"),
            container_running="running" in state,
            waiting_reason=waiting.get("reason"),
            waiting_message=waiting.get("message", ""),
            restarts=container.get("restartCount", 0),
            last_exit=_exit_text(ended) if ended else None,
            crashed=bool(ended) and _crashed(ended),
            finished_at=_finished_at(state.get("terminated", {})),
            unschedulable=scheduled.get("message", "no node fits")
            if scheduled.get("reason") == "Unschedulable"
            else None,
            ended_reason=_ended_reason(status) or state.get("terminated", {}).get("message", ""),
            led_by=metadata.get("annotations", {}).get(c.ANNOTATION_GATEWAY, ""),
        )

    def failure(self, now: datetime) -> tuple[str, str] | None:
        """Why this pod will not come up: (Kubernetes' reason, its message), or None while it may.

        Args:
            now: the API server's time as far as known; only for how long it has been waiting.
        """
        if self.waiting_reason in _NOT_PULLABLE | _NOT_STARTABLE:
            return self.waiting_reason, self.waiting_message
        if self.restarts >= 1 and not self.container_running and self.crashed:
            return "CrashLoopBackOff", f"the container keeps ending: {self.last_exit}"
        age = (now - self.created_at).total_seconds()
        behind = _NOT_SEEN_YET.search(self.unschedulable or "")
        grace = SCHEDULER_LAG_SECONDS if behind else UNSCHEDULABLE_GRACE_SECONDS
        if self.unschedulable and age >= grace:
            return "Unschedulable", self.unschedulable
        return None

    @property
    def progress(self) -> str:
        """What a pod that is not running yet is doing, in a few words."""
        if self.unschedulable:
            return f"waiting for a node: {self.unschedulable}"
        if self.node is None:
            return "waiting for a node"
        if self.last_exit and not self.container_running:
            return f"its container ended ({self.last_exit}) and is started again"
        if self.waiting_reason in (None, "ContainerCreating", "PodInitializing"):
            return "mounting the home and pulling the image"
        return f"{self.waiting_reason}"


def _crashed(terminated: Object) -> bool:
    """Whether a container that ended never served: killed ones did, unless memory ran out at once."""
    if terminated.get("exitCode") in TOLD_TO_END and terminated.get("reason") != "OOMKilled":
        return False
    try:
        started, finished = (parse_timestamp(terminated[k]) for k in ("startedAt", "finishedAt"))
    except (KeyError, TypeError, ValueError):
        return True
    return (finished - started).total_seconds() < SERVED_SECONDS


def _finished_at(terminated: Object) -> datetime | None:
    try:
        return parse_timestamp(terminated["finishedAt"])
    except (KeyError, TypeError, ValueError):
        return None


def _ended_reason(status: Object) -> str:
    """From the status itself, or from the condition that an eviction, a drain or a lost node leaves."""
    disrupted: Object = next(
        (
            condition
            for condition in status.get("conditions", [])
            if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
        ),
        {},
    )
    source = status if status.get("reason") else disrupted
    said = (source.get("reason"), source.get("message"))
    return ": ".join(text.strip(" .") for text in said if text)


def _exit_text(terminated: Object) -> str:
    reason = terminated.get("reason") or "ended"
    return f"{reason}, exit code {terminated.get('exitCode')}"
