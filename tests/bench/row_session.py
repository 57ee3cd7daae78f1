"""A new session up to its first answer, beside a plain MCP server that exec starts in the same pod.

The baseline is what the agent-sandbox MCP example does for each session; its client is kept here.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import anyio
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

from host_client.errors import PodpipeError
from host_client.session import SandboxSession
from host_client.sessions import ANSWER_SECONDS
from in_pod_server.contract import CONTAINER
from tests.bench.harness import Row, Sample, Sides, Span
from tests.bench.lab import PLAIN_CALL, Lab, checked

PLAIN_SERVER = ("python3", "-u", "/app/mcp_server.py")


async def _pipe(lab: Lab, known: SandboxSession) -> Sample:
    """A pipe of its own into a pod that is known to run."""
    session = SandboxSession(known.sandbox, known.pod)
    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.own, lab.kubectl)
        await session.opened()
        opened = time.perf_counter()
        checked(
            await session.request(*PLAIN_CALL, None, timeout=ANSWER_SECONDS, cancels=lambda: True)
        )
        answered = time.perf_counter()
        await session.aclose()
    return _sample(began, opened, answered)


async def _sessions(lab: Lab, known: SandboxSession) -> Sample:
    """What a call pays that finds its pipe closed: the pod is looked up too."""
    await lab.host.sessions.forget(known.sandbox.id)
    began = time.perf_counter()
    await lab.host.sessions.open(known.sandbox.id)
    opened = time.perf_counter()
    checked(await lab.host.sessions.call(known.sandbox.id, *PLAIN_CALL))
    return _sample(began, opened, time.perf_counter())


async def _plain(lab: Lab, known: SandboxSession) -> Sample:
    argv = lab.kubectl.argv("exec", "-i", known.pod.name, "-c", CONTAINER, "--", *PLAIN_SERVER)
    server = StdioServerParameters(command=argv[0], args=argv[1:], env=lab.kubectl.environment)
    began = time.perf_counter()
    with open(os.devnull, "w", encoding="utf-8") as errlog:  # noqa: ASYNC230, PTH123 - not a file
        async with (
            stdio_client(server, errlog=errlog) as (read, write),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            opened = time.perf_counter()
            result = await session.call_tool(*PLAIN_CALL)
            answered = time.perf_counter()
    if result.is_error:
        raise PodpipeError(f"the plain server answered with an error: {result.content}")
    return _sample(began, opened, answered)


def _sample(began: float, opened: float, answered: float) -> Sample:
    spans = (
        Span("to the answer to initialize", 0.0, opened - began),
        Span("first call", opened - began, answered - began),
    )
    return Sample(answered - began, spans)


def _against_plain(
    ours: Callable[[Lab, SandboxSession], Awaitable[Sample]],
) -> Callable[[Lab], AbstractAsyncContextManager[Sides]]:
    @asynccontextmanager
    async def sides(lab: Lab) -> AsyncIterator[Sides]:
        known = await lab.sandbox()
        await lab.host.sessions.forget(known.sandbox.id)
        yield Sides(partial(ours, lab, known), partial(_plain, lab, known))

    return sides


ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="session",
        ours="new pipe into a known pod, to the first answer",
        baseline=f"kubectl exec -i POD -- {' '.join(PLAIN_SERVER)}, to the first answer",
        sides=_against_plain(_pipe),
        runs=15,
        target=0.4,
    ),
    Row(
        name="session-open",
        ours="the same through Sessions, which looks the pod up first",
        baseline=f"kubectl exec -i POD -- {' '.join(PLAIN_SERVER)}, to the first answer",
        sides=_against_plain(_sessions),
        runs=15,
    ),
)
