"""One soak: workers and injectors side by side, then the count of what ran."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from host_client.errors import PodpipeError
from host_client.host import Host
from tests.soak.faults import PROBE_SECONDS, Ground, Injector
from tests.soak.tally import Tally
from tests.soak.workload import Workload

TELL_SECONDS = 1.0
COUNT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a soak is, and how rough.

    Args:
        seconds: until no further call is begun.
        calls: or so many calls, whichever is first; 0 for no such bound.
        seed: of all that is random.
        workers: for each sandbox.
        long_seconds: of a long command, at most.
        freeze_seconds: how long a kubectl is stopped: longer than its heartbeat takes to notice.
        pause_seconds: between recovery and the next fault of a sandbox, at the mean.
        api_seconds: between restarts of the API server, at the mean; 0 for none.
    """

    seconds: float
    calls: int = 0
    seed: int = 1
    workers: int = 3
    long_seconds: float = 8.0
    freeze_seconds: float = 25.0
    pause_seconds: float = 4.0
    api_seconds: float = 150.0


async def soak(
    host: Host,
    ground: Ground,
    sandboxes: list[str],
    plan: Plan,
    tell: Callable[[str], None],
    say: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Run a soak over sandboxes that answer.

    Args:
        host: whose sandboxes.
        ground: how to break them.
        sandboxes: their ids, all with one home.
        plan: how long and how rough.
        tell: told how far it is, every second.
        say: told of each call that is lost, at once.

    Returns:
        All that happened.
    """
    tally = Tally(plan.seed)
    began = time.monotonic()
    dice = random.Random(plan.seed)

    def over() -> bool:
        enough = plan.calls and len(tally.calls) >= plan.calls
        return bool(enough) or time.monotonic() - began >= plan.seconds

    injector = Injector(
        host, ground, tally.faults, random.Random(dice.random()),
        freeze_seconds=plan.freeze_seconds, pause_seconds=plan.pause_seconds,
    )  # fmt: skip
    workload = Workload(host, tally, over, long_seconds=plan.long_seconds)

    async def report() -> None:
        told = 0
        while True:
            lost = [call for call in tally.lost if call.said]
            for call in lost[told:]:
                say(f"lost: {call.describe()}")
            told = len(lost)
            tell(
                f"{time.monotonic() - began:.0f} s: {len(tally.calls)} calls, "
                f"{len(tally.faults)} faults, {told} lost"
            )
            await anyio.sleep(TELL_SECONDS)

    async with anyio.create_task_group() as reporting:
        reporting.start_soon(report)
        async with anyio.create_task_group() as tasks:
            for sandbox in sandboxes:
                tasks.start_soon(injector.break_sandbox, sandbox, over)
                for _ in range(plan.workers):
                    tasks.start_soon(workload.work, sandbox, random.Random(dice.random()))
            if plan.api_seconds and ground.restarts_api:
                tasks.start_soon(injector.break_api, sandboxes, plan.api_seconds, over)
        tally.seconds = time.monotonic() - began
        tally.ran = await _counted(workload, sandboxes)
        reporting.cancel_scope.cancel()
    return tally


async def _counted(workload: Workload, sandboxes: list[str]) -> dict[str, int]:
    """The ids, once the last fault is over and commands that nobody waited for have ended."""
    await anyio.sleep(2.0)
    with anyio.fail_after(COUNT_SECONDS + PROBE_SECONDS):
        while True:
            try:
                return dict(await workload.count(sandboxes))
            except PodpipeError:
                await anyio.sleep(0.5)
