"""What the tools of the host server share: the argument that names a sandbox, answers, progress."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
from mcp.server.mcpserver import Context
from mcp.types import CallToolResult, TextContent
from pydantic import Field

from host_client.status import Progress

PROGRESS_SECONDS = 1.0
"""How often a waiting client is told what is being waited for."""
LIST_BYTES = 400_000
"""What a list may take of a reply, which has it twice, as text and as data."""

SandboxId = Annotated[
    str, Field(description="The sandbox_id (or name) that create_sandbox gave", max_length=63)
]


def answer(text: str, facts: dict[str, Any]) -> CallToolResult:
    """A result whose text and whose structured content are each enough alone."""
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=facts)


@asynccontextmanager
async def progress_of(context: Context[Any, Any]) -> AsyncIterator[Progress]:
    """A progress function whose latest word the client is told once a second."""
    latest: list[str] = []

    async def report() -> None:
        step = 0
        while True:
            await anyio.sleep(PROGRESS_SECONDS)
            step += 1
            await context.report_progress(step, None, latest[-1][:200] if latest else "waiting")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(report)
        try:
            yield lambda text: latest.__setitem__(slice(None), [text])
        finally:
            tasks.cancel_scope.cancel()


def fitting(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of the rows, as many as a reply has room for."""
    room = LIST_BYTES
    taken = []
    for row in rows:
        room -= len(json.dumps(row, ensure_ascii=False).encode())
        if room < 0:
            break
        taken.append(row)
    return taken
