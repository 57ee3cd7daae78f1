"""Which apps are published, and on which ports: a small table with a version that only rises.

The daemon's table is the truth while its pod lives. It is kept on the memory-backed run volume for
the next start of the container; the host keeps it in the record for the next pod, and takes what has
the higher version, so hosts that write at once cannot lose each other's changes.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from in_pod_server import contract
from in_pod_server.errors import ArgumentError, GatewayFailedError, short

_NAME: Final = re.compile(contract.APP_NAME)


@dataclass(frozen=True, slots=True)
class Table:
    """One state of it: each app's port by its name."""

    version: int = 0
    apps: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """The form in which files, annotations and hellos hold it."""
        return json.dumps({"version": self.version, "apps": dict(self.apps)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is no table, or holds what could not be published.
        """
        found = json.loads(text)
        try:
            version, apps = found["version"], dict(found["apps"])
        except (TypeError, KeyError) as error:
            raise ValueError("no table of apps") from error
        if type(version) is not int or version < 0 or len(apps) > contract.MAX_APPS:
            raise ValueError("no table of apps")
        for name, port in apps.items():
            if not _NAME.fullmatch(name) or type(port) is not int or refusal(port):
                raise ValueError(f"{name!r} is no app")
        return cls(version, apps)


def refusal(port: int) -> str:
    """Why no app can be published on a port; empty where one can."""
    if not 1 <= port <= 65535:
        return "ports are from 1 to 65535"
    if port in contract.RESERVED_PORTS:
        return "it is the gateway's own"
    if port < contract.LOWEST_APP_PORT:
        return f"ports below {contract.LOWEST_APP_PORT} are the system's"
    return ""


class Routes:
    """The table of one daemon.

    Args:
        path: where it is kept for the next start of the container.
        sandbox_id: which no app can be called, for it is the sandbox's own page.
        seed: what the pod was made with, as `Table.to_json`; empty for nothing.
    """

    def __init__(self, path: Path, sandbox_id: str, seed: str = "") -> None:
        self._path = path
        self._sandbox_id = sandbox_id
        kept = [_readable(text) for text in (seed, _text(path))]
        self.table = max(kept, key=lambda table: table.version)

    def publish(self, name: str, port: int) -> Table:
        """Publish a port by a name, in place of what had the name before; return the new table.

        Raises:
            ArgumentError: the name or the port cannot be used, or there are too many apps.
            GatewayFailedError: the table cannot be kept; it is as it was.
        """
        if not _NAME.fullmatch(name) or name == self._sandbox_id:
            raise ArgumentError(
                f"{short(name)!r} is no name for an app: it becomes a part of its host, so take up to "
                'forty of a-z, 0-9 and "-" (not at an end), for example "web"'
            )
        if why := refusal(port):
            raise ArgumentError(
                f"internal_port={port} cannot be published ({why}): let the app listen on another "
                "port, for example 3000"
            )
        apps = {**self.table.apps, name: port}
        if len(apps) > contract.MAX_APPS:
            raise ArgumentError(
                f"there are {contract.MAX_APPS} apps already: unexpose_port one that is not needed"
            )
        return self._keep(apps)

    def close(self, name: str) -> Table:
        """Publish an app no longer; return the new table.

        Raises:
            ArgumentError: there is no such app.
            GatewayFailedError: the table cannot be kept; it is as it was.
        """
        if name not in self.table.apps:
            known = ", ".join(self.table.apps) or "none"
            raise ArgumentError(f"no app {short(name)!r} is published; there are: {known}")
        return self._keep({each: p for each, p in self.table.apps.items() if each != name})

    def _keep(self, apps: Mapping[str, int]) -> Table:
        if apps == self.table.apps:
            return self.table
        table = Table(self.table.version + 1, apps)
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(table.to_json(), encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise GatewayFailedError(
                f"the table of apps cannot be kept in {self._path.parent} ({error.strerror}), so "
                "nothing was changed: free some room there, then try again"
            ) from error
        self.table = table
        return table


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _readable(text: str) -> Table:
    try:
        return Table.from_json(text)
    except (ValueError, RecursionError):
        return Table()
