"""The gateway of a real pod, through `podpipe open`: all that holds for a daemon on this machine."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import pytest

from in_pod_server import contract
from tests.cluster import gateways
from tests.cluster.conftest import Cluster
from tests.cluster.gateways import APP_PORT, InPod
from tests.in_pod_server import test_gateway, test_gateway_crowd
from tests.in_pod_server.gateways import Place, Streams
from tests.in_pod_server.support import eventually

OF_THE_ADDRESS = {
    "test_a_host_that_is_no_app_of_the_sandbox_is_not_found",
    "test_case_port_and_domain_of_a_host_say_nothing",
    "test_a_target_that_names_another_host_goes_by_that_host_alone",
}
"""The local address chooses the sandbox by the host, and has words of its own for those it does not."""

globals().update(
    {
        name: test
        for module in (test_gateway, test_gateway_crowd)
        for name, test in vars(module).items()
        if name.startswith("test_") and name not in OF_THE_ADDRESS
    }
)
opened = test_gateway_crowd.opened


@pytest.fixture(scope="module")
def place(cluster: Cluster, sandbox: str) -> Iterator[InPod]:
    with gateways.opened(cluster) as reached:
        yield reached


@pytest.fixture(scope="module")
def app() -> int:
    return APP_PORT


def test_the_record_has_what_clients_of_the_daemon_have_published(
    cluster: Cluster, place: InPod
) -> None:
    place.call("expose_port", internal_port=APP_PORT, name="bare")
    listed = json.loads(cluster.podpipe("apps", "work", "--json").stdout)
    assert "bare" in {app["name"] for app in listed["apps"]}
    place.call("unexpose_port", name="bare")
    assert cluster.podpipe("apps", "work").returncode == 0
    (record,) = cluster.get("configmaps", "-l", f"podpipe/sandbox={place.sandbox_id}")["items"]
    kept = json.loads(record["metadata"]["annotations"][contract.ANNOTATION_APPS])
    assert kept == place.table()


def test_an_app_answers_soon_after_it_was_exposed(cluster: Cluster, place: Place) -> None:
    assert cluster.podpipe("expose", "work", "3000", "soon").returncode == 0
    began = time.monotonic()
    assert place.ask("GET", "/", place.bearer, app="soon").status == 200
    assert time.monotonic() - began < 5, "half a second where nobody else is at work"


def test_a_share_that_runs_out_ends_what_it_opened_and_no_more(
    cluster: Cluster, place: InPod, opened: contextlib.ExitStack
) -> None:
    kept = Streams(opened, place, "web", place.token)
    made = cluster.podpipe("access", "work", "--app", "web", "--for", "3s", "--json")
    shared = json.loads(made.stdout)["token"]
    assert Streams(opened, place, "web", shared).end()
    assert place.ask("GET", "/", {"Authorization": f"Bearer {shared}"}).status == 401
    assert kept.go_on()


def test_apps_and_tokens_are_there_after_suspend_and_resume(cluster: Cluster, place: Place) -> None:
    assert cluster.podpipe("suspend", "work").returncode == 0
    listed = json.loads(cluster.podpipe("apps", "work", "--json").stdout)
    assert (listed["phase"], {"web", "other", "down"} <= {a["name"] for a in listed["apps"]}) == (
        "suspended",
        True,
    )
    assert cluster.podpipe("resume", "work").returncode == 0
    eventually(lambda: place.ask("GET", "/", place.bearer, app="web").status == 503)
    assert place.ask("GET", "/").status == 401


def test_rotation_reaches_a_running_pod_at_once_and_ends_what_is_open(
    cluster: Cluster, place: Place, opened: contextlib.ExitStack
) -> None:
    gateways.start_app(cluster)
    old = [Streams(opened, place, app, place.token) for app in ("web", "other")]
    made = json.loads(cluster.podpipe("access", "work", "--rotate", "--json").stdout)
    fresh = {"Authorization": f"Bearer {made['token']}"}
    assert all(streams.end() for streams in old)
    assert place.ask("GET", "/", place.bearer, app="").status == 401
    assert place.ask("GET", "/", fresh, app="").status == 200
