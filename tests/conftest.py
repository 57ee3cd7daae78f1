"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from host_client.local.tools import cache_home
from tests.canaries import leaks
from tests.turns import turn


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def nothing_secret_was_written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the whole run, in what its tests have left."""
    yield
    assert leaks(tmp_path_factory.getbasetemp()) == []


def pytest_configure() -> None:
    """In the background (nohup, &) we ignore signals; what tests start would inherit that."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # which an exec undoes


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files that need a cluster among the others: the one sort waits, the other computes."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds: dict[bool, list[list[pytest.Item]]] = {True: [], False: []}
    for tests in files.values():
        kinds[any(test.get_closest_marker("cluster") for test in tests)].append(tests)
    spread = [
        (number / len(alike), tests)
        for alike in kinds.values()
        for number, tests in enumerate(alike)
    ]
    spread.sort(key=lambda place: place[0])
    items[:] = [test for _, tests in spread for test in tests]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not item.get_closest_marker("cluster"):
        return (yield)
    with turn(cache_home(), alone=item.get_closest_marker("breaks_node") is not None):
        return (yield)
