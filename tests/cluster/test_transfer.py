"""Transfers through a real kubectl, API server and container runtime."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from host_client.ends import places
from host_client.host import Host
from host_client.line import POD_ARGV
from host_client.outcome import Meter
from tests.cluster.conftest import ROOT, Cluster
from tests.host_client.test_transfer import make_tree, tree

BOUND = 150
POD_END = "take(int(take(8)))"


async def run(host: Host, command: str) -> dict[str, Any]:
    answer = await host.sessions.call("work", "run_command", {"command": command})
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    assert facts["exit_code"] == 0, facts
    return facts


async def ends_in_pod(host: Host) -> int:
    """How many ends of transfers run in the pod."""
    return int((await run(host, f"pgrep -fc '{POD_END[:4]}[(]int' || true"))["stdout"])


def kubectls() -> list[int]:
    """Our own children that carry a transfer."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            line = (proc / "cmdline").read_bytes()
            parent = int((proc / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid() and POD_ARGV[-1].encode() in line:
            found.append(int(proc.name))
    return found


async def test_a_tree_arrives_both_ways_as_it_was(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    source = tmp_path / "src"
    source.mkdir()
    make_tree(source)
    (source / "larger").write_bytes(os.urandom(20_000_000))
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            up = await host.transfers.put("work", [str(source)], "in/")
            down = await host.transfers.get("work", "/workspace/in/src", str(tmp_path / "back"))
            sums = await run(
                host, "cd in/src && sha256sum large larger deep/-leading && find . | wc -l"
            )
            assert await ends_in_pod(host) == 0
    wanted = tree(source)
    assert tree(tmp_path / "back") == wanted
    assert (up.refused, down.refused, up.tries, down.tries) == ((), (), 1, 1)
    local = await anyio.run_process(["sha256sum", "large", "larger", "deep/-leading"], cwd=source)
    assert sums["stdout"] == f"{local.stdout.decode()}{len(wanted) + 1 + wanted_newlines(wanted)}\n"


async def test_either_carrier_brings_everything(
    cluster: Cluster, user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(os.urandom(20_000_000))
    for webs, name in (("true", "websockets"), ("false", "spdy")):
        monkeypatch.setenv("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", webs)
        with anyio.fail_after(BOUND):
            async with Host(cluster.settings()) as host:
                await host.launcher.create(name=name)
                up = await host.transfers.put(name, [str(tmp_path / "f")], "in/")
                down = await host.transfers.get(name, "in/f", str(tmp_path / name))
        assert (up.tries, down.tries) == (1, 1)
        assert (tmp_path / name).read_bytes() == (tmp_path / "f").read_bytes()


def wanted_newlines(names: dict[str, Any]) -> int:
    """`find | wc -l` counts a name with a newline twice."""
    return sum(name.count("\n") for name in names)


async def test_a_killed_kubectl_costs_only_time(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(os.urandom(120_000_000))
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            for way in ("put", "get"):
                meter = Meter()

                async def cut(meter: Meter) -> None:
                    while meter.done < 30_000_000:  # noqa: ASYNC110 - a thread counts
                        await anyio.sleep(0.01)
                    for pid in kubectls():
                        os.kill(pid, signal.SIGKILL)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(cut, meter)
                    if way == "put":
                        done = await host.transfers.put("work", [str(tmp_path / "f")], "", meter)
                    else:
                        done = await host.transfers.get("work", "f", f"{tmp_path}/back/", meter)
                assert done.tries == 2, way
                assert done.files == 1
            left = await run(host, f"find ~ -name '{places.PART_PREFIX}*'")
            # The runtime closes what a dead kubectl held open; nothing waits for it for ever.
            with anyio.fail_after(20):
                while await ends_in_pod(host):  # noqa: ASYNC110 - the pod tells nobody
                    await anyio.sleep(0.2)
    assert left["stdout"] == ""
    assert (tmp_path / "back/f").read_bytes() == (tmp_path / "f").read_bytes()


async def test_a_container_that_dies_under_a_transfer_costs_only_time(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(os.urandom(100_000_000))
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            # By the pod itself: the copy would be over before a kubectl got there.
            some = f"find ~ -name '{places.PART_PREFIX}*' -size +30000k | grep -q ."
            kill = f"until {some}; do sleep 0.01; done; kill -9 -1"
            began = await host.sessions.call("work", "start_background", {"command": kill})
            assert not began.get("isError"), began
            done = await host.transfers.put("work", [str(tmp_path / "f")], "")
            await host.transfers.get("work", "f", f"{tmp_path}/back/")
    assert done.tries > 1
    assert (tmp_path / "back/f").read_bytes() == (tmp_path / "f").read_bytes()


async def test_a_hostile_tree_stays_in_its_target(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s", encoding="utf-8")
    (tmp_path / "target").mkdir()
    (tmp_path / "target/sub").symlink_to(outside)
    script = """
        mkdir -p t/sub t/deep && cd t
        ln -s ../../../../etc/passwd up; ln -s /etc/passwd abs; ln -s deep/../../outside via
        ln -s . here; ln -s here/here/.. twice; mkfifo fifo; echo x > suid; chmod 6755 suid
        echo evil > sub/secret; echo fine > deep/fine
        python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'
    """
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            await run(host, script)
            done = await host.transfers.sync(
                "work", str(tmp_path / "target"), "t", from_sandbox=True
            )
    assert {path for path, _ in done.refused} == {
        "up", "abs", "via", "twice", "fifo", "sock", "suid", "sub",
    }  # fmt: skip
    assert [p.name for p in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text(encoding="utf-8") == "s"
    assert sorted(p.name for p in (tmp_path / "target").iterdir()) == [
        "deep",
        "here",
        "sub",
        "suid",
    ]


async def test_an_interrupt_ends_the_end_in_the_pod(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(20 << 30)
        file.write(os.urandom(4 << 20))
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            await host.launcher.create(name="work")
            process = subprocess.Popen(  # noqa: ASYNC220 - takes a moment
                [sys.executable, "-m", "host_client", "put", "work", str(tmp_path / "huge")],
                env=os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)},
                stderr=subprocess.PIPE,
            )
            while not await ends_in_pod(host):  # noqa: ASYNC110 - the pod tells nobody
                await anyio.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, err = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=20))
            assert (process.returncode, b"interrupted" in err) == (130, True)
            began = time.monotonic()
            while await ends_in_pod(host):
                assert time.monotonic() - began < 20
                await anyio.sleep(0.2)


def test_the_command_line(cluster: Cluster, user: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    make_tree(source)
    assert cluster.podpipe("create", "--name", "cli").returncode == 0
    put = cluster.podpipe("put", "cli", str(source), "x/", "--json")
    assert put.returncode == 0, put.stderr
    assert json.loads(put.stdout)["verified"] is True
    (source / "nothing").unlink()
    synced = cluster.podpipe("sync", "cli", str(source), "x/src", "--delete", "--json")
    assert json.loads(synced.stdout)["removed"] == 1
    got = cluster.podpipe("get", "cli", "x/src", str(tmp_path / "back"))
    assert got.returncode == 0, got.stderr
    assert tree(tmp_path / "back") == tree(source)
