"""The time that expiry is judged by."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """The present, to the second, aware."""
    return datetime.now(UTC).replace(microsecond=0)
