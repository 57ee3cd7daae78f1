"""`podpipe forward` to a real pod: many connections, much data, a break, and ports where nobody is."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from host_client.interrupts import EXIT_INTERRUPTED
from tests.cluster.conftest import ROOT, Cluster
from tests.cluster.gateways import BOUND, PODPIPE
from tests.cluster.test_open import carriers
from tests.host_client.conftest import runs
from tests.host_client.test_forward import free_port, said, unanswered
from tests.in_pod_server.support import eventually

PORT, NOTHING = 3000, 3001
MANY = 100
ECHO = f"""
import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    request_queue_size = {MANY}
Server(("127.0.0.1", {PORT}), Echo).serve_forever()
"""


ECHO_STARTS = (
    ECHO.encode(),
    *("run", "-i", "work", "--"),
    (
        "cat >echo.py; setsid python3 echo.py >/dev/null 2>&1 & "
        f"until (echo >/dev/tcp/127.0.0.1/{PORT}) 2>/dev/null; do sleep 0.1; done"
    ),
)


@dataclass
class Forwarding:
    """A running `podpipe forward` and what it has said on stderr."""

    process: subprocess.Popen[bytes]
    here: int
    nowhere: int
    err: list[str] = field(default_factory=list)


@contextmanager
def forwarding(cluster: Cluster, name: str, **environment: str) -> Iterator[Forwarding]:
    here, nowhere = free_port(), free_port()
    process = subprocess.Popen(
        [*PODPIPE, "forward", name, f"{here}:{PORT}", f"{nowhere}:{NOTHING}"],
        env=os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)} | environment,
        cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    assert process.stderr
    found = Forwarding(process, here, nowhere)
    lines = process.stderr
    reader = threading.Thread(target=lambda: found.err.extend(line.decode() for line in lines))
    reader.start()
    try:
        while (line := process.stdout.readline()) and b"ctrl-C" not in line:
            assert b" leads to port " in line
        assert line, found.err
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND) == EXIT_INTERRUPTED
        reader.join(BOUND)
        process.stdout.close()
        lines.close()


@pytest.fixture(scope="module")
def forwarded(cluster: Cluster, sandbox: str) -> Iterator[Forwarding]:
    started = cluster.podpipe_fed(*ECHO_STARTS)
    assert started.returncode == 0, started.stderr
    with forwarding(cluster, sandbox) as found:
        yield found


def test_a_hundred_connections_at_once_each_get_their_own_bytes(forwarded: Forwarding) -> None:
    everybody = threading.Barrier(MANY, timeout=BOUND)

    def one(number: int) -> bool:
        data = number.to_bytes(4, "big") * 5000
        everybody.wait()
        return said(forwarded.here, data) == data

    with ThreadPoolExecutor(MANY) as pool:
        assert list(pool.map(one, range(MANY))) == [True] * MANY
    assert len(carriers(forwarded.process.pid)) == 1


def test_much_data_arrives_intact_both_ways(forwarded: Forwarding) -> None:
    data = os.urandom(32 << 20)
    with socket.create_connection(("127.0.0.1", forwarded.here), BOUND) as client:

        def send() -> None:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)

        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send)
            heard = b"".join(iter(lambda: client.recv(1 << 20), b""))
            sent.result(BOUND)
    assert hashlib.sha256(heard).digest() == hashlib.sha256(data).digest()


def test_the_next_connection_after_its_kubectl_was_killed_works(forwarded: Forwarding) -> None:
    assert said(forwarded.here, b"before") == b"before"
    (kubectl,) = carriers(forwarded.process.pid)
    os.kill(kubectl, signal.SIGKILL)
    eventually(lambda: not runs(kubectl))
    heard = b""
    while heard != b"after":  # what comes while the ssh above it dies is lost with it
        with suppress(ConnectionError):
            heard = said(forwarded.here, b"after")
    (fresh,) = carriers(forwarded.process.pid)
    assert fresh != kubectl


def test_a_port_on_which_nothing_listens_is_told_and_hurts_no_other(forwarded: Forwarding) -> None:
    """L62: what leads nowhere does not look open."""
    assert unanswered(forwarded.nowhere)
    eventually(lambda: any(f"port {NOTHING} of work closed" in line for line in forwarded.err))
    assert said(forwarded.here, b"still there") == b"still there"


def test_without_ssh_kubectl_forwards_where_it_may_and_the_missing_right_is_told_elsewhere(
    cluster: Cluster, forwarded: Forwarding, tmp_path: Path
) -> None:
    refused = cluster.podpipe("forward", "work", f"{free_port()}:{PORT}", PATH=str(tmp_path))
    assert refused.returncode == 4
    assert "needs the right to get and create pods/portforward" in refused.stderr
    with forwarding(cluster, "work", **cluster.administrator, PATH=str(tmp_path)) as allowed:
        assert said(allowed.here, b"through") == b"through"
        assert unanswered(allowed.nowhere)
        eventually(lambda: any(f"port {NOTHING} of work closed" in line for line in allowed.err))
        assert said(allowed.here, b"again") == b"again"


def test_the_pod_of_now_is_asked_for_when_that_of_before_was_deleted(
    cluster: Cluster, forwarded: Forwarding
) -> None:
    """L62: it looked open, and led to a pod that was no more."""
    forwarded.err.clear()
    (pod,) = cluster.get("pods", "-l", "podpipe/sandbox")["items"]
    cluster.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=1", "--timeout=60s")
    assert unanswered(forwarded.here)
    eventually(lambda: any(f"port {PORT} of work closed" in line for line in forwarded.err))
    assert cluster.podpipe_fed(*ECHO_STARTS).returncode == 0
    assert said(forwarded.here, b"again") == b"again"


def test_a_sandbox_that_was_destroyed_is_named_and_its_ports_here_are_free_afterwards(
    cluster: Cluster, forwarded: Forwarding
) -> None:
    """L62: it looked open, and nothing said that there was no pod."""
    assert cluster.podpipe("create", "--name", "gone").returncode == 0
    with forwarding(cluster, "gone") as other:
        assert cluster.podpipe("destroy", "gone").returncode == 0
        assert unanswered(other.here)
        eventually(lambda: any("gone" in line and "no sandbox" in line for line in other.err))
    with socket.create_server(("127.0.0.1", other.here)):
        pass
