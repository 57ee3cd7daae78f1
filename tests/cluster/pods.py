"""A sandbox called "work" on the real cluster, and its tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from host_client.host import Host
from tests.cluster.conftest import Cluster

BOUND = 150
OTHERS_SECONDS = 1.0
"""Whatever a command does, others are answered within this."""


async def tool(host: Host, name: str, **arguments: Any) -> dict[str, Any]:
    answer = await host.sessions.call("work", name, arguments)
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


async def run(host: Host, command: str, **arguments: Any) -> dict[str, Any]:
    return await tool(host, "run_command", command=command, **arguments)


@asynccontextmanager
async def sandbox(cluster: Cluster, **limits: Any) -> AsyncIterator[Host]:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work", **limits)
            yield host


async def answered_soon(host: Host) -> None:
    """Within a second, three times to one slow node."""
    for _ in range(3):
        with anyio.move_on_after(OTHERS_SECONDS):
            assert (await run(host, "echo ok"))["stdout"] == "ok\n"
            return
    raise AssertionError("others were not answered within a second")
