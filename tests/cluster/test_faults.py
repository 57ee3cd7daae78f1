"""Faults on the real path: every call answered, none run twice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from host_client.host import Host
from tests.cluster.conftest import ROOT, Cluster

BOUND = 150


def kubectls() -> list[int]:
    """Our own kubectl children that are pipes, by process id."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                mine = int(stat[1]) == os.getpid()
                if mine and stat[0] != "Z" and b"dial.py" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def kill_pipe() -> None:
    os.kill(kubectls()[0], signal.SIGKILL)


def freeze_pipe() -> None:
    os.kill(kubectls()[0], signal.SIGSTOP)


def restart_api_server() -> None:
    """End the node's API server by its recorded id; `scripts/cluster up` starts it again."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    record = state / "podpipe/node/run/kube-apiserver.pid"
    if not record.exists():
        pytest.fail("only the node provider's API server can be restarted by a test")
    os.kill(int(record.read_text(encoding="utf-8").split()[0]), signal.SIGKILL)
    bash = shutil.which("bash")
    assert bash
    subprocess.run([bash, str(ROOT / "scripts/cluster"), "up"], check=True, capture_output=True)


async def run(host: Host, command: str) -> dict[str, Any]:
    answer = await host.sessions.call("work", "run_command", {"command": command})
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


@pytest.mark.parametrize("fault", [kill_pipe, freeze_pipe, restart_api_server])
async def test_a_command_outlives_the_fault_and_runs_once(
    cluster: Cluster, user: str, fault: Callable[[], None]
) -> None:
    """L32, L33: a frozen client, and an API server that was restarted under a command."""
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            found: dict[str, Any] = {}

            async def call() -> None:
                found.update(await run(host, "echo id >> ran; sleep 20; echo end"))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await anyio.sleep(2)  # the command is under way by then; if not, the test holds too
                await anyio.to_thread.run_sync(fault)
            assert (found["stdout"], found["exit_code"]) == ("end\n", 0)
            assert (await run(host, "cat ran"))["stdout"] == "id\n"
            while len(kubectls()) > 1:  # noqa: ASYNC110 - a frozen process takes its time to be ended
                await anyio.sleep(0.1)
