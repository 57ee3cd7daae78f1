"""The stub cluster, for servers that other SDKs start."""

from __future__ import annotations

from tests.host_client.conftest import stub

__all__ = ["stub"]
