"""The MCP server that a client starts: lifecycle tools of its own, the daemon's tools forwarded.

The tool list is static: the daemon's tools come from `in_pod_server/tools.json` with a `sandbox_id`
in front, so that listing touches no cluster. Results of the daemon pass through as they are. This is
the one place where a `PodpipeError` becomes the text that a model reads.
"""

# No `from __future__ import annotations` here: the SDK evaluates the tools' annotations, and some
# hold a setting that only the enclosing function knows.
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from typing import Annotated, Any, Self

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

from host_client import __version__, logs, stdio
from host_client.bound import BoundServer, bound_instructions
from host_client.config import Settings
from host_client.errors import PodpipeError, RequestRefused, StillStarting
from host_client.host import Host
from host_client.identity import MAX_NAME
from host_client.launcher import Progress, Status
from host_client.outcome import Meter, Outcome
from host_client.paths import allowed
from host_client.refusals import refusals
from host_client.session import WAIT
from host_client.sessions import ANSWER_SECONDS
from in_pod_server.connection import Connection
from in_pod_server.contract import CALL_LIMIT_SECONDS

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0
"""How often a waiting client is told what is being waited for."""

INSTRUCTIONS = """\
Isolated Linux sandboxes on Kubernetes. create_sandbox gives a sandbox_id; pass it to every other
tool. The home, /home/sandbox (also /workspace), is durable: it outlives suspend, destroy and expiry,
and all sandboxes of a user share it. Everything else in a sandbox is scratch. run_command is for
commands that end; start_background and read_output for servers and long jobs. No call takes longer
than 45 seconds: what still runs then goes on, under a process_id. A suspended sandbox is resumed by
the next call. destroy_sandbox when the work is done.
"""

SandboxId = Annotated[
    str, Field(description="The sandbox_id (or name) that create_sandbox gave", max_length=63)
]


def _pod_tools(toolset: str) -> list[dict[str, Any]]:
    """The daemon's own tool list for a toolset, as it would answer tools/list."""
    text = (resources.files("in_pod_server") / "tools.json").read_text(encoding="utf-8")
    return json.loads(text)[toolset]  # type: ignore[no-any-return]


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


def _answer(text: str, facts: dict[str, Any]) -> CallToolResult:
    """A result whose text and whose structured content are each enough alone."""
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=facts)


def _sandbox_text(facts: Mapping[str, Any]) -> str:
    shown = ("sandbox_id", "name", "phase", "detail", "expires_at", "cpu_limit", "memory_limit")
    return "\n".join(f"{key}: {facts[key]}" for key in shown if facts.get(key))


@asynccontextmanager
async def _progress(context: Context[Any, Any]) -> AsyncIterator[Progress]:
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


def build_server(host: Host) -> MCPServer[Any]:
    """The server with the toolsets that the settings name; touches no cluster.

    Args:
        host: entered by whoever runs the server.
    """

    async def forward(
        context: Context[Any, Any], ref: str, tool: _PodTool, arguments: dict[str, Any]
    ) -> CallToolResult:
        async with refusals():
            began = anyio.current_time()
            await host.open(ref, resume=settings.resumes)
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
        return CallToolResult.model_validate(result)

    settings = host.settings
    tools: list[Tool] = []
    if "default" in settings.toolsets:
        tools += _lifecycle_tools(host) + _transfer_tools(host)
    for toolset in settings.toolsets:
        tools += [_PodTool.make(listed, forward) for listed in _pod_tools(toolset)]
    return BoundServer(
        host.bound,
        "podpipe",
        title="Kubernetes sandboxes",
        instructions=INSTRUCTIONS + bound_instructions(host.bound),
        version=__version__,
        tools=tools,
        log_level=settings.log_level,
        subscriptions=False,
    )


def _lifecycle_tools(host: Host) -> list[Tool]:
    settings = host.settings

    async def create_sandbox(
        context: Context[Any, Any],
        ttl_minutes: Annotated[
            int,
            Field(
                description=f"Lifetime in minutes; 0 for the default of {settings.ttl_minutes}",
                ge=0,
                le=settings.max_ttl_minutes,
            ),
        ] = 0,
        cpu_limit: Annotated[
            str, Field(description=f"CPU cores, such as 500m or 2; default {settings.cpu_limit}")
        ] = "",
        memory_limit: Annotated[
            str, Field(description=f"Memory, such as 512Mi or 4Gi; default {settings.memory_limit}")
        ] = "",
        name: Annotated[
            str,
            Field(description="A name to find it by again; empty for none", max_length=MAX_NAME),
        ] = "",
    ) -> CallToolResult:
        async with refusals(), _progress(context) as progress:
            status = await host.launcher.create(
                name=name,
                ttl_minutes=ttl_minutes,
                cpu_limit=cpu_limit,
                memory_limit=memory_limit,
                progress=progress,
            )
            facts = status.to_json() | {"warnings": host.launcher.warnings}
            text = _sandbox_text(facts)
            if status.phase == "starting":
                text += (
                    "\nIt is still starting; call any tool with this sandbox_id to go on waiting."
                )
            for warning in host.launcher.warnings:
                text += f"\nwarning: {warning}"
            return _answer(text, facts)

    async def list_sandboxes() -> CallToolResult:
        async with refusals():
            found = [status.to_json() for status in await host.launcher.list_all()]
            warnings = host.launcher.warnings
        text = "\n\n".join(map(_sandbox_text, found)) or "no sandboxes; create_sandbox makes one"
        text += "".join(f"\nwarning: {warning}" for warning in warnings)
        return _answer(text, {"sandboxes": found, "warnings": warnings})

    async def get_sandbox_status(sandbox_id: SandboxId) -> CallToolResult:
        async with refusals():
            facts = (await host.sessions.status(sandbox_id)).to_json()
        return _answer("\n".join(f"{key}: {value}" for key, value in facts.items()), facts)

    async def suspend_sandbox(context: Context[Any, Any], sandbox_id: SandboxId) -> CallToolResult:
        async with refusals(), _progress(context) as progress:
            status = await host.launcher.suspend(sandbox_id, progress=progress)
            await host.sessions.forget(status.sandbox.id)
        facts = status.to_json()
        return _answer(f"{_sandbox_text(facts)}\nIts files are kept; any call resumes it.", facts)

    async def resume_sandbox(context: Context[Any, Any], sandbox_id: SandboxId) -> CallToolResult:
        async with refusals(), _progress(context) as progress:
            session = await host.open(sandbox_id, progress=progress)
            news = host.sessions.news(session.sandbox.id)
            facts = Status(session.sandbox, "running", session.pod, news).to_json()
        return _answer(_sandbox_text(facts), facts)

    async def extend_sandbox(
        sandbox_id: SandboxId,
        ttl_minutes: Annotated[
            int,
            Field(
                description="Minutes from now that it shall live at least",
                ge=1,
                le=settings.max_ttl_minutes,
            ),
        ],
    ) -> CallToolResult:
        async with refusals():
            facts = (await host.launcher.extend(sandbox_id, ttl_minutes)).to_json()
        return _answer(_sandbox_text(facts), facts)

    async def destroy_sandbox(context: Context[Any, Any], sandbox_id: SandboxId) -> CallToolResult:
        async with refusals(), _progress(context) as progress:
            sandbox = await host.launcher.destroy(sandbox_id, progress=progress)
            await host.sessions.forget(sandbox.id)
        facts = {"sandbox_id": sandbox.id, "destroyed": True, "home": "kept"}
        return _answer(f"sandbox {sandbox.id} is destroyed; the home is kept", facts)

    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    makes = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
    keeps = ToolAnnotations(
        read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    )
    ends = ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
    )

    def tool(fn: Callable[..., Any], title: str, hints: ToolAnnotations, description: str) -> Tool:
        return Tool.from_function(
            fn, title=title, description=description, annotations=hints, structured_output=False
        )

    return [
        tool(
            create_sandbox,
            "Create a sandbox",
            makes,
            "Start an isolated Linux sandbox with the user's durable home mounted. Returns its "
            "sandbox_id, which every other tool takes, and when it expires. Takes a few seconds; "
            "says `starting` if the image is still being pulled.",
        ),
        tool(list_sandboxes, "List sandboxes", reads, "All sandboxes of this user, oldest first."),
        tool(
            get_sandbox_status,
            "Show a sandbox",
            reads,
            "What one sandbox is doing, why, until when, and on what limits.",
        ),
        tool(
            suspend_sandbox,
            "Suspend a sandbox",
            keeps,
            "End a sandbox's processes and free its resources, keeping the sandbox and its home. "
            "The next call on it resumes it.",
        ),
        tool(
            resume_sandbox,
            "Resume a sandbox",
            keeps,
            "Start a suspended sandbox again now; any other call does so too.",
        ),
        tool(
            extend_sandbox,
            "Extend a sandbox",
            keeps,
            "Let a sandbox live longer: ttl_minutes from now, never shorter than it would have, at "
            f"most {settings.max_ttl_minutes} minutes after it was created.",
        ),
        tool(
            destroy_sandbox,
            "Destroy a sandbox",
            ends,
            "End a sandbox for good. The user's home and its files are kept.",
        ),
    ]


def _transfer_tools(host: Host) -> list[Tool]:
    folders = host.settings.allowed_dirs
    host_path_type = Annotated[
        str,
        Field(
            description="Absolute path on the user's machine, below a folder that the user allows: "
            + (", ".join(folders) or "none so far (PODPIPE_ALLOWED_DIRS)"),
        ),
    ]
    pod_path_type = Annotated[
        str, Field(description="In the sandbox's home; relative to it or absolute")
    ]

    async def transfer(
        context: Context[Any, Any],
        direction: str,
        ref: str,
        here: str,
        there: str,
        begin: Callable[[Meter], Coroutine[Any, Any, Outcome]],
    ) -> CallToolResult:
        async with refusals(), _progress(context) as progress:
            began = anyio.current_time()
            await host.open(ref, progress=progress, resume=host.settings.resumes)
            progress("copying")
            left = max(1.0, CALL_LIMIT_SECONDS - (anyio.current_time() - began))
            try:
                outcome = await host.transfers.within(left, (direction, ref, here, there), begin)
            except StillStarting as waiting:
                return _answer(str(waiting), {"done": False, "detail": waiting.detail})
        facts = outcome.to_json()
        text = outcome.text()
        for entry in facts["refused"][:20]:
            text += f"\nleft out: {entry['path']}: {entry['reason']}"
        if more := len(facts["refused"][20:]) + outcome.unlisted:
            text += f"\nleft out: {more} more"
        return _answer(text, {"done": True, **facts, "refused": facts["refused"][:200]})

    async def upload_file(
        context: Context[Any, Any],
        sandbox_id: SandboxId,
        host_path: host_path_type,
        path: pod_path_type = ".",
    ) -> CallToolResult:
        async with refusals():
            real = allowed(host_path, folders)
        return await transfer(
            context, "up", sandbox_id, host_path, path,
            lambda meter: host.transfers.put(sandbox_id, [real], path, meter),
        )  # fmt: skip

    async def download_file(
        context: Context[Any, Any],
        sandbox_id: SandboxId,
        path: pod_path_type,
        host_path: host_path_type,
    ) -> CallToolResult:
        async with refusals():
            # `get` asks by its end whether it is a folder to copy into; realpath takes that off.
            real = allowed(host_path, folders) + ("/" if host_path.endswith("/") else "")
        return await transfer(
            context, "down", sandbox_id, host_path, path,
            lambda meter: host.transfers.get(sandbox_id, path, real, meter),
        )  # fmt: skip

    hints = ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
    )
    common = (
        " Files and whole folders of any size, each file verified by SHA-256; modes, times and "
        "links that stay inside are kept. Where that is a folder that exists, or ends with /, it is "
        "copied into. Says so if it takes longer than a call may: call again with the same "
        "arguments."
    )
    return [
        Tool.from_function(
            upload_file,
            title="Upload from the user's machine",
            description="Copy a file or a folder from the user's machine into a sandbox." + common,
            annotations=hints,
            structured_output=False,
        ),
        Tool.from_function(
            download_file,
            title="Download to the user's machine",
            description="Copy a file or a folder from a sandbox to the user's machine." + common,
            annotations=hints,
            structured_output=False,
        ),
    ]


async def serve_stdio(settings: Settings, sandbox: str = "") -> None:
    """Serve MCP on stdin and stdout until stdin ends; logs go to stderr and the log file.

    Args:
        settings: whose podpipe it is.
        sandbox: name of the sandbox to work in where a call names none, made when first used.

    Raises:
        UsageError: no sandbox can have that name.
    """
    logs.configure(settings)
    log.info("podpipe %s serves %s", __version__, f"sandbox {sandbox}" if sandbox else "a client")
    # Before anything else: what prints while the server is made would be its first line.
    with stdio.claimed() as (source, sink):
        async with Host(settings, bound=sandbox) as host:
            await stdio.serve(build_server(host), source, sink)
