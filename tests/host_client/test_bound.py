"""`serve --sandbox NAME`: tools work without a sandbox_id, in one lasting sandbox; and serve's log."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from host_client.clock import utc_now
from host_client.errors import SandboxNotFound, UsageError
from host_client.host import Host
from host_client.server import build_server
from tests.host_client.conftest import StubCluster

BOUND = 60
ROOT = Path(__file__).resolve().parents[2]


@contextlib.asynccontextmanager
async def bound(stub: StubCluster, name: str = "lasting") -> AsyncIterator[tuple[Host, Client]]:
    with anyio.fail_after(BOUND):
        async with (
            Host(stub.settings(), bound=name) as host,
            Client(build_server(host)) as client,
        ):
            yield host, client


async def run(client: Client, command: str, **arguments: Any) -> str:
    answer = await client.call_tool("run_command", {"command": command, **arguments})
    assert answer.structured_content, answer.content
    return str(answer.structured_content["stdout"])


async def test_no_tool_of_a_bound_server_requires_a_sandbox_id(stub: StubCluster) -> None:
    async with bound(stub) as (_, client):
        for tool in (await client.list_tools()).tools:
            assert "sandbox_id" not in tool.input_schema.get("required", [])
            properties = tool.input_schema["properties"]
            if tool.name not in ("create_sandbox", "list_sandboxes"):
                assert properties["sandbox_id"]["default"] == "lasting"
        assert client.instructions
        assert "'lasting'" in client.instructions
        assert not (stub.folder / "calls.jsonl").exists()


async def test_the_first_call_makes_the_sandbox_and_the_next_finds_it(stub: StubCluster) -> None:
    async with bound(stub) as (_, client):
        assert await run(client, "echo one > f; cat f") == "one\n"
    async with bound(stub) as (_, client):
        assert await run(client, "cat f", sandbox_id=None) == "one\n"
        shown = await client.call_tool("get_sandbox_status", {})
        assert shown.structured_content
        assert shown.structured_content["name"] == "lasting"
    assert len(stub.names("Pod")) == 1


async def test_two_servers_and_many_calls_at_once_make_one_sandbox(stub: StubCluster) -> None:
    outputs: list[str] = []
    async with bound(stub) as (_, first), bound(stub) as (_, second):

        async def call(client: Client, number: int) -> None:
            outputs.append(await run(client, f"echo {number}"))

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(call, (first, second)[number % 2], number)
    assert sorted(outputs) == [f"{number}\n" for number in range(6)]
    assert len(stub.names("Pod")) == 1


async def test_another_sandbox_is_still_within_reach(stub: StubCluster) -> None:
    async with bound(stub) as (_, client):
        await client.call_tool("create_sandbox", {"name": "other"})
        assert await run(client, "echo other", sandbox_id="other") == "other\n"
        missing = await client.call_tool("run_command", {"sandbox_id": "third", "command": "true"})
        assert missing.is_error
    (pod,) = stub.names("Pod")
    assert pod.startswith("sandbox-other-")


async def test_what_looks_at_or_ends_an_absent_one_makes_none_and_says_what_does(
    stub: StubCluster,
) -> None:
    async with bound(stub) as (_, client):
        for tool in ("get_sandbox_status", "suspend_sandbox", "destroy_sandbox"):
            answer = await client.call_tool(tool, {})
            assert answer.is_error
            assert "the next call that works in it" in str(answer.content)
    assert stub.names("Pod") == []


async def test_one_that_was_destroyed_is_made_anew_by_the_next_call(stub: StubCluster) -> None:
    async with bound(stub) as (_, client):
        await run(client, "echo kept > f")
        assert not (await client.call_tool("destroy_sandbox", {})).is_error
        assert await run(client, "cat f") == "kept\n"


async def test_one_that_has_expired_is_made_anew_with_its_home(
    stub: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bound(stub) as (_, client):
        await run(client, "echo kept > f")
        before = stub.names("Pod")
    later = utc_now() + timedelta(days=2)
    stub.faults(clock={"seconds": timedelta(days=2).total_seconds()})
    monkeypatch.setattr("host_client.clock.Clock.now", lambda _: later)
    async with bound(stub) as (host, client):
        monkeypatch.setattr(host.clock, "now", lambda: later)
        assert await run(client, "cat f") == "kept\n"
    assert len(stub.names("Pod")) == 1
    assert stub.names("Pod") != before


async def test_two_servers_that_find_it_expired_make_one_anew(
    stub: StubCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bound(stub) as (_, client):
        await run(client, "echo kept > f")
    later = utc_now() + timedelta(days=2)
    stub.faults(clock={"seconds": timedelta(days=2).total_seconds()})
    outputs: list[str] = []
    async with bound(stub) as (one, first), bound(stub) as (two, second):
        for host in (one, two):
            monkeypatch.setattr(host.clock, "now", lambda: later)

        async def call(client: Client) -> None:
            outputs.append(await run(client, "cat f"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, first)
            tasks.start_soon(call, second)
    assert outputs == ["kept\n", "kept\n"]
    assert len(stub.names("Pod")) == 1


async def test_a_first_call_that_is_cancelled_takes_nothing_from_who_waits_too(
    stub: StubCluster,
) -> None:
    with anyio.fail_after(BOUND):
        async with (
            Host(stub.settings(), bound="lasting") as first,
            Host(stub.settings(), bound="lasting") as second,
            anyio.create_task_group() as tasks,
        ):
            first_call = anyio.CancelScope()
            begun = anyio.Event()

            async def call() -> None:
                with first_call:
                    await first.open("lasting", progress=lambda _: begun.set())

            tasks.start_soon(call)
            await begun.wait()
            while not stub.names("ConfigMap"):  # noqa: ASYNC110  # another process writes it
                await anyio.sleep(0.01)
            claimed = (await second.launcher.status("lasting")).sandbox.uid
            first_call.cancel()
            session = await second.open("lasting")
            found = await second.launcher.status("lasting")
    assert found.phase == "running"
    assert found.pod
    assert found.pod.uid == session.pod.uid
    assert found.sandbox.uid == claimed, "the record of the cancelled call serves the other"


async def test_a_random_id_that_is_gone_is_not_taken_for_a_name(stub: StubCluster) -> None:
    with anyio.fail_after(BOUND):
        async with Host(stub.settings(), bound="spygsm3rbjnoltfoi") as host:
            with pytest.raises(SandboxNotFound):
                await host.open("spygsm3rbjnoltfoi")


def test_a_name_that_no_sandbox_can_have_is_refused_at_the_door(stub: StubCluster) -> None:
    with pytest.raises(UsageError, match="build-1"):
        Host(stub.settings(), bound="Bad Name")


async def test_serve_logs_a_line_for_each_call_and_nothing_that_was_in_it(
    stub: StubCluster,
) -> None:
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "host_client", "serve", "--sandbox", "lasting"],
        env=stub.environment | {"PYTHONPATH": str(ROOT)},
    )
    with anyio.fail_after(BOUND):
        async with Client(server) as client:
            await run(client, "echo hunter2")
            assert (await client.call_tool("read_file", {"path": "nonesuch"})).is_error
            await client.call_tool("list_sandboxes", {})
            await client.call_tool("hunter2", {})
    path = stub.folder / ".local/state/podpipe/serve.log"
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "hunter2" not in text
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO host_client\.audit\[\d+\]"
    assert [
        match.groups()
        for match in re.finditer(
            rf"^{stamp}: call tool=(\S+) sandbox=(\S+) outcome=(\S+) ms=\d+$", text, re.MULTILINE
        )
    ] == [
        ("run_command", "lasting", "ok"),
        ("read_file", "lasting", "tool_error"),
        ("list_sandboxes", "-", "ok"),
        ("unknown", "-", "refused"),
    ]


async def test_a_log_that_cannot_be_written_stops_no_server(
    stub: StubCluster, tmp_path: Path
) -> None:
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "host_client", "serve"],
        env=stub.environment | {"PYTHONPATH": str(ROOT), "PODPIPE_LOG_FILE": str(tmp_path)},
    )
    with anyio.fail_after(BOUND):
        async with Client(server) as client:
            answer = await client.call_tool("list_sandboxes", {})
    assert json.loads(json.dumps(answer.structured_content))["sandboxes"] == []
