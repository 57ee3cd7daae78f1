"""The server as an MCP client meets it: as a process, with raw lines, over the stub kubectl."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import anyio
import pytest
from mcp import Client

from host_client.config import Settings
from host_client.host import Host
from host_client.server import build_server
from tests.host_client.conftest import StubCluster
from tests.turns import SOON_SECONDS

BOUND = 60
LIFECYCLE = [
    "create_sandbox",
    "list_sandboxes",
    "get_sandbox_status",
    "suspend_sandbox",
    "resume_sandbox",
    "extend_sandbox",
    "destroy_sandbox",
]


class Serve:
    """A `podpipe serve` child, spoken to in raw lines."""

    def __init__(
        self, environment: dict[str, str], stderr: int | BinaryIO = subprocess.PIPE
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "host_client", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd="/",
            env=environment,
        )
        self._id = 0

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._id += 1
        self.send({"id": self._id, "method": method, "params": params or {}})
        assert self.process.stdout
        while True:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read().decode() if self.process.stderr else ""
            answer: dict[str, Any] = json.loads(line)
            if answer.get("id") == self._id:
                return answer

    def initialize(self) -> dict[str, Any]:
        answer = self.ask(
            "initialize",
            {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "test", "version": "1"},
            },
        )
        self.send({"method": "notifications/initialized"})
        return answer

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        answer = self.ask("tools/call", {"name": tool, "arguments": arguments})
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> int:
        assert self.process.stdin
        self.process.stdin.close()
        code = self.process.wait(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()
        return code


@pytest.fixture
def environment(stub: StubCluster) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return stub.environment | {"PATH": "/usr/bin:/bin", "PYTHONPATH": root}


@pytest.fixture
def serve(environment: dict[str, str]) -> Iterator[Serve]:
    child = Serve(environment)
    yield child
    if child.process.poll() is None:
        child.close()


def test_initialize_and_tools_list_touch_no_cluster(serve: Serve, stub: StubCluster) -> None:
    answer = serve.initialize()["result"]
    assert answer["serverInfo"]["name"] == "podpipe"
    assert "create_sandbox" in answer["instructions"]
    names = [tool["name"] for tool in serve.ask("tools/list")["result"]["tools"]]
    assert names[: len(LIFECYCLE)] == LIFECYCLE
    assert {"run_command", "read_file", "write_file", "start_background"} < set(names)
    assert not (stub.folder / "calls.jsonl").exists()


def test_every_tool_suits_every_client(serve: Serve) -> None:
    serve.initialize()
    for tool in serve.ask("tools/list")["result"]["tools"]:
        assert re.fullmatch(r"[a-z_]{1,40}", tool["name"])
        assert tool["description"].strip()
        assert "    " not in tool["description"], f"{tool['name']} keeps its source's indentation"
        assert set(tool["annotations"]) >= {"readOnlyHint", "openWorldHint"}
        assert "outputSchema" not in tool
        if tool["name"] not in ("create_sandbox", "list_sandboxes"):
            assert tool["inputSchema"]["required"][0] == "sandbox_id"


def test_a_whole_life_through_raw_lines(serve: Serve, stub: StubCluster) -> None:
    serve.initialize()
    made = serve.call("create_sandbox", name="work", ttl_minutes=30)
    assert not made.get("isError"), made
    ref = made["structuredContent"]["sandbox_id"]
    assert ref in made["content"][0]["text"]
    ran = serve.call("run_command", sandbox_id=ref, command="echo hello; exit 4")
    assert ran["structuredContent"]["exit_code"] == 4
    assert ran["content"][0]["text"].startswith("exit code 4")
    assert serve.call("list_sandboxes")["structuredContent"]["sandboxes"][0]["phase"] == "running"
    serve.call("write_file", sandbox_id=ref, path="f", content="kept")
    assert (
        serve.call("suspend_sandbox", sandbox_id=ref)["structuredContent"]["phase"] == "suspended"
    )
    assert serve.call("resume_sandbox", sandbox_id=ref)["structuredContent"]["phase"] == "running"
    assert (
        serve.call("read_file", sandbox_id=ref, path="f")["structuredContent"]["content"] == "kept"
    )
    status = serve.call("get_sandbox_status", sandbox_id="work")["structuredContent"]
    assert (status["sandbox_id"], status["user"]) == (ref, "alice")
    later = serve.call("extend_sandbox", sandbox_id=ref, ttl_minutes=600)["structuredContent"]
    assert later["expires_at"] > made["structuredContent"]["expires_at"]
    assert not serve.call("destroy_sandbox", sandbox_id=ref).get("isError")
    assert stub.names("Pod") == []
    assert stub.names("PersistentVolumeClaim") == ["user-alice-pvc"]


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("run_command", {"sandbox_id": "nonesuch", "command": "true"}, "list_sandboxes"),
        ("run_command", {"command": "true"}, "needs sandbox_id"),
        ("run_command", {"sandbox_id": 7, "command": "true"}, "needs sandbox_id"),
        ("create_sandbox", {"name": "Bad Name"}, "build-1"),
        ("create_sandbox", {"cpu_limit": "lots"}, "cpu_limit"),
        ("create_sandbox", {"ttl_minutes": 10**9}, "ttl_minutes"),
        ("extend_sandbox", {"sandbox_id": "x"}, "ttl_minutes"),
        (
            "create_sandbox",
            {"ttl_minutes": "soon"},
            "cannot be called so: ttl_minutes: input should",
        ),
        (
            "create_sandbox",
            {"nmae": "work"},
            "no argument 'nmae'; it takes: ttl_minutes, cpu_limit",
        ),
        (
            "get_sandbox_status",
            {},
            "get_sandbox_status cannot be called so: sandbox_id: field required",
        ),
        ("nonesuch", {}, "there is no tool 'nonesuch'; there are: create_sandbox"),
    ],
)
def test_a_refusal_is_text_that_says_what_to_do(
    serve: Serve, tool: str, arguments: dict[str, Any], text: str
) -> None:
    serve.initialize()
    answer = serve.call(tool, **arguments)
    assert answer["isError"]
    said = answer["content"][0]["text"]
    assert text in said
    assert "Error executing tool" not in said
    assert "pydantic" not in said


def test_without_kubeconfig_it_serves_and_a_call_says_what_is_missing(
    environment: dict[str, str], tmp_path: Path
) -> None:
    child = Serve(environment | {"KUBECONFIG": str(tmp_path / "nonesuch")})
    child.initialize()
    assert child.ask("tools/list")["result"]["tools"]
    answer = child.call("list_sandboxes")
    assert answer["isError"]
    assert "no kubeconfig" in answer["content"][0]["text"]
    assert child.close() == 0


def test_stdin_that_ends_ends_the_server(serve: Serve) -> None:
    serve.initialize()
    start = time.monotonic()
    assert serve.close() == 0
    assert time.monotonic() - start < 5


def test_a_client_that_goes_away_stops_no_command(
    environment: dict[str, str], stub: StubCluster
) -> None:
    """The end of stdin was passed on as a cancel, and a long build died with the chat."""
    child = Serve(environment)
    child.initialize()
    ref = child.call("create_sandbox")["structuredContent"]["sandbox_id"]
    home = stub.folder / "homes/user-alice-pvc"
    command = "touch begun; while [ ! -e go ]; do sleep 0.05; done; touch ended"
    call = {"name": "run_command", "arguments": {"sandbox_id": ref, "command": command}}
    child.send({"id": 99, "method": "tools/call", "params": call})
    _until((home / "begun").exists)
    child.close()
    (home / "go").touch()
    _until((home / "ended").exists)


def _until(holds: Callable[[], bool]) -> None:
    """Wait for what another process does and tells nobody."""
    deadline = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_file_of_the_documented_size_passes(serve: Serve) -> None:
    serve.initialize()
    ref = serve.call("create_sandbox")["structuredContent"]["sandbox_id"]
    text = "é\n" * 1_500_000
    wrote = serve.call("write_file", sandbox_id=ref, path="big", content=text)
    assert not wrote.get("isError"), wrote["content"]
    size = serve.call("run_command", sandbox_id=ref, command="stat -c %s big")
    assert size["structuredContent"]["stdout"].strip() == str(len(text.encode()))


def test_thirty_mebibytes_of_stdin_pass(serve: Serve) -> None:
    """L21, from the client's side."""
    serve.initialize()
    ref = serve.call("create_sandbox")["structuredContent"]["sandbox_id"]
    ran = serve.call("run_command", sandbox_id=ref, command="wc -c", stdin="x\n" * 15_728_640)
    assert ran["structuredContent"]["stdout"] == "31457280\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"garbage", -32700),
        (b'{"x":"\xff\xfe"}', -32700),
        (b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"\\ud800"}}', -32700),
        (b"[]", -32600),
    ],
)
def test_a_line_that_is_no_request_gets_an_error_and_the_server_lives(
    serve: Serve, line: bytes, code: int
) -> None:
    """L18: one bad byte killed the server, or its line was dropped without a word."""
    serve.initialize()
    assert serve.process.stdin
    assert serve.process.stdout
    serve.process.stdin.write(line + b"\n\n")
    serve.process.stdin.flush()
    assert json.loads(serve.process.stdout.readline())["error"]["code"] == code
    assert serve.ask("ping")["result"] == {}


def test_replies_in_flight_are_given_after_stdin_ended(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """L19: the end of stdin dropped them."""
    hello = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"},
    }
    lines = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        *({"jsonrpc": "2.0", "id": n, "method": "tools/list", "params": {}} for n in (2, 3, 4)),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    requests, answers = tmp_path / "requests", tmp_path / "answers"
    requests.write_text(text, encoding="utf-8")
    argv = [sys.executable, "-m", "host_client", "serve"]
    piped = subprocess.run(
        argv, input=text.encode(), env=environment, timeout=30, capture_output=True, check=True
    ).stdout
    with requests.open("rb") as source, answers.open("wb") as sink:
        subprocess.run(argv, stdin=source, stdout=sink, env=environment, timeout=30, check=True)
    for out in (piped, answers.read_bytes()):
        assert sorted(json.loads(line)["id"] for line in out.splitlines()) == [1, 2, 3, 4]


def test_a_client_that_never_reads_stderr_is_served_as_any(
    stub: StubCluster, environment: dict[str, str]
) -> None:
    """One line of the log more than its pipe holds, and the server stood still for ever."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    with os.fdopen(source, "rb"), os.fdopen(sink, "wb", 0) as stderr:
        while stderr.write(b"x" * 4096):
            pass
        os.set_blocking(sink, True)
        serve = Serve(environment | {"PODPIPE_LOG_LEVEL": "INFO"}, stderr)
        ended = threading.Timer(BOUND, serve.process.kill)
        ended.start()
        try:
            serve.initialize()
            assert not serve.call("create_sandbox", name="work").get("isError")
            ran = serve.call("run_command", sandbox_id="work", command="echo on")
            assert ran["structuredContent"]["stdout"] == "on\n"
        finally:
            assert serve.close() == 0
            ended.cancel()


def test_a_client_that_does_not_read_for_long_loses_nothing_and_delays_no_other(
    serve: Serve, stub: StubCluster, environment: dict[str, str]
) -> None:
    """L12: 6 MB of answers while nobody reads them; the pipe behind them is drained all the same."""
    serve.initialize()
    work = serve.call("create_sandbox", name="work")["structuredContent"]["sandbox_id"]
    arguments = {"sandbox_id": work, "command": "seq 1 60000; echo ran >> ran"}
    numbers = [f"big-{number}" for number in range(18)]
    for number in numbers:
        params = {"name": "run_command", "arguments": arguments}
        serve.send({"id": number, "method": "tools/call", "params": params})
    other = Serve(environment)
    try:
        other.initialize()
        ran: list[str] = []
        while len(ran) < len(numbers):  # all of them have run, and their answers wait
            found = other.call("run_command", sandbox_id=work, command="cat ran || true")
            ran = found["structuredContent"]["stdout"].split()
    finally:
        other.close()
    assert serve.process.stdout
    answered = [json.loads(serve.process.stdout.readline()) for _ in numbers]
    assert sorted(answer["id"] for answer in answered) == sorted(numbers)
    sizes = {answer["result"]["structuredContent"]["stdout_bytes"] for answer in answered}
    assert sizes == {348_894}
    assert stub.execs() == 2  # one pipe for each of the two servers


def test_one_socket_may_be_both_stdin_and_stdout(environment: dict[str, str]) -> None:
    """As inetd and socat start a server: what came in was taken for the end of what goes out."""
    ours, theirs = socket.socketpair()
    with ours, ours.makefile("rwb") as lines:
        argv = [sys.executable, "-m", "host_client", "serve"]
        with theirs:
            child = subprocess.Popen(
                argv, stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment
            )
        ours.settimeout(BOUND)
        for n in (1, 2, 3):
            lines.write(json.dumps(_hello(n)).encode() + b"\n")
            lines.flush()
            assert json.loads(lines.readline())["id"] == n
        ours.shutdown(socket.SHUT_WR)
        assert lines.readline() == b""
        assert child.wait(BOUND) == 0


def _hello(number: int) -> dict[str, Any]:
    who = {"name": "t", "version": "1"}
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": who}
    return {"jsonrpc": "2.0", "id": number, "method": "initialize", "params": params}


def test_stdin_that_is_nothing_ends_the_server_at_once(environment: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "host_client", "serve"],
        stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=30, check=True,
    )  # fmt: skip
    assert ended.stdout == b""
    assert b"Traceback" not in ended.stderr


def test_a_probing_second_copy_is_gone_at_once_and_made_nothing(
    environment: dict[str, str], stub: StubCluster
) -> None:
    """Claude Desktop starts a copy, asks server/discover, and sends SIGTERM."""
    child = Serve(environment)
    answer = child.ask(
        "server/discover",
        {
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientInfo": {"name": "probe", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {},
            }
        },
    )
    assert "2026-07-28" in answer["result"]["supportedVersions"]
    start = time.monotonic()
    child.process.send_signal(signal.SIGTERM)
    child.process.wait(5)
    assert time.monotonic() - start < SOON_SECONDS
    child.close()
    assert not (stub.folder / "calls.jsonl").exists()


def test_sigterm_ends_a_pipe_that_is_frozen_too(serve: Serve, stub: StubCluster) -> None:
    """A kubectl that hangs on a dead network does not notice that its stdin has ended."""
    serve.initialize()
    ref = serve.call("create_sandbox")["structuredContent"]["sandbox_id"]
    serve.call("run_command", sandbox_id=ref, command="true")
    pipes = _dials(serve.process.pid)
    assert len(pipes) == 1
    os.kill(pipes[0], signal.SIGSTOP)
    try:
        serve.process.send_signal(signal.SIGTERM)
        serve.process.wait(10)
        assert not any(map(_alive, pipes))
    finally:
        if _alive(pipes[0]):
            os.kill(pipes[0], signal.SIGKILL)
        serve.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_end_of_the_server_stops_no_command(
    serve: Serve, stub: StubCluster, number: signal.Signals
) -> None:
    """A client that restarts its servers cancels nothing: only what it says it cancels is stopped."""
    serve.initialize()
    ref = serve.call("create_sandbox")["structuredContent"]["sandbox_id"]
    serve.call("run_command", sandbox_id=ref, command="mkfifo go")
    (home,) = stub.folder.glob("homes/*")
    command = {"command": "touch began; read x < go; touch ended", "sandbox_id": ref}
    call = {"name": "run_command", "arguments": command}
    serve.send({"id": 99, "method": "tools/call", "params": call})
    wait_for(home / "began")
    serve.process.send_signal(number)
    serve.process.wait(5)
    serve.close()
    go = os.open(home / "go", os.O_WRONLY | os.O_NONBLOCK)  # refused where nobody waits for it
    os.write(go, b"\n")
    os.close(go)
    wait_for(home / "ended")


def test_a_call_under_way_does_not_keep_a_server_whose_client_has_gone(
    serve: Serve, stub: StubCluster
) -> None:
    """Its daemon answers what it was asked, however late, and kubectl waits for that."""
    serve.initialize()
    ref = serve.call("create_sandbox")["structuredContent"]["sandbox_id"]
    serve.call("run_command", sandbox_id=ref, command="true")
    (home,) = stub.folder.glob("homes/*")
    arguments = {"command": "touch began; sleep 20", "sandbox_id": ref}
    call = {"name": "run_command", "arguments": arguments}
    serve.send({"id": 99, "method": "tools/call", "params": call})
    wait_for(home / "began")
    pipes = _dials(serve.process.pid)
    assert len(pipes) == 1
    start = time.monotonic()
    serve.close()
    assert time.monotonic() - start < SOON_SECONDS
    assert not any(map(_alive, pipes))


def wait_for(path: Path) -> None:
    """Wait for what a process makes that nobody here is told of."""
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_leaves_no_pipe_behind(serve: Serve, stub: StubCluster) -> None:
    serve.initialize()
    ref = serve.call("create_sandbox")["structuredContent"]["sandbox_id"]
    serve.call("run_command", sandbox_id=ref, command="true")
    pipes = _dials(serve.process.pid)
    assert len(pipes) == 1
    serve.process.send_signal(signal.SIGTERM)
    serve.process.wait(5)
    deadline = time.monotonic() + 10
    while any(map(_alive, pipes)):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls for what no event announces: the end of somebody else's child
    serve.close()


def _dials(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                if int(stat[1]) == parent and b"dial.py" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_both_protocol_eras_work_in_memory(stub: StubCluster, mode: Any) -> None:
    with anyio.fail_after(BOUND):
        async with (
            Host(stub.settings()) as host,
            Client(build_server(host), mode=mode) as client,
        ):
            made = await client.call_tool("create_sandbox", {"name": "work"})
            assert made.structured_content
            ran = await client.call_tool(
                "run_command", {"sandbox_id": "work", "command": "printf '\\377x'"}
            )
            assert not ran.is_error
            assert ran.structured_content
            assert ran.structured_content["stdout"] == "\\xffx"


async def test_output_that_looks_like_protocol_passes_as_it_is(stub: StubCluster) -> None:
    """L59: a user's stderr was mistaken for the tool's own error."""
    text = 'container not found\ncommand terminated with exit code 137\n{"jsonrpc":"2.0","id":1}\n'
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host, Client(build_server(host)) as client:
            await client.call_tool("create_sandbox", {"name": "work"})
            ran = await client.call_tool(
                "run_command",
                {"sandbox_id": "work", "command": "cat; cat /dev/null >&2", "stdin": text},
            )
            assert ran.structured_content
            assert ran.structured_content["stdout"] == text


async def test_no_tool_but_resume_sandbox_resumes_where_the_setting_says_so(
    stub: StubCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    settings = stub.settings(PODPIPE_RESUME="manual", PODPIPE_ALLOWED_DIRS=str(folder))
    with anyio.fail_after(BOUND):
        async with Host(settings) as host, Client(build_server(host)) as client:
            await client.call_tool("create_sandbox", {"name": "work"})
            work = {"sandbox_id": "work"}
            suspended = await client.call_tool("suspend_sandbox", work)
            assert "resume_sandbox starts it again" in str(suspended.content)
            for tool, arguments in (
                ("run_command", {"command": "true"}),
                ("upload_file", {"host_path": str(folder)}),
            ):
                refused = await client.call_tool(tool, work | arguments)
                assert refused.is_error
                assert "Resume it first" in str(refused.content)
                assert stub.names("Pod") == []
            await client.call_tool("resume_sandbox", work)
            ran = await client.call_tool("run_command", work | {"command": "true"})
            assert not ran.is_error


@pytest.mark.parametrize("resumes", [True, False])
async def test_what_the_model_is_told_of_resuming_is_what_the_setting_says(resumes: bool) -> None:
    server = build_server(Host(Settings(resumes=resumes)))
    tools = {tool.name: str(tool.description) for tool in await server.list_tools()}
    assert ("The next call on it resumes it" in tools["suspend_sandbox"]) == resumes
    assert ("any other call does so too" in tools["resume_sandbox"]) == resumes
    assert ("is resumed by the next call" in str(server.instructions)) == resumes


async def test_the_toolsets_are_what_the_setting_says() -> None:
    def names(*toolsets: str) -> list[str]:
        server = build_server(Host(Settings(toolsets=toolsets)))
        return [tool.name for tool in server._tool_manager.list_tools()]

    assert names("blobs") == ["list_blobs", "write_random_blob", "read_blob"]
    assert names("default")[: len(LIFECYCLE)] == LIFECYCLE
    assert set(names("default", "blobs")) == set(names("default")) | set(names("blobs"))


async def test_a_call_that_had_to_wait_for_its_sandbox_answers_within_the_limit(
    stub: StubCluster, monkeypatch: Any
) -> None:
    """The client's patience is one for both: 10 s of starting leave the command 2 of 12."""
    monkeypatch.setattr("host_client.tools.forwarded.CALL_LIMIT_SECONDS", 12.0)
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host, Client(build_server(host)) as client:
            made = await client.call_tool("create_sandbox", {"name": "work"})
            assert made.structured_content
            opened = host.sessions.open

            async def slow(ref: str, **options: Any) -> Any:
                monkeypatch.setattr(anyio, "current_time", lambda: clock() + 10)
                return await opened(ref, **options)

            clock = anyio.current_time
            monkeypatch.setattr(host.sessions, "open", slow)
            ran = await client.call_tool(
                "run_command", {"sandbox_id": "work", "command": "echo before; sleep 30"}
            )
    assert ran.structured_content
    assert ran.structured_content["state"] == "running"
    assert ran.structured_content["stdout"] == "before\n"
    assert ran.structured_content["duration_seconds"] < 8
