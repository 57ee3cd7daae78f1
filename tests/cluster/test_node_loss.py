"""A node that is lost: its kubelet stops. Everything is told in time, and nothing is lost but what ran."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.to_thread
import pytest

from host_client.errors import PodpipeError, StillStarting
from host_client.host import Host
from tests.cluster.conftest import Cluster
from tests.soak.faults import node_process

CALL_SECONDS = 60
"""A client gives a call up after this."""
END_SECONDS = 45
"""A pod's grace and what a slow node is given on top, and some kubectl calls."""


@contextmanager
def lost_node() -> Iterator[None]:
    """The node's kubelet hears nothing for as long as the block lasts."""
    kubelet = node_process("kubelet")
    os.kill(kubelet, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(kubelet, signal.SIGCONT)


@pytest.mark.breaks_node
async def test_what_is_asked_of_a_lost_node_is_answered_in_time_and_made_good_when_it_is_back(
    cluster: Cluster, user: str
) -> None:
    async with Host(cluster.settings()) as host:
        with anyio.fail_after(CALL_SECONDS):
            for name in ("work", "other"):
                await host.launcher.create(name=name)
            kept = {"command": "echo kept > f"}
            await host.sessions.call("work", "run_command", kept)
            # A pod that is not known to have run is not waited for.
            for name in ("work", "other"):
                while (await host.launcher.status(name)).phase != "running":  # noqa: ASYNC110
                    await anyio.sleep(0.3)
        with lost_node():
            with anyio.fail_after(CALL_SECONDS):
                with pytest.raises(PodpipeError, match=r"lost|answer"):
                    await host.sessions.call("work", "run_command", {"command": "true"})
            with anyio.fail_after(END_SECONDS):
                with pytest.raises(
                    StillStarting, match=r"pod sandbox-work.*its node may not answer"
                ):
                    await host.launcher.suspend("work")
            assert (await host.launcher.status("work")).phase == "stopping"
            with anyio.fail_after(END_SECONDS):
                with pytest.raises(
                    StillStarting, match=r"pod sandbox-other.*its node may not answer"
                ):
                    await host.launcher.destroy("other")
        await host.sessions.forget("work")
        # Back, as its cluster sees it: until then no pod is let onto it.
        ready = ("wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s")
        await anyio.to_thread.run_sync(cluster.kubectl, *ready)
        with anyio.fail_after(CALL_SECONDS):
            answer = await host.sessions.call("work", "run_command", {"command": "cat f"})
            assert answer["structuredContent"]["stdout"] == "kept\n"
            # What its kubelet says of the pod lags behind the pod's own answer.
            while (status := await host.launcher.status("work")).phase == "starting":  # noqa: ASYNC110
                await anyio.sleep(0.3)
            assert (status.phase, status.sandbox.incarnation) == ("running", 2)
        with anyio.fail_after(CALL_SECONDS):
            while len(cluster.get("pods", "-l", f"podpipe/user={user}")["items"]) > 1:  # noqa: ASYNC110
                await anyio.sleep(0.3)
