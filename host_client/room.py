"""Room for one more sandbox: how many a user and a namespace may have.

They are counted twice. Before anything is made, so that a refusal leaves no trace; and again once the
record is there, because two hosts may have counted at the same time: then whoever's record is older
stays. What has expired takes no room.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from host_client.clock import parse_timestamp
from host_client.config import Settings
from host_client.errors import LimitReached
from host_client.sandbox import Sandbox
from in_pod_server import contract as c


class Room:
    """The room that is left for a user.

    Args:
        records: lists the records of all users in the namespace, as the API has them.
        settings: whose, and how many there may be.
        now: the present.
    """

    def __init__(
        self,
        records: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
        settings: Settings,
        now: Callable[[], datetime],
    ) -> None:
        self._records = records
        self._settings = settings
        self._now = now

    async def refuse_full(self, claimed: Sandbox | None = None) -> None:
        """Refuse a sandbox that is one too many.

        Args:
            claimed: the sandbox as its record has been written just now; None before that.

        Raises:
            LimitReached: the message names the maximum and its setting.
        """
        now = self._now()
        there = [
            record["metadata"]
            for record in await self._records()
            if _takes_room(record["metadata"], now)
            and (claimed is None or _before(record["metadata"], claimed))
        ]
        key, settings = self._settings.user_key, self._settings
        own = [each for each in there if each["labels"].get(c.LABEL_USER) == key]
        if len(own) >= settings.max_sandboxes_per_user:
            raise LimitReached(
                f"user {settings.user!r} has as many sandboxes as a user may have, "
                f"{settings.max_sandboxes_per_user} (setting MAX_SANDBOXES_PER_USER): nothing was "
                "made. Destroy one that is not needed; `podpipe list` (list_sandboxes) shows them"
            )
        if len(there) >= settings.max_sandboxes:
            raise LimitReached(
                f"namespace {settings.namespace} has as many sandboxes of all users as it may have, "
                f"{settings.max_sandboxes} (setting MAX_SANDBOXES): nothing was made. Destroy one "
                "that is not needed, or try again later"
            )


def _takes_room(metadata: Mapping[str, Any], now: datetime) -> bool:
    """Whether a record counts: an unreadable one does, for its pod may run."""
    if "deletionTimestamp" in metadata:
        return False
    try:
        notes = metadata["annotations"]
        # Its time may stand still since then.
        seen = notes.get(c.ANNOTATION_SUSPENDED_AT)
        at = min(now, parse_timestamp(seen)) if seen else now
        return parse_timestamp(notes[c.ANNOTATION_EXPIRES_AT]) > at
    except (KeyError, TypeError, ValueError, OverflowError):
        return True


def _before(metadata: Mapping[str, Any], claimed: Sandbox) -> bool:
    """Whether a record was there first.

    A record is not written to before its sandbox has answered, so among those being made its version
    is that of its writing, which the API counts upwards; all others were there.
    """
    state = (metadata.get("annotations") or {}).get(c.ANNOTATION_STATE)
    return state != "Creating" or int(metadata["resourceVersion"]) < int(claimed.version)
