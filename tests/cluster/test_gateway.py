"""The gateway of a real pod, through `podpipe open`: all that holds for a daemon on this machine."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import ROOT, Cluster
from tests.in_pod_server import test_gateway
from tests.in_pod_server.gateways import APP, Place, free_port
from tests.in_pod_server.support import eventually

BOUND = 60
OF_THE_ADDRESS = {
    "test_a_host_that_is_no_app_of_the_sandbox_is_not_found",
    "test_case_port_and_domain_of_a_host_say_nothing",
    "test_a_target_that_names_another_host_goes_by_that_host_alone",
}
"""The local address chooses the sandbox by the host, and has words of its own for those it does not."""

globals().update(
    {
        name: test
        for name, test in vars(test_gateway).items()
        if name.startswith("test_") and name not in OF_THE_ADDRESS
    }
)


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[Place]:
    user = cluster.environment.get("PODPIPE_USER", "")
    cluster.environment["PODPIPE_USER"] = f"user-{secrets.token_hex(4)}"
    made = cluster.podpipe("create", "--name", "work", "--json")
    assert made.returncode == 0, made.stderr
    facts = json.loads(made.stdout)
    ready = cluster.podpipe_fed(
        APP.read_bytes(),
        *("run", "-i", "work", "--"),
        "cat >app.py; setsid python3 app.py 3000 >/dev/null 2>&1 & "
        "until (echo >/dev/tcp/127.0.0.1/3000); do sleep 0.1; done",
    )
    assert ready.returncode == 0, ready.stderr
    for name, port in (("web", 3000), ("other", 3000), ("down", 3001)):
        assert cluster.podpipe("expose", "work", str(port), name).returncode == 0
    port = free_port()
    environment = os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "host_client", "open", "work", "web", "--no-browser"],
        env=environment | {"PODPIPE_OPEN_PORT": str(port)}, cwd="/", stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline().startswith(b"http://web.")
    yield Place(("127.0.0.1", port), facts["token"], facts["sandbox_id"])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=BOUND)
    assert cluster.podpipe("destroy", "work", "--purge-home", "--yes").returncode == 0
    cluster.environment["PODPIPE_USER"] = user


def test_an_app_answers_soon_after_it_was_exposed(cluster: Cluster, place: Place) -> None:
    assert cluster.podpipe("expose", "work", "3000", "soon").returncode == 0
    began = time.monotonic()
    assert place.ask("GET", "/", place.bearer, app="soon").status == 200
    assert time.monotonic() - began < 5, "half a second where nobody else is at work"


def test_a_killed_caddy_is_back_with_all_apps(cluster: Cluster, place: Place) -> None:
    killed = cluster.podpipe("run", "work", "--", "kill -9 $(pidof caddy)")
    assert killed.returncode == 0, killed.stderr
    eventually(lambda: place.ask("GET", "/", place.bearer, app="other").status == 200)


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


def test_rotation_reaches_a_running_pod_at_once(cluster: Cluster, place: Place) -> None:
    fresh = json.loads(cluster.podpipe("access", "work", "--rotate", "--json").stdout)
    assert place.ask("GET", "/", place.bearer, app="").status == 401
    assert (
        place.ask("GET", "/", {"Authorization": f"Bearer {fresh['token']}"}, app="").status == 200
    )
