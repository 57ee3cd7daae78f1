"""What goes wrong in a call, as a sentence that a model can act on."""

from __future__ import annotations

import logging
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, InputRequiredResult
from pydantic import ValidationError

from host_client.errors import PodpipeError, root_cause
from in_pod_server.contract import MAX_ERROR_CHARS

log = logging.getLogger(__name__)


@asynccontextmanager
async def refusals() -> AsyncIterator[None]:
    """Turn what podpipe refuses or fails with into text that the model reads."""
    try:
        yield
    except Exception as caught:
        error = root_cause(caught)
        if isinstance(error, PodpipeError):
            raise ToolError(str(error)) from error
        # Where, but not what it says: that may repeat what the call carried.
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("unexpected %s\n%s", type(error).__name__, where)  # noqa: TRY400
        raise ToolError(
            f"internal error of podpipe ({type(error).__name__}: {error}); its log on stderr has more"
        ) from error


class PlainServer(MCPServer[Any]):
    """An `MCPServer` that says in a sentence why it does not make a call."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Make a call.

        Raises:
            ToolError: it was not made, or failed; the text is for the caller.
        """
        try:
            return await self._called(name, arguments, context)
        except ToolError as error:
            text = str(error)
            if len(text) <= MAX_ERROR_CHARS:
                raise
            half = MAX_ERROR_CHARS // 2
            left_out = len(text) - 2 * half
            raise ToolError(
                f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"
            ) from error.__cause__

    async def _called(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None
    ) -> CallToolResult | InputRequiredResult:
        tool = self._tool_manager.get_tool(name)
        if tool is None:
            known = ", ".join(each.name for each in self._tool_manager.list_tools())
            raise ToolError(f"there is no tool {name!r}; there are: {known}")
        takes = list(tool.parameters["properties"])
        if unknown := [argument for argument in arguments if argument not in takes]:
            # Left out in silence, a misspelt name makes another sandbox than was asked for.
            raise ToolError(
                f"{name} takes no argument {unknown[0]!r}; it takes: {', '.join(takes) or 'none'}"
            )
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            match error.__cause__:
                case ValidationError() as invalid:
                    raise ToolError(_explained(name, invalid)) from None
                case ToolError() as said:  # without the SDK's words in front
                    raise said from said.__cause__
                case _:
                    raise


def _explained(tool: str, invalid: ValidationError) -> str:
    said = []
    for problem in invalid.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(str(part) for part in problem["loc"])
        said.append(f"{where}: {problem['msg'][:1].lower()}{problem['msg'][1:]}")
    return f"{tool} cannot be called so: {'; '.join(said)}"
