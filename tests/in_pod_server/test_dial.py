"""dial: whole bytes both ways, patience with a starting daemon, and a clean end."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from in_pod_server import contract, dial
from tests.in_pod_server.support import DIAL, PATIENCE

BIG = os.urandom(1 << 16) * 64  # 4 MiB: more than all the buffers between two processes


@pytest.fixture
def listener(short_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(short_path / "s"))
        made.listen()
        made.settimeout(PATIENCE)
        yield made


def start(path: Path | str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-u", str(DIAL), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def accept(listener: socket.socket) -> socket.socket:
    peer, _ = listener.accept()
    peer.settimeout(PATIENCE)
    return peer


def send_all(peer: socket.socket, data: bytes) -> None:
    peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)


def read_all(peer: socket.socket) -> bytes:
    data = bytearray()
    while piece := peer.recv(65536):
        data += piece
    return bytes(data)


def test_the_contract_starts_this_file() -> None:
    assert contract.DIAL_ARGV[1:4] == ("-I", "-S", "-u")
    assert Path(contract.DIAL_ARGV[4]).relative_to(contract.APP_DIR) == DIAL.relative_to(
        DIAL.parents[1]
    )


def test_large_data_passes_whole_in_both_directions_at_once(listener: socket.socket) -> None:
    pump = start(listener.getsockname())
    peer = accept(listener)
    sent = threading.Thread(target=send_all, args=(peer, BIG))
    fed = threading.Thread(
        target=lambda: pump.stdin and (pump.stdin.write(BIG), pump.stdin.close())
    )
    assert pump.stdout is not None
    got_up = bytearray()
    upward = threading.Thread(target=lambda: got_up.extend(read_all(peer)))
    for thread in (sent, fed, upward):
        thread.start()
    down = pump.stdout.read()
    for thread in (sent, fed, upward):
        thread.join(PATIENCE)
    assert hashlib.sha256(down).digest() == hashlib.sha256(BIG).digest()
    assert hashlib.sha256(got_up).digest() == hashlib.sha256(BIG).digest()
    finish(pump, peer, code=0)


def test_the_end_of_stdin_passes_on_and_replies_still_come(listener: socket.socket) -> None:
    pump = start(listener.getsockname())
    peer = accept(listener)
    assert pump.stdin is not None
    assert pump.stdout is not None
    pump.stdin.write(b"question\n")
    pump.stdin.close()
    assert read_all(peer) == b"question\n"
    peer.sendall(b"answer\n")
    peer.close()
    assert pump.stdout.read() == b"answer\n"
    finish(pump, peer, code=0)


def test_it_ends_with_0_when_the_daemon_closes(listener: socket.socket) -> None:
    pump = start(listener.getsockname())
    peer = accept(listener)
    peer.close()
    finish(pump, peer, code=0)


def test_it_ends_quietly_when_nobody_reads_its_output_any_more(listener: socket.socket) -> None:
    pump = start(listener.getsockname())
    peer = accept(listener)
    assert pump.stdout is not None
    pump.stdout.close()
    assert read_all(peer) == b"", "dial noticed while both sides were silent"
    finish(pump, peer, code=0)


def test_a_slow_reader_slows_the_writer_and_loses_nothing(listener: socket.socket) -> None:
    pump = start(listener.getsockname())
    peer = accept(listener)
    peer.setblocking(False)
    accepted = 0
    with pytest.raises(BlockingIOError):  # noqa: PT012 - it is the last of many that fails
        while True:
            accepted += peer.send(BIG[accepted : accepted + 65536])
    assert accepted < len(BIG), "nobody reads, so not everything may be taken in"
    peer.settimeout(PATIENCE)
    rest = threading.Thread(target=send_all, args=(peer, BIG[accepted:]))
    rest.start()
    assert pump.stdout is not None
    assert hashlib.sha256(pump.stdout.read()).digest() == hashlib.sha256(BIG).digest()
    rest.join(PATIENCE)
    finish(pump, peer, code=0)


def test_it_waits_for_a_socket_that_is_not_there_yet(short_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(short_path / "s"))  # bound and not listening: connections are refused
    pump = start(short_path / "s")
    with stale:
        stale.listen()
        stale.settimeout(PATIENCE)
        peer = accept(stale)
        peer.close()
        finish(pump, peer, code=0)


def test_a_missing_daemon_is_said_in_one_line(short_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        dial.connect(str(short_path / "s"), patience=0.05)
    too_long = short_path / ("x" * 200)
    pump = start(too_long)
    _, stderr = pump.communicate(timeout=PATIENCE)
    assert pump.returncode == 1
    assert stderr.decode().count("\n") == 1
    assert f"no daemon answers on {too_long}" in stderr.decode()


def finish(pump: subprocess.Popen[bytes], peer: socket.socket, *, code: int) -> None:
    peer.close()
    for stream in (pump.stdin, pump.stdout):
        if stream and not stream.closed:
            stream.close()
    assert pump.wait(PATIENCE) == code
    assert pump.stderr is not None
    assert pump.stderr.read() == b""
    pump.stderr.close()
