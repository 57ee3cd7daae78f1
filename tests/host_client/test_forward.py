"""`podpipe forward` as a process over the stub kubectl: ports here that lead to ports of a sandbox."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from host_client.interrupts import EXIT_INTERRUPTED
from tests.host_client.conftest import Podpipe, StubCluster, runs
from tests.host_client.test_ssh import PATIENCE, keys, runtime, separation, work
from tests.in_pod_server.support import eventually

__all__ = ["runtime", "separation", "work"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server on a port of the stub's pods, which are this machine; it talks to each that comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def each(client: socket.socket) -> None:
            with client:
                talk(client)

        def accept() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=each, args=(client,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def echo(client: socket.socket) -> None:
    """Say all that was said, once the other has ended."""
    data = b"".join(iter(lambda: client.recv(65536), b""))
    client.sendall(data)


def said(port: int, data: bytes, address: str = "127.0.0.1") -> bytes:
    """What is answered to data and its end; ConnectionError where it is cut off at any step of that."""
    with socket.create_connection((address, port), PATIENCE) as client:
        client.sendall(data)
        try:
            client.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            # What was reset since the data went has no end to send, and Python has no name for that.
            raise ConnectionResetError(*error.args) from error
        return b"".join(iter(lambda: client.recv(65536), b""))


def unanswered(port: int) -> bool:
    """Whether what is said there is cut off without a word."""
    try:
        return said(port, b"hello?") == b""
    except ConnectionError:
        return True


@contextmanager
def forwarding(podpipe: Podpipe, *ports: str) -> Iterator[subprocess.Popen[bytes]]:
    process = podpipe.start("forward", "work", *ports)
    assert process.stdout
    try:
        while (line := process.stdout.readline()) and b"ctrl-C" not in line:
            assert b" leads to port " in line
        assert line, process.communicate()[1].decode()
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == EXIT_INTERRUPTED


def carrier(process: subprocess.Popen[bytes]) -> int:
    """The pid of the ssh below podpipe."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text("ascii").split()
    (found,) = [
        int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text("ascii") == "ssh\n"
    ]
    return found


def gone(pid: int) -> None:
    """Wait until a process has ended."""
    eventually(lambda: not runs(pid))


def test_every_byte_arrives_and_so_does_the_end_of_either_side(podpipe: Podpipe, work: str) -> None:
    data = os.urandom(5_000_000)
    here, other = free_port(), free_port()
    with (
        serving(echo) as one,
        serving(lambda client: client.sendall(b"other")) as two,
        forwarding(podpipe, f"{here}:{one}", f"{other}:{two}"),
    ):
        heard = said(here, data)
        assert hashlib.sha256(heard).digest() == hashlib.sha256(data).digest()
        assert said(other, b"") == b"other"


def test_a_reader_that_is_slow_stalls_nobody(podpipe: Podpipe, work: str) -> None:
    def talk(client: socket.socket) -> None:
        if client.recv(1) == b"m":
            client.sendall(bytes(64_000_000))
        else:
            client.sendall(b"quick")

    here = free_port()
    with (
        serving(talk) as there,
        forwarding(podpipe, f"{here}:{there}"),
        socket.create_connection(("127.0.0.1", here), PATIENCE) as slow,
    ):
        slow.sendall(b"m")
        assert slow.recv(1)
        for _ in range(20):
            assert said(here, b"q") == b"quick"
        got = 1
        while chunk := slow.recv(1 << 20):
            got += len(chunk)
        assert got == 64_000_000


@pytest.mark.parametrize("how", ["its ssh is killed", "the sandbox was suspended"])
def test_the_next_connection_after_a_break_works(podpipe: Podpipe, work: str, how: str) -> None:
    here = free_port()
    with serving(echo) as there, forwarding(podpipe, f"{here}:{there}") as process:
        assert said(here, b"before") == b"before"
        if how == "its ssh is killed":
            os.kill(child := carrier(process), signal.SIGKILL)
            gone(child)  # what comes while it dies is lost with it
        else:
            assert podpipe("suspend", work).returncode == 0
        assert said(here, b"after") == b"after"


def test_where_a_proxy_lets_no_spdy_through_it_goes_by_websockets(
    podpipe: Podpipe, stub: StubCluster, work: str
) -> None:
    stub.faults(spdy={"stderr": "error: unable to upgrade connection: 403"})
    here = free_port()
    with serving(echo) as there, forwarding(podpipe, f"{here}:{there}"):
        assert said(here, b"through") == b"through"


def test_only_this_machine_is_listened_to(podpipe: Podpipe, work: str) -> None:
    here = free_port()
    with serving(echo) as there, forwarding(podpipe, f"{here}:{there}"):
        for table, only in (("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")):
            lines = Path(f"/proc/net/{table}").read_text("ascii").splitlines()[1:]
            listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
            ours = {a.split(":")[0] for a in listening if int(a.split(":")[1], 16) == here}
            assert ours <= {only}
            assert ours or table == "tcp6"


def test_a_port_on_which_nothing_listens_closes_at_once_and_that_is_told_once(
    podpipe: Podpipe, work: str
) -> None:
    """L62: what leads nowhere does not look open."""
    here, nothing = free_port(), free_port()
    process = podpipe.start("forward", "work", f"{here}:{nothing}")
    assert process.stdout
    assert b" leads to port " in process.stdout.readline()
    for _ in range(3):
        assert unanswered(here)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    told = [line for line in err.decode().splitlines() if "without a word" in line]
    assert len(told) == 1
    assert f"port {nothing} of work closed" in told[0]
    assert "podpipe run work -- ps x" in told[0]


def test_a_client_that_only_knocks_is_told_nothing(podpipe: Podpipe, work: str) -> None:
    here = free_port()
    with serving(echo) as there:
        process = podpipe.start("forward", "work", f"{here}:{there}")
        assert process.stdout
        assert b" leads to port " in process.stdout.readline()
        assert said(here, b"") == b""
        assert said(here, b"x") == b"x"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert b"without a word" not in err


def test_a_port_of_this_machine_that_is_taken_is_told(podpipe: Podpipe, work: str) -> None:
    with serving(echo) as taken:
        ended = podpipe("forward", work, f"{taken}:8000")
    assert ended.returncode == 1
    assert f"port {taken} of this machine is taken by another program" in ended.stderr


@pytest.mark.parametrize("ports", ["x", "0", "70000:80", "80:", "1:2:3", "-1"])
def test_what_is_no_pair_of_ports_is_refused(podpipe: Podpipe, runtime: Path, ports: str) -> None:
    ended = podpipe("forward", "work", ports)
    assert (ended.returncode, ended.stdout) == (2, "")


def test_an_ssh_ends_with_its_podpipe_even_if_that_is_killed(
    podpipe: Podpipe, work: str, runtime: Path
) -> None:
    """What it leaves in the runtime folder the next one removes."""
    with serving(echo) as there:
        process = podpipe.start("forward", work, f"{free_port()}:{there}")
        assert process.stdout
        assert b" leads to port " in process.stdout.readline()
        child = carrier(process)
        process.kill()
        process.communicate(timeout=PATIENCE)
    gone(child)
    assert keys(runtime)
    assert podpipe("shell", work, "--", "true").returncode == 0
    assert keys(runtime) == []


def test_without_ssh_kubectl_forwards_and_that_is_said(
    podpipe: Podpipe, work: str, tmp_path: Path
) -> None:
    here = free_port()
    with serving(echo) as there:
        process = podpipe.start("forward", work, f"{here}:{there}", PATH=str(tmp_path))
        assert process.stdout
        assert b" leads to port " in process.stdout.readline()
        assert said(here, b"through") == b"through"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert b"no ssh here, so kubectl port-forward carries the connections" in err


def test_without_ssh_and_without_the_right_to_forward_both_ways_out_are_told(
    podpipe: Podpipe, stub: StubCluster, work: str, tmp_path: Path
) -> None:
    refusal = 'pods "p" is forbidden: User "alice" cannot get resource "pods/portforward"'
    stub.faults(**{"port-forward": {"stderr": f"error: error upgrading connection: {refusal}"}})
    here = free_port()
    ended = podpipe("forward", work, f"{here}:3000", PATH=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (4, "")
    said = ended.stderr
    assert "needs the right to get and create pods/portforward in sandbox-system" in said
    assert "install OpenSSH's client" in said
    with socket.create_server(("127.0.0.1", here)):
        pass


def test_json_stays_one_document_when_forwarding_is_interrupted(
    podpipe: Podpipe, work: str
) -> None:
    process = podpipe.start("forward", "work", f"{free_port()}:{free_port()}", "--json")
    assert process.stdout
    said = b""
    while (line := process.stdout.readline()) and line != b"]\n":
        said += line
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == EXIT_INTERRUPTED
    (pair,) = json.loads(said + line + rest)
    assert set(pair) == {"local", "remote"}
