"""The ways from Caddy to the apps: each ends when the right by which it was opened does.

Caddy can end all of its connections or none. So it reaches an app by an address of the loopback that
stands for that app, its port and one grant, where we take its connections and pass them on: what came
by there is known, and is cut when the app is closed or the grant is gone, while nothing else is touched.
No address is used twice, so a request that was let through just before leads nowhere.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import itertools
import logging
import resource
import socket
from collections.abc import Callable
from typing import Final

import anyio
import anyio.abc

from in_pod_server import contract
from in_pod_server.gateway.access import Grant
from in_pod_server.splice import End, accepted

FIRST: Final = ipaddress.IPv4Address("127.1.0.1")
PORT: Final = contract.RESERVED_PORTS[-1]
"""Of all addresses, for it is in the way of no app; any other where a command has it at every address."""
BACKLOG: Final = 512
DIAL_SECONDS: Final = 2.0
MAX_OPEN: Final = 1000
"""Requests at once: of each that is not read up to a third of a MiB is held."""
MAX_WAYS: Final = 128
"""Of those without a request, each of which is a descriptor: any app may be opened by any grant."""
RESERVED_FILES: Final = 512
"""Descriptors that no request to an app takes from pipes, commands and the ways."""

logger = logging.getLogger(__name__)


class Ways:
    """The ways to all apps of one sandbox."""

    def __init__(self) -> None:
        self._tasks: anyio.abc.TaskGroup | None = None
        self._addresses = map(FIRST.__add__, itertools.count())
        self._ways: dict[tuple[str, int, Grant | None], Way] = {}
        """Last the one that was asked for last."""

    async def run(self) -> None:
        """Have ways until cancelled; there are none before."""
        async with anyio.create_task_group() as self._tasks:
            await anyio.sleep_forever()

    def to(self, app: str, port: int, grant: Grant | None) -> str:
        """The upstream for a request to an app.

        Args:
            app: its name.
            port: where it listens.
            grant: by which it is opened; None for what is public.

        Raises:
            OSError: there is no room for another.
        """
        assert self._tasks
        key = app, port, grant
        way = self._ways.pop(key, None)
        if way is None:
            self._make_room()
            way = Way(f"{next(self._addresses)}", port, self._has_room)
            self._tasks.start_soon(way.serve)
        self._ways[key] = way
        return way.upstream

    def end_unless(self, allowed: Callable[[str, int, Grant | None], bool]) -> None:
        """End the ways of which it is not true, given app, port and grant, and every request on them."""
        for key in [key for key in self._ways if not allowed(*key)]:
            self._ways.pop(key).end()

    def _make_room(self) -> None:
        """End those without a request that were asked for longest ago, so that one more is not too many."""
        idle = [key for key, way in self._ways.items() if not way.open_requests]
        for key in idle[: max(0, len(self._ways) - MAX_WAYS + 1)]:
            self._ways.pop(key).end()

    def _has_room(self) -> bool:
        """Whether there is memory for another request, and descriptors, of which each takes two."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unbounded = files == resource.RLIM_INFINITY
        most = MAX_OPEN if unbounded else min(MAX_OPEN, (files - RESERVED_FILES) // 2)
        return self.open_requests() < most

    def open_requests(self) -> int:
        """How many requests are open, streams among them: Caddy has a connection for each."""
        return sum(way.open_requests for way in self._ways.values())


class Way:
    """One address, and what came by there.

    Args:
        address: of the loopback.
        leads_to: a port of an app.
        has_room: whether another request may come.

    Raises:
        OSError: it cannot be listened on.
    """

    def __init__(self, address: str, leads_to: int, has_room: Callable[[], bool]) -> None:
        self.open_requests = 0
        self._leads_to = leads_to
        self._has_room = has_room
        self._listener = _listening(address)
        self.upstream = "{}:{}".format(*self._listener.getsockname())
        self._scope = anyio.CancelScope()

    def end(self) -> None:
        """Take no more, and cut what is open."""
        self._scope.cancel()

    async def serve(self) -> None:
        """Pass on what comes, until the end."""
        with self._listener, self._scope:
            async with anyio.create_task_group() as requests:
                while True:
                    requests.start_soon(self._lead, await accepted(self._listener))

    async def _lead(self, client: End) -> None:
        if not self._has_room():
            client.reset()  # which Caddy tells its client as 503, to come again
            return
        ends = [client]
        self.open_requests += 1
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                ends.append(await self._dialled())
            await client.join(ends[1])
        except OSError as error:
            # Caddy is cut off, and says so to its client.
            logger.info("no way to port %d: %s", self._leads_to, error)
        finally:
            self.open_requests -= 1
            for end in ends:
                end.reset()

    async def _dialled(self) -> End:
        """A connection to the app. Raises `OSError` where it takes none."""
        loop = asyncio.get_running_loop()
        try:
            return (await loop.create_connection(End, "127.0.0.1", self._leads_to))[1]
        except ConnectionRefusedError:
            return (await loop.create_connection(End, "::1", self._leads_to))[1]


def _listening(address: str) -> socket.socket:
    try:
        listener = socket.create_server((address, PORT), backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener = socket.create_server((address, 0), backlog=BACKLOG)
    listener.setblocking(False)
    return listener
