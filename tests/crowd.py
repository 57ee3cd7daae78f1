"""Very many sandboxes that cost a node nothing: records whose pods are never scheduled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import anyio

from host_client import manifest
from host_client.clock import utc_now
from host_client.config import Settings
from host_client.kubectl import Kubectl
from host_client.sandbox import draft_sandbox
from in_pod_server import contract as c

SELECTOR = f"{c.LABEL_MANAGED_BY}={c.PREFIX}"
BATCH = 500
WRITERS = 3
GATE = "podpipe.test/never"
CALL_SECONDS = 300.0

Tell = Callable[[str], None]


@dataclass(slots=True)
class Crowd:
    """A namespace full of sandboxes.

    Args:
        kubectl: of the namespace.
        settings: of one of its users.
    """

    kubectl: Kubectl
    settings: Settings

    async def add(self, count: int, *, users: int = 1, expired: bool = False, tell: Tell) -> None:
        """Make sandboxes with their pods, shared out among users.

        Args:
            count: sandboxes.
            users: the first is the settings' own.
            expired: whether their time is over.
            tell: told how far it is.
        """
        now = utc_now()
        waiting = [range(at, min(at + BATCH, count)) for at in range(0, count, BATCH)]

        async def work() -> None:
            while waiting:
                await self._batch(waiting.pop(), users, now, expired)
                tell(f"{count - BATCH * len(waiting)} of {count} sandboxes")

        async with anyio.create_task_group() as tasks:
            for _ in range(WRITERS):
                tasks.start_soon(work)

    async def _batch(self, numbers: range, users: int, now: datetime, expired: bool) -> None:
        drafts = []
        for number in numbers:
            user = (
                f"{self.settings.user}-{number % users}" if number % users else self.settings.user
            )
            settings = replace(self.settings, user=user)
            draft = draft_sandbox(settings, now - timedelta(minutes=30))
            ends = now + timedelta(minutes=-5 if expired else 60)
            drafts.append((settings, replace(draft, state="Running", expires_at=ends)))
        made = await self._create([manifest.record(draft, owner) for owner, draft in drafts])
        await self._create(
            [
                _gated(manifest.pod(replace(draft, uid=uid), owner, "", ["ReadWriteMany"]))
                for (owner, draft), uid in zip(drafts, made, strict=True)
            ]
        )

    async def _create(self, objects: list[manifest.Object]) -> list[str]:
        """Create objects; their uids, in that order."""
        bundle = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        said = await self.kubectl.run(
            "create", "--validate=false", "-f", "-", "-o", "jsonpath={.metadata.uid} ",
            stdin=bundle, timeout=CALL_SECONDS,
        )  # fmt: skip
        uids = said.split()
        if len(uids) != len(objects):
            raise AssertionError(f"{len(objects)} objects were to be made, and {len(uids)} were")
        return uids


def _gated(pod: manifest.Object) -> dict[str, Any]:
    """A pod that no scheduler looks at, and that fits no node."""
    spec = pod["spec"] | {
        "schedulingGates": [{"name": GATE}],
        "nodeSelector": {GATE: "no-node-has-this"},
    }
    return pod | {"spec": spec}


@asynccontextmanager
async def crowd(settings: Settings, namespace: str, tell: Tell) -> AsyncIterator[Crowd]:
    """A namespace of its own, empty at first and gone afterwards.

    Args:
        settings: the cluster, and the user whose sandboxes are looked at.
        namespace: to make.
        tell: told what is being done.
    """
    own = replace(settings, namespace=namespace)
    kubectl = Kubectl(own)
    await kubectl.run("create", "namespace", namespace)
    try:
        yield Crowd(kubectl, own)
    finally:
        tell("removing them")
        with anyio.CancelScope(shield=True):
            # The cluster's own way with a namespace takes its objects by kind, not one by one, and
            # goes on by itself.
            await kubectl.run("delete", "namespace", namespace, "--wait=false")
