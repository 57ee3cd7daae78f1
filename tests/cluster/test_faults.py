"""Faults on the real path: every call answered, none run twice."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from host_client.errors import ContainerRestarted, PodReplaced
from host_client.host import Host
from in_pod_server.contract import CONTAINER, DIAL_ARGV, META_LEASE
from tests.cluster.conftest import Cluster
from tests.soak.faults import pipes, restart_api_server, send

BOUND = 150


def kill_pipe() -> None:
    send(signal.SIGKILL, pipes()[:1])


def freeze_pipe() -> None:
    send(signal.SIGSTOP, pipes()[:1])


async def run(host: Host, command: str) -> dict[str, Any]:
    answer = await host.sessions.call("work", "run_command", {"command": command})
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


@pytest.mark.parametrize(
    "fault",
    [
        kill_pipe,
        freeze_pipe,
        pytest.param(restart_api_server, marks=pytest.mark.breaks_node),
    ],
)
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
            while len(pipes()) > 1:  # noqa: ASYNC110 - a frozen process takes its time to be ended
                await anyio.sleep(0.1)


async def test_a_pod_that_is_deleted_under_a_call_is_told_within_half_a_minute(
    cluster: Cluster, user: str
) -> None:
    """L32: the client froze. The daemon ends its commands and says so, or the pod's end is told."""
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            made = await host.launcher.create(name="work")
            await run(host, "true")
            found: list[object] = []

            async def call() -> None:
                try:
                    found.append((await run(host, "echo id >> ran; sleep 40"))["signal"])
                except PodReplaced as replaced:
                    found.append(replaced.old_uid)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await anyio.sleep(2)  # as above
                pod = made.pod
                assert pod
                assert await host.kubectl.delete("pods", pod.name, uid=pod.uid)
                with anyio.fail_after(30):
                    while not found:  # noqa: ASYNC110 - the call is another task's
                        await anyio.sleep(0.1)
            assert found[0] in ("SIGTERM", made.pod and made.pod.uid)
            assert (await run(host, "cat ran"))["stdout"] == "id\n"
            assert (await host.launcher.status("work")).sandbox.id == made.sandbox.id


async def test_a_container_that_dies_under_a_call_is_told_with_its_exit_code(
    cluster: Cluster, user: str
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            with pytest.raises(ContainerRestarted, match=r"137.*may have run in part.*survive"):
                await run(host, "echo id >> ran; kill -9 -1; sleep 30")
            assert (await run(host, "cat ran"))["stdout"] == "id\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_no_dial_is_left_in_the_pod_by_a_host_that_is_gone(
    cluster: Cluster, user: str, number: signal.Signals
) -> None:
    """Whether its kubectl was killed, or is frozen for ever with answers on the way."""
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            await run(host, "true")
            session = host.sessions.existing("work")
            assert session
            pod = session.pod.name

            def dials() -> int:
                """Ours, which `run` came by, is the one that stays."""
                return int(cluster.kubectl("exec", pod, "-c", CONTAINER, "--", "bash", "-c",
                                           "pgrep -fc '[d]ial.py' || true"))  # fmt: skip

            lost = subprocess.Popen(  # noqa: ASYNC220 - stopped for ever, it must not be waited for
                host.kubectl.exec_argv(pod, DIAL_ARGV), env=host.kubectl.environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert lost.stdin
            assert lost.stdout
            hello = {"protocolVersion": "2025-11-25", "capabilities": {},
                     "clientInfo": {"name": "test", "version": "0"}}  # fmt: skip
            big = {"name": "run_command",
                   "arguments": {"command": "head -c 300000 /dev/zero | tr '\\0' x"}}  # fmt: skip
            messages: list[dict[str, Any]] = [
                {"id": 0, "method": "initialize", "params": hello},
                {"method": "notifications/initialized"},
                {"id": 1, "method": "ping", "params": {"_meta": {META_LEASE: 5}}},
                *({"id": n, "method": "tools/call", "params": big} for n in range(2, 10)),
            ]
            for message in messages:
                lost.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            lost.stdin.flush()
            await anyio.to_thread.run_sync(lost.stdout.readline)
            assert dials() == 2
            lost.send_signal(number)
            try:
                while dials() > 1:  # noqa: ASYNC110 - another process, in the pod
                    await anyio.sleep(0.5)
            finally:
                lost.kill()
                lost.communicate()
            assert (await run(host, "echo ok"))["stdout"] == "ok\n"
