"""A sandbox's own end: at its expiry, wherever that was moved to, and when nobody has used it."""

from __future__ import annotations

import json
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from in_pod_server import contract
from tests.in_pod_server.support import (
    INITIALIZE,
    PATIENCE,
    Daemon,
    Wire,
    eventually,
    marked,
    start_daemon,
)

IDLE = 2


def in_seconds(seconds: float, zone: str = "Z") -> str:
    when = datetime.now(UTC) + timedelta(seconds=seconds)
    return when.strftime("%Y-%m-%dT%H:%M:%S") + zone


def annotate(base: Path, expires_at: str) -> None:
    """Write the pod's annotations as the kubelet does."""
    (base / "podinfo").mkdir(exist_ok=True)
    lines = {
        contract.ANNOTATION_USER_ID: "eve\npodpipe/expires-at=x",
        contract.ANNOTATION_EXPIRES_AT: expires_at,
        "kubernetes.io/config.source": "api",
    }
    fresh = base / "podinfo" / "fresh"
    fresh.write_text("\n".join(f"{name}={json.dumps(text)}" for name, text in lines.items()))
    fresh.rename(base / "podinfo" / contract.PODINFO_ANNOTATIONS)


def code(daemon: Daemon, seconds: float = PATIENCE) -> int:
    return daemon.process.wait(seconds)


def lives(daemon: Daemon, seconds: float) -> bool:
    with pytest.raises(subprocess.TimeoutExpired):
        code(daemon, seconds)
    return True


def tell(wire: Wire, number: int, **meta: Any) -> None:
    names = {"lease": contract.META_LEASE, "expires_at": contract.META_EXPIRES_AT}
    said = {names[name]: value for name, value in meta.items()}
    assert wire.request(number, "ping", {"_meta": said})["result"] == {}


def test_a_sandbox_ends_by_itself_at_its_expiry_with_nobody_there(short_path: Path) -> None:
    annotate(short_path, in_seconds(3600))
    with start_daemon(short_path) as daemon:
        with Wire(daemon.socket) as wire:
            command = "trap 'echo told >end' TERM; touch ready; sleep 60"
            began = wire.call(1, "start_background", command=command)
            process_id = began["structuredContent"]["process_id"]
            eventually((daemon.home / "ready").exists)
        annotate(short_path, in_seconds(3))
        assert code(daemon) == 0
        assert marked(process_id) == []
        assert (daemon.home / "end").read_text() == "told\n", "it was given its grace"
        assert "the sandbox ends: it expired at" in daemon.stderr()


def test_a_call_under_way_at_expiry_is_answered_and_the_next_is_not_started(
    short_path: Path,
) -> None:
    annotate(short_path, in_seconds(3600))
    with start_daemon(short_path) as daemon, Wire(daemon.socket) as wire:
        tell(wire, 1, lease=60)
        command = "trap 'sleep 0.5' TERM; touch ready; sleep 60"
        call = {"name": "run_command", "arguments": {"command": command}}
        wire.send({"jsonrpc": "2.0", "id": "slow", "method": "tools/call", "params": call})
        eventually((daemon.home / "ready").exists)
        annotate(short_path, in_seconds(3))
        ending = wire.receive()
        assert ending == {
            "jsonrpc": "2.0",
            "method": contract.METHOD_ENDING,
            "params": {contract.ENDING_TAKEN: "slow"},
        }
        late = {"name": "run_command", "arguments": {"command": "touch late"},
                "_meta": {contract.META_CALL_ID: "late", contract.META_BOOT_ID: "x"}}  # fmt: skip
        wire.send({"jsonrpc": "2.0", "id": "late", "method": "tools/call", "params": late})
        replies = {reply["id"]: reply["result"] for reply in (wire.receive(), wire.receive())}
        assert replies["slow"]["structuredContent"]["state"] in ("killed", "exited")
        assert replies["late"]["isError"]
        assert code(daemon) == 0
        assert not (daemon.home / "late").exists()


@pytest.mark.parametrize("by", ["annotation", "pipe"])
def test_an_extension_in_time_moves_the_end(short_path: Path, by: str) -> None:
    annotate(short_path, in_seconds(3600))
    with start_daemon(short_path) as daemon, Wire(daemon.socket) as wire:
        annotate(short_path, in_seconds(6))
        assert lives(daemon, 2), "and has read it"
        if by == "pipe":
            tell(wire, 1, expires_at=in_seconds(3600))
        else:
            annotate(short_path, in_seconds(3600))
        assert lives(daemon, 6)
        assert wire.request(2, "ping")["result"] == {}


def test_no_pipe_makes_a_sandbox_s_life_shorter(short_path: Path) -> None:
    """A host that knows of no extension yet says what it knows with each of its pings."""
    annotate(short_path, in_seconds(3600))
    with start_daemon(short_path) as daemon, Wire(daemon.socket) as wire:
        tell(wire, 1, expires_at=in_seconds(-60))
        assert lives(daemon, 2)


@pytest.mark.parametrize(
    "text", ["", "soon", "2020-01-01", "2020-01-01T00:00:00", "0000-00-00T00:00:00Z", "1", "\\"]
)
def test_an_expiry_that_cannot_be_read_ends_nothing(short_path: Path, text: str) -> None:
    """Garbage, or a time without a zone: kept, and the pod's activeDeadlineSeconds is there yet."""
    annotate(short_path, text)
    with start_daemon(short_path) as daemon, Wire(daemon.socket) as wire:
        said: tuple[Any, ...] = (text, None, 7, [], {"x": 1})
        for number, told in enumerate(said, 1):
            tell(wire, number, expires_at=told)
        assert lives(daemon, 1.5)


@pytest.mark.parametrize(("zone", "ahead"), [("+05:00", 5), ("-08:30", -8.5), ("+00:00", 0)])
def test_an_expiry_counts_in_its_own_zone(short_path: Path, zone: str, ahead: float) -> None:
    annotate(short_path, in_seconds(3600))
    with start_daemon(short_path) as daemon:
        Wire(daemon.socket).close()
        annotate(short_path, in_seconds(ahead * 3600 + 6, zone))
        assert lives(daemon, 2), "and has read it"
        assert code(daemon) == 0


def test_a_container_that_is_restarted_after_the_expiry_ends_again(short_path: Path) -> None:
    annotate(short_path, in_seconds(-3600))
    for _ in range(2):
        with start_daemon(short_path) as daemon:
            assert code(daemon) == 0, daemon.stderr()


# --- idle -----------------------------------------------------------------------------------------


def idle_daemon(base: Path) -> Any:
    return start_daemon(base, **{contract.ENV_IDLE_SECONDS: str(IDLE)})


def test_a_sandbox_that_nobody_uses_ends_by_itself(short_path: Path) -> None:
    with idle_daemon(short_path) as daemon, Wire(daemon.socket) as wire:
        for number in range(1, 5):  # a host that is there, and calls nothing, is no use
            tell(wire, number, lease=60)
        assert wire.call(9, "run_command", command="true")["structuredContent"]["exit_code"] == 0
        used = time.monotonic()
        assert code(daemon) == 0
        assert time.monotonic() - used > IDLE - 0.1
        assert "idle" in daemon.stderr()


def test_a_sandbox_lives_for_ever_where_idle_is_not_set(daemon: Daemon) -> None:
    assert contract.ENV_IDLE_SECONDS not in Path(f"/proc/{daemon.process.pid}/environ").read_text()
    assert lives(daemon, IDLE + 2)


@pytest.mark.parametrize(
    "use",
    ["sleep 6", "(setsid sleep 6 >/dev/null 2>&1 &)", "background"],
    ids=["a call", "what a command left", "a background command"],
)
def test_what_runs_is_use(short_path: Path, use: str) -> None:
    with idle_daemon(short_path) as daemon, Wire(daemon.socket) as wire:
        tell(wire, 1, lease=60)
        began = time.monotonic()
        if use == "background":
            wire.call(2, "start_background", command="sleep 6")
        else:
            wire.call(2, "run_command", command=use)
        assert code(daemon) == 0
        assert time.monotonic() - began > 6 + IDLE - 1.5  # it looks once a second


def test_a_client_of_connect_is_use_for_as_long_as_it_is_connected(short_path: Path) -> None:
    with idle_daemon(short_path) as daemon:
        with Wire(daemon.socket):
            assert lives(daemon, IDLE + 2)
        assert code(daemon) == 0


def test_a_call_whose_client_left_is_use_until_it_ends(short_path: Path) -> None:
    with idle_daemon(short_path) as daemon:
        with Wire(daemon.socket) as wire:
            tell(wire, 1, lease=60)
            boot = wire.request(2, "initialize", INITIALIZE)["result"]["capabilities"]
            name = {contract.META_CALL_ID: "c",
                    contract.META_BOOT_ID: boot["experimental"][contract.HELLO][contract.HELLO_BOOT_ID]}  # fmt: skip
            call = {"name": "run_command", "arguments": {"command": "sleep 5; touch done"},
                    "_meta": name}  # fmt: skip
            wire.send({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": call})
            eventually(lambda: "sleep 5" in str(wire.call(4, "list_processes")))
        assert code(daemon) == 0
        assert (daemon.home / "done").exists()


@pytest.mark.parametrize("value", ["-1", "2m", "x", "1.5"])
def test_idle_seconds_that_are_none_are_refused_at_the_start(short_path: Path, value: str) -> None:
    with start_daemon(short_path, **{contract.ENV_IDLE_SECONDS: value}) as daemon:
        assert code(daemon) == 2
        assert "is no number of seconds" in daemon.stderr()
