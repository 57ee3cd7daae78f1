"""Many sandboxes on a real API server: one sees one's own, and a sweep takes what is over, quickly."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from host_client.backends.pod import PodBackend
from host_client.launcher import Launcher
from host_client.pod_view import PodView
from host_client.sandbox import Sandbox
from in_pod_server import contract as c
from tests.cluster.conftest import Cluster
from tests.crowd import crowd

SANDBOXES, USERS, EXPIRED, LOOPED = 600, 6, 200, 5
FASTER = 3
"""Ten at a thousand, as `scripts/bench reap` measures; so few pay more for the start of a process."""


async def not_connected(_: Sandbox, __: PodView) -> None:
    raise AssertionError("nothing here is to be connected to")


async def test_of_many_sandboxes_one_s_own_are_listed_and_those_that_expired_are_swept(
    cluster: Cluster,
) -> None:
    # A namespace of its own, for which nobody has roles.
    settings = replace(cluster.administrator_settings(), user="crowd")
    async with crowd(settings, f"{cluster.namespace}-many", print) as made:
        await made.add(SANDBOXES, users=USERS, tell=print)
        await made.add(EXPIRED, users=USERS, expired=True, tell=print)
        launcher = Launcher(PodBackend(made.kubectl, made.settings), made.settings, not_connected)
        own = await launcher.list_all()
        assert {status.sandbox.user_id for status in own} == {"crowd"}
        phases = [status.phase for status in own]
        assert phases.count("starting") == SANDBOXES // USERS
        assert phases.count("expired") == len(own) - SANDBOXES // USERS > 0

        over = [status.sandbox for status in own if status.phase == "expired"][:LOOPED]
        began = time.monotonic()
        for sandbox in over:
            await made.kubectl.run("delete", "configmap", sandbox.object_name)
        one_by_one = (time.monotonic() - began) / LOOPED

        began = time.monotonic()
        ran = cluster.podpipe(
            "reap", "--json",
            NAMESPACE=made.settings.namespace, KUBECONFIG=cluster.administrator["KUBECONFIG"],
        )  # fmt: skip
        took = time.monotonic() - began
        assert ran.returncode == 0, ran.stderr
        report = json.loads(ran.stdout)
        expired = [each for each in report["deleted"] if each["reason"] == "expired"]
        assert (len(expired), report["sandboxes"]) == (
            EXPIRED - LOOPED,
            SANDBOXES + EXPIRED - LOOPED,
        )
        print(f"{one_by_one * 1e3:.0f} ms each one by one, {took / len(expired) * 1e3:.1f} swept")
        assert took < one_by_one * len(expired) / FASTER
        left = await made.kubectl.select("configmaps", f"{c.LABEL_MANAGED_BY}={c.PREFIX}")
        assert len(left) == SANDBOXES
