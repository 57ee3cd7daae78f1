"""A warm `run_command("true")` beside `kubectl exec POD -- true`, same kubectl, same pod."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

from host_client.errors import PodpipeError
from tests.bench.harness import Row, Sides, timed
from tests.bench.lab import Lab, checked

AT_ONCE = 64
PARALLEL = 32
BURST = 5
"""Calls in a row by either side in its turn: a warm call is one that follows another."""
PODPIPE = Path(sys.executable).with_name("podpipe")
TRUE = {"command": "true"}

Call = Callable[[], Coroutine[Any, Any, None]]
Caller = Callable[[Lab], AbstractAsyncContextManager[Call]]


@asynccontextmanager
async def _served(lab: Lab) -> AsyncIterator[Call]:
    """Calls as an MCP client makes them: through `podpipe serve` on stdio."""
    session = await lab.sandbox()
    server = StdioServerParameters(
        command=str(PODPIPE),
        args=["serve"],
        env=dict(lab.settings.environment) | {"PODPIPE_USER": lab.settings.user},
    )
    async with Client(server) as client:

        async def call() -> None:
            result = await client.call_tool(
                "run_command", {"sandbox_id": session.sandbox.id, **TRUE}
            )
            _expect_success(result.is_error, result.structured_content, result.content)

        yield call


@asynccontextmanager
async def _in_process(lab: Lab) -> AsyncIterator[Call]:
    """Calls as our own code makes them: `Sessions.call`, no host server between."""
    session = await lab.sandbox()

    async def call() -> None:
        result = await lab.host.sessions.call(session.sandbox.id, "run_command", dict(TRUE))
        _expect_success(False, checked(result), result["content"])

    yield call


def _expect_success(is_error: bool | None, facts: dict[str, Any] | None, content: object) -> None:
    if is_error or not facts or facts.get("exit_code") != 0:
        raise PodpipeError(f"run_command('true') did not succeed: {content}")


def _against_exec(
    caller: Caller, at_once: int = 1
) -> Callable[[Lab], AbstractAsyncContextManager[Sides]]:
    @asynccontextmanager
    async def sides(lab: Lab) -> AsyncIterator[Sides]:
        pod = (await lab.sandbox()).pod.name
        async with caller(lab) as call:

            async def volley() -> None:
                async with anyio.create_task_group() as tasks:
                    for _ in range(at_once):
                        tasks.start_soon(call)

            ours = timed(call) if at_once == 1 else timed(volley, share=at_once)
            yield Sides(ours, timed(partial(lab.exec_true, pod)))

    return sides


@asynccontextmanager
async def _both_at_once(lab: Lab) -> AsyncIterator[Sides]:
    pod = (await lab.sandbox()).pod.name
    async with _served(lab) as call:

        async def volley(one: Call) -> None:
            async with anyio.create_task_group() as tasks:
                for _ in range(PARALLEL):
                    tasks.start_soon(one)

        execs = partial(volley, partial(lab.exec_true, pod))
        yield Sides(timed(partial(volley, call)), timed(execs))


ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="run",
        ours="run_command('true') through podpipe serve and the pipe",
        baseline="kubectl exec POD -- true",
        sides=_against_exec(_served),
        runs=40,
        target=1 / 15,
        burst=BURST,
    ),
    Row(
        name="run-64",
        ours=f"the same, {AT_ONCE} at once, time for each",
        baseline="one kubectl exec POD -- true",
        sides=_against_exec(_served, AT_ONCE),
        runs=10,
    ),
    Row(
        name="run-32",
        ours=f"{PARALLEL} run_command('true') at once in one sandbox, all of them",
        baseline=f"{PARALLEL} kubectl exec POD -- true at once",
        sides=_both_at_once,
        runs=5,
        target=1 / 10,
    ),
    Row(
        name="run-session",
        ours="run_command('true') by Sessions.call, without the host server",
        baseline="kubectl exec POD -- true",
        sides=_against_exec(_in_process),
        runs=40,
        burst=BURST,
    ),
    Row(
        name="run-session-64",
        ours=f"the same, {AT_ONCE} at once, time for each",
        baseline="one kubectl exec POD -- true",
        sides=_against_exec(_in_process, AT_ONCE),
        runs=10,
    ),
)
