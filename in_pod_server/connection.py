"""One client: an MCP session over our own framing, on the daemon's socket or the host's stdio.

The event loop reads and writes the stream itself. A reply is handed to the transport whole, so a
cancelled call can never leave half a line behind; a client that does not read stops being read.
What a call needs to know about the connection it came by, it finds as its request context.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
from mcp.server._otel import OpenTelemetryMiddleware
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp.types import (
    INVALID_REQUEST,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from in_pod_server.contract import (
    ENDING_TAKEN,
    IN_FLIGHT_LIMIT,
    MAX_REQUEST_BYTES,
    META_LEASE,
    METHOD_ENDING,
)
from in_pod_server.framing import Refused, encode, error, parse
from in_pod_server.lines import LineBuffer, Overlong
from in_pod_server.parts import Parts
from in_pod_server.streams import STALL_SECONDS, Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.streams.memory import MemoryObjectSendStream
    from mcp.server.mcpserver import MCPServer
    from mcp.types import JSONRPCMessage


READ_BYTES = 65536
WRITE_BUFFER_BYTES = 256 * 1024
"""What may wait in the transport for a slow client before its next request is not read."""
HANGUP_POLL_SECONDS = 0.05

logger = logging.getLogger(__name__)


class Connection:
    """The session's write stream, and what its calls may ask: has the client gone, or cancelled?"""

    def __init__(
        self,
        streams: Streams,
        *,
        max_message_bytes: int,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        linger_seconds: float = math.inf,
        parts: Parts | None = None,
        on_told: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._streams = streams
        self._reader, self._writer = streams.reader, streams.writer
        self._limit = max_message_bytes
        self._request_limit = max_request_bytes
        self._linger = linger_seconds
        self._parts = parts
        self._on_told = on_told
        self._in_flight: dict[RequestId, int] = {}
        """Requests in work, and the number of each: the session takes 1 and "1" for the same id."""
        self._ids: dict[RequestId, RequestId] = {}
        """By number, what the client calls it."""
        self._last = 0
        self._taken: RequestId | None = None
        self._settled = anyio.Event()
        self._write_lock = anyio.Lock(fast_acquire=True)
        self._cancelled: set[RequestId] = set()
        self._lease: float | None = None
        self._writer.transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)

    @property
    def leased(self) -> bool:
        """Whether the client is a host of ours, which tells by its calls that it uses the sandbox."""
        return self._lease is not None

    async def answered(self) -> None:
        """Wait until no request is in work."""
        while self._in_flight:
            await self._settled.wait()

    async def tell_ending(self) -> None:
        """Tell a host of ours that calls after those that were read by now are not started.

        What it sends meanwhile, and what this daemon is killed before reading, it can then safely
        send to the next one. Other clients know no such message, and hold no lease.
        """
        if self._lease is None:
            return
        params = {ENDING_TAKEN: self._taken}
        with contextlib.suppress(anyio.BrokenResourceError):
            await self._write(
                JSONRPCNotification(jsonrpc="2.0", method=METHOD_ENDING, params=params)
            )

    def cancelled_by_client(self, request_id: RequestId | None) -> bool:
        """Tell an explicit `notifications/cancelled` from the end of the connection.

        Args:
            request_id: as the session has it.
        """
        return request_id in self._cancelled

    async def serve(
        self, server: MCPServer[Any], *, experimental: dict[str, dict[str, Any]]
    ) -> None:
        """Run one MCP session until the client has left."""
        # Private: MCPServer has no public way to serve a stream of our own.
        lowlevel = server._lowlevel_server
        # Spans that nobody collects: latency of each call.
        lowlevel.middleware[:] = [
            each for each in lowlevel.middleware if not isinstance(each, OpenTelemetryMiddleware)
        ]
        options = lowlevel.create_initialization_options(experimental_capabilities=experimental)
        feed, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, feed)
                await lowlevel.run(messages, self, options)
                tasks.cancel_scope.cancel()
        finally:
            if self._parts:
                self._parts.clear()

    async def _read(self, feed: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        lines = LineBuffer(self._request_limit)
        async with feed:
            try:
                while data := await self._received():
                    for line in lines.feed(data):
                        await self._take(line, feed)
                await self._finish()
            except (OSError, anyio.BrokenResourceError):
                logger.debug("a client went away")

    async def _received(self) -> bytes:
        """The next bytes; none at the client's end, or where it promised more and is silent."""
        with anyio.move_on_after(self._lease):
            return await self._reader.read(READ_BYTES)
        logger.info("a client has been silent for %g s and is taken for gone", self._lease)
        # What waits to be written to it would keep the session, and whoever pumps for it.
        self._streams.abort()
        return b""

    async def _take(
        self, line: bytes | Overlong, feed: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        if not isinstance(line, Overlong) and not line.strip():
            return
        reply: JSONRPCMessage | None = None
        message: JSONRPCMessage | None
        try:
            message = parse(line, self._request_limit)
            if self._parts:
                message, reply = self._parts.take(message)
        except Refused as refused:
            message, reply = None, refused.reply
        if reply:
            await self._write(reply)
        if message is None:
            return
        settle = None
        if isinstance(message, JSONRPCRequest):
            if message.id in self._in_flight:
                reason = "Invalid Request: a request with this id is still in work"
                await self._write(error(message.id, INVALID_REQUEST, reason))
                return
            while len(self._in_flight) >= IN_FLIGHT_LIMIT:
                await self._settled.wait()
            settle = partial(self._unanswered, self._number(message))
        elif (
            isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled"
        ):
            self._note_cancel(message)
        if isinstance(message, JSONRPCRequest) and message.method == "ping":
            self._renew(message)
        metadata = ServerMessageMetadata(request_context=self, on_request_unanswered=settle)
        await feed.send(SessionMessage(message, metadata))

    def _number(self, request: JSONRPCRequest) -> int:
        """Give a request the id by which the session knows it; return that."""
        self._last += 1
        self._taken = request.id
        self._in_flight[request.id] = self._last
        self._ids[self._last] = request.id
        request.id = self._last
        return self._last

    def _note_cancel(self, cancel: JSONRPCNotification) -> None:
        named = (cancel.params or {}).get("requestId")
        # Some clients write numbers as text here.
        for asked in (named, int(named) if isinstance(named, str) and named.isdecimal() else None):
            if isinstance(asked, str | int) and not isinstance(asked, bool):
                number = self._in_flight.get(asked)
                if number is not None:
                    self._cancelled.add(number)
                    cancel.params = {**(cancel.params or {}), "requestId": number}
                    return
        # What is not in work must not be taken for the number of something that is.
        cancel.params = {**(cancel.params or {}), "requestId": 0}

    def _renew(self, ping: JSONRPCRequest) -> None:
        """Take up a client's promise to send something at least so often, and what it knows."""
        meta = (ping.params or {}).get("_meta") or {}
        self._on_told(meta)
        lease = meta.get(META_LEASE)
        if isinstance(lease, int | float) and lease is not True and lease > 0:
            self._lease = lease

    async def _finish(self) -> None:
        """Answer what a client asked that writes no more, unless it no longer listens either."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._give_up_stalled)
            with anyio.move_on_after(self._linger):
                while self._in_flight and not self._hung_up():
                    with anyio.move_on_after(HANGUP_POLL_SECONDS):
                        await self._settled.wait()
            tasks.cancel_scope.cancel()

    async def _give_up_stalled(self) -> None:
        """A killed kubectl can leave the end that we write to open, with nobody who reads it."""
        await self._streams.taken(STALL_SECONDS)
        self._streams.abort()

    def _hung_up(self) -> bool:
        if self._writer.transport.is_closing():
            return True
        poller = select.poll()
        stream = self._writer.get_extra_info("socket") or self._writer.get_extra_info("pipe")
        poller.register(stream.fileno(), 0)
        return bool(poller.poll(0))

    async def _unanswered(self, number: RequestId) -> None:
        self._settle(number)

    def _settle(self, number: RequestId) -> None:
        self._in_flight.pop(self._ids.pop(number, number), None)
        self._cancelled.discard(number)
        self._settled.set()
        self._settled = anyio.Event()

    async def _write(self, message: JSONRPCMessage) -> None:
        line = encode(message, self._limit)
        async with self._write_lock:
            try:
                # Before and not after: what waits for a slow client is one buffer and one line.
                await self._writer.drain()
            except OSError as exc:
                raise anyio.BrokenResourceError from exc
            if self._writer.transport.is_closing():
                raise anyio.BrokenResourceError
            self._streams.together.write(line)

    # --- the stream that the session writes to ---------------------------------------------------

    async def send(self, item: SessionMessage, /) -> None:
        """Write one message of the session."""
        message = item.message
        if not isinstance(message, (JSONRPCResponse, JSONRPCError)) or message.id is None:
            await self._write(message)
            return
        number = message.id
        message.id = self._ids.get(number, number)
        try:
            await self._write(message)
        finally:
            self._settle(number)

    async def aclose(self) -> None:
        """Do nothing: whoever opened the streams closes them when the session has ended."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.aclose()
