"""The server as real MCP clients start it: Claude Desktop's way, several copies, the inspector."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from tests.cluster.conftest import ROOT, Cluster, does_the_main_job
from tests.node import installed, node
from tests.turns import SOON_SECONDS

BOUND = 120
INSPECTOR = "@modelcontextprotocol/inspector@2.12.0"


@pytest.fixture
def desktop(cluster: Cluster, user: str, tmp_path: Path) -> StdioServerParameters:
    """As Claude Desktop starts a server: cwd /, a short PATH, little else but KUBECONFIG."""
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "host_client", "serve"],
        cwd="/",
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "KUBECONFIG": cluster.environment["KUBECONFIG"],
            "NAMESPACE": cluster.namespace,
            "PODPIPE_USER": user,
            "PODPIPE_KUBECTL": cluster.environment["PODPIPE_KUBECTL"],
        },
    )


async def test_a_client_with_a_bare_environment_does_the_main_job(
    desktop: StdioServerParameters,
) -> None:
    with anyio.fail_after(BOUND):
        await does_the_main_job(desktop)


async def test_three_copies_work_on_one_sandbox_at_once(desktop: StdioServerParameters) -> None:
    with anyio.fail_after(BOUND):
        async with Client(desktop) as first, Client(desktop) as second, Client(desktop) as third:
            await first.call_tool("create_sandbox", {"name": "work"})
            outputs: list[str] = []

            async def work(client: Client, number: int) -> None:
                for turn in range(5):
                    answer = await client.call_tool(
                        "run_command",
                        {"sandbox_id": "work", "command": f"echo {number}.{turn} | tee -a log"},
                    )
                    assert answer.structured_content, answer.content
                    outputs.append(answer.structured_content["stdout"].strip())

            async with anyio.create_task_group() as tasks:
                for number, client in enumerate((first, second, third)):
                    tasks.start_soon(work, client, number)
            log = await third.call_tool("read_file", {"sandbox_id": "work", "path": "log"})
            await second.call_tool("destroy_sandbox", {"sandbox_id": "work"})
    assert log.structured_content
    assert sorted(log.structured_content["content"].split()) == sorted(outputs)
    assert len(set(outputs)) == 15


def test_a_probing_copy_makes_nothing_and_goes_at_once(
    desktop: StdioServerParameters, cluster: Cluster
) -> None:
    probe = {
        "jsonrpc": "2.0",
        "id": "probe",
        "method": "server/discover",
        "params": {
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientInfo": {"name": "probe", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {},
            }
        },
    }
    before = cluster.left()
    with subprocess.Popen(
        [desktop.command, *desktop.args],
        cwd="/",
        env=desktop.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as copy:
        assert copy.stdin
        assert copy.stdout
        copy.stdin.write(json.dumps(probe).encode() + b"\n")
        copy.stdin.flush()
        assert "supportedVersions" in json.loads(copy.stdout.readline())["result"]
        copy.send_signal(signal.SIGTERM)
        start = time.monotonic()
        copy.wait(10)
        assert time.monotonic() - start < SOON_SECONDS
    assert cluster.left() == before


@pytest.mark.parametrize("end", ["EOF", "SIGTERM", "SIGKILL"])
def test_copies_with_calls_under_way_go_at_once_and_leave_nothing_in_the_pod(
    desktop: StdioServerParameters, cluster: Cluster, end: str
) -> None:
    assert cluster.podpipe("create", "--name", "work").returncode == 0
    copies = [
        subprocess.Popen(
            [desktop.command, *desktop.args],
            cwd="/",
            env=desktop.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(3)
    ]
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}}
    for number, copy in enumerate(copies):
        command = f"touch began{number}; sleep 8; touch ended{number}"
        call = {"name": "run_command", "arguments": {"sandbox_id": "work", "command": command}}
        tell(copy, "initialize", hello | {"clientInfo": {"name": "t", "version": "1"}}, number=1)
        tell(copy, "notifications/initialized")
        tell(copy, "tools/call", call, number=2)
    wait = "for i in $(seq 200); do {} && exit 0; sleep 0.1; done; exit 1"
    begun = cluster.podpipe("run", "work", "--", "sh", "-c", wait.format("ls began0 began1 began2"))
    assert begun.returncode == 0, begun.stderr
    start = time.monotonic()
    for copy in copies:
        if end == "EOF":
            assert copy.stdin
            copy.stdin.close()
        else:
            copy.send_signal(signal.Signals[end])
    for copy in copies:
        copy.wait(10)
    took = time.monotonic() - start
    for copy in copies:
        for stream in (copy.stdin, copy.stdout):
            assert stream
            stream.close()
    assert took < SOON_SECONDS
    # The one that counts has a dial of its own; what ran goes on, since no client cancelled it.
    left = '[ "$(pgrep -fc "[d]ial[.]py")" = 1 ]'
    gone = cluster.podpipe("run", "work", "--", "sh", "-c", wait.format(left))
    assert gone.returncode == 0, "dials are left"
    ended = cluster.podpipe("run", "work", "--", "sh", "-c", wait.format("ls ended0 ended1 ended2"))
    assert ended.returncode == 0, "the client's end stopped a command"


def tell(
    copy: subprocess.Popen[bytes],
    method: str,
    params: dict[str, Any] | None = None,
    number: int | None = None,
) -> None:
    """Send a message, a request if it has a number."""
    message = {"jsonrpc": "2.0", "method": method, "params": params or {}}
    assert copy.stdin
    copy.stdin.write(json.dumps(message | ({"id": number} if number else {})).encode() + b"\n")
    copy.stdin.flush()


@pytest.fixture(scope="session")
def inspector() -> list[str]:
    """The MCP inspector's command line, installed once into the cache."""
    program = installed(INSPECTOR).parents[1] / ".bin/mcp-inspector"
    return [node(), str(program), "--cli"]


def inspect(
    inspector: list[str], desktop: StdioServerParameters, *argv: str
) -> subprocess.CompletedProcess[str]:
    assert desktop.env
    return subprocess.run(
        [*inspector, *_env_options(desktop.env), desktop.command, *desktop.args, *argv, "-q"],
        env={"PATH": "/usr/bin:/bin", "HOME": desktop.env["HOME"]},
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        check=False,
    )


def _env_options(environment: dict[str, str]) -> list[str]:
    return [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_finds_every_schema_portable(
    inspector: list[str], desktop: StdioServerParameters, era: str
) -> None:
    listed = inspect(
        inspector, desktop, "--protocol-era", era,
        "--method", "tools/list", "--strict", "--format", "json",
    )  # fmt: skip
    assert listed.returncode == 0, listed.stderr
    tools: Any = json.loads(listed.stdout)["result"]
    names = [tool["name"] for tool in tools["tools"]]
    assert {"create_sandbox", "run_command", "read_file"} < set(names)


def test_the_inspector_calls_tools(inspector: list[str], desktop: StdioServerParameters) -> None:
    made = inspect(
        inspector, desktop, "--method", "tools/call", "--tool-name", "create_sandbox",
        "--tool-arg", "name=seen", "--format", "json",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    ran = inspect(
        inspector, desktop, "--method", "tools/call", "--tool-name", "run_command",
        "--tool-arg", "sandbox_id=seen", "command=echo inspected", "--format", "json",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "inspected" in ran.stdout
    refused = inspect(
        inspector, desktop, "--method", "tools/call", "--tool-name", "run_command",
        "--tool-arg", "sandbox_id=nonesuch", "command=true",
    )  # fmt: skip
    assert refused.returncode == 5, "a tool's refusal is told from success"
