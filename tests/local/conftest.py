"""What the tests of scripts/cluster and scripts/image share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.stubs import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with nothing on it."""
    return Machine(tmp_path)
