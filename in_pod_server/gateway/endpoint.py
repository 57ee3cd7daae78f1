"""The HTTP that Caddy speaks to us, on a unix socket: requests without a body, read by hand.

What is asked is told by a header that Caddy sets after it removed the client's: to check a request,
to say that an app does not answer, or, without it, for the sandbox's own page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

from in_pod_server.gateway import pages
from in_pod_server.gateway.auth import Answer, Gatekeeper, Request

ASK: Final = "X-Podpipe-Ask"
CHECK: Final = "check"
DOWN: Final = "down"
UPGRADE: Final = "X-Podpipe-Upgrade"
HEAD_BYTES: Final = 128 * 1024
"""Caddy takes 32 KiB of a client, and repeats its path in headers of its own."""
BACKLOG: Final = 512
"""What is more at once Caddy is refused, and its clients with it."""

Serve = Callable[[Request], Awaitable[Answer]]

logger = logging.getLogger(__name__)


class Endpoint:
    """Answers Caddy until it is closed.

    Args:
        path: of the socket, which is made anew, for our user alone.
        gatekeeper: decides the checks.
        page: answers what is asked of the sandbox's own page.
    """

    def __init__(self, path: Path, gatekeeper: Gatekeeper, page: Serve) -> None:
        self.path = path
        self._gatekeeper = gatekeeper
        self._page = page
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Listen.

        Raises:
            OSError: the socket cannot be made.
        """
        self.path.unlink(missing_ok=True)
        # The folder is our user's alone; this is for a run folder that somebody opened up.
        self._server = await asyncio.start_unix_server(
            self._attend, self.path, limit=HEAD_BYTES, backlog=BACKLOG, start_serving=False
        )
        self.path.chmod(0o600)
        await self._server.start_serving()

    def close(self) -> None:
        """Answer nobody any more."""
        if self._server:
            self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        self.path.unlink(missing_ok=True)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                answer, goes_on = await self._reply(head)
                writer.write(answer)
                await writer.drain()
                if not goes_on:
                    return
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # it went away, or sent what Caddy would not have let through
        finally:
            self._clients.discard(writer)
            writer.close()

    async def _reply(self, head: bytes) -> tuple[bytes, bool]:
        """What is answered, and whether another request may follow: never what is a client's body."""
        goes_on = False
        try:
            request, asked = _parse(head)
            goes_on = request.headers.get("content-length", "0") == "0" and (
                "transfer-encoding" not in request.headers
            )
            if not goes_on:
                answer = Answer(400, {"Connection": "close"}, "no body is taken here")
            elif asked == CHECK:
                answer = self._gatekeeper.decide(request)
            elif asked == DOWN:
                answer = _down(request)
            else:
                answer = await self._page(request)
        except Exception:
            # The boundary: a fault of ours lets nobody through.
            logger.exception("a request to the gateway could not be decided")
            answer = Answer(500, {}, "the gateway failed")
        return _encoded(answer), goes_on


def _parse(head: bytes) -> tuple[Request, str]:
    """The request that is asked about, and what is asked.

    Raises:
        ValueError: it is no HTTP.
    """
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, uri, _ = first.split(" ")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError("no header")
        name, value = name.lower(), value.strip(" \t")
        if name in headers:
            value = headers[name] + ("; " if name == "cookie" else ", ") + value
        headers[name] = value
    asked = headers.get(ASK.lower(), "")
    if asked == CHECK:
        # A check itself is always a GET.
        method, uri = headers["x-forwarded-method"], headers["x-forwarded-uri"]
    return Request(method, uri, headers, headers.get(UPGRADE.lower(), "")), asked


def _down(request: Request) -> Answer:
    body, kind = pages.refusal(
        503,
        "app is not answering on its port (yet)",
        "The app does not answer on its port yet. This page tries again by itself.",
        html=request.for_a_person,
    )
    headers = {"Retry-After": str(pages.RETRY_SECONDS), "Cache-Control": "no-store"}
    return Answer(503, {**kind, **headers}, body)


def _encoded(answer: Answer) -> bytes:
    body = answer.body.encode()
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items() if value]
    lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join(line.replace("\r", " ").replace("\n", " ") for line in lines)
    return head.encode("latin-1", "replace") + b"\r\n\r\n" + body
