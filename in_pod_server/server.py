"""The MCP server of one sandbox: all tools, and the one place where their failures become words."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.types import CallToolResult, TextContent
from pydantic import ValidationError

from in_pod_server import __version__, contract
from in_pod_server.app_tools import add_app_tools
from in_pod_server.blobs import add_blob_tools
from in_pod_server.errors import ArgumentError, StartFailedError, readable
from in_pod_server.file_tools import add_file_tools
from in_pod_server.files import Home
from in_pod_server.gateway.gateway import Gateway
from in_pod_server.process_tools import add_process_tools
from in_pod_server.processes import ProcessTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp.server.mcpserver import Context
    from mcp.types import InputRequiredResult

    from in_pod_server.ledger import Ledger
    from in_pod_server.lifetime import Lifetime
    from in_pod_server.ssh import Ssh

TOOLSET_DEFAULT: Final = "default"
TOOLSET_BLOBS: Final = "blobs"

INSTRUCTIONS: Final = """\
A Linux sandbox with one home folder that is kept. run_command runs bash and returns exit code,
stdout and stderr; every call is a fresh shell. What takes longer than a call answers "still
running" with a process_id: follow it with read_output, end it with stop_process. Servers belong in
start_background; programs that ask are talked to by start_background(stdin=open or terminal=true),
send_input and read_output(pattern). What a person shall open in a browser is published by
expose_port, each app at a host of its own. Files of the home: write_file, read_file, list_files, file_info,
move_file and delete_file need no quoting; find with search_files, change with edit_file.
"""

logger = logging.getLogger(__name__)


class SandboxServer(MCPServer[Any]):
    """An `MCPServer` whose failures are short, say what to do next, and hide nothing."""

    def add_tool(self, fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Register a tool described by its docstring, the same on every Python version."""
        described = {"description": inspect.cleandoc(fn.__doc__ or "")}
        super().add_tool(fn, *args, **{**options, **described})

    ledger: Ledger | None = None
    """Where calls that their client named are kept; None where nobody can ask again."""
    lifetime: Lifetime | None = None
    """What each call prolongs, where the server can end by itself."""
    ssh: Ssh | None = None
    """Whom ssh lets in; None where it lets nobody."""

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any],
        context: Context[Any, Any] | None = None,
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool; every failure is a `ToolError` with text meant for the caller.

        A call that its client named runs at most once, whoever asks for it again.
        """
        if name == contract.CANCEL_CALL and self.ledger:
            self.ledger.cancel(str(arguments.get(contract.CANCEL_ID, "")))
            return CallToolResult(content=[])
        if name == contract.ADMIT_SSH and self.ssh:
            key = str(arguments.get(contract.SSH_KEY, ""))
            with self.lifetime.call() if self.lifetime else contextlib.nullcontext():
                facts = await anyio.to_thread.run_sync(self.ssh.admit, key)
            return CallToolResult(content=[], structured_content=facts)
        meta = dict(context.request_context.meta or {}) if context and self.ledger else {}
        call_id, boot_id = meta.get(contract.META_CALL_ID), meta.get(contract.META_BOOT_ID)
        age = meta.get(contract.META_CALL_AGE)
        if not isinstance(call_id, str) or not isinstance(boot_id, str):
            return await self._run_tool(name, arguments, context)
        assert context is not None
        assert self.ledger is not None
        request = context.request_context
        connection, request_id = request.request, request.request_id
        assert connection is not None
        # The call is the daemon's from here on: the end of this connection is nothing to it.
        request.request = None

        async def run() -> CallToolResult:
            try:
                result = await self._run_tool(name, arguments, context)
                assert isinstance(result, CallToolResult)
                return result
            except Exception as failed:  # a failed call must not end the daemon that owns it
                text = TextContent(type="text", text=str(failed))
                return CallToolResult(content=[text], is_error=True)

        return await self.ledger.call(
            call_id,
            boot_id,
            run,
            lambda: connection.cancelled_by_client(request_id),
            age=age if isinstance(age, int | float) else 0.0,
        )

    async def _run_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None
    ) -> CallToolResult | InputRequiredResult:
        with self.lifetime.call() if self.lifetime else contextlib.nullcontext():
            try:
                self._refuse_unknown(name, arguments)
                return await self._tried(name, arguments, context)
            except ToolError as error:
                raise readable(error) from error.__cause__

    async def _tried(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None
    ) -> CallToolResult | InputRequiredResult:
        try:
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError as exc:
            cause = exc.__cause__ or exc
            if isinstance(cause, RuntimeError) and "start new thread" in str(cause):
                raise StartFailedError(
                    f"{name} could not run: the sandbox is at its limit of processes; "
                    "stop some first (list_processes, stop_process)"
                ) from None
            logger.exception("internal error in %s", name, exc_info=cause)
            raise ToolError(
                f"internal error in {name}: {type(cause).__name__}; this is a fault of the sandbox "
                "server, not of the call, and the pod's log tells more"
            ) from cause
        except ToolError as exc:
            match exc.__cause__:
                case ValidationError() as invalid:
                    raise ArgumentError(_explain(name, invalid)) from None
                case ToolError() as said:
                    raise said from said.__cause__
                case _:
                    raise

    def _refuse_unknown(self, name: str, arguments: dict[str, Any]) -> None:
        tool = self._tool_manager.get_tool(name)
        if tool is None:
            known = ", ".join(tool.name for tool in self._tool_manager.list_tools())
            raise ArgumentError(f"there is no tool {name!r}; there are: {known}")
        takes = list(tool.parameters.get("properties", {}))
        unknown = [argument for argument in arguments if argument not in takes]
        if unknown:
            raise ArgumentError(
                f"{name} takes no argument {unknown[0]!r}; it takes: {', '.join(takes) or 'none'}"
            )


def _explain(name: str, invalid: ValidationError) -> str:
    """Say in a line what is wrong with each argument."""
    said = []
    for problem in invalid.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(str(part) for part in problem["loc"])
        said.append(f"{where}: {problem['msg'][:1].lower()}{problem['msg'][1:]}")
    return f"{name} cannot be called so: {'; '.join(said)}"


def build_server(
    *,
    processes: ProcessTable,
    home: Home,
    workspace: Home,
    gateway: Gateway,
    max_file_bytes: int = contract.MAX_FILE_BYTES,
) -> SandboxServer:
    """Return the daemon's server with its own tools and the example's."""
    server = SandboxServer(
        contract.SERVER_NAME,
        version=__version__,
        instructions=INSTRUCTIONS,
        log_level="WARNING",
        subscriptions=False,
    )
    add_process_tools(server, processes, home)
    add_file_tools(server, home, max_file_bytes=max_file_bytes)
    add_app_tools(server, gateway)
    add_blob_tools(server, workspace)
    return server


async def describe_tools(server: SandboxServer) -> str:
    """Return what tools.json holds: each toolset's tools, just as tools/list gives them."""
    blobs = SandboxServer(contract.SERVER_NAME)
    add_blob_tools(blobs, Home([]))
    names = {tool.name for tool in await blobs.list_tools()}
    toolsets: dict[str, list[Any]] = {TOOLSET_DEFAULT: [], TOOLSET_BLOBS: []}
    for tool in await server.list_tools():
        toolset = TOOLSET_BLOBS if tool.name in names else TOOLSET_DEFAULT
        toolsets[toolset].append(tool.model_dump(mode="json", by_alias=True, exclude_none=True))
    return json.dumps(toolsets, indent=2, sort_keys=True) + "\n"
