"""Fixtures: a sandbox in memory, a daemon shared by a file's tests, and one for a test alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.in_pod_server.support import Daemon, Sandbox, Wire, open_sandbox, start_daemon


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with open_sandbox(tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def short_module_path() -> Iterator[Path]:
    """A socket's path may have 107 bytes only, and pytest's own folders are longer."""
    folder = Path(tempfile.mkdtemp(prefix="pp-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def short_path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pp-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def daemon(short_module_path: Path) -> Iterator[Daemon]:
    with start_daemon(short_module_path) as running:
        Wire(running.socket).close()
        yield running


@pytest.fixture
def own_daemon(short_path: Path) -> Iterator[Daemon]:
    with start_daemon(short_path) as running:
        yield running


@pytest.fixture
def wire(daemon: Daemon) -> Iterator[Wire]:
    with Wire(daemon.socket) as connected:
        yield connected
