"""The test builds of both servers, each behind a bridge, shared by all runs of the suite."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host_client.conftest import StubCluster

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 30.0


@contextlib.contextmanager
def running(*argv: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A module of ours as a process, ended afterwards."""
    with subprocess.Popen(
        [sys.executable, "-m", *argv],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            # Streams that a client never read to their end would hold a graceful one up.
            process.kill()


@contextlib.contextmanager
def bridged(socket: Path) -> Iterator[str]:
    """The URL of a bridge to the server on a socket."""
    with running("tests.conformance.bridge", str(socket), environment={}) as process:
        assert process.stdout
        yield process.stdout.readline().strip()


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="mcp-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def urls(folder: Path) -> Iterator[dict[str, str]]:
    """Where `podpipe serve` and the daemon answer, by name."""
    stub = StubCluster(folder)
    with contextlib.ExitStack() as stack:
        sockets = {name: folder / f"{name}.sock" for name in ("serve", "daemon")}
        (folder / "daemon").mkdir()
        servers = [
            stack.enter_context(
                running(
                    "tests.conformance.servers", name, str(socket), str(folder / name),
                    environment=stub.environment,
                )
            )
            for name, socket in sockets.items()
        ]  # fmt: skip
        deadline = time.monotonic() + PATIENCE
        while not all(socket.exists() for socket in sockets.values()):
            assert time.monotonic() < deadline
            assert all(server.poll() is None for server in servers), "a test build ended"
            time.sleep(0.02)
        yield {name: stack.enter_context(bridged(socket)) for name, socket in sockets.items()}
    stub.close()
