"""`podpipe connect` to commands of a pod: byte for byte what they are here, and none is left."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, Cluster
from tests.conformance.conftest import PATIENCE, bridged, running
from tests.conformance.suite import RELEASED, Verdict, judge
from tests.node import installed, node

BOUND = 60
EVERYTHING = "@modelcontextprotocol/server-everything@2026.8.31"
PROGRAM = "node_modules/@modelcontextprotocol/server-everything/dist/index.js"
TYPESCRIPT = "@modelcontextprotocol/sdk@1.32.2"
SCENARIOS = ["server-initialize", "ping", "tools-list", "resources-list", "prompts-list"]
"""Those that need nothing of the suite's own in the server."""


def connect(cluster: Cluster, *command: str, stdin: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "host_client", "connect", "work", "--", *command],
        env=os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE if stdin is None else stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )


def lines(stderr: bytes) -> list[str]:
    """What was said, less the progress."""
    return [line for line in stderr.decode().splitlines() if not line.endswith(" …")]


def test_a_line_of_5_mb_and_every_byte_pass_both_ways(cluster: Cluster, sandbox: str) -> None:
    data = bytes(range(256)) + b"x" * 5_000_000 + b"\n" + bytes(range(256))
    out, _ = connect(cluster, "cat").communicate(data, timeout=BOUND)
    assert out == data
    script = "head -c 5000000 /dev/zero | tr '\\0' y; echo; exec sha256sum"
    out, _ = connect(cluster, "sh", "-c", script).communicate(data, timeout=BOUND)
    assert out == b"y" * 5_000_000 + f"\n{hashlib.sha256(data).hexdigest()}  -\n".encode()


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("nonesuch",), 127, "podpipe: the sandbox has no command nonesuch: give the path"),
        (("/etc/passwd",), 126, "podpipe: /etc/passwd may not be executed in the sandbox: run"),
        (("sh", "-c", "cat; echo apart >&2; exit 7"), 7, "apart"),
        (("sh", "-c", "kill -9 $$"), 137, ""),
    ],
    ids=["absent", "not executable", "failing", "killed"],
)
def test_a_commands_end_is_told_by_its_code_and_in_its_own_words(
    cluster: Cluster, sandbox: str, command: tuple[str, ...], code: int, said: str
) -> None:
    process = connect(cluster, *command)
    _, err = process.communicate(timeout=BOUND)
    assert process.returncode == code
    last = lines(err)
    assert len(last) == (1 if said else 0), last
    assert "".join(last).startswith(said)


def test_the_end_of_stdin_arrives_whatever_it_is_and_what_comes_later_is_read(
    cluster: Cluster, sandbox: str, tmp_path: Path
) -> None:
    (tmp_path / "given").write_bytes(b"given ")
    script = "cat; sleep 1; echo late"
    for path, expected in ((tmp_path / "given", b"given late\n"), (Path(os.devnull), b"late\n")):
        with path.open("rb") as source:
            process = connect(cluster, "sh", "-c", script, stdin=source.fileno())
            assert process.communicate(timeout=BOUND)[0] == expected
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = connect(cluster, "sh", "-c", script, stdin=theirs.fileno())
        ours.sendall(b"sent ")
        ours.shutdown(socket.SHUT_WR)
        assert process.communicate(timeout=BOUND)[0] == b"sent late\n"


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "never reads"])
@pytest.mark.parametrize("end", ["HUP", "TERM", "KILL", "KILL kubectl"])
def test_nothing_is_left_of_a_command_whose_connect_ended(
    cluster: Cluster, sandbox: str, end: str, reads: bool
) -> None:
    """One that minds neither signals nor the end of its stdin, whose input may be stuck, too."""
    mark = f"x{secrets.token_hex(8)}"
    reading = "cat >/dev/null; " if reads else ""
    script = f"trap '' TERM INT HUP; : {mark}; sleep 600 & echo up; {reading}wait; sleep 600"
    process = connect(cluster, "sh", "-c", script)
    assert process.stdout
    assert process.stdin
    assert process.stdout.readline() == b"up\n"
    os.set_blocking(process.stdin.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(100):
            os.write(process.stdin.fileno(), b"x" * 65536)
    if end == "KILL kubectl":
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (kubectl,) = [
            int(pid)
            for pid in path.read_text("ascii").split()
            if b"looks=" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(kubectl, signal.SIGKILL)
    else:
        process.send_signal(signal.Signals[f"SIG{end}"])
    process.wait(BOUND)
    process.stdout.close()
    with contextlib.suppress(OSError):
        process.stdin.close()
    assert process.stderr
    process.stderr.close()
    script = f"for i in $(seq 100); do pgrep -f '[ ]{mark}' >/dev/null || exit 0; sleep 0.1; done; exit 1"
    left = cluster.podpipe("run", "work", "--", "sh", "-c", script)
    assert left.returncode == 0, left.stderr


@contextlib.contextmanager
def served(argv: list[str], environment: dict[str, str]) -> Iterator[str]:
    """The URL of a stdio server."""
    with tempfile.TemporaryDirectory(prefix="mcp-", dir="/tmp") as folder:
        socket = Path(folder) / "s"
        command = ("tests.conformance.servers", "command", str(socket), *argv)
        with running(*command, environment=environment):
            deadline = time.monotonic() + PATIENCE
            while not socket.exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            with bridged(socket) as url:
                yield url


async def score(url: str, results: Path) -> Verdict:
    verdicts = await asyncio.gather(
        *(judge(RELEASED, ["--scenario", name], url, results / name) for name in SCENARIOS)
    )
    unmet = {check: said for verdict in verdicts for check, said in verdict.unmet.items()}
    return Verdict(frozenset().union(*(verdict.passed for verdict in verdicts)), unmet)


@pytest.fixture(scope="module")
def ways(cluster: Cluster, sandbox: str) -> dict[str, list[str]]:
    """The commands of a server that is not ours: as it runs here, and in a sandbox."""
    package = installed(EVERYTHING).parents[2]
    for words in ([node(), "node"], [str(package / "node_modules"), "./"]):
        put = cluster.podpipe("put", sandbox, *words)
        assert put.returncode == 0, put.stderr
    connect = [sys.executable, "-m", "host_client", "connect", sandbox, "--"]
    return {
        "here": [node(), str(package / PROGRAM)],
        "there": [*connect, "./node", PROGRAM],
    }


async def test_server_everything_scores_in_a_sandbox_as_it_does_here(
    cluster: Cluster, ways: dict[str, list[str]], tmp_path: Path
) -> None:
    verdicts = {}
    for name, argv in ways.items():
        with served(argv, cluster.environment | {"PYTHONPATH": str(ROOT)}) as url:
            verdicts[name] = await score(url, tmp_path / name)
    assert len(verdicts["here"].passed) >= len(SCENARIOS)
    assert verdicts["there"] == verdicts["here"]


def test_a_client_of_another_sdk_hears_the_same_from_both(
    cluster: Cluster, ways: dict[str, list[str]]
) -> None:
    calls = [
        {"tool": "echo", "arguments": {"message": "\u0001 𝄞 " + "x" * 30_000}},
        {"tool": "get-sum", "arguments": {"a": 1, "b": 2}},
        {"tool": "get-sum", "arguments": {"a": "no number"}},
        {"tool": "get-structured-content", "arguments": {"location": "Chicago"}},
        {"tool": "get-tiny-image", "arguments": {}},
        {"tool": "trigger-long-running-operation", "arguments": {"duration": 1, "steps": 2}},
    ]
    environment = os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)}
    heard = {}
    for name, command in ways.items():
        plan = {"command": command, "env": environment, "calls": calls}
        ran = subprocess.run(
            [node(), str(ROOT / "tests/sdks/client.mjs"), str(installed(TYPESCRIPT))],
            input=json.dumps(plan),
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        heard[name] = json.loads(ran.stdout)
    assert len(heard["here"]["tools"]) > 10
    assert heard["here"]["results"][1]["content"][0]["text"].endswith("3.")
    assert heard["there"] == heard["here"]
