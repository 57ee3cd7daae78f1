"""MCP over the stdin and stdout of a child: requests by number, answers as they come.

The event loop gives the bytes straight to whoever waits for them. The SDK's client would put two
tasks, two queues and a validation of every message between, which is a third of a short call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import anyio

from host_client import __version__
from host_client.errors import STDERR_TAIL, RequestRefused, SessionLost
from in_pod_server.contract import ENDING_TAKEN, MAX_REQUEST_BYTES, METHOD_ENDING
from in_pod_server.lines import LineBuffer, Overlong
from in_pod_server.streams import Together

log = logging.getLogger(__name__)

PROTOCOL_VERSION = "2025-11-25"
"""The newest that has an `initialize`, which is our hello."""
METHOD_NOT_FOUND = -32601
NEWS_KEPT = 64
"""Progress of one call that waits for a slow listener; the oldest is dropped."""
MOST_SILENCES = 5
"""How often the time of an answer that waits behind others may begin anew: what brings bytes and not the
answer for longer takes nothing in any more."""
EXIT_SECONDS = 0.1
"""How long a child that has ended may leave its stdout open: a child of its own may still hold it."""
CLOSE_SECONDS = 0.8
"""How long the child may take to end by itself when its stdin is closed; then it is made to."""
LEAVE_SECONDS = 0.2
"""The same where it is still asked something that nobody waits for: it ends no sooner than that."""
TERM_SECONDS = 0.3
KILL_SECONDS = 1.0

OnProgress = Callable[[float, float | None, str | None], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is not answered yet."""

    bell: asyncio.Event = field(default_factory=asyncio.Event)
    """Rung when any of the following changes, and when there is room to write again."""
    news: deque[tuple[float, float | None, str | None]] = field(
        default_factory=lambda: deque(maxlen=NEWS_KEPT)
    )
    answer: dict[str, Any] | None = None
    sent: bool = False
    lost: str = ""
    """Why there will be no answer."""

    async def rung(self) -> None:
        """Wait for the next ring.

        Raises:
            SessionLost: there will be no answer.
        """
        await self.bell.wait()
        self.bell.clear()
        if self.lost and self.answer is None:
            raise SessionLost(self.lost, sent=self.sent)

    def lose(self, why: str) -> None:
        self.lost = why
        self.bell.set()


class Pipe(asyncio.SubprocessProtocol):
    """A child that is spoken to. Made by `Pipe.start`; whoever has it calls `aclose`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stderr = b""
        """The last of what the child wrote to stderr; for messages only, never for decisions."""
        self.ended = anyio.Event()
        """Set when nothing more can come out of the pipe."""
        self.ending = False
        """Whether the other end has said that it takes no more; it may still answer what it has."""
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._lines = LineBuffer(MAX_REQUEST_BYTES)
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._exited = anyio.Event()
        self._full = False
        self._together = Together(self._send)
        self._left: set[int] = set()
        """Numbers of requests that were given up here and are still in work at the other end."""

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], name: str) -> Pipe:
        """Start the child.

        Args:
            argv: its command line.
            env: its whole environment.
            name: what to call the other end in messages.

        Raises:
            OSError: it cannot be started.
        """
        loop = asyncio.get_running_loop()
        _, pipe = await loop.subprocess_exec(
            lambda: cls(name),
            *argv,
            env=env,
            # A session of its own: ctrl-C is for us, who close it in our own time.
            start_new_session=True,
        )
        return pipe

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._transport.get_pid()

    async def initialize(self, timeout: float) -> dict[str, Any]:
        """Shake hands; return the answer to `initialize`.

        Args:
            timeout: seconds.

        Raises:
            SessionLost: there was no answer.
            RequestRefused: there was another than the protocol's.
        """
        info = {"name": "podpipe", "version": __version__}
        asked = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": info}
        hello = await self.request("initialize", asked, timeout=timeout)
        self.notify("notifications/initialized")
        return hello

    async def request(
        self,
        method: str,
        params: dict[str, Any] | None = None,
        *,
        timeout: float,
        of_silence: bool = False,
        on_progress: OnProgress | None = None,
        cancels: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            method: of the protocol.
            params: for it; written before anything else happens.
            timeout: seconds.
            of_silence: whether they begin anew with all that comes, up to `MOST_SILENCES` of them:
                on a slow way an answer waits behind others.
            on_progress: receives its progress: done, total, message.
            cancels: asked when this task is cancelled: whether the other end is told to stop.

        Returns:
            The result, as it came.

        Raises:
            SessionLost: the pipe is closed, broke or froze; `sent` says whether the other end may
                have the request.
            RequestRefused: the other end answered with an error of the protocol.
        """
        number = next(self._numbers)
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": number, "method": method}
        if on_progress:
            meta = (params or {}).get("_meta", {})
            params = {**(params or {}), "_meta": {**meta, "progressToken": number}}
        if params is not None:
            message["params"] = params
        line = _dump(message)
        asked = self._asked[number] = _Asked()
        began = self._loop.time()
        timer = self._loop.call_later(timeout, lambda: look())

        def look() -> None:
            nonlocal timer
            heard = min(self._heard, began + MOST_SILENCES * timeout) if of_silence else began
            left = max(began, heard) + timeout - self._loop.time()
            if left > 0:
                timer = self._loop.call_later(left, look)
            else:
                asked.lose(f"{self.name} did not answer within {timeout:.3g} s")

        try:
            while self._full:
                await asked.rung()
            if self.ending:
                raise SessionLost(f"{self.name} is ending", sent=False)
            self._write(line)
            asked.sent = True
            while asked.answer is None:
                await asked.rung()
                while asked.news and on_progress:
                    await on_progress(*asked.news.popleft())
        except asyncio.CancelledError:
            if asked.sent and cancels():
                self.notify("notifications/cancelled", {"requestId": number})
            elif asked.sent:
                self._left.add(number)
            raise
        finally:
            timer.cancel()
            del self._asked[number]
        return _result(method, asked.answer)

    def notify(self, method: str, params: dict[str, Any] | None = None) -> None:
        """Send a notification; nothing happens if the pipe is closed."""
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        with contextlib.suppress(SessionLost):
            self._write(_dump(message))

    async def aclose(self) -> None:
        """Let the child end, or make it; return when it has, which takes two seconds at most."""
        transport = self._transport
        with anyio.CancelScope(shield=True):
            if stdin := self._stdin:
                self._together.flush()
                stdin.close()
            for number, seconds in (
                (0, LEAVE_SECONDS if self._left else CLOSE_SECONDS),
                (signal.SIGTERM, TERM_SECONDS),
                (signal.SIGKILL, KILL_SECONDS),
            ):
                if number:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(transport.get_pid(), number)
                with anyio.move_on_after(seconds):
                    await self._exited.wait()
                    break
            self._end()
            transport.close()

    # --- writing ---------------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        if self.ended.is_set() or not self._stdin or self._stdin.is_closing():
            raise SessionLost(f"the pipe into {self.name} is closed", sent=False)
        self._together.write(line)

    @property
    def _stdin(self) -> asyncio.WriteTransport | None:
        return cast("asyncio.WriteTransport | None", self._transport.get_pipe_transport(0))

    def _send(self, data: bytes) -> None:
        stdin = self._stdin
        if stdin and not stdin.is_closing():
            stdin.write(data)

    # --- reading ---------------------------------------------------------------------------------

    def _take(self, line: bytes | Overlong) -> None:
        if isinstance(line, Overlong):
            self._answer(
                line.id, {"error": {"code": 0, "message": f"the answer has {line.size} bytes"}}
            )
            return
        try:
            message = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            if line.strip():
                log.debug("%s wrote %d bytes that are no message", self.name, len(line))
        elif "method" not in message:
            self._answer(message.get("id"), message)
        elif "id" in message:
            self._reply(message)
        elif message["method"] == "notifications/progress":
            self._hear(message.get("params"))
        elif message["method"] == METHOD_ENDING:
            self._leave(message.get("params"))

    def _answer(self, number: object, message: dict[str, Any]) -> None:
        if not isinstance(number, int):
            log.debug("%s answered what was never asked: %r", self.name, number)
            return
        self._left.discard(number)
        if asked := self._asked.get(number):
            asked.answer = message
            asked.bell.set()

    def _reply(self, message: dict[str, Any]) -> None:
        """Answer what the other end asks: we live, and can do nothing else for it."""
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "ping":
            reply["result"] = {}
        else:
            reply["error"] = {"code": METHOD_NOT_FOUND, "message": "Method not found"}
        # A lone surrogate in its id is not ours to answer.
        with contextlib.suppress(SessionLost, UnicodeEncodeError):
            self._write(_dump(reply))

    def _hear(self, params: object) -> None:
        if not isinstance(params, dict):
            return
        number, done = params.get("progressToken"), params.get("progress")
        if not isinstance(number, int) or not isinstance(done, int | float):
            return
        if asked := self._asked.get(number):
            total, said = params.get("total"), params.get("message")
            asked.news.append(
                (
                    done,
                    total if isinstance(total, int | float) else None,
                    said if isinstance(said, str) else None,
                )
            )
            asked.bell.set()

    def _leave(self, params: object) -> None:
        """The other end starts nothing more: what it had not read by now may go elsewhere."""
        self.ending = True
        taken = params.get(ENDING_TAKEN) if isinstance(params, dict) else None
        last = taken if isinstance(taken, int) else 0
        for number, asked in self._asked.items():
            if number > last:
                asked.sent = False
                asked.lose(f"{self.name} is ending")

    def _end(self) -> None:
        """Nothing more will come: whoever waits is told."""
        if self.ended.is_set():
            return
        self.ended.set()
        self._full = False
        for asked in self._asked.values():
            asked.lose(f"the pipe into {self.name} broke")

    # --- what the event loop tells ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the child's transport."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        """Take what the child wrote."""
        assert isinstance(data, bytes)
        if fd == 1:
            self._heard = self._loop.time()
            for line in self._lines.feed(data):
                self._take(line)
        else:
            log.debug("%s: %r", self.name, data[-STDERR_TAIL:])
            self.stderr = (self.stderr + data)[-STDERR_TAIL:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Note that the child closed one of its streams."""
        if fd == 1:
            self._end()

    def process_exited(self) -> None:
        """Note that the child has ended; what it wrote may still be on its way."""
        self._exited.set()
        self._loop.call_later(EXIT_SECONDS, self._end)

    def pause_writing(self) -> None:
        """Hold back further requests: the other end does not read."""
        self._full = True

    def resume_writing(self) -> None:
        """Let them go on."""
        self._full = False
        for asked in self._asked.values():
            asked.bell.set()


def _dump(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _result(method: str, answer: dict[str, Any]) -> dict[str, Any]:
    match answer:
        case {"result": dict(result)}:
            return result
        case {"error": {"code": int(code), "message": str(said)}}:
            raise RequestRefused(said, code=code)
        case _:
            raise RequestRefused(f"the answer to {method} is not one of the protocol", code=0)
