"""A sandbox with published apps on the real cluster, reached through `podpipe open`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.cluster.conftest import ROOT, Cluster
from tests.in_pod_server.gateways import APP, Served, free_port
from tests.in_pod_server.support import Wire

APP_PORT = 3000
BOUND = 60
PODPIPE = (sys.executable, "-m", "host_client")


@dataclass(frozen=True)
class InPod(Served):
    """A gateway of a pod."""

    environment: Mapping[str, str] = field(default_factory=dict)

    def client(self) -> contextlib.AbstractContextManager[Wire]:
        return connected(self.environment)

    def kill_caddy(self) -> None:
        self.call("run_command", command="kill -9 $(pidof caddy)")


@contextlib.contextmanager
def connected(environment: Mapping[str, str]) -> Iterator[Wire]:
    """The tools of the sandbox, by a pipe of their own."""
    ours, theirs = socket.socketpair()
    with theirs:
        pipe = subprocess.Popen(
            [*PODPIPE, "connect", "work"],
            env=environment,
            cwd="/",
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
        )
    try:
        ours.settimeout(BOUND)
        with Wire(ours) as wire:
            yield wire
    finally:
        ours.close()
        pipe.wait(BOUND)


def start_app(cluster: Cluster) -> None:
    """Have the app run, and wait until it does."""
    ready = cluster.podpipe_fed(
        APP.read_bytes(),
        *("run", "-i", "work", "--"),
        f"cat >app.py; setsid python3 app.py {APP_PORT} >/dev/null 2>&1 & "
        f"until (echo >/dev/tcp/127.0.0.1/{APP_PORT}); do sleep 0.1; done",
    )
    assert ready.returncode == 0, ready.stderr


@contextlib.contextmanager
def opened(cluster: Cluster) -> Iterator[InPod]:
    """The gateway of sandbox "work", whose apps `web` and `other` run, and whose `down` does not."""
    start_app(cluster)
    for name, port in (("web", APP_PORT), ("other", APP_PORT), ("down", APP_PORT + 1)):
        assert cluster.podpipe("expose", "work", str(port), name).returncode == 0
    made = cluster.podpipe("access", "work", "--json")
    assert made.returncode == 0, made.stderr
    facts = json.loads(made.stdout)
    port = free_port()
    environment = os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)}
    environment["PODPIPE_OPEN_PORT"] = str(port)
    process = subprocess.Popen(
        [*PODPIPE, "open", "work", "web", "--no-browser"],
        env=environment, cwd="/", stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline().startswith(b"http://web.")
    with connected(environment) as wire:
        yield InPod(
            ("127.0.0.1", port),
            facts["token"],
            facts["sandbox_id"],
            wire=wire,
            environment=environment,
        )
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=BOUND)
