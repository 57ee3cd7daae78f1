"""The soak's short form on the real cluster; `scripts/bench soak` is the long one."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from host_client.host import Host
from tests.cluster.conftest import Cluster
from tests.soak.faults import RealCluster
from tests.soak.run import Plan, soak

BOUND = 300


@pytest.mark.breaks_node
async def test_no_call_is_lost_or_run_twice_while_everything_breaks(
    cluster: Cluster, user: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("host_client.session.HEARTBEAT_SECONDS", 2.0)
    monkeypatch.setattr("host_client.session.HEARTBEAT_ANSWER_SECONDS", 2.0)
    plan = Plan(
        seconds=40, seed=3, workers=2, long_seconds=3, freeze_seconds=6, pause_seconds=1,
        api_seconds=20,
    )  # fmt: skip
    with anyio.fail_after(BOUND):
        async with Host(cluster.settings()) as host:
            sandboxes = [(await host.launcher.create()).sandbox.id for _ in range(2)]
            tally = await soak(host, RealCluster(host), sandboxes, plan, lambda _: None)
    assert tally.good, tally.text()
    assert len({fault.kind for fault in tally.faults}) >= 4, tally.text()
