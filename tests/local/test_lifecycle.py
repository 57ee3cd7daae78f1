"""The node from the first `up` to `down --purge`, for real, on a copy-on-write view of this machine.

One run of lifecycle.py in namespaces of its own (isolated.sh) serves all tests of this file, so a
node that runs outside, with other tests on it, is not touched. About twenty seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from host_client.local.binaries import build_folder, missing_binaries
from host_client.local.tools import cache_home
from tests.local.stubs import CHECKOUT

pytestmark = pytest.mark.cluster

WHOLE_LIFE_SECONDS = 240


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    assert sys.platform == "linux", "a node needs Linux"
    assert os.geteuid() == 0, "a node needs root"
    assert not missing_binaries(cache_home()), "run `scripts/cluster up --provider node` once first"
    here = CHECKOUT / "tests" / "local"
    work = tmp_path_factory.mktemp("machine")
    program = [sys.executable, "-m", "tests.local.lifecycle", str(build_folder(cache_home()))]
    done = subprocess.run(
        [here / "isolated.sh", work, "env", f"--chdir={CHECKOUT}", *program],
        cwd=CHECKOUT,
        capture_output=True,
        encoding="utf-8",
        timeout=WHOLE_LIFE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def test_up_brings_every_component_up_and_the_node_ready(facts: dict[str, Any]) -> None:
    assert facts["first up"]["code"] == 0, facts["first up"]["err"]
    status = json.loads(facts["first up"]["out"])
    assert status["up"]
    assert all(status["components"].values())
    assert facts["ready"] == "pod/pod condition met"


def test_a_second_up_is_quick(facts: dict[str, Any]) -> None:
    assert facts["second up"]["code"] == 0
    assert facts["second up"]["seconds"] < 2


def test_the_looking_sees_a_running_node(facts: dict[str, Any]) -> None:
    """Otherwise the tests below would prove nothing."""
    seen = facts["while up"]

    assert any("kubelet" in process for process in seen["processes"])
    assert any("hostpath_pv" in mount for mount in seen["mounts"])
    assert "podpipe0" in seen["links"]
    assert all(seen[kind] for kind in ("rules", "chains", "groups", "files"))


def test_an_image_is_loaded_while_the_one_before_it_is_collected(facts: dict[str, Any]) -> None:
    assert facts["loads"]["failures"] == []


def test_an_image_that_cannot_be_loaded_leaves_the_one_before_it(facts: dict[str, Any]) -> None:
    loads = facts["loads"]

    assert "images import" in loads["refused"]
    assert loads["kept"]
    assert loads["held"] == []


def test_down_leaves_nothing_but_its_state_folder(facts: dict[str, Any]) -> None:
    assert facts["down"]["code"] == 0, facts["down"]["err"]
    assert facts["after down"] == facts["before"]
    assert facts["status when down"]["code"] == 1


def test_objects_and_homes_are_there_after_down_and_up(facts: dict[str, Any]) -> None:
    assert facts["up again"]["code"] == 0, facts["up again"]["err"]
    assert facts["object"] == "y"
    assert facts["home"] == "of the user"


def test_up_recovers_a_node_whose_processes_were_all_killed(facts: dict[str, Any]) -> None:
    assert not json.loads(facts["status when killed"]["out"])["up"]
    assert facts["up after a hard stop"]["code"] == 0, facts["up after a hard stop"]["err"]
    assert json.loads(facts["up after a hard stop"]["out"])["up"]


def test_up_starts_only_what_is_missing(facts: dict[str, Any]) -> None:
    healed = facts["up of half a node"]

    assert healed["code"] == 0, healed["err"]
    assert "starting kube-scheduler, kubelet\n" in healed["err"]
    assert facts["object at the end"] == "y"


def test_purge_leaves_nothing_at_all_even_of_a_node_whose_containerd_was_killed(
    facts: dict[str, Any],
) -> None:
    assert facts["purge"]["code"] == 0, facts["purge"]["err"]
    left = facts["after purge"]
    before = facts["before"]
    cached = [path for path in left["files"] if "/podpipe-test/cache/" in path]
    assert cached == []
    assert {**left, "files": []} == {**before, "files": []}
    assert set(left["files"]) <= set(before["files"])
    assert facts["folders"] == []


def test_purge_of_nothing_is_fine_and_env_says_what_to_run(facts: dict[str, Any]) -> None:
    assert facts["purge of nothing"]["code"] == 0
    assert facts["env after purge"]["code"] == 3
    assert "scripts/cluster up" in facts["env after purge"]["err"]


def test_purge_follows_no_link_out_of_its_cache(facts: dict[str, Any]) -> None:
    assert facts["binaries"]
