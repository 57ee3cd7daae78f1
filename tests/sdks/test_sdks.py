"""Clients that are not ours: the TypeScript SDK and mcp 1.x do the demo and call every tool."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host_client.conftest import StubCluster
from tests.in_pod_server.gateways import free_port
from tests.node import INSTALL_SECONDS, installed, node

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TYPESCRIPT = "@modelcontextprotocol/sdk@1.32.2"
PYTHON_1 = "mcp==1.30.0"
BOUND = 120


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, "arguments": arguments}


def of(index: int, field: str) -> dict[str, Any]:
    """An argument that is a field of the result of an earlier call."""
    return {"from": index, "field": field}


def python_1() -> str:
    """The interpreter of a virtual environment with mcp 1.x."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podpipe/pip"
    folder = cache / PYTHON_1.replace("==", "-")
    python = folder / "bin/python"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            venv.create(folder, clear=True, with_pip=True)
            subprocess.run(
                [str(python), "-m", "pip", "install", "--quiet", PYTHON_1],
                check=True, timeout=INSTALL_SECONDS, capture_output=True,
            )  # fmt: skip
            (folder / "complete").touch()
    return str(python)


@pytest.fixture(params=["typescript", "python-1"])
def client(request: pytest.FixtureRequest) -> list[str]:
    """The command of a client that makes the calls of a plan."""
    if request.param == "typescript":
        return [node(), str(HERE / "client.mjs"), str(installed(TYPESCRIPT))]
    return [python_1(), str(HERE / "client.py")]


@pytest.fixture
def environment(stub: StubCluster) -> dict[str, str]:
    return stub.environment | {
        "PYTHONPATH": str(ROOT),
        "PODPIPE_TOOLSET": "default,blobs",
        "PODPIPE_ALLOWED_DIRS": str(stub.folder),
    }


@pytest.fixture(scope="session")
def listed() -> dict[str, list[str]]:
    """The daemon's tools, by toolset."""
    toolsets = json.loads((ROOT / "in_pod_server/tools.json").read_text(encoding="utf-8"))
    return {name: [tool["name"] for tool in tools] for name, tools in toolsets.items()}


class Answers:
    """What a client got: the tools' names, and each result in the order of the calls."""

    def __init__(self, calls: list[dict[str, Any]], said: dict[str, Any]) -> None:
        self.tools: list[str] = said["tools"]
        self._named = [made["tool"] for made in calls]
        self._results = said["results"]
        for name, result in zip(self._named, self._results, strict=True):
            assert not result.get("isError"), (name, result)
            assert result["content"][0]["text"], f"{name}: enough for who reads text"
            assert result["structuredContent"], f"{name}: enough for who reads data"

    def facts(self, tool: str, nth: int = 0) -> Any:
        where = [n for n, name in enumerate(self._named) if name == tool][nth]
        return self._results[where]["structuredContent"]


def answers(
    client: list[str], server: list[str], environment: dict[str, str], calls: list[dict[str, Any]]
) -> Answers:
    plan = {
        "command": [sys.executable, "-m", "host_client", *server],
        "env": environment,
        "calls": calls,
    }
    ended = subprocess.run(
        client, input=json.dumps(plan), capture_output=True, text=True, timeout=BOUND, check=False,
        env={"PATH": os.environ["PATH"], "HOME": environment["HOME"]}, cwd="/",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return Answers(calls, json.loads(ended.stdout))


def test_it_does_the_whole_demo(
    client: list[str], environment: dict[str, str], stub: StubCluster
) -> None:
    """The story of client.py, and every tool of the host's own."""
    here = stub.folder / "returned"
    work = {"sandbox_id": of(0, "sandbox_id")}
    got = answers(
        client,
        ["serve"],
        environment,
        [
            call("create_sandbox", name="work", ttl_minutes=30),
            call("run_command", **work, command="echo hello; exit 3"),
            call("write_random_blob", **work, name="random.bin", size_bytes=256),
            call("suspend_sandbox", **work),
            call("resume_sandbox", **work),
            call("read_blob", **work, name="random.bin"),
            call("read_file", **work, path="random.bin", encoding="base64"),
            call("download_file", **work, path="random.bin", host_path=str(here)),
            call("upload_file", **work, host_path=str(here), path="again.bin"),
            call("file_info", **work, path="again.bin", sha256=True),
            call("extend_sandbox", **work, ttl_minutes=60),
            call("get_sandbox_status", **work),
            call("list_sandboxes"),
            call("destroy_sandbox", **work),
        ],
    )
    assert (got.facts("run_command")["exit_code"], got.facts("run_command")["stdout"]) == (
        3,
        "hello\n",
    )
    digest = got.facts("write_random_blob")["sha256"]
    assert got.facts("suspend_sandbox")["phase"] == "suspended"
    assert got.facts("read_blob")["sha256"] == digest
    returned = base64.b64decode(got.facts("read_file")["content"])
    assert hashlib.sha256(returned).hexdigest() == digest
    assert here.read_bytes() == returned
    assert got.facts("file_info")["sha256"] == digest
    assert got.facts("get_sandbox_status")["phase"] == "running"
    assert len(got.facts("list_sandboxes")["sandboxes"]) == 1
    assert got.facts("destroy_sandbox")["destroyed"] is True
    assert stub.names("Pod") == []


@pytest.fixture
def sandbox(environment: dict[str, str], stub: StubCluster) -> Iterator[str]:
    """A sandbox to connect to, which can publish apps."""
    stub.faults(gateway={"port": free_port()})
    for words in (["create", "--name", "work"], ["destroy", "work"]):
        subprocess.run(
            [sys.executable, "-m", "host_client", *words],
            env=environment, cwd="/", check=True, capture_output=True, timeout=BOUND,
        )  # fmt: skip
        if words[0] == "create":
            yield "work"


def test_it_calls_every_tool_of_the_daemon_through_connect(
    client: list[str], environment: dict[str, str], sandbox: str, listed: dict[str, list[str]]
) -> None:
    calls = [
        call("run_command", command="cat; echo $A >&2", stdin="in", env={"A": "err"}),
        call("start_background", command="cat", stdin="open"),
        call("send_input", process_id=of(1, "process_id"), content="typed\n"),
        call("read_output", process_id=of(1, "process_id"), pattern="typed", wait_seconds=20),
        call("list_processes", running_only=True),
        call("stop_process", process_id=of(1, "process_id")),
        call("write_file", path="d/f", content="one two\n"),
        call("edit_file", path="d/f", old_text="two", new_text="three"),
        call("read_file", path="d/f"),
        call("list_files", path="d"),
        call("search_files", pattern="three"),
        call("move_file", path="d/f", new_path="d/g"),
        call("file_info", path="d/g"),
        call("write_random_blob", name="blob", size_bytes=10),
        call("read_blob", name="blob"),
        call("list_blobs"),
        call("delete_file", path="d", recursive=True),
        call("expose_port", internal_port=3000, name="web"),
        call("list_apps"),
        call("unexpose_port", name="web"),
    ]
    got = answers(client, ["connect", sandbox], environment, calls)
    offered = listed["default"] + listed["blobs"]
    assert got.tools == offered
    assert {made["tool"] for made in calls} == set(offered), "each of them is called"
    ran = got.facts("run_command")
    assert (ran["exit_code"], ran["stdout"], ran["stderr"]) == (0, "in", "err\n")
    process_id = got.facts("start_background")["process_id"]
    assert "typed" in json.dumps(got.facts("read_output"))
    assert [row["process_id"] for row in got.facts("list_processes")["processes"]] == [process_id]
    assert got.facts("read_file")["content"] == "one three\n"
    assert got.facts("file_info")["size"] == len("one three\n")
    assert got.facts("read_blob")["sha256"] == got.facts("write_random_blob")["sha256"]
    assert "blob" in got.facts("list_blobs")["result"]
