"""A running sandbox deleted, and suspended, beside a bare pod that kubectl deletes.

What is timed ends when the pod is gone. The bare pod has the same image and limits; it runs `sleep`,
which as process 1 hears no TERM, with a grace of one second.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import anyio

from host_client.host import Host
from host_client.launcher import Launcher
from tests.bench.harness import Row, Sample, Sides
from tests.bench.lab import CLEANUP_SECONDS, LABEL, PLAIN_CALL, WAIT, Lab, checked, cleaned
from tests.bench.row_create import like_ours

NAME = "ends"
LIMIT_SECONDS = 5.0

End = Callable[[Launcher], Awaitable[object]]


async def _running(host: Host) -> None:
    """A sandbox that has answered, as one in use has."""
    known = [status.sandbox.name for status in await host.launcher.list_all()]
    if NAME not in known:
        await host.launcher.create(name=NAME)
    checked(await host.sessions.call(NAME, *PLAIN_CALL))


async def _ended(host: Host, end: End) -> Sample:
    await _running(host)
    began = time.perf_counter()
    await end(host.launcher)
    took = time.perf_counter() - began
    await host.sessions.forget(NAME)
    return Sample(took)


async def _bare(lab: Lab, objects: tuple[Mapping[str, Any], ...]) -> Sample:
    name = objects[0]["metadata"]["name"]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    await lab.type("apply", "-f", "-", stdin=text)
    await lab.type("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={WAIT}")
    began = time.perf_counter()
    await lab.type("delete", f"pod/{name}", "--wait=true")
    return Sample(time.perf_counter() - began)


def _sides(end: End) -> Callable[[Lab], Any]:
    @asynccontextmanager
    async def sides(lab: Lab) -> AsyncIterator[Sides]:
        host = Host(replace(lab.settings, user=f"{lab.settings.user}-end"))
        try:
            async with cleaned(host, lab.tell):
                lab.tell("making a sandbox to take the bare pod's limits from")
                objects = await like_ours(lab, host)
                yield Sides(partial(_ended, host, end), partial(_bare, lab, objects))
        finally:
            with anyio.fail_after(CLEANUP_SECONDS, shield=True):
                await lab.type(
                    "delete", "pod,pvc", "-l", f"{LABEL}={lab.run}", "--ignore-not-found"
                )

    return sides


ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="delete",
        ours="destroy a running sandbox, until its pod is gone",
        baseline="kubectl delete of a bare running pod, grace 1 s",
        sides=_sides(lambda launcher: launcher.destroy(NAME)),
        runs=10,
        limit=LIMIT_SECONDS,
    ),
    Row(
        name="suspend",
        ours="suspend a running sandbox, until its pod is gone",
        baseline="kubectl delete of a bare running pod, grace 1 s",
        sides=_sides(lambda launcher: launcher.suspend(NAME)),
        runs=10,
        limit=LIMIT_SECONDS,
    ),
)
