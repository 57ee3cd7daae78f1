"""Processes are stopped by an identity that cannot be anybody else's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from host_client.local.processes import (
    Process,
    Records,
    choose_port,
    comes_free,
    holder_of,
    identify,
    port_is_free,
    spawn,
    stop,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the node is Linux only")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def stubborn() -> Iterator[subprocess.Popen[bytes]]:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def known(pid: int) -> Process:
    process = identify(pid)
    assert process is not None
    return process


def test_a_recorded_process_is_found_again(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    records = Records(tmp_path / "run")
    records.save("etcd", known(child.pid))

    assert records.load("etcd") == known(child.pid)
    assert records.alive("etcd")


def test_a_reused_pid_is_not_ours_and_is_never_killed(child: subprocess.Popen[bytes]) -> None:
    other = replace(known(child.pid), started=known(child.pid).started - 1)

    assert not other.alive
    assert stop(other)
    assert child.poll() is None


def test_a_record_from_before_a_reboot_is_not_ours(child: subprocess.Popen[bytes]) -> None:
    before = replace(known(child.pid), boot="00000000-0000-0000-0000-000000000000")

    assert not before.alive
    assert stop(before)
    assert child.poll() is None


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert identify(process.pid) is None


def test_a_process_named_with_parentheses_and_spaces_is_identified(tmp_path: Path) -> None:
    odd = tmp_path / "a) (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "60"]) as process:
        assert known(process.pid).alive
        process.kill()


def test_stop_kills_what_does_not_end_by_itself(stubborn: subprocess.Popen[bytes]) -> None:
    assert stop(known(stubborn.pid), grace=0.1)
    assert stubborn.wait() == -signal.SIGKILL


def test_stop_lets_a_process_end_by_itself(child: subprocess.Popen[bytes]) -> None:
    assert stop(known(child.pid))
    assert child.wait() == -signal.SIGTERM


def test_an_unreadable_record_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "etcd.pid").write_text("garbage", "ascii")

    assert Records(tmp_path).load("etcd") is None
    assert not Records(tmp_path).alive("etcd")


def test_a_spawned_process_has_a_session_of_its_own_and_a_log_with_the_run_before(
    tmp_path: Path,
) -> None:
    log = tmp_path / "logs" / "echo.log"
    for text in ("first", "second"):
        process = spawn(["sh", "-c", f"echo {text}; exec sleep 60"], log=log, cwd=tmp_path)
        assert process is not None
        assert os.getsid(process.pid) == process.pid
        while log.read_text("utf-8") != f"{text}\n":
            assert process.alive
        assert stop(process)
        os.waitpid(process.pid, 0)

    assert log.with_name("echo.log.1").read_text("utf-8") == "first\n"


def test_the_usual_port_is_chosen_only_when_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: int = server.getsockname()[1]

        assert not port_is_free(taken)
        other = choose_port(taken)
        assert other != taken
        assert port_is_free(other)


def test_a_port_is_waited_for_that_a_killed_process_has_not_let_go_of_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        closes = threading.Timer(0.3, server.close)
        closes.start()
        assert not port_is_free(port)
        assert comes_free(port)
        closes.join()


def test_a_port_that_stays_taken_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("host_client.local.processes.KILL_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not comes_free(server.getsockname()[1])


def test_the_holder_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert f"(pid {os.getpid()})" in holder_of(server.getsockname()[1])
