"""`podpipe reap` on a real API server, whose lists are null where they are empty."""

from __future__ import annotations

import json

from tests.cluster.conftest import Cluster

PAST = "2020-01-01T00:00:00Z"


def test_what_expired_goes_and_what_lives_and_every_home_stays(cluster: Cluster, user: str) -> None:
    ids = {}
    for name in ("old", "new"):
        made = cluster.podpipe("create", "--name", name, "--json")
        assert made.returncode == 0, made.stderr
        ids[name] = json.loads(made.stdout)["sandbox_id"]
    record = f"configmap/sandbox-{ids['old']}"
    cluster.kubectl("annotate", "--overwrite", record, f"podpipe/expires-at={PAST}")
    homes = cluster.get("persistentvolumeclaims")["items"]

    tried = cluster.podpipe("reap", "--dry-run")
    assert tried.returncode == 0, tried.stderr
    assert ids["old"] in tried.stdout
    assert f"ConfigMap/sandbox-{ids['old']}" in cluster.left()

    reaped = cluster.podpipe("reap")
    assert reaped.returncode == 0, reaped.stderr
    assert ids["old"] in reaped.stdout
    assert ids["new"] not in reaped.stdout
    left = cluster.left()
    assert f"ConfigMap/sandbox-{ids['old']}" not in left
    assert f"ConfigMap/sandbox-{ids['new']}" in left
    assert len(cluster.get("persistentvolumeclaims")["items"]) == len(homes) > 0
