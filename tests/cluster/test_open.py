"""The local address over a real pod's gateway: reached, come back to, and shared without stalls."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ROOT, Cluster
from tests.host_client.test_forward import free_port
from tests.in_pod_server.support import eventually

BOUND = 60
SIZE = 30_000_000
APP = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = bytes({SIZE}) if "large" in self.path else b"quick"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Handler).serve_forever()
"""


class Opened:
    """A `podpipe open` of one app, and a client of its address."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def ask(self, path: str = "docs", host: str = "") -> tuple[int, bytes]:
        """Status and body; Python does not know that *.localhost is this machine."""
        named, _, port = self.url.removeprefix("http://").rstrip("/").partition(":")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}", headers={"Host": host or f"{named}:{port}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=BOUND) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()


def carriers(pid: int) -> list[int]:
    """The kubectl of each ssh of a podpipe."""
    return [
        child
        for parent in children(pid)
        if Path(f"/proc/{parent}/comm").read_text("ascii") == "ssh\n"
        for child in children(parent)
    ]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def opened(cluster: Cluster) -> Iterator[Opened]:
    user = cluster.environment["PODPIPE_USER"] = f"user-{secrets.token_hex(4)}"
    made = cluster.podpipe("create", "--name", "work")
    assert made.returncode == 0, made.stderr
    start = cluster.podpipe_fed(
        APP.encode(),
        "run",
        "-i",
        "work",
        "--",
        "cat >app.py; setsid python3 app.py >/dev/null 2>&1 &",
    )
    assert start.returncode == 0, start.stderr
    calls: list[dict[str, Any]] = [
        {"method": "initialize", "id": 1, "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}},
        {"method": "notifications/initialized"},
        {"method": "tools/call", "id": 2, "params": {
            "name": "expose_port", "arguments": {"internal_port": 3000, "name": "web"}}},
    ]  # fmt: skip
    environment = os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)}
    environment["PODPIPE_OPEN_PORT"] = str(free_port())
    program = [sys.executable, "-m", "host_client"]
    pipe = subprocess.Popen(
        [*program, "connect", "work"],
        env=environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert pipe.stdin
    assert pipe.stdout
    for call in calls:
        pipe.stdin.write(json.dumps({"jsonrpc": "2.0", **call}).encode() + b"\n")
    pipe.stdin.flush()
    answers = [json.loads(pipe.stdout.readline()) for _ in range(2)]
    assert not answers[1]["result"].get("isError"), answers
    pipe.communicate(timeout=BOUND)
    process = subprocess.Popen(
        [*program, "open", "work", "web", "--no-browser"],
        env=environment, cwd="/", stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    yield Opened(process, process.stdout.readline().decode().partition("?")[0])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=BOUND)
    cluster.environment["PODPIPE_USER"] = user
    assert cluster.podpipe("destroy", "work", "--purge-home", "--yes").returncode == 0


def test_a_public_page_of_an_app_is_there_and_the_rest_is_the_gateways_to_refuse(
    opened: Opened,
) -> None:
    assert opened.ask() == (200, b"quick")
    assert opened.ask("secret")[0] == 401
    assert opened.ask(host="evil.example")[0] == 421
    assert opened.ask(host=opened.url.removeprefix("http://web.").rstrip("/"))[0] == 401


def test_the_next_request_after_its_kubectl_was_killed_is_answered(opened: Opened) -> None:
    assert opened.ask()[0] == 200
    (kubectl,) = carriers(opened.process.pid)
    os.kill(kubectl, signal.SIGKILL)
    eventually(lambda: kubectl not in carriers(opened.process.pid))
    assert opened.ask() == (200, b"quick")


def test_32_connections_and_a_download_go_on_beside_each_other(opened: Opened) -> None:
    with ThreadPoolExecutor(34) as pool:
        large = [pool.submit(opened.ask, "docs?large") for _ in range(2)]
        small = [pool.submit(opened.ask) for _ in range(128)]
        assert {each.result(BOUND) for each in small} == {(200, b"quick")}
        assert [each.result(BOUND) == (200, bytes(SIZE)) for each in large] == [True, True]
    assert len(carriers(opened.process.pid)) == 1


def test_a_request_resumes_a_suspended_sandbox(cluster: Cluster, opened: Opened) -> None:
    assert cluster.podpipe("suspend", "work").returncode == 0
    assert opened.ask("secret")[0] == 401, "its gateway has answered, and knows the app"
    assert "running" in cluster.podpipe("status", "work").stdout
