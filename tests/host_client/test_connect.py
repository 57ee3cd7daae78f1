"""`podpipe connect` as a process over the stub kubectl: a raw pipe to the daemon or to a command."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from host_client.errors import EXIT_USAGE
from host_client.interrupts import EXIT_INTERRUPTED
from in_pod_server.contract import HELLO
from tests.host_client.conftest import Podpipe, StubCluster, runs


def test_connect_is_a_byte_exact_pipe_for_any_client(podpipe: Podpipe) -> None:
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "t", "version": "1"},
        },
    }
    process = podpipe.start("connect", "work")
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps(hello).encode() + b"\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert HELLO in answer["result"]["capabilities"]["experimental"]
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_connect_makes_a_named_sandbox_that_is_absent_and_says_what_it_waits_for(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    for _ in range(2):
        process = podpipe.start("connect", "lasting", "--", "cat")
        out, err = process.communicate(b"through", timeout=60)
        assert (process.returncode, out) == (0, b"through"), err.decode()
        assert b"podpipe: connecting" in err
    assert len(stub.names("Pod")) == 1


def test_two_connects_to_one_absent_name_make_one_sandbox(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    both = [podpipe.start("connect", "lasting", "--", "cat") for _ in range(2)]
    ends = [process.communicate(b"x", timeout=60) for process in both]
    assert [out for out, _ in ends] == [b"x", b"x"], ends
    assert len(stub.names("Pod")) == 1


def test_connect_to_a_random_id_that_is_gone_makes_nothing(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    ended = podpipe("connect", "spygsm3rbjnoltfoi")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert stub.names("Pod") == []


@pytest.mark.parametrize("name", ["connect", "shell", "run"])
def test_an_option_after_the_sandbox_is_refused_before_anything_is_made(
    podpipe: Podpipe, name: str
) -> None:
    said = podpipe(name, "work", "--nonsense", "x")
    assert said.returncode == EXIT_USAGE
    assert "--nonsense stands after the sandbox" in said.stderr
    assert f"podpipe {name} work -- " in said.stderr
    assert "no sandboxes" in podpipe("list").stdout.lower()


def test_connect_runs_any_other_command_and_changes_no_byte(podpipe: Podpipe) -> None:
    data = os.urandom(300_000)
    process = podpipe.start("connect", "work", "--", "cat")
    out, _ = process.communicate(data, timeout=60)
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()


def test_connect_passes_on_exit_code_stderr_and_the_end_of_either_side(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    script = "cat; echo seen the end; exec >&-; echo apart >&2; exit 7"
    process = podpipe.start("connect", "work", "--", "sh", "-c", script)
    out, err = process.communicate(b"typed ", timeout=60)
    assert (process.returncode, out) == (7, b"typed seen the end\n")
    assert b"apart" in err
    assert b"typed" not in err


def test_connect_changes_none_of_256_bytes_and_cuts_no_line_of_5_mb(podpipe: Podpipe) -> None:
    data = bytes(range(256)) + b"x" * 5_000_000 + b"\n" + bytes(range(256))
    process = podpipe.start("connect", "work", "--", "cat")
    out, _ = process.communicate(data, timeout=60)
    assert out == data


@pytest.mark.parametrize("command", ["connect", "serve", "run"])
def test_a_parent_that_ignores_its_childrens_end_leaves_us_ours(
    podpipe: Podpipe, command: str
) -> None:
    """An ignored SIGCHLD is inherited, and every child of ours was lost: nothing could be called."""
    podpipe("create", "--name", "work")
    argv = {
        "connect": ("connect", "work", "--", "cat"),
        "serve": ("serve", "--sandbox", "work"),
        "run": ("run", "-i", "work", "--", "cat"),
    }[command]
    calls = [
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "t", "version": "1"},
            },
        },
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {
            "jsonrpc": "2.0",
            "id": 2,
            "method": "tools/call",
            "params": {"name": "run_command", "arguments": {"command": "echo through"}},
        },
    ]
    given = "".join(json.dumps(each) + "\n" for each in calls) + "through"
    process = podpipe.start(*argv, by="trap '' CHLD")
    assert process.stdin
    assert process.stdout
    process.stdin.write(given.encode())
    process.stdin.flush()
    # A server told of the end cancels what it is at.
    answers = [process.stdout.readline() for _ in range(2)] if command == "serve" else []
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err.decode()
    assert "through\\n" in answers[1].decode() if answers else out.decode() == given


def test_connect_takes_a_closed_stdin_as_an_empty_one(podpipe: Podpipe) -> None:
    process = podpipe.start("connect", "work", "--", "sh", "-c", "cat; echo end", by="exec <&-")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"end\n"), err.decode()


@pytest.mark.parametrize("kind", ["socket", "file", "null"])
def test_connect_takes_any_kind_of_stdin(podpipe: Podpipe, tmp_path: Path, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        source = sink = theirs.fileno()
        if kind != "socket":
            path = tmp_path / "given"
            path.write_bytes(b"given")
            name = path if kind == "file" else Path(os.devnull)
            source = stack.enter_context(name.open("rb")).fileno()
        process = podpipe.start(
            "connect", "work", "--", "sh", "-c", "cat; echo end", ends=(source, sink)
        )
        theirs.close()
        if kind == "socket":
            ours.sendall(b"given")
            ours.shutdown(socket.SHUT_WR)
        ours.settimeout(60)
        out = b""
        while chunk := ours.recv(65536):
            out += chunk
        assert out == (b"end\n" if kind == "null" else b"givenend\n")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()


def test_connect_gives_a_command_no_terminal(podpipe: Podpipe) -> None:
    ended = podpipe("connect", "work", "--", "sh", "-c", "test -t 0 || test -t 1 || test -t 2")
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("nonesuch", 127, "the sandbox has no command nonesuch"),
        ("./nonesuch", 127, "the sandbox has no command ./nonesuch"),
        ("--help", 127, "the sandbox has no command --help"),
        ("./plain", 126, "./plain may not be executed in the sandbox: run chmod +x"),
        ("/tmp", 126, "/tmp is a folder"),
    ],
)
def test_connect_to_what_is_no_command_is_one_clear_line(
    podpipe: Podpipe, stub: StubCluster, command: str, code: int, said: str
) -> None:
    podpipe("create", "--name", "work")
    (home,) = stub.folder.glob("homes/*")
    (home / "plain").write_text("#!/bin/sh\n", encoding="utf-8")
    ended = podpipe("connect", "work", "--", command)
    assert (ended.returncode, ended.stdout) == (code, "")
    (line,) = [each for each in ended.stderr.splitlines() if each != "podpipe: connecting …"]
    assert line.startswith(f"podpipe: {said}")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"apart",
        b"apart\n",
        b"command terminated with",
        b"command terminated with exit code 7\n",
    ],
)
def test_connect_adds_nothing_to_what_a_command_says_on_stderr(
    podpipe: Podpipe, tmp_path: Path, said: bytes
) -> None:
    """kubectl tells the exit code there, too, in a line that a command's own may run into."""
    podpipe("create", "--name", "work")
    (tmp_path / "said").write_bytes(said)
    process = podpipe.start("connect", "work", "--", "sh", "-c", f"cat {tmp_path}/said >&2; exit 7")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert err == "podpipe: connecting …\n".encode() + said


def test_what_a_command_says_on_stderr_is_there_at_once(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    process = podpipe.start(
        "connect", "work", "--", "sh", "-c", "printf 'name? ' >&2; read -r name"
    )
    assert process.stderr
    process.stderr.readline()
    assert process.stderr.read(6) == b"name? "
    process.communicate(b"x\n", timeout=60)
    assert process.returncode == 0


def test_connect_waits_for_what_a_command_says_after_its_stdin_ended(podpipe: Podpipe) -> None:
    process = podpipe.start(
        "connect", "work", "--", "sh", "-c", "cat >/dev/null; sleep 1; echo late"
    )
    out, _ = process.communicate(b"x", timeout=60)
    assert (process.returncode, out) == (0, b"late\n")


STUBBORN = "trap '' TERM INT HUP; sleep 600 & echo $! $$; wait; wait; sleep 600"
"""A command, and a child of its own, that take no notice of signals nor of the end of stdin."""


def pids_of(process: subprocess.Popen[bytes]) -> list[int]:
    assert process.stdout
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    return pids


def wait_for_the_end_of(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(runs, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls for the end of what is no child of ours


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("trap", ["", "trap '' TERM INT HUP; "])
def test_a_signal_ends_what_connect_runs_and_leaves_nothing(
    podpipe: Podpipe, number: signal.Signals, trap: str
) -> None:
    """What takes no notice of the end of its stdin ran on in the pod for ever."""
    script = f"{trap}sleep 600 & echo $! $$; wait; wait; sleep 600"
    process = podpipe.start("connect", "work", "--", "sh", "-c", script)
    pids = pids_of(process)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == EXIT_INTERRUPTED
    wait_for_the_end_of(pids)


def test_what_nohup_started_outlives_its_terminal(podpipe: Podpipe) -> None:
    process = podpipe.start("connect", "work", "--", "sh", "-c", "echo on; cat", by="trap '' HUP")
    assert process.stdout
    assert process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(b"still", timeout=60)
    assert (process.returncode, out) == (0, b"still")


def kubectls_of(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The pids of the command's kubectl and of the lifeline's."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text("ascii").split()
    found = {b"looks=" in Path(f"/proc/{pid}/cmdline").read_bytes(): int(pid) for pid in pids}
    return found[False], found[True]


@pytest.mark.parametrize("killed", ["connect", "kubectl", "lifeline", "connect and kubectl"])
def test_a_kill_leaves_nothing_of_what_connect_runs(podpipe: Podpipe, killed: str) -> None:
    """Nobody is left to end it but what waits in the pod."""
    process = podpipe.start("connect", "work", "--", "sh", "-c", STUBBORN)
    pids = pids_of(process)
    kubectl, lifeline = kubectls_of(process)
    numbers = {"connect": process.pid, "kubectl": kubectl, "lifeline": lifeline}
    for name in killed.split(" and "):
        os.kill(numbers[name], signal.SIGKILL)
    wait_for_the_end_of(pids)
    process.communicate(timeout=30)
    if killed == "kubectl":
        assert process.returncode == 128 + signal.SIGKILL
    if killed == "lifeline":
        assert process.returncode in (1, 128 + signal.SIGKILL)


def test_a_command_is_ended_that_nothing_in_the_pod_would_end(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    failed = stub.folder / "failed"
    kubectl = stub.folder / "flaky"
    kubectl.write_text(
        f'#!/bin/sh\ncase "$*" in *looks=*) [ -e {failed} ] || {{ touch {failed}; exit 1; }};; esac\n'
        f'exec {stub.folder}/kubectl "$@"\n',
        encoding="utf-8",
    )
    kubectl.chmod(0o755)
    script = f"{STUBBORN} & wait"
    process = podpipe.start(
        "connect", "work", "--", "sh", "-c", script, PODPIPE_KUBECTL=str(kubectl)
    )
    pids = pids_of(process)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"the connection to the sandbox was lost, and the command was ended" in err
    wait_for_the_end_of(pids)


def test_connect_leaves_nothing_that_a_command_left_running(podpipe: Podpipe) -> None:
    script = "setsid sleep 600 >/dev/null 2>&1 & echo $! $$"
    process = podpipe.start("connect", "work", "--", "sh", "-c", script)
    pids = pids_of(process)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not any(map(runs, pids))
