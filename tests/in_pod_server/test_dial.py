"""dial: both ends handed over, patience with a starting daemon, and a clean end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from in_pod_server import contract, dial
from tests.in_pod_server.support import DIAL, PATIENCE

ARGV = [sys.executable, "-I", "-S", "-u", str(DIAL)]


@pytest.fixture
def listener(short_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(short_path / "s"))
        made.listen()
        made.settimeout(PATIENCE)
        yield made


def start(path: Path | str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*ARGV, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextlib.contextmanager
def accepted(listener: socket.socket) -> Iterator[tuple[socket.socket, int, int]]:
    """Accept a dial: its socket, and the stdin and stdout that it hands over."""
    peer, _ = listener.accept()
    with peer:
        peer.settimeout(PATIENCE)
        said, fds, _, _ = socket.recv_fds(peer, 16, 8)
        assert said == dial.HANDOVER
        source, sink = fds
        try:
            yield peer, source, sink
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)


def test_the_contract_starts_this_file() -> None:
    assert contract.DIAL_ARGV[1:4] == ("-I", "-S", "-u")
    assert Path(contract.DIAL_ARGV[4]).relative_to(contract.APP_DIR) == DIAL.relative_to(
        DIAL.parents[1]
    )


def test_it_hands_over_its_own_ends_and_holds_neither(listener: socket.socket) -> None:
    pump = start(listener.getsockname())
    assert pump.stdin
    assert pump.stdout
    with accepted(listener) as (peer, source, sink):
        pump.stdin.write(b"question\n")
        pump.stdin.close()
        with os.fdopen(source, "rb", closefd=False) as questions:
            assert questions.read() == b"question\n", "to its end, which dial does not hold back"
        os.write(sink, b"answer\n")
        os.close(sink)
        assert pump.stdout.read() == b"answer\n"
        peer.close()
        finish(pump, code=0)


def test_it_ends_with_0_when_the_daemon_closes_and_not_before(listener: socket.socket) -> None:
    pump = start(listener.getsockname())
    assert pump.stdin
    assert pump.stdout
    with accepted(listener) as (peer, source, sink):
        pump.stdin.close()
        pump.stdout.close()
        os.close(source)
        os.close(sink)
        assert pump.poll() is None
        peer.close()
        finish(pump, code=0)


@pytest.mark.parametrize("end", ["stdin", "stdout"])
def test_what_no_loop_can_wait_for_is_refused_in_one_line(
    listener: socket.socket, short_path: Path, end: str
) -> None:
    with (short_path / "file").open("w+b") as file:
        ends: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, end: file}
        path = str(listener.getsockname())
        ran = subprocess.Popen([*ARGV, path], stderr=subprocess.PIPE, **ends)
        _, stderr = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 2
    assert stderr.count(b"\n") == 1
    assert b"have to be pipes" in stderr


def test_it_waits_for_a_socket_that_is_not_there_yet(short_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(short_path / "s"))  # bound and not listening: connections are refused
    pump = start(short_path / "s")
    with stale:
        stale.listen()
        stale.settimeout(PATIENCE)
        with accepted(stale) as (peer, _, _):
            peer.close()
            finish(pump, code=0)


def test_a_missing_daemon_is_said_in_one_line(short_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        dial.connect(str(short_path / "s"), patience=0.05)
    too_long = short_path / ("x" * 200)
    pump = start(too_long)
    _, stderr = pump.communicate(timeout=PATIENCE)
    assert pump.returncode == 1
    assert stderr.decode().count("\n") == 1
    assert f"no daemon answers on {too_long}" in stderr.decode()


def finish(pump: subprocess.Popen[bytes], *, code: int) -> None:
    for stream in (pump.stdin, pump.stdout):
        if stream and not stream.closed:
            stream.close()
    assert pump.wait(PATIENCE) == code
    assert pump.stderr is not None
    assert pump.stderr.read() == b""
    pump.stderr.close()
