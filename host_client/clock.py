"""The time that expiry is judged by: the API server's, for a host's own clock may be wrong.

Times are aware UTC datetimes; in the cluster they are RFC 3339 with a Z.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

TOLERANCE = timedelta(seconds=2)
"""The API server's answers are to the second, and take a moment: less is no difference."""
TRUSTED = timedelta(minutes=10)
"""How long what was heard holds: a clock may be set meanwhile."""


def utc_now() -> datetime:
    """The present by this machine's clock, to the second, aware."""
    return datetime.now(UTC).replace(microsecond=0)


class Clock:
    """This machine's clock, put right by what the API server was heard to say.

    Args:
        local: this machine's; tests move it.
    """

    def __init__(self, local: Callable[[], datetime] = utc_now) -> None:
        self.local = local
        self._ahead = timedelta(0)
        self._heard: datetime | None = None

    def now(self) -> datetime:
        """The present by the API server's clock, as far as it is known."""
        return self.local() - self._ahead

    @property
    def unsure(self) -> bool:
        """Whether the API server has not been heard lately."""
        return self._heard is None or abs(self.local() - self._heard) > TRUSTED

    def hear(self, theirs: datetime, asked: datetime) -> None:
        """Take up the API server's time.

        Args:
            theirs: what it said.
            asked: this machine's time when it was asked; it answered between then and now.
        """
        self._heard = self.local()
        if theirs < asked - TOLERANCE:
            self._ahead = asked - theirs
        elif theirs > self._heard + TOLERANCE:
            self._ahead = self._heard - theirs
        else:
            self._ahead = timedelta(0)


def timestamp(when: datetime) -> str:
    """RFC 3339 in UTC with a Z, to the second."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> datetime:
    """The aware UTC datetime that `text` gives.

    Raises:
        ValueError: not RFC 3339, or without a time zone.
    """
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return when.astimezone(UTC)
