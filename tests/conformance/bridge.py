"""Streamable HTTP on loopback in front of a stdio server, for the suite that speaks only HTTP.

    python -m tests.conformance.bridge SOCKET        prints the URL once it listens

A session of the 2025 eras is a connection of its own, as it is a process of its own behind real
stdio. Requests of 2026-07-28 have no session: they share one connection, under ids and progress
tokens of the bridge's making, since on HTTP each client counts for itself. Of HTTP it does what a
transport must; what a deployment adds (headers held against bodies, Origin, replay) it does not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from mcp.types import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    UNSUPPORTED_PROTOCOL_VERSION,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Message = dict[str, Any]

LINE_LIMIT = 32 * 1024 * 1024
SESSION = "mcp-session-id"
STATUS = {
    METHOD_NOT_FOUND: 404,
    INVALID_PARAMS: 400,
    MISSING_REQUIRED_CLIENT_CAPABILITY: 400,
    UNSUPPORTED_PROTOCOL_VERSION: 400,
}
"""The HTTP status that 2026-07-28 asks for when a request is refused before anything was streamed."""


class Wire:
    """One connection to the server; hands each message to the request that it belongs to."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, renumber: bool
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._renumber = renumber
        self._numbers = itertools.count(1)
        self._waiting: dict[Any, asyncio.Queue[Message]] = {}
        self._tokens: dict[Any, tuple[Any, Any]] = {}
        self._pump = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, path: str, *, renumber: bool) -> Wire:
        return cls(*await asyncio.open_unix_connection(path, limit=LINE_LIMIT), renumber=renumber)

    def write(self, message: Message) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def ask(self, message: Message) -> AsyncIterator[Message]:
        """Send a request; yield what comes for it, the answer last."""
        asked = message["id"]
        key = f"bridge-{next(self._numbers)}" if self._renumber else asked
        queue = self._waiting[key] = asyncio.Queue()
        meta = (message.get("params") or {}).get("_meta") or {}
        if self._renumber and "progressToken" in meta:
            self._tokens[key] = (key, meta["progressToken"])
            params = message["params"] | {"_meta": meta | {"progressToken": key}}
            message = message | {"params": params}
        self.write(message | {"id": key})
        try:
            while True:
                got = await queue.get()
                if "method" not in got:
                    yield got | {"id": asked}
                    return
                yield got
        finally:
            self._waiting.pop(key, None)
            self._tokens.pop(key, None)

    async def _read(self) -> None:
        while line := await self._reader.readline():
            message = json.loads(line)
            if "method" not in message:
                if queue := self._waiting.get(message.get("id")):
                    queue.put_nowait(message)
                continue
            params = message.get("params") or {}
            token = params.get("progressToken")
            if known := self._tokens.get(token):
                key, own = known
                message["params"] = params | {"progressToken": own}
                self._waiting[key].put_nowait(message)
            elif self._waiting:
                # Of a session there is one client, and what it asked last is what this is about.
                self._waiting[next(reversed(self._waiting))].put_nowait(message)

    async def close(self) -> None:
        self._writer.close()
        self._pump.cancel()


class Bridge:
    """The one endpoint."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._sessions: dict[str, Wire] = {}
        self._shared: Wire | None = None
        self._opening = asyncio.Lock()

    async def post(self, request: Request) -> Response:
        message: Message = await request.json()
        session = request.headers.get(SESSION)
        headers: dict[str, str] = {}
        if message.get("method") == "initialize" and not _modern(message, request):
            session = uuid.uuid4().hex
            self._sessions[session] = await Wire.open(self._socket, renumber=False)
            headers = {SESSION: session}
        if session is None:
            wire = await self._stateless()
        elif session in self._sessions:
            wire = self._sessions[session]
        else:
            return Response(status_code=404)
        if "method" not in message or "id" not in message:
            wire.write(message)
            return Response(status_code=202)
        answers = wire.ask(message)
        first = await anext(answers)
        if "error" in first and session is None:
            status = STATUS.get(first["error"]["code"], 200)
            return JSONResponse(first, status_code=status)

        async def events() -> AsyncIterator[str]:
            yield _event(first)
            async for answer in answers:
                yield _event(answer)

        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    async def delete(self, request: Request) -> Response:
        wire = self._sessions.pop(request.headers.get(SESSION, ""), None)
        if wire:
            await wire.close()
        return Response(status_code=200 if wire else 404)

    async def get(self, _: Request) -> Response:
        return Response(status_code=405)

    async def _stateless(self) -> Wire:
        async with self._opening:
            if self._shared is None:
                self._shared = await Wire.open(self._socket, renumber=True)
                # The first request settles a pipe's era for good, and a bad one must not be it.
                async for _ in self._shared.ask(_DISCOVER):
                    pass
            return self._shared


_DISCOVER: Message = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "server/discover",
    "params": {
        "_meta": {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "bridge", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        }
    },
}


def _modern(message: Message, request: Request) -> bool:
    meta = (message.get("params") or {}).get("_meta") or {}
    return (
        "io.modelcontextprotocol/protocolVersion" in meta
        or request.headers.get("mcp-protocol-version") == "2026-07-28"
    )


def _event(message: Message) -> str:
    return f"event: message\ndata: {json.dumps(message)}\n\n"


async def main(socket: str) -> None:
    """Serve until terminated."""
    bridge = Bridge(socket)
    app = Starlette(
        routes=[
            Route("/mcp", bridge.post, methods=["POST"]),
            Route("/mcp", bridge.get, methods=["GET"]),
            Route("/mcp", bridge.delete, methods=["DELETE"]),
        ]
    )
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
    listener = config.bind_socket()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
