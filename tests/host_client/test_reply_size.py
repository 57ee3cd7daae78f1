"""No line that `podpipe serve` writes reaches a million bytes, whatever a sandbox holds or is asked."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from in_pod_server.contract import LABEL_SANDBOX
from tests.host_client.conftest import ROOT, StubCluster

LIMIT = 1_000_000
BOUND = 60
HUGE = 3_000_000
CHARACTERS = {
    "control": b"\x01",
    "quote": b'"',
    "backslash": b"\\",
    "delete": b"\x7f",
    "two bytes": "é".encode(),
    "four bytes": "𝄞".encode(),
    "no text": b"\xff",
    "line": b"\n",
}
"""What takes the most room of a message: up to six bytes for one, or as many as it has."""


class Serve:
    """A `podpipe serve` with a sandbox, and the home behind it."""

    def __init__(self, stub: StubCluster, allowed: Path) -> None:
        self.stub = stub
        self.process = subprocess.Popen(
            [sys.executable, "-m", "host_client", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=stub.environment
            | {
                "PYTHONPATH": str(ROOT),
                "PODPIPE_TOOLSET": "default,blobs",
                "PODPIPE_ALLOWED_DIRS": str(allowed),
            },
        )
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}}
        self.ask("initialize", hello | {"clientInfo": {"name": "t", "version": "1"}})
        self.tools = {tool["name"]: tool for tool in self.ask("tools/list", {})["tools"]}
        self.call("create_sandbox", name="work")
        self.call("list_files", sandbox_id="work")
        (self.home,) = stub.folder.glob("homes/*")

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        line = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(line).encode() + b"\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], BOUND)[0], f"no answer to {method}"
        answer = self.process.stdout.readline()
        assert len(answer) < LIMIT, f"{len(answer)} bytes: {answer[:200]!r}"
        result: dict[str, Any] = json.loads(answer)["result"]
        return result

    def call(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """Make a call that must succeed; its answer as data."""
        answer = self.ask("tools/call", {"name": tool, "arguments": arguments})
        assert not answer.get("isError"), answer
        facts: dict[str, Any] = answer["structuredContent"]
        return facts

    def work(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        return self.call(tool, sandbox_id="work", **arguments)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    stub = StubCluster(tmp_path_factory.mktemp("stub"))
    server = Serve(stub, tmp_path_factory.getbasetemp())
    yield server
    server.process.communicate(timeout=BOUND)
    stub.close()


@pytest.fixture(params=CHARACTERS)
def filled(request: pytest.FixtureRequest, serve: Serve) -> bytes:
    """A character that the home's file `filled` is full of."""
    character = CHARACTERS[request.param]
    (serve.home / "filled").write_bytes(character * (HUGE // len(character)))
    return character


def test_what_a_command_writes(serve: Serve, filled: bytes) -> None:
    ran = serve.work("run_command", command="cat filled; cat filled >&2")
    assert ran["stdout_truncated"]
    assert ran["stderr_truncated"]
    for encoding in ("text", "base64"):
        read = serve.work(
            "read_output", process_id=ran["process_id"], max_bytes=1_048_576, encoding=encoding
        )
        assert 0 < read["cursor"] < HUGE


def test_what_a_file_holds(serve: Serve, filled: bytes) -> None:
    for arguments in ({}, {"encoding": "base64"}, {"tail_lines": 10**9}):
        read = serve.work("read_file", path="filled", max_bytes=HUGE, **arguments)
        assert 0 < read["bytes_read"] < HUGE


def test_what_a_search_finds(serve: Serve, filled: bytes) -> None:
    text = filled.replace(b"\n", b"x") * 200
    (serve.home / "lines").write_bytes((b"find" + text + b"\n") * 5000)
    found = serve.work(
        "search_files", path="lines", pattern="find", max_results=2000, context_lines=20
    )
    assert found["truncated"]


def test_what_an_edit_shows(serve: Serve, filled: bytes) -> None:
    text = filled.decode("utf-8", "replace") * 300_000
    (serve.home / "edited").write_bytes(b"old")
    serve.work("edit_file", path="edited", old_text="old", new_text=text)


@pytest.fixture(scope="module")
def crowd(serve: Serve) -> Path:
    """A folder of the home with more names, of the worst kinds, than an answer takes."""
    folder = serve.home / "crowd"
    folder.mkdir()
    for character in CHARACTERS.values():
        for number in range(1500):
            name = character.replace(b"\n", b"\r") * (240 // len(character))
            (folder / os.fsdecode(b"%04d" % number + name)).touch()
    return folder


def test_what_a_folder_holds(serve: Serve, crowd: Path) -> None:
    listed = serve.work("list_files", path="crowd", max_entries=10_000)
    assert listed["truncated"]
    found = serve.work("search_files", path="crowd", pattern=".", kind="name", max_results=2000)
    assert found["truncated"]


def test_what_the_blobs_are(serve: Serve, crowd: Path) -> None:
    made = [serve.home / entry.name for entry in crowd.iterdir()]
    for path in made:
        path.touch()
    try:
        assert serve.work("list_blobs")["result"]
    finally:
        for path in made:
            path.unlink()


@pytest.mark.parametrize("character", ["\x01", "𝄞", "\\"])
def test_a_path_of_any_length(serve: Serve, character: str) -> None:
    path = "/".join([character * (250 // len(character.encode()))] * 15)
    serve.work("write_file", path=f"{path}/file", content="x")
    (serve.home / "link").symlink_to(path)
    try:
        serve.work("file_info", path="link")
        serve.work("move_file", path=f"{path}/file", new_path=f"{path}/moved")
        serve.work("list_files", path=path)
        serve.work("search_files", path=path, pattern="x")
        serve.work("delete_file", path=f"{path}/moved")
    finally:
        (serve.home / "link").unlink()


def test_a_list_of_commands(serve: Serve) -> None:
    path = "/".join(["\x01" * 250] * 15)
    for number in range(150):
        serve.work("start_background", command="true" + "\x01" * 300, log_file=f"{path}/{number}")
    assert serve.work("list_processes", max_entries=1000)["truncated"]


def test_a_list_of_sandboxes(serve: Serve) -> None:
    """They are as many as the cluster takes, and each tells why it is as it is."""
    record = next(o for key, o in serve.stub.objects.items() if key.startswith("ConfigMap/"))
    objects = serve.stub.objects
    for number in range(3000):
        copy = json.loads(json.dumps(record))
        name = f"{record['metadata']['name'][:-5]}{number:05}"
        copy["metadata"] |= {"name": name, "uid": name}
        copy["metadata"]["labels"][LABEL_SANDBOX] = name
        objects[f"ConfigMap/{name}"] = copy
    state = serve.stub.folder / "state.json"
    before = state.read_text(encoding="utf-8")
    state.write_text(json.dumps(objects), encoding="utf-8")
    try:
        listed = serve.call("list_sandboxes")
        assert len(listed["sandboxes"]) < listed["total"] == 3001
    finally:
        state.write_text(before, encoding="utf-8")


def test_what_a_transfer_leaves_out(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "given"
    for _ in range(12):
        path /= "\x01" * 250
    path.mkdir(parents=True)
    for number in range(300):
        (path / f"{number}").symlink_to("/etc/passwd")
    put = serve.work("upload_file", host_path=str(tmp_path / "given"))
    assert len(put["refused"]) + put["refused_unlisted"] == 300


def strings(tool: dict[str, Any]) -> list[str]:
    """The arguments of a tool that take text of any kind."""
    properties = tool["inputSchema"]["properties"]
    return [name for name, schema in properties.items() if schema.get("type") == "string"]


def test_a_refusal_whatever_is_refused(serve: Serve) -> None:
    """An error repeats what was given, and what was given may be longer than an answer."""
    samples = {"string": "x", "number": 1, "integer": 16, "boolean": False, "object": {}}
    for huge in ("\x01" * 400_000, "é" * 900_000):
        for name, tool in serve.tools.items():
            schema = tool["inputSchema"]
            good = {
                each: "work"
                if each == "sandbox_id"
                else samples[schema["properties"][each]["type"]]
                for each in schema.get("required", [])
            }
            for argument in strings(tool):
                serve.ask("tools/call", {"name": name, "arguments": good | {argument: huge}})
            serve.ask("tools/call", {"name": name, "arguments": good | {huge: 1}})
        environment = {"command": "true", "sandbox_id": "work", "env": {huge: "x"}}
        serve.ask("tools/call", {"name": "run_command", "arguments": environment})
        refused = serve.ask("tools/call", {"name": huge, "arguments": {}})
        assert refused["isError"]
