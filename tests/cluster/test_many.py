"""One host and many sandboxes: every call is answered, and what that costs in memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
from mcp import Client, StdioServerParameters

from tests.cluster.conftest import ROOT, Cluster

SANDBOXES = 20
CALLS = 20
HOST_MIB = 90
BOUND = 240


def servers() -> dict[int, str]:
    """The children of this process that are `podpipe serve`, with their status."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"host_client\0serve" in (entry / "cmdline").read_bytes():
                status = (entry / "status").read_text(encoding="utf-8")
                if f"\nPPid:\t{os.getpid()}\n" in status:
                    found[int(entry.name)] = status
        except OSError:
            continue
    return found


def resident_mib(status: str) -> float:
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


async def test_twenty_sandboxes_with_twenty_calls_each_are_all_answered_in_little_memory(
    cluster: Cluster, user: str
) -> None:
    """Small sandboxes, so that a laptop's node holds them all."""
    answers: dict[tuple[str, int], str] = {}
    little = {"CPU_REQUEST": "10m", "MEMORY_REQUEST": "32Mi", "MEMORY_LIMIT": "512Mi"}
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "host_client", "serve"],
        env=os.environ
        | cluster.environment
        | {"PYTHONPATH": str(ROOT), "PODPIPE_USER": user}
        | little,
    )
    with anyio.fail_after(BOUND):
        async with Client(server) as client:

            async def call(name: str, number: int) -> None:
                asked = {"sandbox_id": name, "command": f"sleep 0.2; echo {name} {number}"}
                answer = await client.call_tool("run_command", asked)
                assert answer.structured_content, answer.content
                answers[name, number] = answer.structured_content["stdout"]

            names = [f"many-{number}" for number in range(SANDBOXES)]

            async def make(name: str) -> None:
                async with few_at_a_time:
                    made = await client.call_tool("create_sandbox", {"name": name})
                    assert not made.is_error, made.content
                    await call(name, 0)

            few_at_a_time = anyio.CapacityLimiter(4)
            async with anyio.create_task_group() as tasks:
                for name in names:
                    tasks.start_soon(make, name)
            (opened,) = servers().values()
            async with anyio.create_task_group() as tasks:
                for name in names:
                    for number in range(CALLS):
                        tasks.start_soon(call, name, number)
            (worked,) = servers().values()
    assert answers == {
        (name, number): f"{name} {number}\n" for name in names for number in range(CALLS)
    }
    assert resident_mib(opened) <= HOST_MIB
    assert resident_mib(worked) <= HOST_MIB + 10, "what many calls at once took is given back"
