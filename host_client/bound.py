"""An MCP server that may be bound to a lasting sandbox: its tools then need no sandbox_id.

The arguments are completed and the schemas adapted here alone, so no tool knows of it; the host makes
the sandbox when it is first worked in.
"""

from __future__ import annotations

from typing import Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, InputRequiredResult

from host_client.audit import Audit
from host_client.errors import SandboxNotFound
from host_client.refusals import PlainServer

_INSTRUCTIONS = """\
Tools that take a sandbox_id work in the sandbox {name!r} where it is left out; it is made when first
used, so create_sandbox is only for another one.
"""
"""What a server that is bound to a sandbox says besides."""


def bound_instructions(name: str) -> str:
    """What a server says besides when it is bound to the sandbox `name`; nothing for no name."""
    return _INSTRUCTIONS.format(name=name) if name else ""


def _missed(error: BaseException | None) -> bool:
    """Whether a sandbox that is not there is what an error comes from."""
    while error and not isinstance(error, SandboxNotFound):
        error = error.__cause__
    return error is not None


class BoundServer(PlainServer):
    """The server, which may have a sandbox of its own, and records each call.

    Args:
        bound: the sandbox of a call that names none; empty for none.
        audit: where calls are recorded.
        options: as the SDK takes them.
    """

    def __init__(
        self, bound: str, audit: Audit, *args: Any, tools: list[Tool], **options: Any
    ) -> None:
        self._bound = bound
        self._audit = audit
        super().__init__(*args, tools=[*map(self._optional, tools)] if bound else tools, **options)

    def _optional(self, tool: Tool) -> Tool:
        """A tool whose sandbox_id may be left out."""
        schema = tool.parameters
        if "sandbox_id" not in schema["properties"]:
            return tool
        described = schema["properties"]["sandbox_id"] | {
            "default": self._bound,
            "description": f"Only for a sandbox other than {self._bound!r}",
        }
        parameters = schema | {
            "properties": schema["properties"] | {"sandbox_id": described},
            "required": [name for name in schema["required"] if name != "sandbox_id"],
        }
        return tool.model_copy(update={"parameters": parameters})

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool."""
        tool = self._tool_manager.get_tool(name)
        takes_sandbox = tool is not None and "sandbox_id" in tool.parameters["properties"]
        if self._bound and takes_sandbox and arguments.get("sandbox_id") in (None, ""):
            arguments = arguments | {"sandbox_id": self._bound}
        ref = arguments.get("sandbox_id")
        with self._audit.call(name if tool else "unknown", ref, arguments) as entry:
            try:
                result = await super().call_tool(name, arguments, context)
            except ToolError as error:
                if self._bound and ref == self._bound and _missed(error):
                    raise ToolError(
                        f"sandbox {ref!r} is not there now; the next call that works in it, such as "
                        "run_command, makes it"
                    ) from error
                if error.__cause__ is None:
                    entry.outcome = "refused"
                raise
            if isinstance(result, CallToolResult) and result.is_error:
                entry.outcome = "tool_error"
        return result
