"""The local address of every published app: `http://APP.SANDBOX_ID.sandbox.localhost:PORT`.

A connection's first request says by its Host which sandbox it is for; from there on bytes are passed on
as they come, to that sandbox's gateway and no other, which answers only for hosts of its own. One process
listens, whichever was first; the others wait to take its place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import h11

from host_client.errors import (
    PodpipeError,
    PortTaken,
    SandboxExpired,
    SandboxNotFound,
    SandboxSuspended,
    StillStarting,
    root_cause,
)
from host_client.gateway import DOMAIN, Gateway
from host_client.loopback import listening
from host_client.tunnel import Tunnel
from in_pod_server.contract import GATEWAY_PORT
from in_pod_server.splice import End

if TYPE_CHECKING:
    from host_client.host import Host

log = logging.getLogger(__name__)

WHO = "/.well-known/podpipe"
"""Of `DOMAIN` itself: whose listener this is."""
HEAD_BYTES = 32 * 1024
HEAD_SECONDS = 10.0
"""A browser opens connections ahead of what it will ask; it opens them anew."""
LOOKUPS = 4
"""Sandboxes that are looked for at once: any page may name hosts that do not exist."""
TAKE_OVER_SECONDS = 1.0
STOPPED_SECONDS = 60.0
"""How long one of ours that listened may not answer: a person may have stopped it, and let it go on."""
RETRY_SECONDS = 2

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}\.)?({_LABEL})\.{re.escape(DOMAIN)}")
_STATUS: Mapping[type[PodpipeError], HTTPStatus] = {
    SandboxNotFound: HTTPStatus.NOT_FOUND,
    SandboxExpired: HTTPStatus.GONE,
    SandboxSuspended: HTTPStatus.SERVICE_UNAVAILABLE,
    StillStarting: HTTPStatus.SERVICE_UNAVAILABLE,
}


class _Refused(Exception):
    """A request that leads nowhere: what it is answered."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class Listener:
    """The local address of one user's sandboxes.

    Args:
        host: whose.
        port: of this machine's loopback.
        tasks: where carriers live.
    """

    def __init__(self, host: Host, port: int, tasks: anyio.abc.TaskGroup) -> None:
        self._host = host
        self._port = port
        self._tasks = tasks
        self._tunnels: dict[str, Tunnel] = {}
        self._lookups = anyio.CapacityLimiter(LOOKUPS)

    def url(self, sandbox_id: str, app: str = "") -> str:
        """Where an app is, or the sandbox's own page."""
        return Gateway(port=self._port).address(sandbox_id, app)

    async def serve(self, *, task_status: anyio.abc.TaskStatus[bool]) -> None:
        """Listen until cancelled; started as soon as anybody does, with whether it is this process.

        Raises:
            PortTaken: by what is no listener of this user's.
            PodpipeError: as `loopback.listening`.
        """
        told = False
        answered = anyio.current_time()
        while True:
            try:
                async with listening(self._port, self._handle, self._tasks):
                    if not told:
                        task_status.started(True)
                    log.info("listening on port %d", self._port)
                    await anyio.sleep_forever()
            except PortTaken as taken:
                ours = await self._ours()
                if ours:
                    answered = anyio.current_time()
                waits = ours is None and anyio.current_time() - answered < STOPPED_SECONDS
                if not ours and not (told and waits):
                    raise PortTaken(
                        f"port {self._port} of this machine is taken by another program, or by podpipe "
                        f"for another user or cluster{'' if ours is False else ', and does not answer'}; "
                        "set PODPIPE_OPEN_PORT to a free one"
                    ) from taken
                if not told:
                    task_status.started(False)
                    told = True
                await anyio.sleep(TAKE_OVER_SECONDS)

    def _owner(self) -> str:
        kubectl = self._host.kubectl
        facts = [self._host.settings.user, kubectl.target.server, kubectl.namespace]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    async def _ours(self) -> bool | None:
        """Whether who listens there serves the same user's sandboxes; None where it does not say."""
        request = f"GET {WHO} HTTP/1.1\r\nHost: {DOMAIN}\r\nConnection: close\r\n\r\n"
        said = b""
        with anyio.move_on_after(HEAD_SECONDS):
            try:
                async with await anyio.connect_tcp("127.0.0.1", self._port) as stream:
                    await stream.send(request.encode("ascii"))
                    while len(said) < HEAD_BYTES:
                        said += await stream.receive()
            except anyio.EndOfStream:
                return said.endswith(self._owner().encode("ascii"))
            except (OSError, anyio.BrokenResourceError):
                return True  # It has just gone; the next try shows.
            return False
        return None

    async def _handle(self, client: End) -> None:
        try:
            await self._lead(client)
        except Exception as caught:  # whatever it is, it is this one connection's
            error = root_cause(caught)
            if isinstance(error, OSError):
                log.info("a connection was lost: %s", error)
                return
            if isinstance(error, _Refused):
                status, why = error.status, str(error)
            elif isinstance(error, PodpipeError):
                log.info("%s", error)
                status, why = _STATUS.get(type(error), HTTPStatus.BAD_GATEWAY), str(error)
            else:
                # Where, but not what it says: that may repeat what the request carried.
                where = "".join(traceback.format_tb(error.__traceback__))
                log.error("unexpected %s\n%s", type(error).__name__, where)  # noqa: TRY400
                status, why = HTTPStatus.INTERNAL_SERVER_ERROR, "internal error of podpipe"
            await client.tell(_answer(status, why))

    async def _lead(self, client: End) -> None:
        """Pass a connection on to the sandbox that its first request names."""
        head, request = b"", None
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        with anyio.move_on_after(HEAD_SECONDS):
            while request is None:
                if not (chunk := await client.receive()):
                    return
                head += chunk
                request = _request(parser, chunk)
        if request is None:
            return
        name = _host_of(request)
        if name == DOMAIN and request.target == WHO.encode("ascii"):
            await client.tell(_answer(HTTPStatus.OK, self._owner()))
            return
        tunnel = await self._tunnel(name)
        unavailable = _answer(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"nothing answers for {name} in its sandbox (yet): expose a port there first",
        )
        async with tunnel.connected(GATEWAY_PORT) as there:
            await client.join(there, head, silent=unavailable)

    async def _tunnel(self, name: str) -> Tunnel:
        """The way to the sandbox of a host.

        Raises:
            SandboxNotFound: it is no sandbox of this user.
            PodpipeError: as `Launcher.find`.
        """
        found = _HOST.fullmatch(name)
        if not found:
            raise _Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"this address serves APP.SANDBOX_ID.{DOMAIN} and nothing else",
            )
        sandbox_id = found[1]
        if sandbox_id not in self._tunnels:
            async with self._lookups:
                sandbox, _ = await self._host.launcher.find(sandbox_id)
            if sandbox.id != sandbox_id:
                raise SandboxNotFound(
                    f"{sandbox_id} is a name; its address is that of {sandbox.id}"
                )
            self._tunnels.setdefault(
                sandbox_id, Tunnel(self._host, sandbox_id, [GATEWAY_PORT], self._tasks)
            )
        return self._tunnels[sandbox_id]


class OnDemand:
    """The listener of a process that listens from when it is first asked to.

    Args:
        host: whose sandboxes, in the tasks of which it lives.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._listener: Listener | None = None
        self._starting = anyio.Lock()

    async def listener(self) -> Listener:
        """The local address of published apps, from now on served by this process or another.

        Raises:
            PortTaken: its port is another program's.
            PodpipeError: as `Host.kubectl`, or the port cannot be listened on.
        """
        async with self._starting:
            if self._listener is None:
                port = self._host.settings.gateway.port
                listener = Listener(self._host, port, self._host.tasks)
                await self._host.tasks.start(self._serve, listener)
                self._listener = listener
            return self._listener

    async def _serve(self, listener: Listener, *, task_status: anyio.abc.TaskStatus[bool]) -> None:
        try:
            await listener.serve(task_status=task_status)
        except PodpipeError as error:
            if self._listener is not listener:
                raise  # to whoever waits for it
            # Another program was quicker to take the port that another podpipe has left.
            log.warning("apps are not at their local address any more: %s", error)
            self._listener = None


def _request(parser: h11.Connection, data: bytes) -> h11.Request | None:
    """The request that is complete with this, if it is."""
    try:
        parser.receive_data(data)
        event = parser.next_event()
    except h11.RemoteProtocolError as error:
        raise _Refused(
            HTTPStatus(error.error_status_hint), f"this is no HTTP/1.1 request: {error}"
        ) from error
    return event if isinstance(event, h11.Request) else None


def _host_of(request: h11.Request) -> str:
    """The host that a request is for, without its port."""
    named = [value.decode("ascii", "replace") for name, value in request.headers if name == b"host"]
    if len(named) != 1:
        raise _Refused(HTTPStatus.BAD_REQUEST, "a request has to name one Host")
    return re.sub(r":\d{1,5}\Z", "", named[0]).lower()


def _answer(status: HTTPStatus, text: str) -> bytes:
    body = text.encode()
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        lines.append(f"Retry-After: {RETRY_SECONDS}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
