"""A gateway under test: where it is reached, and requests that say exactly what they mean.

The tests need no more of it than this, so the same ones hold for a pod behind any address.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from in_pod_server import contract
from in_pod_server.gateway.access import cookie_of
from in_pod_server.gateway.auth import COOKIE
from in_pod_server.gateway.caddy import program
from tests.in_pod_server.support import PATIENCE, Wire, eventually, start_daemon

APP = Path(__file__).parents[1] / "stubs" / "web_app.py"
SANDBOX = "s1abc"


def hash_of(token: str) -> str:
    return hashlib.sha256(cookie_of(token).encode()).hexdigest()


def access(version: int, *grants: tuple[str, str, str]) -> str:
    """What ANNOTATION_ACCESS says of tokens, each with its app and its time."""
    return json.dumps(
        {
            "version": version,
            "grants": [
                {"hash": hash_of(t), "app": app, "until": until} for t, app, until in grants
            ],
        }
    )


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    set_cookies: Sequence[str]
    body: bytes

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


@dataclass(frozen=True)
class Place:
    """One sandbox's gateway, as its clients reach it."""

    address: tuple[str, int]
    token: str
    sandbox_id: str = SANDBOX
    domain: str = "sandbox.localhost"

    @property
    def base(self) -> str:
        return f"{self.sandbox_id}.{self.domain}"

    @property
    def cookie(self) -> str:
        return f"{COOKIE}={cookie_of(self.token)}"

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def host(self, app: str = "web") -> str:
        return f"{app}.{self.base}:{self.address[1]}" if app else f"{self.base}:{self.address[1]}"

    def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        *,
        app: str = "web",
        host: str | None = None,
        body: bytes | None = None,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request whose target is not changed, and begin to read its reply."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", self.host(app) if host is None else host)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        try:
            connection.endheaders(body)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def ask(
        self, method: str, target: str, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Reply:
        connection, response = self.open(method, target, headers, **more)
        with contextlib.closing(connection):
            return Reply(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.headers.get_all("Set-Cookie") or [],
                response.read(),
            )

    def seen(self, target: str, headers: Mapping[str, str], **more: Any) -> dict[str, Any]:
        """What the app saw of a request that was let through."""
        reply = self.ask("GET", target, headers, **more)
        assert reply.status == 200, reply
        return reply.json()

    @contextlib.contextmanager
    def websocket(
        self,
        target: str = "/ws",
        headers: Mapping[str, str] | None = None,
        *,
        app: str = "web",
        origin: str | None = None,
    ) -> Iterator[tuple[ClientConnection, dict[str, Any]]]:
        """An open WebSocket, and what the app saw of its handshake."""
        with (
            socket.create_connection(self.address, PATIENCE) as raw,
            connect(
                f"ws://{self.host(app)}{target}",
                sock=raw,
                additional_headers=headers,
                origin=origin,  # type: ignore[arg-type]
                max_size=None,
                proxy=None,
                ping_interval=None,
                open_timeout=PATIENCE,
                close_timeout=1,
            ) as opened,
        ):
            yield opened, json.loads(opened.recv(PATIENCE))


@dataclass(frozen=True)
class Served(Place, abc.ABC):
    """A gateway and the tools of its sandbox."""

    wire: Wire = None  # type: ignore[assignment]

    def call(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        result = self.wire.call(secrets.token_hex(4), tool, **arguments)
        assert not result.get("isError"), result
        facts: dict[str, Any] = result["structuredContent"]
        return facts

    def refused(self, tool: str, /, **arguments: Any) -> str:
        result = self.wire.call(secrets.token_hex(4), tool, **arguments)
        assert result.get("isError"), result
        text: str = result["content"][0]["text"]
        return text

    def table(self) -> dict[str, Any]:
        """What is published, as the record keeps it."""
        found: dict[str, Any] = json.loads(self.call("list_apps")["table"])
        return found

    @abc.abstractmethod
    def client(self) -> contextlib.AbstractContextManager[Wire]:
        """Another client of the tools."""

    @abc.abstractmethod
    def kill_caddy(self) -> None:
        """End it as the kernel would for want of memory."""


@dataclass(frozen=True)
class Local(Served):
    """A gateway of a daemon on this machine."""

    folder: Path = Path()
    process: subprocess.Popen[bytes] = None  # type: ignore[assignment]

    @property
    def daemon_pid(self) -> int:
        return self.process.pid

    def runs(self) -> bool:
        return self.process.poll() is None

    def client(self) -> contextlib.AbstractContextManager[Wire]:
        return Wire(self.folder / "d.sock")

    def kill_caddy(self) -> None:
        os.kill(self.caddy(), signal.SIGKILL)

    def tell(self, told: str) -> None:
        """Tell the grants, as a host does."""
        self.wire.request(secrets.token_hex(4), "ping", {"_meta": {contract.META_ACCESS: told}})

    def caddy(self) -> int:
        """Process id of the Caddy of this daemon."""
        found: list[int] = []

        def runs() -> bool:
            children = Path(f"/proc/{self.daemon_pid}/task/{self.daemon_pid}/children")
            for pid in children.read_text().split():
                with contextlib.suppress(OSError):
                    if b"caddy" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found[:] = [int(pid)]
                        return True
            return False

        eventually(runs)
        return found[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    """Whether somebody listens on a port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def web_app() -> Iterator[int]:
    """An app that runs; its port."""
    port = free_port()
    process = subprocess.Popen([sys.executable, str(APP), str(port)])

    try:
        eventually(lambda: accepts(port))
        yield port
    finally:
        process.kill()
        process.wait(PATIENCE)


@contextlib.contextmanager
def gateway(
    base: Path,
    *,
    notes: str = "",
    port: int = 0,
    idle_seconds: int = 0,
    proxied: bool = False,
    under: Sequence[str] = (),
) -> Iterator[Local]:
    """A daemon with a gateway, one token for everything, and nothing published.

    `notes` is what the pod's annotations say instead, `port` one that may be taken; its clients may be
    `proxied`; `under` is a program that becomes it.
    """
    port, token = port or free_port(), secrets.token_urlsafe(contract.TOKEN_BYTES)
    (base / "podinfo").mkdir(exist_ok=True)
    told = json.dumps(access(1, (token, "", "")))
    (base / "podinfo" / contract.PODINFO_ANNOTATIONS).write_text(
        notes or f"{contract.ANNOTATION_ACCESS}={told}\n"
    )
    named = {contract.ENV_SANDBOX_ID: SANDBOX, contract.ENV_IDLE_SECONDS: str(idle_seconds)}
    if proxied:
        named[contract.ENV_GATEWAY_ADDRESS] = "127.0.0.1"
    with (
        start_daemon(base, under=under, arguments=("--gateway-port", str(port)), **named) as daemon,
        Wire(daemon.socket) as wire,
    ):
        yield Local(
            ("127.0.0.1", port),
            token,
            wire=wire,
            folder=base,
            process=daemon.process,
        )


def ends(opened: ClientConnection) -> bool:
    """Whether a WebSocket is closed by the other end, within our patience."""
    try:
        opened.recv(10)
    except ConnectionClosed:
        return True
    return False


class Streams:
    """A WebSocket, an event stream and a download, unread so far, that somebody has opened of one app."""

    def __init__(self, stack: contextlib.ExitStack, place: Place, app: str, token: str) -> None:
        bearer = {"Authorization": f"Bearer {token}"}
        self.socket = stack.enter_context(place.websocket(headers=bearer, app=app))[0]
        self.responses = []
        for target in ("/sse", "/endless"):
            connection, response = place.open("GET", target, bearer, app=app)
            stack.callback(connection.close)
            assert response.status == 200
            self.responses.append(response)

    def go_on(self) -> bool:
        self.socket.send("still there")
        return self.socket.recv(10) == "still there" and all(
            response.read(10) for response in self.responses
        )

    def end(self) -> bool:
        """Whether all are ended by the other end, within our patience."""
        for response in self.responses:
            with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
                while response.read(1 << 16):
                    pass
        return ends(self.socket)


@contextlib.contextmanager
def proxy(config: str, port: int) -> Iterator[None]:
    """A Caddy of its own, as somebody's proxy before the gateway, which listens on `port`."""
    caddy = program()
    assert caddy, "the Python environment brings a Caddy"
    process = subprocess.Popen(
        [caddy, "run", "--config", "-", "--adapter", "caddyfile"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin
    with process.stdin:
        process.stdin.write(config.encode())

    try:
        eventually(lambda: accepts(port))
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)
