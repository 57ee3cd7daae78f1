"""Ten thousand sandboxes on one API server: list one's own, and reap a thousand that expired.

They are records with pods that are never scheduled, in a namespace of their own, shared by a hundred
users. A reap is a process of its own, so that its memory can be told; the loop that it is measured
against deletes a few of as many, one `kubectl delete` each, and both are given per sandbox.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from host_client.backends.pod import PodBackend
from host_client.errors import PodpipeError
from host_client.launcher import Launcher
from host_client.pod_view import PodView
from host_client.sandbox import Sandbox
from in_pod_server import contract as c
from tests.bench.harness import Row, Sample, Sides, Span, timed
from tests.bench.lab import Lab
from tests.bench.report import ROOT
from tests.crowd import Crowd, crowd

SANDBOXES, USERS = 10_000, 100
EXPIRED, LOOPED = 1_000, 20
MEMORY_MIB = 256.0
"""The most that a reap among them may take; a process that does nothing takes 60."""


def _crowd(lab: Lab) -> AbstractAsyncContextManager[Crowd]:
    return _filled(lab)


@asynccontextmanager
async def _filled(lab: Lab) -> AsyncIterator[Crowd]:
    async with crowd(lab.settings, f"podpipe-bench-{lab.run}", lab.tell) as made:
        await made.add(SANDBOXES, users=USERS, tell=lab.tell)
        yield made


async def _not_connected(_: Sandbox, __: PodView) -> None:
    raise AssertionError("nothing here is to be connected to")


async def _list(made: Crowd) -> Sample:
    launcher = Launcher(PodBackend(made.kubectl, made.settings), made.settings, _not_connected)
    began = time.perf_counter()
    own = await launcher.list_all()
    took = time.perf_counter() - began
    if len(own) != SANDBOXES // USERS:
        raise PodpipeError(f"{len(own)} sandboxes were listed of {SANDBOXES // USERS}")
    return Sample(took)


@asynccontextmanager
async def _list_sides(lab: Lab) -> AsyncIterator[Sides]:
    made = await lab.once(_crowd)
    selector = f"{c.LABEL_MANAGED_BY}={c.PREFIX},{c.LABEL_USER}={made.settings.user_key}"
    listed = partial(made.kubectl.run, "get", "configmaps,pods", "-l", selector, "-o", "json")
    yield Sides(partial(_list, made), timed(listed))


async def _reap(lab: Lab, made: Crowd) -> Sample:
    await made.add(EXPIRED, users=USERS, expired=True, tell=lab.tell)
    began = time.perf_counter()
    report, mib = await anyio.to_thread.run_sync(_swept, made)
    took = time.perf_counter() - began
    gone = [each for each in report["deleted"] if each["reason"] == "expired"]
    if len(gone) != EXPIRED or report["failed"] or report["sandboxes"] < SANDBOXES:
        raise PodpipeError(f"of {EXPIRED} expired {len(gone)} were reaped; {report['failed']}")
    if mib > MEMORY_MIB:
        raise PodpipeError(f"the reap took {mib:.0f} MiB, more than {MEMORY_MIB:.0f}")
    return Sample(took / EXPIRED, (Span(f"all {EXPIRED}, at most {mib:.0f} MiB", 0.0, took),))


def _swept(made: Crowd) -> tuple[dict[str, Any], float]:
    """Run `podpipe reap`; what it reports, and its peak memory in MiB."""
    environment = {
        **made.settings.environment,
        "NAMESPACE": made.settings.namespace,
        "PYTHONPATH": str(ROOT),
    }
    read, write = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "host_client", "reap", "--json"],
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, write, 1), (os.POSIX_SPAWN_CLOSE, read)],
    )
    os.close(write)
    with os.fdopen(read) as out:
        said = out.read()
    _, _, usage = os.wait4(pid, 0)
    return json.loads(said), usage.ru_maxrss / 1024


async def _loop(lab: Lab, made: Crowd) -> Sample:
    await made.add(LOOPED, expired=True, tell=lab.tell)
    mine = await made.kubectl.select(
        "configmaps", f"{c.LABEL_MANAGED_BY}={c.PREFIX},{c.LABEL_USER}={made.settings.user_key}"
    )
    newest = sorted(mine, key=lambda record: str(record["metadata"]["creationTimestamp"]))[-LOOPED:]
    began = time.perf_counter()
    for record in newest:
        await made.kubectl.run("delete", "configmap", record["metadata"]["name"])
    return Sample((time.perf_counter() - began) / LOOPED)


@asynccontextmanager
async def _reap_sides(lab: Lab) -> AsyncIterator[Sides]:
    made = await lab.once(_crowd)
    yield Sides(partial(_reap, lab, made), partial(_loop, lab, made))


ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="list",
        ours=f"list one's own of {SANDBOXES} sandboxes",
        baseline="kubectl get of the same records and pods",
        sides=_list_sides,
        runs=10,
        limit=2.0,
    ),
    Row(
        name="reap",
        ours=f"podpipe reap of {EXPIRED} expired among {SANDBOXES}, per sandbox",
        baseline=f"a loop of one kubectl delete each, over {LOOPED}, per sandbox",
        sides=_reap_sides,
        runs=3,
        target=0.1,
        warmups=0,
    ),
)
