"""The soak's short form, over the stub kubectl and real daemons."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio

from host_client.host import Host
from host_client.kubectl import Kubectl
from host_client.pod_view import PodView
from tests.host_client.conftest import StubCluster
from tests.soak.faults import pipes, send
from tests.soak.run import Plan, soak

BOUND = 200
REFUSED = "The connection to the server stub:6443 was refused - did you specify the right host?"


class StubGround:
    """How a stub cluster is broken."""

    restarts_api = True

    def __init__(self, stub: StubCluster, host: Host) -> None:
        self._stub = stub
        self._host = host

    def mark(self, pod: PodView) -> str:
        return pod.uid[:13]

    async def end_container(self, pod: PodView) -> bool:
        pid = self._stub.folder / "pods" / pod.name / "pid"
        if not pid.exists():
            return False
        os.kill(int(pid.read_text(encoding="utf-8")), signal.SIGKILL)
        return True

    async def delete_pod(self, pod: PodView) -> bool:
        return await Kubectl(self._stub.settings()).delete("pods", pod.name, uid=pod.uid)

    async def restart_api(self) -> None:
        away = {"stderr": REFUSED}
        self._stub.faults(get=away, exec=away, apply=away, patch=away)
        send(signal.SIGKILL, pipes())
        await anyio.sleep(1.5)
        self._stub.faults()


async def test_no_call_is_lost_or_run_twice_while_everything_breaks(
    stub: StubCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr("host_client.session.HEARTBEAT_SECONDS", 1.0)
    monkeypatch.setattr("host_client.session.HEARTBEAT_ANSWER_SECONDS", 1.0)
    plan = Plan(
        seconds=25, seed=11, workers=2, long_seconds=3, freeze_seconds=4, pause_seconds=0.7,
        api_seconds=8,
    )  # fmt: skip
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            sandboxes = [(await host.launcher.create()).sandbox.id for _ in range(2)]
            tally = await soak(host, StubGround(stub, host), sandboxes, plan, lambda _: None)
    assert tally.good, tally.text()
    assert len({fault.kind for fault in tally.faults}) >= 4, tally.text()
