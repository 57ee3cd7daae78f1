"""The audit: a line for each call, whatever its end, and nothing that was in it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from host_client import audit
from host_client.audit import Audit, digest
from host_client.config import Settings
from host_client.errors import PodpipeError, SandboxNotFound
from host_client.host import Host
from host_client.server import build_server
from tests.host_client.conftest import Podpipe, StubCluster

FIELDS = [
    "time", "user", "session", "context", "sandbox", "sandbox_id", "tool", "arguments_sha256",
    "outcome", "bytes_in", "bytes_out", "ms", "reconnects",
]  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of(stub: StubCluster) -> Path:
    return stub.folder / ".local/state/podpipe/audit.jsonl"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def audit_to(path: Path) -> Audit:
    return Audit(Settings(user="alice", session="s-1", audit_file=path), lambda: "kind")


def test_a_line_says_who_did_what_where_and_how_it_ended(path: Path) -> None:
    with audit_to(path).call("run_command", "work", {"command": "secret words"}) as entry:
        audit.concerns("work-abcdefgh")
        audit.count(bytes_in=5, reconnects=1)
        audit.count(bytes_in=2, bytes_out=7)
    assert entry.outcome == "ok"
    (line,) = lines(path)
    assert list(line) == FIELDS
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line.pop("ms") >= 0
    assert line == {
        "user": "alice",
        "session": "s-1",
        "context": "kind",
        "sandbox": "work",
        "sandbox_id": "work-abcdefgh",
        "tool": "run_command",
        "arguments_sha256": hashlib.sha256(b'{"command":"secret words"}').hexdigest(),
        "outcome": "ok",
        "bytes_in": 7,
        "bytes_out": 7,
        "reconnects": 1,
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_digest_depends_on_what_is_said_and_not_on_how() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})
    assert digest({"a": "\ud800é"}) != digest({"a": "é"})


def not_found() -> Exception:
    error = RuntimeError("for the model")
    error.__cause__ = ExceptionGroup("tasks", [SandboxNotFound("no")]).exceptions[0]
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (SandboxNotFound("no"), "sandbox_not_found"),
        (PodpipeError("no"), "podpipe_error"),
        (ExceptionGroup("tasks", [SandboxNotFound("no")]), "sandbox_not_found"),
        (not_found(), "sandbox_not_found"),
        (ValueError("no"), "internal_error"),
    ],
    ids=str,
)
async def test_the_outcome_is_the_error_behind_it(
    path: Path, error: BaseException, outcome: str
) -> None:
    with pytest.raises(type(error)), audit_to(path).call("x", None, {}):
        raise error
    assert [line["outcome"] for line in lines(path)] == [outcome]


async def test_a_cancelled_call_is_recorded_as_such(path: Path) -> None:
    with anyio.CancelScope() as scope, audit_to(path).call("x", None, {}):
        scope.cancel()
        await anyio.sleep_forever()
    assert [line["outcome"] for line in lines(path)] == ["cancelled"]


@pytest.mark.parametrize("sandbox", ["a b\nforged", 7, None, "x" * 200, "../x"])
def test_what_is_no_name_of_a_sandbox_is_not_written(path: Path, sandbox: object) -> None:
    with audit_to(path).call("x", sandbox, {"sandbox_id": sandbox}):
        pass
    assert [line["sandbox"] for line in lines(path)] == [""]


async def test_calls_at_once_are_counted_apart(path: Path) -> None:
    book = audit_to(path)
    both = anyio.Event()

    async def call(number: int) -> None:
        with book.call(f"t{number}", None, {}):
            if number == 2:
                both.set()
            await both.wait()
            audit.count(bytes_in=number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, 1)
        tasks.start_soon(call, 2)
    assert {line["tool"]: line["bytes_in"] for line in lines(path)} == {"t1": 1, "t2": 2}
    audit.count(bytes_in=1)  # outside of any call: nothing to add to


def write_many(path: Path, number: int) -> None:
    book = audit_to(path)
    for turn in range(200):
        with book.call(f"t{number}", None, {"turn": turn}):
            pass


def test_several_processes_write_whole_lines(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    written = [(line["tool"], line["arguments_sha256"]) for line in lines(path)]
    assert sorted(written) == sorted(
        (f"t{number}", digest({"turn": turn})) for number in range(3) for turn in range(200)
    )


def test_a_file_that_cannot_be_written_fails_no_call_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = audit_to(tmp_path)
    for _ in range(2):
        with book.call("x", None, {}):
            pass
    said = capsys.readouterr().err
    assert said.count("cannot be written") == 1
    assert "PODPIPE_AUDIT_FILE" in said


async def test_every_call_of_a_served_tool_is_recorded(stub: StubCluster) -> None:
    """Also one of no such tool, or with arguments that it does not take."""
    with anyio.fail_after(60):
        async with Host(stub.settings()) as host, Client(build_server(host)) as client:
            await client.call_tool("create_sandbox", {"name": "work"})
            work = {"sandbox_id": "work"}
            await client.call_tool("run_command", work | {"command": "echo hunter2"})
            await client.call_tool("read_file", work | {"path": "nonesuch"})
            await client.call_tool("get_sandbox_status", {"sandbox_id": "hunter2"})
            await client.call_tool("create_sandbox", {"cpu_limit": "hunter2"})
            await client.call_tool("destroy_sandbox", {})
            await client.call_tool("hunter2", {})
    found = lines(of(stub))
    made = found[0]["sandbox_id"]
    assert made.startswith("work-")
    assert [
        (line["tool"], line["sandbox"], line["sandbox_id"], line["outcome"]) for line in found
    ] == [
        ("create_sandbox", "", made, "ok"),
        ("run_command", "work", made, "ok"),
        ("read_file", "work", made, "tool_error"),
        ("get_sandbox_status", "hunter2", "", "sandbox_not_found"),
        ("create_sandbox", "", "", "usage_error"),
        ("destroy_sandbox", "", "", "refused"),
        ("unknown", "", "", "refused"),
    ]
    assert {(line["user"], line["context"]) for line in found} == {("alice", "stub")}
    assert found[1]["bytes_in"] > len("echo hunter2")
    assert found[1]["bytes_out"] > len("hunter2")
    assert found[0]["bytes_in"] == 0


async def test_a_pipe_that_broke_under_a_call_is_counted(stub: StubCluster) -> None:
    with anyio.fail_after(60):
        async with Host(stub.settings()) as host, Client(build_server(host)) as client:
            made = await client.call_tool("create_sandbox", {"name": "work"})
            assert made.structured_content
            await host.pipes.forget(made.structured_content["sandbox_id"])
            stub.faults(pipe={"after": 3000, "ending": "die", "times": 1})
            ran = await client.call_tool(
                "run_command", {"sandbox_id": "work", "command": "head -c 9000 /dev/zero"}
            )
            assert not ran.is_error
    assert lines(of(stub))[-1]["reconnects"] == 1


def test_commands_are_recorded_and_those_that_only_look_here_are_not(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    (stub.folder / "notes").write_bytes(b"x" * 1000)
    podpipe("create", "--name", "work")
    assert podpipe("run", "work", "--", "exit 3").returncode == 3
    podpipe("put", "work", str(stub.folder / "notes"), "n")
    podpipe("get", "work", "n", str(stub.folder / "back"))
    podpipe("status", "nonesuch")
    for unrecorded in ("settings", "render", "doctor", "create --nonesuch"):
        podpipe(*unrecorded.split())
    podpipe("install", "codex", "--dry-run")
    podpipe("reap", "--dry-run")
    found = lines(of(stub))
    assert [(line["tool"], line["sandbox"], line["outcome"]) for line in found] == [
        ("podpipe create", "", "ok"),
        ("podpipe run", "work", "ok"),
        ("podpipe put", "work", "ok"),
        ("podpipe get", "work", "ok"),
        ("podpipe status", "nonesuch", "sandbox_not_found"),
        ("podpipe reap", "", "ok"),
    ]
    assert (found[2]["bytes_in"], found[3]["bytes_out"]) == (1000, 1000)
    assert {line["context"] for line in found} == {"stub"}
