"""Real daemons, real sockets and an in-memory client, for the tests of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, TextContent

from in_pod_server.files import Home
from in_pod_server.gateway.gateway import Gateway
from in_pod_server.launch import Launcher
from in_pod_server.processes import ProcessTable
from in_pod_server.server import build_server

ROOT = Path(__file__).parents[2]
DIAL = ROOT / "in_pod_server" / "dial.py"
PATIENCE = 20.0

INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "0"},
}


def text_of(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


def data_of(result: CallToolResult) -> dict[str, Any]:
    assert not result.is_error, text_of(result)
    assert result.structured_content, "never empty"
    return dict(result.structured_content)


@dataclass(frozen=True)
class Sandbox:
    """An in-memory client of the server, and what lies behind it."""

    client: Client
    processes: ProcessTable
    home: Path
    run_dir: Path
    log_dir: Path

    async def call(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        return data_of(await self.client.call_tool(tool, arguments))

    async def refused(self, tool: str, /, **arguments: Any) -> str:
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error, text_of(result)
        return text_of(result)


@contextlib.asynccontextmanager
async def open_sandbox(base: Path, **options: Any) -> AsyncIterator[Sandbox]:
    home, run_dir, log_dir = base / "home", base / "run", base / "log"
    for folder in (home, run_dir, log_dir):
        folder.mkdir()
    launcher = Launcher(home=home, run_dir=run_dir, user="sandbox", tmp_dir=Path("/tmp"))
    with Home([home, Path("/workspace")]) as files, Home([home]) as workspace:
        async with ProcessTable(launcher, log_dir=log_dir) as processes:
            gateway = Gateway("", run_dir, base / "gateway.sock", base / "annotations", 0)
            server = build_server(
                processes=processes, home=files, workspace=workspace, gateway=gateway, **options
            )
            async with Client(server, mode="legacy") as client:
                yield Sandbox(client, processes, home, run_dir, log_dir)


@dataclass(frozen=True)
class Daemon:
    """A daemon in a process of its own."""

    base: Path
    process: subprocess.Popen[bytes]

    @property
    def socket(self) -> Path:
        return self.base / "d.sock"

    @property
    def home(self) -> Path:
        return self.base / "home"

    def stderr(self) -> str:
        return (self.base / "stderr").read_text()

    def dial_argv(self) -> list[str]:
        return [sys.executable, "-I", "-S", "-u", str(DIAL), str(self.socket)]

    def parameters(self) -> StdioServerParameters:
        argv = self.dial_argv()
        return StdioServerParameters(command=argv[0], args=argv[1:])


def daemon_argv(base: Path) -> list[str]:
    argv = [sys.executable, "-m", "in_pod_server", "serve", "--socket", str(base / "d.sock")]
    for option, folder in (
        ("--home", "home"),
        ("--workspace", "home"),
        ("--run-dir", "run"),
        ("--log-dir", "log"),
        ("--podinfo", "podinfo"),
    ):
        argv += [option, str(base / folder)]
    return [*argv, "--gateway-port", "0"]


@contextlib.contextmanager
def start_daemon(
    base: Path, *, under: Sequence[str] = (), arguments: Sequence[str] = (), **environment: str
) -> Iterator[Daemon]:
    """Run a daemon, `under` a program that becomes it, with more `arguments`."""
    (base / "home").mkdir(exist_ok=True)
    (base / "podinfo").mkdir(exist_ok=True)
    (base / "podinfo" / "uid").write_text("pod-uid-1\n")
    with (base / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*under, *daemon_argv(base), *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | environment,
        )
    try:
        yield Daemon(base, process)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE)
            raise


class Wire:
    """JSON-RPC by hand on the daemon's socket, or one that leads there: what no client of the SDK sends."""

    def __init__(self, way: Path | socket.socket, *, initialize: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX) if isinstance(way, Path) else way
        try:
            if isinstance(way, Path):
                self._connect(way)  # with no timeout yet: it waits where the queue is full
            self.socket.settimeout(PATIENCE)
        except BaseException:
            self.socket.close()
            raise
        self._file = self.socket.makefile("rb")
        if initialize:
            self.request(0, "initialize", INITIALIZE)
            self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def _connect(self, path: Path) -> None:
        def connected() -> bool:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                self.socket.connect(str(path))
                return True
            return False

        eventually(connected)

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, message: dict[str, Any]) -> None:
        self.write(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        line = self._file.readline()
        assert line.endswith(b"\n"), line
        value: dict[str, Any] = json.loads(line.decode())
        return value

    def at_end(self) -> bool:
        return self._file.readline() == b""

    def request(
        self, request_id: int | str, method: str, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        self.send({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params or {}})
        reply = self.receive()
        assert reply["id"] == request_id, reply
        return reply

    def call(self, request_id: int | str, tool: str, /, **arguments: Any) -> dict[str, Any]:
        reply = self.request(request_id, "tools/call", {"name": tool, "arguments": arguments})
        result: dict[str, Any] = reply["result"]
        return result

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for what another process does and tells nobody."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def marked(process_id: str) -> list[int]:
    """Return the live processes that carry a command's marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if f"PODPIPE_PROCESS_ID={process_id}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
