"""What a launcher needs of a kind of sandbox object; `pod` is the plain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from host_client.pod_view import PodView
from host_client.sandbox import Sandbox, SandboxSpec


class Backend(Protocol):
    """Objects of sandboxes in a cluster, for one user."""

    warnings: list[str]

    async def observe(self, sandbox_id: str) -> tuple[Sandbox, list[PodView]]:
        """The record and all its pods, or SandboxNotFound."""

    async def owned_by(self, user_key: str) -> list[tuple[Sandbox, list[PodView]]]:
        """All readable records with their pods, of a user, or of all for an empty key."""

    async def records(self) -> Sequence[Mapping[str, Any]]:
        """The records of all users, as the API has them."""

    async def cluster_classes(self) -> tuple[str, str]:
        """What `start` has to know of the cluster; it asks itself if nobody has."""

    async def server_time(self) -> datetime | None:
        """The API server's clock; None where it is not told."""

    async def claim(self, sandbox: Sandbox) -> Sandbox:
        """Write a new record, or NameTaken; its times in the answer are by the API server's clock."""

    async def update(self, old: Sandbox, new: Sandbox) -> Sandbox:
        """Change all but the spec by compare-and-swap, or Conflict."""

    async def announce(self, sandbox: Sandbox, pod: PodView) -> None:
        """Tell a running pod its expiry, its apps and who may open them."""

    async def refuse_oversized(self, spec: SandboxSpec) -> None:
        """UsageError where no node is as large as the limits."""

    async def home(self) -> Mapping[str, Any] | None:
        """The user's home, None if it was never made, or NameTaken."""

    async def start(self, sandbox: Sandbox, home: Mapping[str, Any] | None) -> PodView:
        """Make the present incarnation; the uid of the home if this made it."""

    async def predecessors(self, sandbox: Sandbox) -> list[PodView]:
        """Pods of an earlier sandbox of the same name."""

    async def users_of_home(self) -> list[str]:
        """What uses the user's home, as Kind/name."""

    async def stop(self, pod: PodView) -> None:
        """Ask for the end of this very pod."""

    async def delete(self, sandbox: Sandbox) -> None:
        """Delete the record and all that it owns."""

    async def delete_home(self, uid: str) -> bool:
        """Delete the home that has this uid."""

    async def pods_left(self, sandbox: Sandbox) -> list[PodView]:
        """Its pods that still exist."""

    async def last_words(self, pod: PodView) -> str:
        """The end of a crashed container's log."""
