"""What the tests of scripts/cluster and scripts/image share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.stubs import Machine


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with nothing on it, in a folder whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="podpipe-") as folder:
        yield Machine(Path(folder))
