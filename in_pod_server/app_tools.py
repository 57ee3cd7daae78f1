"""The tools that publish apps of the sandbox, each at a host of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from in_pod_server.gateway.gateway import Gateway
from in_pod_server.gateway.home_page import App
from in_pod_server.gateway.routes import Table
from in_pod_server.results import result

AppName = Annotated[
    str, Field(description='The app\'s name, a part of its host: a-z, 0-9, "-", such as web.')
]


def add_app_tools(server: MCPServer[Any], gateway: Gateway) -> None:
    """Register expose_port, list_apps and unexpose_port."""

    @server.tool(
        title="Publish an app",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=True
        ),
    )
    async def expose_port(
        *,
        internal_port: Annotated[
            int,
            Field(
                json_schema_extra={"minimum": 1024, "maximum": 65535},
                description="Where the app listens in the sandbox; not 8080 or 2019.",
            ),
        ],
        name: AppName,
    ) -> CallToolResult:
        """Publish a server that runs in the sandbox at an address of its own.

        Start the server with start_background first; it may listen on localhost. It gets requests
        unchanged, WebSockets too, at the root of its host. A name that is published already moves
        to the new port. Whoever opens it needs a token of the sandbox; only GET of /docs, /redoc
        and /openapi.json needs none.
        """
        gateway.publish(name, internal_port)
        apps = await gateway.apps()
        app = next((each for each in apps if each.name == name), App(name, internal_port, False))
        hint = "" if app.answers else "Nothing listens there yet: until it does, visitors get 503."
        return result(_line(app), hint, **_facts(gateway, app), **_known(gateway.table))

    @server.tool(
        title="List apps",
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    async def list_apps() -> CallToolResult:
        """List the published apps, and whether each answers on its port now."""
        apps = await gateway.apps()
        text = "\n".join(map(_line, apps)) or "no app is published; expose_port publishes one"
        return result(text, apps=[_facts(gateway, app) for app in apps], **_known(gateway.table))

    @server.tool(
        title="Close an app",
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        ),
    )
    async def unexpose_port(*, name: AppName) -> CallToolResult:
        """Publish an app no longer, and end what is open to it. The server itself runs on."""
        gateway.close(name)
        return result(f"app {name} is not published any more", name=name, **_known(gateway.table))


def _facts(gateway: Gateway, app: App) -> Mapping[str, Any]:
    return {
        "name": app.name,
        "internal_port": app.port,
        "host": f"{app.name}.{gateway.sandbox_id}",
        "answers": app.answers,
    }


def _line(app: App) -> str:
    state = "answers" if app.answers else "does not answer"
    return f"{app.name}: port {app.port}, {state}"


def _known(table: Table) -> Mapping[str, Any]:
    """The table for whoever keeps it: the host writes it into the record."""
    return {"table": table.to_json()}
