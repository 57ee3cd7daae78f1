"""Room for sandboxes on the real API server, where several hosts ask for the last of it at once."""

from __future__ import annotations

import anyio

from host_client.errors import LimitReached
from host_client.host import Host
from tests.cluster.conftest import Cluster

HOSTS = 4
BOUND = 120


async def test_of_hosts_that_create_at_once_one_has_the_last_room(
    cluster: Cluster, user: str
) -> None:
    made: list[str] = []
    refused: list[str] = []

    async def create(number: int) -> None:
        async with Host(cluster.settings(MAX_SANDBOXES_PER_USER="1")) as host:
            try:
                await host.launcher.create(name=f"racer-{number}")
                made.append(f"racer-{number}")
            except LimitReached as error:
                refused.append(str(error))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as hosts:
            for number in range(HOSTS):
                hosts.start_soon(create, number)
    assert (len(made), len(refused)) == (1, HOSTS - 1)
    assert all("MAX_SANDBOXES_PER_USER" in text for text in refused)
    async with Host(cluster.settings()) as host:
        (left,) = await host.launcher.list_all()
        assert left.sandbox.name == made[0]
        await host.launcher.destroy(made[0])
