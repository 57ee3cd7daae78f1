"""The main job on a real node: create, work, suspend, resume, recover, destroy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from host_client.errors import SessionLost
from host_client.host import Host
from host_client.session import SandboxSession
from tests.cluster.conftest import ROOT, Cluster

BOUND = 120


async def run(host: Host, ref: str, command: str, **arguments: Any) -> dict[str, Any]:
    answer = await host.sessions.call(ref, "run_command", {"command": command, **arguments})
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


async def ended(session: SandboxSession) -> None:
    """Wait until the host has noticed that the pipe is gone."""
    while session.alive:  # noqa: ASYNC110 - kubectl tells it by ending
        await anyio.sleep(0.05)


def test_client_prints_four_blocks_with_equal_sums_and_leaves_nothing(cluster: Cluster) -> None:
    before = cluster.left()
    ran = subprocess.run(
        [sys.executable, str(ROOT / "host_client/client.py")],
        env=os.environ | cluster.environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for line in (
        "Session 1 — write a random blob to the PVC",
        "Suspend → Resume — the PVC persists, the container fs does not",
        "Session 2 — read the blob back from the PVC",
        "[host] OK — sha256 matches across pod restart: ",
        "Return the file to the host and re-hash locally",
        "[host] OK — PVC contents survived pod restart and round-trip back to the host",
    ):
        assert line in ran.stdout
    assert cluster.left() == before


async def test_files_outlive_suspend_and_the_container_does_not(
    cluster: Cluster, user: str
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            await run(host, "work", "echo kept > f; echo lost > /tmp/f; cp f /workspace/g")
            first = await host.sessions.open("work")
            await host.launcher.suspend("work")
            assert cluster.get("pods", "-l", f"podpipe/user={user}")["items"] == []
            facts = await run(host, "work", "cat f g; ls /tmp/f")
            second = await host.sessions.open("work")
    assert (facts["stdout"], facts["exit_code"]) == ("kept\nkept\n", 2)
    assert first.pod.uid != second.pod.uid


async def test_a_pod_deleted_by_hand_is_made_anew_by_the_next_call(
    cluster: Cluster, user: str
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            made = await host.launcher.create(name="work")
            await run(host, "work", "echo kept > f")
            before = await host.sessions.open("work")
            cluster.kubectl("delete", "pod", made.sandbox.pod_name)
            await ended(before)
            assert (await run(host, "work", "cat f"))["stdout"] == "kept\n"


async def test_a_command_that_kills_everything_only_restarts_the_container(
    cluster: Cluster, user: str
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            before = await host.sessions.open("work")
            await run(host, "work", "echo kept > f")
            with pytest.raises(SessionLost, match="may have run"):
                await run(host, "work", "kill -9 -1")
            assert (await run(host, "work", "cat f"))["stdout"] == "kept\n"
            after = await host.sessions.open("work")
    assert after.pod.uid == before.pod.uid
    assert after.boot_id != before.boot_id


async def test_the_sandbox_is_confined_as_its_manifest_says(cluster: Cluster, user: str) -> None:
    script = """
        id -u; id -g
        touch /x 2>/dev/null || echo root-fs-read-only
        for d in "$HOME" /workspace /tmp; do touch $d/x && echo "$d writable"; done
        ls /var/run/secrets/kubernetes.io 2>/dev/null || echo no-token
        grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status
        env | grep -c KUBERNETES || true
    """
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            out = (await run(host, "work", script))["stdout"].replace("\t", " ").splitlines()
    assert out == [
        "1000",
        "1000",
        "root-fs-read-only",
        "/home/sandbox writable",
        "/workspace writable",
        "/tmp writable",
        "no-token",
        "CapEff: 0000000000000000",
        "CapBnd: 0000000000000000",
        "NoNewPrivs: 1",
        "Seccomp: 2",
        "0",
    ]


async def test_hosts_that_resume_at_once_make_one_pod(cluster: Cluster, user: str) -> None:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            await host.launcher.suspend("work")
        uids: list[str] = []

        async def resume() -> None:
            async with Host(cluster.settings()) as other:
                uids.append((await other.launcher.running("work"))[1].uid)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(resume)
    assert len(set(uids)) == 1
    assert len(cluster.get("pods", "-l", f"podpipe/user={user}")["items"]) == 1


async def test_destroy_takes_seconds_and_keeps_the_home(cluster: Cluster, user: str) -> None:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            await run(host, "work", "echo kept > f; nohup sleep 1000 >/dev/null 2>&1 &")
            with anyio.fail_after(15):
                await host.launcher.destroy("work")
            left = [entry for entry in cluster.left() if user in entry or "sandbox-work" in entry]
            assert left == [f"PersistentVolumeClaim/user-{user}-pvc"]
            await host.launcher.create(name="work")
            assert (await run(host, "work", "cat f"))["stdout"] == "kept\n"


async def test_everything_of_a_sandbox_hangs_from_its_record(cluster: Cluster, user: str) -> None:
    """kubectl is enough to remove one: nothing is left but the home."""
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            made = await host.launcher.create(name="work")
        cluster.kubectl("delete", "configmap", made.sandbox.object_name)
        cluster.kubectl("wait", "--for=delete", f"pod/{made.sandbox.pod_name}", "--timeout=60s")
    assert [entry for entry in cluster.left() if made.sandbox.id in entry] == []


async def test_the_example_server_runs_in_the_image_through_connect(
    cluster: Cluster, user: str
) -> None:
    with anyio.fail_after(BOUND):
        assert cluster.podpipe("create", "--name", "work").returncode == 0
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "host_client", "connect", "work", "--", "python3", "-u", "/app/mcp_server.py"],
            env=os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        async with Client(server, mode="legacy") as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names == ["list_blobs", "write_random_blob", "read_blob"]
            wrote = await client.call_tool("write_random_blob", {"name": "b", "size_bytes": 9})
            read = await client.call_tool("read_blob", {"name": "b"})
    assert wrote.structured_content
    assert read.structured_content
    assert wrote.structured_content["path"] == "/workspace/b"
    assert wrote.structured_content["sha256"] == read.structured_content["sha256"]


async def test_connect_reaches_the_daemon(cluster: Cluster, user: str) -> None:
    with anyio.fail_after(BOUND):
        assert cluster.podpipe("create", "--name", "work").returncode == 0
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "host_client", "connect", "work"],
            env=os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)},
        )
        async with Client(server, mode="legacy") as client:
            ran = await client.call_tool("run_command", {"command": "echo hi"})
    assert ran.structured_content
    assert ran.structured_content["stdout"] == "hi\n"


def test_the_command_line_does_a_whole_life(cluster: Cluster, user: str) -> None:
    made = cluster.podpipe(
        "create", "--name", "cli", "--cpu", "500m", "--memory", "256Mi", "--json"
    )
    assert made.returncode == 0, made.stderr
    facts = json.loads(made.stdout)
    pod = cluster.get("pod", facts["pod"])
    assert pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "500m"
    ran = cluster.podpipe("run", "cli", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (ran.returncode, ran.stdout) == (7, "out\n")
    assert "err" in ran.stderr
    assert cluster.podpipe("suspend", "cli").returncode == 0
    assert cluster.podpipe("run", "cli", "--", "true").returncode == 0
    assert cluster.podpipe("extend", "cli", "100").returncode == 0
    gone = cluster.podpipe("destroy", "cli", "--purge-home", "--yes", "--json")
    assert json.loads(gone.stdout) == {
        "sandbox_id": facts["sandbox_id"],
        "destroyed": True,
        "home": "purged",
    }
    assert [entry for entry in cluster.left() if user in entry or "sandbox-cli" in entry] == []


def test_doctor_finds_nothing_wrong_with_the_role_of_a_launcher(
    cluster: Cluster, user: str
) -> None:
    report = cluster.podpipe("doctor", "--json")
    assert report.returncode == 0, report.stdout
    results = {finding["check"]: finding["result"] for finding in json.loads(report.stdout)}
    of_the_cluster = {check: results.pop(check) for check in ("runtimeclass", "image", "clock")}
    assert "failure" not in of_the_cluster.values()
    assert {check for check, result in results.items() if result != "ok"} == {
        "storageclass",  # not to be read without --cluster-reads
        "processes",  # an administrator's to know
        "network policy",  # not to be known without --deep
    }


def test_doctor_tries_in_two_sandboxes_and_leaves_none(cluster: Cluster, user: str) -> None:
    """Whether one reaches the other is the cluster's matter; that it is found out is ours."""
    report = cluster.podpipe("doctor", "--deep", "--json")
    found = {finding["check"]: finding for finding in json.loads(report.stdout)}
    assert found["sandbox made"]["result"] == "ok", report.stdout
    assert found["network"]["result"] in ("ok", "failure"), report.stdout
    assert report.returncode == (found["network"]["result"] == "failure")
    selector = ("-l", f"podpipe/user={user}")
    assert cluster.get("configmaps", *selector)["items"] == []
    cluster.kubectl("wait", "--for=delete", "pods", *selector, "--timeout=30s")
