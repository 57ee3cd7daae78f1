"""A client that promised to be heard of and is silent: it is taken for gone, and only it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from in_pod_server import contract
from tests.in_pod_server.support import INITIALIZE, PATIENCE, Daemon, Wire, eventually

LEASE = 0.5


def promise(wire: Wire, number: int, lease: Any = LEASE) -> None:
    assert wire.request(number, "ping", {"_meta": {contract.META_LEASE: lease}})["result"] == {}


def test_a_client_that_breaks_its_promise_is_closed_and_no_other_is(daemon: Daemon) -> None:
    with Wire(daemon.socket) as quiet, Wire(daemon.socket) as frozen:
        promise(frozen, 1)
        assert frozen.at_end()
        assert quiet.request(1, "ping")["result"] == {}, "one that promised nothing may be silent"


def test_a_client_that_keeps_its_promise_stays_however_long_a_call_takes(daemon: Daemon) -> None:
    with Wire(daemon.socket) as wire:
        promise(wire, 1, lease=2)
        arguments = {"command": "sleep 3; echo end"}
        call = {"name": "run_command", "arguments": arguments}
        wire.send({"jsonrpc": "2.0", "id": "slow", "method": "tools/call", "params": call})
        for number in range(2, 500):
            wire.send({"jsonrpc": "2.0", "id": number, "method": "ping"})
            reply = wire.receive()
            if reply["id"] == "slow":
                assert reply["result"]["structuredContent"]["stdout"] == "end\n"
                return
            subprocess.run(["sleep", "0.1"], check=True)
    pytest.fail("no answer")


def test_its_command_goes_on_when_a_client_is_taken_for_gone(daemon: Daemon) -> None:
    done = daemon.home / "done"
    with Wire(daemon.socket) as wire:
        command = {"command": f"sleep 2; touch {done}"}
        call = {"name": "run_command", "arguments": command}
        wire.send({"jsonrpc": "2.0", "id": "slow", "method": "tools/call", "params": call})
        promise(wire, 1)
        assert wire.at_end()
        assert not done.exists()
    eventually(done.exists)


@pytest.mark.parametrize("lease", ["soon", None, -1, 0, True, [], {}])
def test_a_promise_that_is_none_closes_nothing(daemon: Daemon, lease: Any) -> None:
    with Wire(daemon.socket) as wire, Wire(daemon.socket) as other:
        promise(wire, 1, lease)
        promise(other, 1)
        assert other.at_end()
        assert wire.request(2, "ping")["result"] == {}


def test_dial_ends_though_nobody_takes_what_the_daemon_said(daemon: Daemon) -> None:
    """A kubectl that is frozen for ever, with more on the way than all the pipes hold."""
    pump = subprocess.Popen(
        daemon.dial_argv(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert pump.stdin
    script = {"command": "head -c 300000 /dev/zero | tr '\\0' x"}
    asked: list[dict[str, Any]] = [
        {"id": 0, "method": "initialize", "params": INITIALIZE},
        {"method": "notifications/initialized"},
        *(
            {"id": number, "method": "tools/call",
             "params": {"name": "run_command", "arguments": script}}
            for number in range(1, 9)
        ),
        {"id": 9, "method": "ping", "params": {"_meta": {contract.META_LEASE: 3}}},
    ]  # fmt: skip
    for message in asked:
        pump.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    pump.stdin.flush()
    try:
        assert pump.wait(2 * PATIENCE) == 0
    finally:
        pump.kill()
        pump.communicate()
