"""The gateway of one sandbox: its parts together, for the daemon and for the tools."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import anyio

from in_pod_server import contract
from in_pod_server.errors import GatewayFailedError
from in_pod_server.gateway.access import Access, Grant, now
from in_pod_server.gateway.auth import Gatekeeper
from in_pod_server.gateway.caddy import Caddy, program
from in_pod_server.gateway.endpoint import Endpoint
from in_pod_server.gateway.home_page import App, Facts, HomePage
from in_pod_server.gateway.routes import Routes, Table
from in_pod_server.gateway.ways import Ways
from in_pod_server.podinfo import read_annotations
from in_pod_server.process import Process

FOLDER: Final = "gateway"
BACKLOG: Final = 512
LOOK_SECONDS: Final = 1.0
"""Between two looks at the grants."""
ANSWER_SECONDS: Final = 1.0
"""For an app to accept a connection."""

logger = logging.getLogger(__name__)


class Gateway:
    """Publishes apps of a sandbox on one port, to whoever has a grant.

    Args:
        sandbox_id: by which it knows its hosts; empty where the pod was made without one.
        run_dir: where its table is.
        socket_path: of the socket on which Caddy asks us.
        podinfo: the pod's annotations, as a downwardAPI file.
        port: where it listens; 0 for none at all.
        address: at which a proxy reaches it; empty for the loopback and no proxy.
    """

    def __init__(
        self,
        sandbox_id: str,
        run_dir: Path,
        socket_path: Path,
        podinfo: Path,
        port: int,
        address: str = "",
    ) -> None:
        self.sandbox_id = sandbox_id
        self.port = port
        self._address = address
        self._podinfo = podinfo
        self._socket_path = socket_path
        self._folder = run_dir / FOLDER
        self.access = Access()
        told = read_annotations(podinfo)
        self.access.take(told.get(contract.ANNOTATION_ACCESS))
        self._routes = Routes(
            run_dir / "apps.json", sandbox_id, told.get(contract.ANNOTATION_APPS, "")
        )
        self._ways = Ways()
        self._caddy: Caddy | None = None
        self._why_not = "this sandbox was made without a gateway"

    @property
    def table(self) -> Table:
        """The published apps."""
        return self._routes.table

    @contextlib.asynccontextmanager
    async def running(
        self,
        *,
        processes: Iterable[Process],
        home: Path,
        expires_at: Callable[[], datetime | None],
        on_use: Callable[[], None],
    ) -> AsyncIterator[None]:
        """Serve while the context is open; a port that is taken is told to who publishes an app.

        Args:
            processes: what the page shows as running.
            home: whose room it shows.
            expires_at: until when the sandbox lives.
            on_use: called for each request to an app that was let through.
        """
        if not self.sandbox_id or not self.port:
            yield
            return

        async def facts() -> Facts:
            return Facts(await self.apps(), processes, expires_at(), home)

        gatekeeper = Gatekeeper(
            self.sandbox_id,
            self.access,
            lambda name: self.table.apps.get(name),
            self._ways.to,
            f"unix/{self._socket_path}",
            on_use,
        )
        page = HomePage(self.sandbox_id, facts, gatekeeper.ticket)
        endpoint = Endpoint(self._socket_path, gatekeeper, page.serve)
        with contextlib.ExitStack() as stack:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                listener = stack.enter_context(_listening(self._address, self.port))
                await endpoint.open()
            except OSError as error:
                self._why_not = _explained(self.port, error)
                logger.warning("apps cannot be published: %s", self._why_not)
                yield
                return
            stack.callback(endpoint.close)
            path = program()
            if path is None:
                self._why_not = "the image holds no Caddy: build it from podpipe's Dockerfile"
                logger.warning("apps cannot be published: %s", self._why_not)
                yield
                return
            self._caddy = caddy = Caddy(
                path, listener, self._socket_path, self._folder, proxied=bool(self._address)
            )
            if self.table.apps:
                caddy.want()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._ways.run)
                tasks.start_soon(caddy.run)
                tasks.start_soon(self._watch)
                try:
                    yield
                finally:
                    tasks.cancel_scope.cancel()

    def told(self, access: object) -> None:
        """Take up the grants that a host tells, and end what they do not cover any more."""
        self.access.take(access)
        self._ways.end_unless(self._allowed)

    def open_requests(self) -> int:
        """How many requests to published apps are open now, streams among them."""
        return self._ways.open_requests()

    def publish(self, name: str, port: int) -> Table:
        """Publish a port by a name, and end what is open to one before; return the new table.

        Raises:
            ArgumentError: as `Routes.publish`.
            GatewayFailedError: there is no gateway, or the table cannot be kept.
        """
        if self._caddy is None:
            raise GatewayFailedError(f"no app can be published: {self._why_not}")
        table = self._routes.publish(name, port)
        self._ways.end_unless(self._allowed)
        self._caddy.want()
        return table

    def close(self, name: str) -> Table:
        """Publish an app no longer, and end its open requests; return the new table.

        Raises:
            ArgumentError, GatewayFailedError: as `Routes.close`.
        """
        table = self._routes.close(name)
        self._ways.end_unless(self._allowed)
        return table

    async def apps(self) -> Sequence[App]:
        """The published apps, and which of them answer now."""
        answers: dict[int, bool] = {}

        async def look(port: int) -> None:
            answers[port] = await _accepts(port)

        apps = sorted(self.table.apps.items())
        async with anyio.create_task_group() as tasks:
            for port in {port for _, port in apps}:
                tasks.start_soon(look, port)
        return [App(name, port, answers[port]) for name, port in apps]

    async def _watch(self) -> None:
        """Take up what the kubelet tells, and end what grants had opened that are no more."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            self.access.take(read_annotations(self._podinfo).get(contract.ANNOTATION_ACCESS))
            self._ways.end_unless(self._allowed)

    def _allowed(self, app: str, port: int, grant: Grant | None) -> bool:
        """Whether an app is still published on a port, and still open to a grant."""
        return self.table.apps.get(app) == port and (
            grant is None or self.access.opens(grant, app, now())
        )


def _listening(address: str, port: int) -> socket.socket:
    every = address == contract.EVERY_ADDRESS
    dual = every and socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # What a daemon before us had open must not keep its port from us.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("" if every else address or "127.0.0.1", port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _explained(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is the gateway's, and something else listened there when the sandbox "
            "started: suspend and resume the sandbox"
        )
    return f"the gateway could not start ({error})"


async def _accepts(port: int) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            _, writer = await asyncio.open_connection("localhost", port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
