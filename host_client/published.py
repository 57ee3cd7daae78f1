"""The apps of one user's sandboxes: keep in the record what daemons say, and make tokens for them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import timedelta

from host_client.apps import Grants, new_token, version_of
from host_client.backends.backend import Backend
from host_client.clock import Clock, timestamp
from host_client.errors import Conflict, SandboxNotFound, UsageError
from host_client.launcher import Launcher
from host_client.pipes import Pipes
from host_client.sandbox import Sandbox, current_pod
from in_pod_server import contract as c


@dataclass(frozen=True, slots=True)
class Opened:
    """A new token and what it opens; nobody can read it again."""

    sandbox: Sandbox
    token: str
    app: str
    until: str


class Apps:
    """The apps of one user's sandboxes, as far as their records know them.

    Args:
        launcher: finds the sandboxes.
        backend: where their records are.
        pipes: tell a daemon what has changed.
        clock: what times are judged by.
    """

    def __init__(self, launcher: Launcher, backend: Backend, pipes: Pipes, clock: Clock) -> None:
        self._launcher = launcher
        self._backend = backend
        self._pipes = pipes
        self._clock = clock

    async def keep(self, sandbox: Sandbox, table: str) -> Sandbox:
        """Write a daemon's table into the record, unless that has a newer one.

        Args:
            sandbox: whose daemon said so.
            table: as it said it.

        Returns:
            The record as it is now.
        """
        found = sandbox
        while version_of(found.apps) < version_of(table):
            try:
                try:
                    return await self._backend.update(found, replace(found, apps=table))
                except Conflict:
                    found, _ = await self._backend.observe(sandbox.id)
            except SandboxNotFound:
                return sandbox
            if found.uid != sandbox.uid:
                return sandbox  # made anew under its name: that one has apps of its own
        return found

    async def grant(
        self, ref: str, *, app: str = "", seconds: float = 0, rotate: bool = False
    ) -> Opened:
        """Make a token of a sandbox; its daemon knows it when this returns, if one runs.

        Args:
            ref: id or name.
            app: the only one that it opens; empty for all, and the sandbox's page.
            seconds: after which it opens nothing any more; 0: while the sandbox lives.
            rotate: whether all earlier ones are cleared, and what they have opened is ended.

        Raises:
            UsageError: there are too many, or the app's name is none.
            SandboxNotFound: no such sandbox of this user.
            SandboxExpired: its time is over.
        """
        if app and not re.fullmatch(c.APP_NAME, app):
            raise UsageError(f"{app[:80]!r} is no app's name: lower-case letters, digits and '-'")
        token = new_token()
        while True:
            sandbox, pods = await self._launcher.find_living(ref)
            now = self._clock.now()
            until = timestamp(now + timedelta(seconds=seconds)) if seconds else ""
            grants = Grants.from_json(sandbox.access)
            if rotate:
                grants = grants.cleared()
            grants = grants.with_token(token, now, app, until)
            try:
                written = replace(sandbox, access=grants.to_json())
                sandbox = await self._backend.update(sandbox, written)
            except Conflict:
                continue
            pod = current_pod(sandbox, pods)
            if pod and not pod.ended and sandbox.state == "Running":
                await self._backend.announce(sandbox, pod)
                await self._pipes.tell(sandbox, pod)
            return Opened(sandbox, token, app, until)
