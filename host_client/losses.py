"""What a sandbox has lost, in sentences: between two calls, and under one that ran.

Files in the home are never lost; processes are with their container, scratch files with their pod.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import anyio

from host_client.backoff import pauses
from host_client.errors import (
    ContainerRestarted,
    PodpipeError,
    PodReplaced,
    SandboxEnded,
    SandboxExpired,
    SandboxNotFound,
    SessionLost,
)
from host_client.launcher import Launcher
from host_client.pod_view import PodView
from host_client.session import SandboxSession

log = logging.getLogger(__name__)

NEWS = "sandbox_news"
"""In a result's structured content: what the sandbox had lost before the call."""
REASON_SECONDS = 3.0
"""For finding out why a container ended: its status tells a second late."""
RETRY_SECONDS = (0.05, 1.0)
"""Between two looks at that: at first, and at most."""


class Losses:
    """What sandboxes lose between their calls, and why.

    Args:
        launcher: looks at them.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._served: dict[str, tuple[PodView, str] | None] = {}
        """By sandbox: the pod and the boot id that its last call went to; None once it was ended on
        purpose."""
        self._news: dict[str, str] = {}
        """By sandbox: what was lost between two calls, until a caller is told."""

    async def compare(self, session: SandboxSession) -> None:
        """Note what was lost since the last call on a sandbox."""
        box, now = session.sandbox.id, (session.pod, session.boot_id)
        unknown = box not in self._served
        before, self._served[box] = self._served.get(box), now
        if before is None:
            # Not by us; but it may be us who just found its pod gone and started another.
            why = self._launcher.why_ended(box) if unknown else ""
            lost = "pod" if why else ""
        elif before[0].uid != session.pod.uid:
            why = self._launcher.why_ended(box, before[0].uid) or "it was deleted or suspended"
            lost = "pod"
        else:
            lost = "container" if before[1] != session.boot_id else ""
            why = await self.why_restarted(box, before[0], 0.0) if lost else ""
        if lost == "pod":
            self._news[box] = (
                f"the pod of this sandbox was replaced ({why}). Files in the home survive; "
                "processes and what was in /tmp do not"
            )
        elif lost:
            self._news[box] = (
                f"the container of this sandbox was restarted{_because(why)}. Files and /tmp "
                "survive; processes that ran do not"
            )

    async def why_restarted(self, sandbox_id: str, before: PodView, patience: float) -> str:
        """Why the container of a pod ended after it was looked at; empty where that is not told.

        Args:
            sandbox_id: the sandbox.
            before: its pod, as it was then.
            patience: seconds to wait for a status that lags.
        """
        give_up = anyio.current_time() + patience
        for pause in pauses(*RETRY_SECONDS):
            try:
                pod = (await self._launcher.status(sandbox_id)).pod
            except PodpipeError as error:
                log.info("%s", error)
                break
            if pod is None or pod.uid != before.uid:
                break
            if pod.restarts > before.restarts:
                return pod.last_exit or ""
            if anyio.current_time() > give_up:
                break
            await anyio.sleep(pause)
        return ""

    def news(self, sandbox_id: str) -> str:
        """What a sandbox has lost without being asked to since its last call; told once."""
        return self._news.pop(sandbox_id, "")

    def meant(self, sandbox_id: str) -> None:
        """Note that a sandbox is ended on purpose: what it loses by that is no news."""
        self._served[sandbox_id] = None

    def replaced(self, tool: str, first: SandboxSession, session: SandboxSession) -> PodReplaced:
        """What to say of a call that began in another pod than the sandbox has now."""
        old, new = first.pod, session.pod
        self.news(session.sandbox.id)
        why = self._launcher.why_ended(session.sandbox.id, old.uid)
        return PodReplaced(
            f"pod {old.name} ({old.uid}) was deleted or ended{_because(why)} while {tool} ran in it, and "
            f"{new.name} ({new.uid}) took its place: the call may have run in part. Files in the home "
            "survive; processes and scratch files do not. Check before you call it again",
            old_uid=old.uid,
            new_uid=new.uid,
            reason=why,
        )

    async def restarted(
        self, session: SandboxSession, first: SandboxSession, tool: str, result: dict[str, Any]
    ) -> ContainerRestarted:
        """What to say of a call that an earlier start of the daemon had begun."""
        self._news.pop(session.sandbox.id, None)
        reason = await self.why_restarted(session.sandbox.id, first.pod, REASON_SECONDS)
        said = "\n".join(block.get("text", "") for block in result.get("content", []))
        return ContainerRestarted(
            f"the container of sandbox {session.sandbox.id} ended{_because(reason)} while {tool} ran: {said}. "
            "It may have run in part. Files in the home survive; processes do not. Check before "
            "you call it again",
            reason=reason,
        )


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def with_news(result: dict[str, Any], news: str) -> dict[str, Any]:
    """A result that also tells what was lost before the call, to readers of either half of it."""
    if not news:
        return result
    block = {"type": "text", "text": f"[before this {news}]"}
    told = result | {"content": [*result.get("content", []), block]}
    if isinstance(facts := result.get("structuredContent"), dict):
        told["structuredContent"] = facts | {NEWS: news}
    return told


def ended(tool: str, ref: str, error: SandboxNotFound | SandboxExpired) -> SandboxEnded:
    """What to say of a call that ran in a sandbox which is no more, as the error says."""
    reason: Literal["destroyed", "expired"] = (
        "expired" if isinstance(error, SandboxExpired) else "destroyed"
    )
    return SandboxEnded(
        f"sandbox {ref} was {reason} while {tool} ran ({error}): the call may have run in part. "
        "The home survives; processes do not. Create a sandbox to look at the files",
        reason=reason,
    )


def unknown(tool: str, why: str) -> SessionLost:
    """What to say of a call whose answer cannot be had."""
    return SessionLost(
        f"{tool} was sent and its answer is lost ({why}): it may have run. Check its effects before "
        "you call it again (files survive; list_processes shows what is running)",
        sent=True,
    )
