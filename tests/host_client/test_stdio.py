"""The wire between client and server: whatever comes in, and whatever prints, each line out is valid."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from host_client.stdio import MAX_CALL_BYTES
from tests.host_client.conftest import StubCluster

ROOT = Path(__file__).resolve().parents[2]
BOUND = 60
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}}
CLIENT = {"clientInfo": {"name": "t", "version": "1"}}
PING = b'{"jsonrpc":"2.0","id":%s,"method":"ping"}'


class Lines:
    """A `podpipe serve`, initialized, that is given bytes and read line by line."""

    def __init__(self, environment: dict[str, str], *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *(argv or ("-m", "host_client", "serve"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment | {"PYTHONPATH": str(ROOT)},
        )
        hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": HELLO | CLIENT}
        assert "result" in self.ask(json.dumps(hello).encode())

    def ask(self, line: bytes) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert answer["jsonrpc"] == "2.0"
        return answer


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lines]:
    stub = StubCluster(tmp_path_factory.mktemp("stub"))
    server = Lines(stub.environment)
    yield server
    server.process.communicate(timeout=BOUND)
    assert server.process.returncode == 0
    stub.close()


def code(answer: dict[str, Any]) -> int | None:
    found: int | None = answer.get("error", {}).get("code")
    return found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (PING % b"1", None),
        (PING % b'"one"', None),
        (PING % b'"\\u00e9\\ud83d\\ude00"', None),
        (PING % b"-7", None),
        (PING % b"1" + b"\r", None),
        (b"\n \n\r\n" + PING % b"2", None),
        (PING % b"null", -32600),
        (PING % b"1.5", -32600),
        (PING % b"true", -32600),
        (PING % b"{}", -32600),
        (PING % b'"\\ud800"', -32700),
        (b"\xef\xbb\xbf" + PING % b"3", -32700),
        (b"\0", -32700),
        (PING.replace(b"ping", b"pi\0ng") % b"4", -32700),
        (PING.replace(b"ping", b"pi\xffng") % b"5", -32700),
        (PING.replace(b"ping", b"\\ud800") % b"6", -32700),
        (b"[" + PING % b"7" + b"]", -32600),
        (b"{}", -32600),
        (b"null", -32600),
        (b"[" * 100_000, -32700),
        (b'{"jsonrpc":"1.0","id":8,"method":"ping"}', -32600),
        (PING.replace(b"}", b',"params":{"x":"' + b"x" * 10_000_000 + b'"}}') % b"9", None),
        (
            PING.replace(b"}", b',"params":{"x":"' + b"x" * MAX_CALL_BYTES + b'"}}') % b"10",
            -32600,
        ),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else str(value),
)
def test_every_line_has_its_answer_and_the_server_goes_on(
    lines: Lines, line: bytes, said: int | None
) -> None:
    assert code(lines.ask(line)) == said
    assert lines.ask(PING % b'"after"') == {"jsonrpc": "2.0", "id": "after", "result": {}}


@pytest.mark.parametrize("text", ["\ud800", "a\0b", "\u2028\u2029\x85", "\ufeff", "\U0001f600"])
def test_any_text_in_an_argument_is_answered(lines: Lines, text: str) -> None:
    call = {"name": "get_sandbox_status", "arguments": {"sandbox_id": text}}
    ask = {"jsonrpc": "2.0", "id": "t", "method": "tools/call", "params": call}
    answer = lines.ask(json.dumps(ask).encode())
    assert code(answer) == -32700 if text == "\ud800" else answer["result"]["isError"]
    assert answer["id"] == "t"


NOISY = """
import os, subprocess, sys, warnings
from host_client import server
from host_client.cli import main
build = server.build_server
def noisy(host):
    print("a print"); sys.stdout.write("half a line")
    os.write(1, b"a write to descriptor 1")
    subprocess.run(["echo", "a child"])
    warnings.warn("a warning")
    return build(host)
server.build_server = noisy
sys.exit(main(["serve"]))
"""


def test_what_a_library_prints_goes_to_stderr(stub: StubCluster) -> None:
    server = Lines(stub.environment, "-c", NOISY)
    assert server.ask(PING % b"1")["result"] == {}
    out, err = server.process.communicate(timeout=BOUND)
    assert out == b""
    for noise in (b"a print", b"half a line", b"a write to", b"a child", b"a warning"):
        assert noise in err
