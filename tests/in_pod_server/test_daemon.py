"""The daemon on its socket: hello, many clients, junk, cancel and disconnect, and a clean end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from in_pod_server import __version__, contract
from in_pod_server.daemon import SLICE_NANOSECONDS, DaemonError, bound
from tests.in_pod_server.support import (
    INITIALIZE,
    PATIENCE,
    ROOT,
    Daemon,
    Wire,
    daemon_argv,
    data_of,
    eventually,
    marked,
    start_daemon,
)
from tests.turns import SOON_SECONDS


def test_the_version_is_the_package_s() -> None:
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


async def test_a_client_through_dial_gets_the_hello_and_a_result(daemon: Daemon) -> None:
    with anyio.fail_after(PATIENCE):
        async with Client(daemon.parameters(), mode="legacy") as client:
            assert client.server_info is not None
            assert client.server_info.name == contract.SERVER_NAME
            assert client.server_info.version == __version__
            experimental = client.server_capabilities.experimental
            assert experimental is not None
            hello = experimental[contract.HELLO]
            assert hello[contract.HELLO_CONTRACT] == contract.CONTRACT_VERSION
            assert hello[contract.HELLO_POD_UID] == "pod-uid-1"
            assert len(hello[contract.HELLO_BOOT_ID]) == 16
            ran = data_of(await client.call_tool("run_command", {"command": "printf x; exit 7"}))
            assert (ran["stdout"], ran["exit_code"]) == ("x", 7)


def test_the_hello_changes_with_a_restart_only(short_path: Path) -> None:
    def boot_id(daemon: Daemon) -> str:
        with Wire(daemon.socket, initialize=False) as wire:
            reply = wire.request(0, "initialize", INITIALIZE)
            hello = reply["result"]["capabilities"]["experimental"][contract.HELLO]
            return str(hello[contract.HELLO_BOOT_ID])

    with start_daemon(short_path) as first:
        assert boot_id(first) == boot_id(first)
        before = boot_id(first)
    (short_path / "podinfo" / "uid").unlink()
    with start_daemon(short_path) as second:
        assert boot_id(second) != before


def test_clients_may_connect_and_write_while_the_daemon_still_starts(own_daemon: Daemon) -> None:
    with Wire(own_daemon.socket) as wire:
        assert wire.request(1, "ping")["result"] == {}


def test_the_socket_is_for_its_owner_only_and_gone_at_the_end(short_path: Path) -> None:
    with start_daemon(short_path) as daemon:
        Wire(daemon.socket).close()
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
    assert not daemon.socket.exists()


def test_a_dead_daemon_s_socket_is_replaced(short_path: Path) -> None:
    with start_daemon(short_path) as killed:
        Wire(killed.socket).close()
        killed.process.kill()
        killed.process.wait(PATIENCE)
        assert killed.socket.exists()
    with start_daemon(short_path) as daemon, Wire(daemon.socket) as wire:
        assert wire.request(1, "ping")["result"] == {}


def test_a_second_daemon_is_refused_while_the_first_lives(daemon: Daemon) -> None:
    second = subprocess.run(
        daemon_argv(daemon.base), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert second.returncode == 1
    assert "another daemon serves" in second.stderr
    assert second.stderr.count("\n") == 1
    with Wire(daemon.socket) as wire:
        assert wire.request(1, "ping")["result"] == {}


def test_what_is_no_socket_is_not_replaced(short_path: Path) -> None:
    (short_path / "d.sock").write_text("precious")
    with pytest.raises(DaemonError, match="is no socket"), bound(short_path / "d.sock"):
        pass
    assert (short_path / "d.sock").read_text() == "precious"
    with pytest.raises(DaemonError, match="longer than 107"), bound(short_path / ("x" * 120)):
        pass


@pytest.mark.parametrize("value", ["0", "-1", "5M", "x"])
def test_a_wrong_limit_is_refused_at_the_start(short_path: Path, value: str) -> None:
    ran = subprocess.run(
        daemon_argv(short_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, contract.ENV_MAX_FILE_BYTES: value},
    )
    assert ran.returncode == 2
    assert contract.ENV_MAX_FILE_BYTES in ran.stderr


def test_junk_is_answered_and_the_session_lives_on(wire: Wire) -> None:
    """L18: one invalid byte in a request must not kill the server, nor leave it silent."""
    wire.write(
        b'{"jsonrpc":"2.0","id":5,"method":"ping","params":{"x":"\xff\xfe"}}\n\n \ngarbage\n'
    )
    wire.write(b'{"jsonrpc":"2.0","id":6,"method":"ping","params":{"x":"\\udc00"}}\r\n')
    replies = [wire.receive() for _ in range(3)]
    assert [(reply["id"], reply["error"]["code"]) for reply in replies] == [
        (5, -32700),
        (None, -32700),
        (6, -32700),
    ]
    assert wire.request(7, "ping")["result"] == {}


def test_a_line_over_the_limit_is_refused_by_its_id_and_the_session_lives_on(wire: Wire) -> None:
    size = contract.MAX_REQUEST_BYTES
    request = {"jsonrpc": "2.0", "id": 5, "method": "ping", "params": {"x": "y" * size}}
    wire.send(request)
    reply = wire.receive()
    assert reply["id"] == 5
    assert str(size) in reply["error"]["message"]
    largest = json.dumps(request | {"params": {"x": ""}})
    room = size - len(largest)
    wire.write(json.dumps(request | {"params": {"x": "y" * room}}).encode() + b"\n")
    assert wire.receive() == {"jsonrpc": "2.0", "id": 5, "result": {}}


def test_an_id_that_is_still_in_work_is_refused(wire: Wire) -> None:
    call = {"name": "run_command", "arguments": {"command": "read line < fifo; echo $line"}}
    wire.call(1, "run_command", command="mkfifo fifo")
    wire.send({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call})
    wire.send({"jsonrpc": "2.0", "id": 2, "method": "ping"})
    assert "still in work" in wire.receive()["error"]["message"]
    go = {"name": "run_command", "arguments": {"command": "echo go > fifo; rm fifo"}}
    wire.send({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": go})
    replies = {reply["id"]: reply for reply in (wire.receive(), wire.receive())}
    assert replies[2]["result"]["structuredContent"]["stdout"] == "go\n"


def test_a_number_and_the_same_number_as_text_are_two_ids(wire: Wire) -> None:
    """The session below takes them for one: their calls, replies and cancels must not be mixed up."""
    wire.call(1, "run_command", command="mkfifo one two")
    for request_id, fifo in ((7, "one"), ("7", "two")):
        call = {"name": "run_command", "arguments": {"command": f"read line < {fifo}; echo $line"}}
        wire.send({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": call})
    wire.send(cancel(8))  # nobody's yet
    go = {"name": "run_command", "arguments": {"command": "echo for-two > two; echo for-one > one"}}
    wire.send({"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": go})
    replies = {reply["id"]: reply for reply in (wire.receive() for _ in range(3))}
    said = {each: reply["result"]["structuredContent"]["stdout"] for each, reply in replies.items()}
    assert said == {7: "for-one\n", "7": "for-two\n", 8: ""}


def test_a_cancel_ends_the_call_of_exactly_that_id(wire: Wire) -> None:
    for request_id in (7, "7"):
        call = {
            "name": "run_command",
            "arguments": {"command": f"echo $$ > {type(request_id).__name__}; sleep 60"},
        }
        wire.send({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": call})
    wire.call(8, "run_command", command="until [ -s int ] && [ -s str ]; do sleep 0.01; done")
    wire.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "7"}})
    wire.call(9, "run_command", command="while kill -0 $(cat str); do sleep 0.01; done")
    alive = wire.call(10, "run_command", command="kill -0 $(cat int)")
    assert alive["structuredContent"]["exit_code"] == 0
    wire.send(cancel(7))
    gone = wire.call(11, "run_command", command="while kill -0 $(cat int); do sleep 0.01; done")
    assert gone["structuredContent"]["state"] == "exited"


def test_other_requests_are_answered_during_a_long_command(daemon: Daemon) -> None:
    """L58: one long command must not block everything."""
    with Wire(daemon.socket) as busy, Wire(daemon.socket) as other:
        long = {"name": "run_command", "arguments": {"command": "sleep 30", "timeout_seconds": 30}}
        for wire in (busy, other):
            wire.send({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": long})
        for wire in (busy, other):
            for request_id, step in enumerate(("ping", "list_files", "run_command"), 2):
                begun = time.monotonic()
                if step == "ping":
                    wire.request(request_id, "ping")
                else:
                    arguments = {"command": "echo hi"} if step == "run_command" else {}
                    assert not wire.call(request_id, step, **arguments)["isError"]
                assert time.monotonic() - begun < SOON_SECONDS
        for wire in (busy, other):
            wire.send(cancel(1))


def test_clients_that_do_not_read_or_send_halves_disturb_nobody(daemon: Daemon) -> None:
    with Wire(daemon.socket) as deaf, Wire(daemon.socket) as torn, Wire(daemon.socket) as good:
        torn.write(b'{"jsonrpc":"2.0","id":1,"meth')
        deaf.call(1, "run_command", command="head -c 300000 /dev/zero | tr '\\0' x > big")
        deaf.socket.settimeout(0.5)
        read = {"name": "read_file", "arguments": {"path": "big"}}
        with pytest.raises(TimeoutError):  # noqa: PT012 - at some point the daemon stops reading from it
            for request_id in range(2, 5000):
                deaf.send(
                    {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": read}
                )
        assert good.request(2, "ping")["result"] == {}
        assert (
            good.call(3, "run_command", command="echo hi")["structuredContent"]["stdout"] == "hi\n"
        )
    assert memory_kib(daemon) < 400_000


def test_the_memory_of_what_clients_never_read_is_given_back_when_they_are_killed(
    tmp_path: Path,
) -> None:
    with start_daemon(tmp_path) as daemon, Wire(daemon.socket) as wire:
        wire.call(1, "run_command", command="head -c 4000000 /dev/zero | tr '\\0' x > big")
        idle = memory_kib(daemon)
        read = {"name": "read_file", "arguments": {"path": "big", "max_bytes": 4_000_000}}
        for _ in range(2):  # else more would be left each time
            with contextlib.ExitStack() as killed:
                for deaf in [killed.enter_context(Wire(daemon.socket)) for _ in range(12)]:
                    for request_id in range(1, 9):
                        deaf.send(
                            {
                                "jsonrpc": "2.0",
                                "id": request_id,
                                "method": "tools/call",
                                "params": read,
                            }
                        )
                eventually(lambda: memory_kib(daemon) > idle + 65_536)
            eventually(lambda: memory_kib(daemon) < idle + 16_384)


def memory_kib(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_replies_in_work_are_still_given_after_the_end_of_input(daemon: Daemon) -> None:
    """L19: a client that writes its calls, closes its side and reads must get every reply."""
    messages = [
        {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        *(
            {
                "jsonrpc": "2.0",
                "id": n,
                "method": "tools/call",
                "params": {"name": "run_command", "arguments": {"command": f"sleep 0.3; echo {n}"}},
            }
            for n in (1, 2, 3)
        ),
    ]
    ran = subprocess.run(
        daemon.dial_argv(),
        input="".join(json.dumps(message) + "\n" for message in messages).encode(),
        capture_output=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0
    assert ran.stderr == b""
    replies = {
        reply["id"]: reply for reply in map(json.loads, ran.stdout.decode().split("\n")[:-1])
    }
    assert sorted(replies) == [0, 1, 2, 3]
    assert replies[2]["result"]["structuredContent"]["stdout"] == "2\n"


def cancel(request_id: int) -> dict[str, Any]:
    return {
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": {"requestId": request_id, "reason": "test"},
    }


def start_and_mark(wire: Wire, request_id: int, name: str) -> None:
    """Start a long command, and return once it runs."""
    command = f"echo started > {name}; sleep 60; echo ended > {name}"
    call = {"name": "run_command", "arguments": {"command": command, "timeout_seconds": 60}}
    wire.send({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": call})


def process_of(wire: Wire, name: str) -> dict[str, Any]:
    rows = wire.call(900, "list_processes")["structuredContent"]["processes"]
    (row,) = [row for row in rows if name in row["command"]]
    return dict(row)


def until_started(daemon: Daemon, name: str) -> None:
    eventually((daemon.home / name).exists)


def test_an_explicit_cancel_stops_the_command(daemon: Daemon, wire: Wire) -> None:
    start_and_mark(wire, 1, "cancelled")
    until_started(daemon, "cancelled")
    process_id = process_of(wire, "cancelled")["process_id"]
    assert marked(process_id)
    wire.send(cancel(1))
    stopped = wire.call(2, "stop_process", process_id=process_id)["structuredContent"]
    assert (stopped["state"], stopped["signal"]) == ("killed", "SIGTERM")
    assert marked(process_id) == []


def test_a_cancel_just_before_the_end_of_the_connection_still_stops(daemon: Daemon) -> None:
    with Wire(daemon.socket) as gone:
        start_and_mark(gone, 1, "both")
        until_started(daemon, "both")
        gone.send(cancel(1))
    with Wire(daemon.socket) as wire:
        process_id = process_of(wire, "both")["process_id"]
        read = wire.call(1, "read_output", process_id=process_id, wait_seconds=20)
        assert read["structuredContent"]["eof"] is True
        assert marked(process_id) == []


def test_the_end_of_a_connection_leaves_the_command_running(daemon: Daemon) -> None:
    with Wire(daemon.socket) as dropped:
        start_and_mark(dropped, 1, "dropped")
        until_started(daemon, "dropped")
    with Wire(daemon.socket) as wire:
        process = process_of(wire, "dropped")
        assert process["state"] == "running"
        assert marked(process["process_id"])
        wire.call(1, "stop_process", process_id=process["process_id"])


def test_dropped_connections_leave_nothing_open(daemon: Daemon) -> None:
    fds = Path(f"/proc/{daemon.process.pid}/fd")

    def sockets() -> int:
        found = 0
        for fd in fds.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += str(fd.readlink()).startswith("socket:")
        return found

    idle = 3  # the listener, and the pair by which the loop wakes itself
    wires = [Wire(daemon.socket) for _ in range(20)]
    for number, wire in enumerate(wires):
        start_and_mark(wire, 1, f"many{number}")
    crowded = sockets()
    for wire in wires:
        wire.close()
    assert crowded >= idle + 20
    eventually(lambda: sockets() == idle)
    with Wire(daemon.socket) as wire:
        for number in range(20):
            eventually((daemon.home / f"many{number}").exists)
            process_id = process_of(wire, f"many{number};")["process_id"]
            wire.call(1, "stop_process", process_id=process_id, grace_seconds=0)


def test_a_lone_surrogate_in_a_result_or_a_file_name_is_escaped(daemon: Daemon, wire: Wire) -> None:
    (daemon.home / os.fsdecode(b"bad-\xff\xfe")).write_text("content")
    names = [e["path"] for e in wire.call(1, "list_files")["structuredContent"]["entries"]]
    assert "bad-\\xff\\xfe" in names
    assert wire.call(2, "read_file", path="bad-\\xff\\xfe")["content"][0]["text"] == "content"
    ran = wire.call(3, "run_command", command="printf 'a\\xff\\xed\\xa0\\x80z'")[
        "structuredContent"
    ]
    assert ran["stdout"] == "a\\xff\\xed\\xa0\\x80z"
    assert ran["stdout_bytes"] == 6


def test_sigterm_ends_commands_answers_their_callers_and_tells_in_its_code(
    own_daemon: Daemon,
) -> None:
    with Wire(own_daemon.socket) as wire:
        stubborn = "trap '' TERM; echo up > up; while :; do sleep 0.1; done"
        call = {"name": "run_command", "arguments": {"command": stubborn}}
        wire.send({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
        started = wire.call(2, "start_background", command="setsid sleep 60 & wait")
        until_started(own_daemon, "up")
        begun = time.monotonic()
        own_daemon.process.send_signal(signal.SIGTERM)
        result = wire.receive()["result"]
        assert "the sandbox itself was ended" in result["content"][0]["text"]
        reply = result["structuredContent"]
        assert (reply["state"], reply["sandbox_ended"]) == ("killed", True)
        assert wire.at_end()
        assert own_daemon.process.wait(PATIENCE) == 128 + signal.SIGTERM
        assert time.monotonic() - begun < SOON_SECONDS
        assert (
            marked(started["structuredContent"]["process_id"]) == marked(reply["process_id"]) == []
        )
    assert "Traceback" not in own_daemon.stderr()


def test_sigint_ends_it_as_well(own_daemon: Daemon) -> None:
    Wire(own_daemon.socket).close()
    own_daemon.process.send_signal(signal.SIGINT)
    assert own_daemon.process.wait(PATIENCE) == 128 + signal.SIGINT


def test_a_daemon_that_is_ending_says_so_and_starts_no_named_call(own_daemon: Daemon) -> None:
    """A host must know which calls it may send to the next pod; others are not told what they know not."""
    with Wire(own_daemon.socket, initialize=False) as host, Wire(own_daemon.socket) as other:
        hello = host.request(0, "initialize", INITIALIZE)["result"]["capabilities"]["experimental"]
        host.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        host.request(1, "ping", {"_meta": {contract.META_LEASE: 60}})
        stubborn = "trap '' TERM; echo up > up; while :; do sleep 0.1; done"
        call = {"name": "run_command", "arguments": {"command": stubborn}}
        other.send({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
        until_started(own_daemon, "up")
        own_daemon.process.send_signal(signal.SIGTERM)
        ending = {"jsonrpc": "2.0", "method": contract.METHOD_ENDING, "params": {"taken": 1}}
        assert host.receive() == ending
        boot_id = hello[contract.HELLO][contract.HELLO_BOOT_ID]
        name = {contract.META_CALL_ID: "a", contract.META_BOOT_ID: boot_id}
        late = {"_meta": name, "name": "write_file", "arguments": {"path": "f", "content": "x"}}
        refused = host.request(2, "tools/call", late)["result"]
        assert refused["_meta"] == {contract.META_FATE: contract.FATE_NOT_STARTED}
        assert "was not started" in refused["content"][0]["text"]
        assert other.receive()["result"]["structuredContent"]["sandbox_ended"]
        assert other.at_end()
    own_daemon.process.wait(PATIENCE)
    assert not (own_daemon.home / "f").exists()
    journal = (own_daemon.base / "run" / "calls.journal").read_text()
    assert '"a"' not in journal


def test_commands_get_no_descriptor_of_the_daemon(daemon: Daemon) -> None:
    with Wire(daemon.socket) as wire, Wire(daemon.socket):
        ran = wire.call(1, "run_command", command="readlink /proc/$$/fd/*")["structuredContent"]
    links = ran["stdout"].split()
    assert links[0] == "/dev/null"
    assert [link.split(":")[0] for link in links[1:]] == ["pipe", "pipe"]


def test_the_daemon_s_memory_is_not_for_its_commands() -> None:
    code = (
        "import ctypes; from in_pod_server.daemon import _become_undumpable as f; f();"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=PATIENCE
    )
    assert ran.stdout == b"0\n"
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 1


def test_the_daemon_s_turns_on_a_cpu_are_short_and_its_commands_are_the_usual(
    daemon: Daemon,
) -> None:
    """So a command that just started cannot keep the daemon waiting, nor be interrupted more often."""
    usual = turn_of(0)
    if usual == 0:
        pytest.skip("this Linux, older than 6.12, has one length of turn for all")
    with Wire(daemon.socket) as wire:
        started = wire.call(1, "start_background", command="sleep 60")["structuredContent"]
        assert turn_of(daemon.process.pid) == SLICE_NANOSECONDS < usual
        assert turn_of(started["pid"]) == usual


def turn_of(pid: int) -> int:
    """The turn that the scheduler gives a process, in ns; 0 where it is not the process's own."""
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    attributes = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(number, pid, attributes, 48, 0) == 0
    turn: int = struct.unpack_from("=Q", attributes, 24)[0]
    return turn


def test_tools_json_is_what_the_server_lists(daemon: Daemon, wire: Wire) -> None:
    stored = (ROOT / "in_pod_server" / "tools.json").read_text()
    printed = subprocess.run(
        [sys.executable, "-m", "in_pod_server", "tools"],
        cwd=ROOT,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert printed.stdout.decode() == stored, "write it anew: python -m in_pod_server tools"
    toolsets = json.loads(stored)
    assert (
        wire.request(1, "tools/list")["result"]["tools"] == toolsets["default"] + toolsets["blobs"]
    )


def test_importing_the_command_line_and_the_daemon_is_light() -> None:
    code = (
        "import sys, in_pod_server.__main__, in_pod_server.daemon;"
        "print(sorted({'mcp', 'anyio', 'pydantic', 'asyncio'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=PATIENCE
    )
    assert ran.stdout == b"[]\n"


def test_a_listening_socket_takes_clients_before_anybody_accepts(short_path: Path) -> None:
    with bound(short_path / "d.sock"), socket.socket(socket.AF_UNIX) as early:
        early.connect(str(short_path / "d.sock"))


def open_pipes(daemon: Daemon) -> set[str]:
    links = []
    for fd in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(fd.readlink()))
    return {link for link in links if link.startswith("pipe:")}


@contextlib.contextmanager
def dialed(daemon: Daemon) -> Iterator[subprocess.Popen[bytes]]:
    """A session through dial, initialized, and what it still holds taken away at the end."""
    with subprocess.Popen(
        daemon.dial_argv(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as pump:
        assert ask(pump, 0, "initialize", **INITIALIZE)["result"]
        try:
            yield pump
        finally:
            pump.kill()


def ask(pump: subprocess.Popen[bytes], number: int, method: str, **params: Any) -> Any:
    assert pump.stdin
    assert pump.stdout
    message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    pump.stdin.write(json.dumps(message).encode() + b"\n")
    pump.stdin.flush()
    return json.loads(pump.stdout.readline())


@pytest.mark.parametrize("loss", ["dial is killed", "nobody listens", "the client ends"])
def test_whatever_ends_a_dialed_session_nothing_of_it_is_left_open(
    daemon: Daemon, loss: str
) -> None:
    """A killed kubectl can leave the other end of dial's stdin open in the pod for ever."""
    eventually(daemon.socket.exists)
    before = open_pipes(daemon)
    with dialed(daemon) as pump:
        assert len(open_pipes(daemon)) == len(before) + 2
        assert pump.stdin
        assert pump.stdout
        match loss:
            case "dial is killed":
                pump.kill()
            case "nobody listens":
                pump.stdout.close()
            case "the client ends":
                pump.stdin.close()
        eventually(lambda: open_pipes(daemon) == before)
        assert pump.wait(PATIENCE) == (-signal.SIGKILL if loss == "dial is killed" else 0)


def test_a_slow_reader_gets_every_byte_of_its_last_reply(daemon: Daemon) -> None:
    """More than all the buffers on the way hold, asked for by a client that has closed its stdin."""
    (daemon.home / "big").write_text("x" * 300_000)
    with dialed(daemon) as pump:
        assert pump.stdin
        assert pump.stdout
        asked = {"name": "read_file", "arguments": {"path": "big", "max_bytes": 300_000}}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": asked}
        pump.stdin.write(json.dumps(message).encode() + b"\n")
        pump.stdin.close()
        pump.stdin = None
        line = bytearray()
        while piece := os.read(pump.stdout.fileno(), 4096):
            line += piece
        assert json.loads(line)["result"]["structuredContent"]["content"] == "x" * 300_000
        assert pump.wait(PATIENCE) == 0


def held(daemon: Daemon) -> list[str]:
    """What the daemon has open, but for what it has by itself."""
    links = []
    for fd in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(fd.readlink()))
    return sorted(link for link in links if "anon_inode" not in link)


@pytest.mark.parametrize(
    "kind", ["none", "one", "three", "twenty", "directories", "file", "null", "pipe and folder"]
)
def test_a_client_that_hands_over_something_else_is_let_go_and_leaves_nothing(
    daemon: Daemon, short_path: Path, kind: str
) -> None:
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(Wire(daemon.socket))
        wire.request(1, "ping")

        def opened(path: str | Path, flags: int = os.O_RDONLY) -> int:
            fd = os.open(path, flags)
            stack.callback(os.close, fd)
            return fd

        pipe = os.pipe()
        for fd in pipe:
            stack.callback(os.close, fd)
        (short_path / "file").touch()
        fds = {
            "none": [],
            "one": [pipe[0]],
            "three": [*pipe, pipe[0]],
            "twenty": [pipe[0]] * 20,
            "directories": [opened("/"), opened("/")],
            "file": [pipe[0], opened(short_path / "file", os.O_RDWR)],
            "null": [opened(os.devnull), opened(os.devnull, os.O_WRONLY)],
            "pipe and folder": [pipe[0], opened("/")],
        }[kind]
        before = held(daemon)
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(PATIENCE)
                client.connect(str(daemon.socket))
                socket.send_fds(client, [b"\0"], fds)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b"", "let go"
        eventually(lambda: held(daemon) == before)
        assert wire.request(2, "ping")["result"] == {}


def test_clients_that_leave_without_a_word_cost_nothing(daemon: Daemon) -> None:
    with Wire(daemon.socket) as wire:
        wire.request(1, "ping")
        before = held(daemon)
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                for _ in range(100):
                    silent = stack.enter_context(socket.socket(socket.AF_UNIX))
                    silent.connect(str(daemon.socket))
        assert wire.request(2, "ping")["result"] == {}
        eventually(lambda: held(daemon) == before)


def test_clients_that_never_speak_hold_up_others_for_a_moment_only(daemon: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(Wire(daemon.socket))
        for _ in range(300):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(str(daemon.socket))
        with Wire(daemon.socket) as wire:
            assert wire.request(1, "ping")["result"] == {}
