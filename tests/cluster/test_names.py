"""Names on the real API server: as long as they may be, and used again at once."""

from __future__ import annotations

import json

from host_client.identity import MAX_NAME
from tests.cluster.conftest import Cluster


def test_the_longest_name_has_a_sandbox(cluster: Cluster, user: str) -> None:
    """L43: there was never a pod."""
    name = "n" * MAX_NAME
    made = cluster.podpipe("create", "--name", name, "--json")
    assert made.returncode == 0, made.stderr
    assert cluster.podpipe("run", name, "--", "true").returncode == 0
    assert cluster.podpipe("destroy", name).returncode == 0


def test_a_name_is_free_again_at_once_and_with_it_the_home(cluster: Cluster, user: str) -> None:
    """L47: the new sandbox was bound to the claim that was going."""
    pods = set()
    for turn in range(4):
        made = cluster.podpipe("create", "--name", "again", "--json")
        assert made.returncode == 0, made.stderr
        pods.add(json.loads(made.stdout)["pod"])
        found = cluster.podpipe("run", "again", "--", "cat turn; echo " + str(turn) + " > turn")
        assert found.stdout == "", "a fresh home"
        gone = cluster.podpipe("destroy", "again", "--purge-home", "--yes")
        assert gone.returncode == 0, gone.stderr
    assert len(pods) == 4
