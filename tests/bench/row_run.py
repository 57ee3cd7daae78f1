"""A warm `run_command("true")` beside `kubectl exec POD -- true`, same kubectl, same pod."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

from host_client.errors import PodpipeError
from host_client.pipe import Pipe
from tests.bench.harness import Row, Sample, Sides, percentile, timed
from tests.bench.lab import Lab, checked

AT_ONCE = 64
SANDBOXES = 20
CALLS = 20
PARALLEL = 32
BURST = 20
"""Calls in a row by either side in its turn: a warm call is one that follows another."""
PODPIPE = Path(sys.executable).with_name("podpipe")
TRUE = {"command": "true"}
SERVE_SECONDS = 60.0
"""No call is waited for longer."""

Call = Callable[[], Coroutine[Any, Any, None]]
Caller = Callable[[Lab], AbstractAsyncContextManager[Call]]


@asynccontextmanager
async def _served(lab: Lab) -> AsyncIterator[Call]:
    """Calls through `podpipe serve` on stdio, by a client that adds no threads of its own."""
    session = await lab.sandbox()
    pipe = await Pipe.start([str(PODPIPE), "serve"], _environment(lab), "podpipe serve")
    try:
        await pipe.initialize(SERVE_SECONDS)
        arguments = {"sandbox_id": session.sandbox.id, **TRUE}

        async def call() -> None:
            params = {"name": "run_command", "arguments": arguments}
            result = await pipe.request("tools/call", params, timeout=SERVE_SECONDS)
            _expect_success(
                result.get("isError"), result.get("structuredContent"), result["content"]
            )

        yield call
    finally:
        await pipe.aclose()


@asynccontextmanager
async def _served_to_sdk(lab: Lab) -> AsyncIterator[Call]:
    """The same by the Python SDK's client, whose stdio goes through threads."""
    session = await lab.sandbox()
    server = StdioServerParameters(command=str(PODPIPE), args=["serve"], env=_environment(lab))
    async with Client(server) as client:

        async def call() -> None:
            result = await client.call_tool(
                "run_command", {"sandbox_id": session.sandbox.id, **TRUE}
            )
            _expect_success(result.is_error, result.structured_content, result.content)

        yield call


def _environment(lab: Lab) -> dict[str, str]:
    return dict(lab.settings.environment) | {"PODPIPE_USER": lab.settings.user}


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


@asynccontextmanager
async def _served_and_direct(lab: Lab) -> AsyncIterator[Sides]:
    async with _served(lab) as served, _in_process(lab) as direct:
        yield Sides(timed(served), timed(direct))


@asynccontextmanager
async def _recovering(lab: Lab) -> AsyncIterator[Sides]:
    session = await lab.sandbox()
    name = session.sandbox.id

    async def ours() -> Sample:
        # A call first: it opens what the last sample broke.
        await lab.host.sessions.call(name, "run_command", dict(TRUE))
        broken = lab.host.sessions.existing(name)
        if broken is None or broken.kubectl_pid is None:
            raise PodpipeError("there is no pipe to break")
        began = time.perf_counter()
        os.kill(broken.kubectl_pid, signal.SIGKILL)
        result = await lab.host.sessions.call(name, "run_command", dict(TRUE))
        taken = time.perf_counter() - began
        _expect_success(False, checked(result), result["content"])
        return Sample(taken)

    yield Sides(ours, timed(partial(lab.exec_true, session.pod.name)))


@asynccontextmanager
async def _many(lab: Lab) -> AsyncIterator[Sides]:
    pod = (await lab.sandbox()).pod.name
    lab.tell(f"making {SANDBOXES} sandboxes")
    ids = [(await lab.host.launcher.create()).sandbox.id for _ in range(SANDBOXES)]

    async def ours() -> Sample:
        took: list[float] = []

        async def call(sandbox_id: str, number: int) -> None:
            began = time.perf_counter()
            asked = {"command": f"sleep 0.2; echo {number}"}
            facts = checked(await lab.host.sessions.call(sandbox_id, "run_command", asked))
            if facts["stdout"] != f"{number}\n":
                raise PodpipeError(f"call {number} of {sandbox_id} got another's answer: {facts}")
            took.append(time.perf_counter() - began)

        async with anyio.create_task_group() as tasks:
            for sandbox_id in ids:
                for number in range(CALLS):
                    tasks.start_soon(call, sandbox_id, number)
        return Sample(percentile(sorted(took), 0.99))

    try:
        yield Sides(ours, timed(partial(lab.exec_true, pod)))
    finally:
        with anyio.CancelScope(shield=True):
            for sandbox_id in ids:
                await lab.host.launcher.destroy(sandbox_id)


ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="run",
        ours="run_command('true') through podpipe serve and the pipe",
        baseline="kubectl exec POD -- true",
        sides=_against_exec(_served),
        runs=60,
        target=1 / 22,
        burst=BURST,
    ),
    Row(
        name="run-sdk",
        ours="the same, called by the Python SDK's own client",
        baseline="kubectl exec POD -- true",
        sides=_against_exec(_served_to_sdk),
        runs=60,
        burst=BURST,
    ),
    Row(
        name="run-64",
        ours=f"run_command('true') through podpipe serve, {AT_ONCE} at once, time for each",
        baseline="one kubectl exec POD -- true",
        sides=_against_exec(_served, AT_ONCE),
        runs=10,
        target=1 / 60,
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
        runs=60,
        target=1 / 35,
        burst=BURST,
    ),
    Row(
        name="run-session-64",
        ours=f"the same, {AT_ONCE} at once, time for each",
        baseline="one kubectl exec POD -- true",
        sides=_against_exec(_in_process, AT_ONCE),
        runs=10,
        target=1 / 60,
    ),
    Row(
        name="run-overhead",
        ours="run_command('true') through podpipe serve",
        baseline="run_command('true') by Sessions.call",
        sides=_served_and_direct,
        runs=60,
        burst=BURST,
        added=0.003,
    ),
    Row(
        name="recovery",
        ours="kill -9 of the pipe's kubectl, then run_command('true') until it is answered",
        baseline="kubectl exec POD -- true",
        sides=_recovering,
        runs=10,
        target=2.0,
    ),
    Row(
        name="many",
        ours=f"{CALLS} run_command at once in each of {SANDBOXES} sandboxes: the slowest but 1 %",
        baseline="kubectl exec POD -- true",
        sides=_many,
        runs=5,
    ),
)
