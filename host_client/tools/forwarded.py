"""The daemon's tools, listed without a cluster and forwarded to the sandbox that a call names.

The list is static: it comes from `in_pod_server/tools.json`, with a `sandbox_id` in front. Results of
the daemon pass through as they are.
"""

# No `from __future__ import annotations` here: the SDK evaluates the tools' annotations.
import json
from collections.abc import Callable, Coroutine, Mapping
from importlib import resources
from typing import Any, Self

import anyio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from host_client.apps import APP_TOOLS, out_of_reach, told_with_addresses
from host_client.errors import PodpipeError, RequestRefused
from host_client.gateway import Gateway
from host_client.host import Host
from host_client.listener import OnDemand
from host_client.refusals import refusals
from host_client.session import WAIT, SandboxSession
from host_client.sessions import ANSWER_SECONDS
from host_client.tools.common import SandboxId
from in_pod_server.connection import Connection
from in_pod_server.contract import CALL_LIMIT_SECONDS


def forwarded_tools(host: Host, local: OnDemand, toolset: str) -> list[Tool]:
    """The tools of a toolset, for the sandboxes of a host and the local address of their apps."""

    async def forward(
        context: Context[Any, Any], ref: str, tool: _PodTool, arguments: dict[str, Any]
    ) -> CallToolResult:
        async with refusals():
            began = anyio.current_time()
            session = await host.open(ref)
            # A sandbox that had to be started has used up some of the client's patience.
            left = max(1.0, CALL_LIMIT_SECONDS - (anyio.current_time() - began))
            asked = arguments.get(WAIT, tool.waits)
            if isinstance(asked, int | float) and asked:
                arguments = arguments | {WAIT: min(asked, left)}
            request = context.request_context
            connection = request.request

            def cancels() -> bool:
                """A client that asks for it stops a call; one that goes away does not."""
                return not isinstance(connection, Connection) or connection.cancelled_by_client(
                    request.request_id
                )

            try:
                result = await host.sessions.call(
                    ref,
                    tool.name,
                    arguments,
                    reads_only=tool.reads_only,
                    on_progress=context.report_progress,
                    within=ANSWER_SECONDS - (anyio.current_time() - began),
                    cancels=cancels,
                )
            except RequestRefused as error:
                raise PodpipeError(f"{tool.name} failed in the sandbox: {error}") from error
        if tool.name in APP_TOOLS:
            result = told_with_addresses(result, host.settings.gateway)
            result = await _served(host.settings.gateway, local, session, result)
        return CallToolResult.model_validate(result)

    return [_PodTool.make(listed, forward) for listed in _listed(toolset)]


async def _served(
    gateway: Gateway, local: OnDemand, session: SandboxSession, result: dict[str, Any]
) -> dict[str, Any]:
    """A result that tells addresses, once these are served; with the reason where they are not."""
    facts = result.get("structuredContent") or {}
    if not facts.get("url") and not facts.get("apps"):
        return result
    why = out_of_reach(gateway, session.sandbox.id, session.pod)
    if not gateway.in_cluster:
        try:
            await local.listener()
        except PodpipeError as error:
            why = f"no address of an app is served on this machine: {error}"
    if not why:
        return result
    told = {"type": "text", "text": f"[{why}]"}
    return result | {
        "content": [*result.get("content", []), told],
        "structuredContent": facts | {"warning": why},
    }


class _PodTool(Tool):
    """A tool of the daemon, with the sandbox to run it in as its first argument."""

    forward: Callable[..., Coroutine[Any, Any, CallToolResult]] = Field(exclude=True)

    @classmethod
    def make(
        cls, listed: Mapping[str, Any], forward: Callable[..., Coroutine[Any, Any, CallToolResult]]
    ) -> Self:
        """The host's form of one entry of the daemon's tool list."""

        async def first_argument(sandbox_id: SandboxId) -> None:
            """Only its signature is used."""

        shape = Tool.from_function(first_argument, name=listed["name"], structured_output=False)
        schema = listed["inputSchema"]
        parameters = schema | {
            "properties": shape.parameters["properties"] | schema.get("properties", {}),
            "required": ["sandbox_id", *schema.get("required", [])],
        }
        return cls(
            fn=first_argument,
            name=listed["name"],
            title=listed.get("title"),
            description=listed["description"],
            parameters=parameters,
            fn_metadata=shape.fn_metadata,
            is_async=True,
            context_kwarg=None,
            icons=None,
            meta=None,
            annotations=ToolAnnotations.model_validate(listed.get("annotations", {})),
            forward=forward,
        )

    async def run(
        self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False
    ) -> Any:
        """Forward the call; the daemon validates the arguments that are its own."""
        rest = dict(arguments)
        ref = rest.pop("sandbox_id", None)
        if not isinstance(ref, str) or not ref:
            raise ToolError(f"{self.name} needs sandbox_id, which create_sandbox gives")
        return await self.forward(context, ref, self, rest)

    @property
    def reads_only(self) -> bool:
        """Whether the call may be made again if its answer was lost."""
        return bool(self.annotations and self.annotations.read_only_hint)

    @property
    def waits(self) -> float:
        """Seconds that a call waits unless its arguments say otherwise; 0 for most tools."""
        default = self.parameters["properties"].get(WAIT, {}).get("default", 0)
        return float(default)


def _listed(toolset: str) -> list[dict[str, Any]]:
    """The daemon's own tool list for a toolset, as it would answer tools/list."""
    text = (resources.files("in_pod_server") / "tools.json").read_text(encoding="utf-8")
    return json.loads(text)[toolset]  # type: ignore[no-any-return]
