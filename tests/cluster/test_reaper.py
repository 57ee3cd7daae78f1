"""The reaper against a real API server: its races, its orphans, and creates whose host is killed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.conftest import Cluster
from tests.reaping import RACERS, VERBS, Killed, killed_creates, race

EXTENSIONS = 200
GONE_SECONDS = 60.0
"""The garbage collector takes what hung from a record a moment later, and a pod takes its grace."""


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


def reaped(cluster: Cluster, *argv: str) -> dict[str, Any]:
    ran = cluster.podpipe("reap", "--json", *argv)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    return report


def parts(cluster: Cluster, user: str) -> list[str]:
    """Everything of a user but his home."""
    items = cluster.get("pods,configmaps,services,secrets", "-l", f"podpipe/user={user}")["items"]
    return sorted(f"{item['kind']}/{item['metadata']['name']}" for item in items)


async def test_of_200_extensions_that_meet_a_sweep_none_is_lost(
    cluster: Cluster, user: str
) -> None:
    tally = await race(cluster.settings(), EXTENSIONS // RACERS, cluster.reaper_settings())
    print(tally)
    assert tally.extended + tally.reaped == EXTENSIONS
    assert tally.extended, "no extension was ever first: nothing was raced"
    assert tally.reaped, "no deletion was ever first: nothing was raced"


def test_of_a_create_whose_host_is_killed_a_sweep_leaves_the_home_at_most(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    """Killed while a call is under way, which here too costs a minute, it is over the stub."""

    def swept_clean(killed: Killed) -> None:
        report = reaped(cluster, "--grace", "0")
        assert report["failed"] == {}
        if killed.finished:
            assert [name.split("/")[0] for name in parts(cluster, user)] == ["ConfigMap", "Pod"]
            assert cluster.podpipe("destroy", "work").returncode == 0
        until(lambda: not parts(cluster, user), f"{killed}: {parts(cluster, user)}")

    killed = killed_creates(os.environ | cluster.environment, tmp_path, "after", swept_clean)
    print(killed)
    assert {each.call.split()[0] for each in killed} == set(VERBS)


def test_what_hangs_from_no_record_is_swept_and_what_is_not_ours_is_left(
    cluster: Cluster, user: str
) -> None:
    assert cluster.podpipe("create", "--name", "work").returncode == 0
    (record,) = cluster.get("configmaps", "-l", f"podpipe/user={user}")["items"]
    labels = record["metadata"]["labels"]
    name = record["metadata"]["name"]
    service = {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80}]}}
    ours = service | {"metadata": {"name": name, "labels": labels}}
    theirs = service | {"metadata": {"name": "theirs", "labels": labels}}
    cluster.apply(ours, theirs)
    assert reaped(cluster, "--grace", "0")["deleted"] == []
    cluster.kubectl("delete", "configmap", name, "--cascade=orphan")
    found = reaped(cluster, "--grace", "0", "--dry-run")["deleted"]
    assert sorted(each["object"].split("/")[0] for each in found) == ["pods", "services"]
    until(lambda: reaped(cluster, "--grace", "0")["deleted"] == [], "orphans are never gone")
    until(lambda: parts(cluster, user) == ["Service/theirs"], "what is left is not theirs alone")
    cluster.kubectl("delete", "service", "theirs")
