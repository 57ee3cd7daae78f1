"""The end of a sandbox by itself, on a real cluster: expiry, idleness, and one home for two."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import anyio
import pytest

from host_client.clock import timestamp, utc_now
from host_client.errors import SandboxExpired
from host_client.host import Host
from host_client.losses import NEWS
from in_pod_server import contract as c
from tests.cluster.conftest import Cluster
from tests.idling import idle_after

BOUND = 170
IDLE_SECONDS = 4


async def run(host: Host, command: str) -> dict[str, Any]:
    answer = await host.sessions.call("work", "run_command", {"command": command})
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


async def phase(host: Host, wanted: str) -> str:
    """Wait until the sandbox is so; its detail."""
    while True:
        status = await host.launcher.status("work")
        if status.phase == wanted:
            return status.detail
        await anyio.sleep(0.5)


def pods(cluster: Cluster, user: str) -> list[Any]:
    found: list[Any] = cluster.get("pods", "-l", f"podpipe/user={user}")["items"]
    return found


@pytest.fixture
def idles_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    idle_after(IDLE_SECONDS, monkeypatch)


async def test_a_sandbox_ends_its_pod_at_the_expiry_that_the_annotation_tells(
    cluster: Cluster, user: str
) -> None:
    """No host is there any more, and no reaper; only the kubelet tells the daemon."""
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            made = await host.launcher.create(name="work")
            await run(host, "echo kept > f; (sleep 1000 &) ; true")
        assert made.pod
        soon = timestamp(utc_now() + timedelta(seconds=8))
        for what in (f"configmap/{made.sandbox.object_name}", f"pod/{made.pod.name}"):
            cluster.kubectl("annotate", "--overwrite", what, f"{c.ANNOTATION_EXPIRES_AT}={soon}")
        # It was told a later one by pipe, which holds for that start of the daemon: start another.
        cluster.kubectl("exec", made.pod.name, "--", "bash", "-c", "kill -9 $(pgrep -o -P 1)")
        while (pod := pods(cluster, user)[0])["status"]["phase"] == "Running":  # noqa: ASYNC110
            await anyio.sleep(0.5)
        (container,) = pod["status"]["containerStatuses"]
        ended = container["state"]["terminated"]
        assert (pod["status"]["phase"], ended["exitCode"]) == ("Succeeded", 0)
        assert ended["message"] == f"it expired at {soon}"
        async with Host(cluster.settings()) as host:
            with pytest.raises(SandboxExpired, match="its home is kept"):
                await run(host, "true")
            assert len(pods(cluster, user)) == 1, "no use revives it"
            await host.launcher.destroy("work")
            await host.launcher.create(name="work")
            assert (await run(host, "cat f"))["stdout"] == "kept\n"


@pytest.mark.usefixtures("idles_in_seconds")
async def test_an_idle_sandbox_ends_its_pod_and_the_next_call_resumes_it(
    cluster: Cluster, user: str
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings(IDLE_SUSPEND_MINUTES="1")) as host:
            made = await host.launcher.create(name="work")
            await run(host, "echo kept > f")
            assert "it was idle for" in await phase(host, "suspended")
            assert pods(cluster, user)[0]["status"]["phase"] == "Succeeded"
            facts = await run(host, "cat f")
            assert facts["stdout"] == "kept\n"
            assert "it was idle for" in facts[NEWS]
            again = await host.launcher.status("work")
            assert again.pod
            assert made.pod
            assert again.pod.uid != made.pod.uid
            assert again.sandbox.expires_at == made.sandbox.expires_at
            assert [pod["metadata"]["uid"] for pod in pods(cluster, user)].count(again.pod.uid) == 1


@pytest.mark.usefixtures("idles_in_seconds")
async def test_what_an_exec_runs_beside_the_daemon_is_use(cluster: Cluster, user: str) -> None:
    """A transfer, `connect ID -- CMD`, a shell: the daemon has not started them and sees them."""
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings(IDLE_SUSPEND_MINUTES="1")) as host:
            made = await host.launcher.create(name="work")
            assert made.pod
            began = time.monotonic()
            await host.kubectl.run(
                "exec", made.pod.name, "--", "sleep", str(4 * IDLE_SECONDS), timeout=60
            )
            assert time.monotonic() - began > 4 * IDLE_SECONDS - 1, "it was cut off"
            await phase(host, "suspended")


async def test_two_sandboxes_of_one_user_are_on_one_node_with_one_home(
    cluster: Cluster, user: str
) -> None:
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            for name in ("work", "other"):
                await host.launcher.create(name=name)
            await run(host, "echo shared > f")
            seen = await host.sessions.call("other", "run_command", {"command": "cat f"})
            assert seen["structuredContent"]["stdout"] == "shared\n"
    found = pods(cluster, user)
    assert len({pod["spec"]["nodeName"] for pod in found}) == 1
    for pod in found:
        (term,) = pod["spec"]["affinity"]["podAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["labelSelector"]["matchLabels"][c.LABEL_USER] == user
        assert term["topologyKey"] == "kubernetes.io/hostname"
