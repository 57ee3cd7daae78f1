"""Clocks that tests move."""

from __future__ import annotations

from datetime import datetime

from host_client.clock import Clock


class Moved(Clock):
    """One that no API server puts right, as if time itself had moved."""

    def hear(self, theirs: datetime, asked: datetime) -> None:
        """Nothing."""
