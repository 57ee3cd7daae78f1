"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.canaries import leaks


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def nothing_secret_was_written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the whole run, in what its tests have left."""
    yield
    assert leaks(tmp_path_factory.getbasetemp()) == []
