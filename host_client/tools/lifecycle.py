"""The tools for the life of sandboxes: create, list, status, suspend, resume, extend, destroy."""

# No `from __future__ import annotations` here: the SDK evaluates the tools' annotations, and some
# hold a setting that only the enclosing function knows.
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from host_client.apps import REDACTED, apps_of, first_grant, new_token
from host_client.host import Host
from host_client.identity import MAX_NAME
from host_client.refusals import refusals
from host_client.status import Status
from host_client.tools.common import SandboxId, answer, fitting, progress_of


def lifecycle_tools(host: Host) -> list[Tool]:
    """The tools, for the sandboxes of a host."""
    settings = host.settings
    # The launcher refuses what is beyond a maximum, by the name of its setting, which a schema cannot.

    async def create_sandbox(
        context: Context[Any, Any],
        ttl_minutes: Annotated[
            int,
            Field(
                description=f"Lifetime in minutes; 0 for the default of {settings.ttl_minutes}",
                json_schema_extra={"minimum": 0, "maximum": settings.max_ttl_minutes},
            ),
        ] = 0,
        cpu_limit: Annotated[
            str,
            Field(
                description=f"CPU cores, such as 500m or 2; default {settings.cpu_limit}, at most "
                f"{settings.max_cpu_limit}"
            ),
        ] = "",
        memory_limit: Annotated[
            str,
            Field(
                description=f"Memory, such as 512Mi or 4Gi; default {settings.memory_limit}, at "
                f"most {settings.max_memory_limit}"
            ),
        ] = "",
        name: Annotated[
            str,
            Field(description="A name to find it by again; empty for none", max_length=MAX_NAME),
        ] = "",
    ) -> CallToolResult:
        token = new_token()
        async with refusals(), progress_of(context) as progress:
            status = await host.launcher.create(
                access=first_grant(token, host.clock.now()),
                name=name,
                ttl_minutes=ttl_minutes or None,
                cpu_limit=cpu_limit,
                memory_limit=memory_limit,
                progress=progress,
            )
            facts = status.to_json() | {"warnings": host.launcher.warnings}
            facts |= {"url": settings.gateway.address(status.sandbox.id), "token": token}
            text = f"{_sandbox_text(facts)}\nurl: {facts['url']}\ntoken: {token}"
            if status.phase == "starting":
                text += (
                    "\nIt is still starting; call any tool with this sandbox_id to go on waiting."
                )
            for warning in host.launcher.warnings:
                text += f"\nwarning: {warning}"
            return answer(text, facts)

    async def list_sandboxes() -> CallToolResult:
        async with refusals():
            every = [status.to_json() for status in await host.launcher.list_all()]
            warnings = host.launcher.warnings
        found = fitting(every)
        text = "\n\n".join(map(_sandbox_text, found)) or "no sandboxes; create_sandbox makes one"
        if len(found) < len(every):
            text += f"\n[{len(found)} of {len(every)}; destroy_sandbox those that are not needed]"
        text += "".join(f"\nwarning: {warning}" for warning in warnings)
        return answer(text, {"sandboxes": found, "total": len(every), "warnings": warnings})

    async def get_sandbox_status(sandbox_id: SandboxId) -> CallToolResult:
        async with refusals():
            facts = (await host.sessions.status(sandbox_id)).to_json()
        facts |= {"url": settings.gateway.address(facts["sandbox_id"]), "token": REDACTED}
        return answer("\n".join(f"{key}: {value}" for key, value in facts.items()), facts)

    async def suspend_sandbox(context: Context[Any, Any], sandbox_id: SandboxId) -> CallToolResult:
        async with refusals(), progress_of(context) as progress:
            status = await host.launcher.suspend(sandbox_id, progress=progress)
            await host.sessions.forget(status.sandbox.id)
        facts = status.to_json()
        how = "any call resumes it" if settings.resumes else "resume_sandbox starts it again"
        return answer(f"{_sandbox_text(facts)}\nIts files are kept; {how}.", facts)

    async def resume_sandbox(context: Context[Any, Any], sandbox_id: SandboxId) -> CallToolResult:
        async with refusals(), progress_of(context) as progress:
            session = await host.open(sandbox_id, progress=progress, resume=True)
            news = host.sessions.news(session.sandbox.id)
            facts = Status(session.sandbox, "running", session.pod, news).to_json()
        return answer(_sandbox_text(facts), facts)

    async def extend_sandbox(
        sandbox_id: SandboxId,
        ttl_minutes: Annotated[
            int,
            Field(
                description="Minutes from now that it shall live at least",
                json_schema_extra={"minimum": 1, "maximum": settings.max_ttl_minutes},
            ),
        ],
    ) -> CallToolResult:
        async with refusals():
            facts = (await host.sessions.extend(sandbox_id, ttl_minutes)).to_json()
        return answer(_sandbox_text(facts), facts)

    async def destroy_sandbox(context: Context[Any, Any], sandbox_id: SandboxId) -> CallToolResult:
        async with refusals(), progress_of(context) as progress:
            sandbox = await host.launcher.destroy(sandbox_id, progress=progress)
            await host.sessions.forget(sandbox.id)
        facts = {"sandbox_id": sandbox.id, "destroyed": True, "home": "kept"}
        return answer(f"sandbox {sandbox.id} is destroyed; the home is kept", facts)

    async def get_sandbox_access(
        sandbox_id: SandboxId,
        rotate: Annotated[
            bool, Field(description="Clear all earlier tokens, and end what they have opened")
        ] = False,
    ) -> CallToolResult:
        async with refusals():
            made = await host.apps.grant(sandbox_id, rotate=rotate)
        links = {
            name or "page": settings.gateway.address(made.sandbox.id, name)
            for name in ("", *apps_of(made.sandbox.apps))
        }
        facts = {"sandbox_id": made.sandbox.id, "token": made.token, "apps": links}
        text = "\n".join(f"{name}: {url}" for name, url in links.items())
        return answer(f"token: {made.token}\n{text}", facts)

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

    trusted = [
        tool(
            get_sandbox_access,
            "Get access to a sandbox's apps",
            ends,
            "Make a token that opens the sandbox's apps, as `Authorization: Bearer` or `?token=`. For "
            "trusted gateways: keep it from what a model reads.",
        )
    ]
    return [
        tool(
            create_sandbox,
            "Create a sandbox",
            makes,
            "Start an isolated Linux sandbox with the user's durable home mounted. Returns its "
            "sandbox_id, which every other tool takes, when it expires, the url of its page, and the "
            "token that opens it and its published apps (as ?token=), which is shown this once. Takes a few seconds; "
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
            + (
                "The next call on it resumes it."
                if settings.resumes
                else "Calls on it are refused until resume_sandbox."
            ),
        ),
        tool(
            resume_sandbox,
            "Resume a sandbox",
            keeps,
            "Start a suspended sandbox again now; "
            + ("any other call does so too." if settings.resumes else "no other call does so."),
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
        *(trusted if settings.access_tool else []),
    ]


def _sandbox_text(facts: Mapping[str, Any]) -> str:
    shown = ("sandbox_id", "name", "phase", "detail", "expires_at", "cpu_limit", "memory_limit")
    return "\n".join(f"{key}: {facts[key]}" for key in shown if facts.get(key))
