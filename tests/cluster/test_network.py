"""The network policy of `render admin`, enforced: what a sandbox reaches without it, and not with it.

The node of `scripts/cluster` enforces policies for as long as this takes. On another cluster, whose
network plugin enforces none, there is nothing to see, and the test says so.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
import yaml

from host_client.host import Host
from host_client.local import policies
from host_client.local.cluster import Choice
from host_client.local.console import Console
from host_client.local.node import Node
from host_client.local.tools import run
from tests.cluster.conftest import Cluster, administered
from tests.cluster.relay import relay

PORT = 20000
BOUND = 120.0
ENFORCED_SECONDS = 15.0
"""How long a network plugin may take to notice that a policy came or went."""

LISTEN = f"""\
import socket
server = socket.create_server(("", {PORT}))
print(socket.gethostbyname(socket.gethostname()), flush=True)
while True:
    server.accept()[0].close()
"""
GATEWAY = """\
import socket, struct
for line in open("/proc/net/route").readlines()[1:]:
    _, target, gateway, *_ = line.split()
    if target == "00000000":
        print(socket.inet_ntoa(struct.pack("<L", int(gateway, 16))))
"""
REACH = """\
import socket, ssl, sys
for target in sys.argv[1:]:
    host, port, kind = target.split(":")
    try:
        with socket.create_connection((host, int(port)), 2) as plain:
            if kind == "tls":
                context = ssl._create_unverified_context()
                with context.wrap_socket(plain) as server:
                    server.sendall(b"GET /version HTTP/1.0\\r\\n\\r\\n")
                    print("reached" if server.recv(9) == b"HTTP/1.0 " else "no answer")
            else:
                print("reached")
    except OSError as error:
        print(error)
"""


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node | None]:
    """The node, enforcing policies; None where the cluster is another one."""
    found = Choice(os.environ, Console()).current()
    if (
        not isinstance(found, Node)
        or found.access().context != cluster.environment["PODPIPE_CONTEXT"]
    ):
        yield None
        return
    enforced = policies.NAME in found.status("none").components
    found.enforce_policies(on=True)
    yield found
    if not enforced:
        found.enforce_policies(on=False)
        left = run(["iptables", "-w", "-S"]).stdout + run(["ipset", "list", "-n"]).stdout
        assert not [trace for trace in (*policies.CHAINS, *policies.SETS) if trace in left]


async def call(host: Host, ref: str, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await host.sessions.call(ref, tool, arguments)
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


async def python(host: Host, ref: str, program: str, *argv: str) -> list[str]:
    command = f"/usr/bin/python3 -c '{program}' {' '.join(argv)}"
    lines: list[str] = (await call(host, ref, "run_command", command=command))[
        "stdout"
    ].splitlines()
    return lines


@pytest.mark.breaks_node
async def test_the_policy_closes_what_a_sandbox_reached_and_exec_goes_on(
    cluster: Cluster, user: str, node: Node | None
) -> None:
    policy = next(
        found
        for found in yaml.safe_load_all(cluster.administer())
        if found["kind"] == "NetworkPolicy" and found["metadata"]["namespace"] == cluster.namespace
    )
    with ExitStack() as stack:
        async with Host(cluster.settings()) as host:
            with anyio.fail_after(BOUND):
                for name in ("one", "other"):
                    await host.launcher.create(name=name)
                started = await call(
                    host, "other", "start_background",
                    command=f"/usr/bin/python3 -c '{LISTEN}'",
                )  # fmt: skip
                read = await call(
                    host, "other", "read_output",
                    process_id=started["process_id"], wait_seconds=10, pattern=r"\n",
                )  # fmt: skip
                targets = {"another sandbox": f"{read['data'].strip()}:{PORT}:tcp"}
                if node:  # it is this machine
                    (bridge,) = await python(host, "one", GATEWAY)
                    api = urlsplit(host.kubectl.target.server)
                    assert api.hostname
                    assert api.port
                    plain = stack.enter_context(relay(bridge))
                    tls = stack.enter_context(relay(bridge, (api.hostname, api.port)))
                    targets["the node"] = f"{bridge}:{plain}:tcp"
                    targets["an API server"] = f"{bridge}:{tls}:tls"

                async def reached() -> dict[str, str]:
                    said = await python(host, "one", REACH, *targets.values())
                    return dict(zip(targets, said, strict=True))

                cluster.kubectl("delete", "networkpolicy", policy["metadata"]["name"])
                with anyio.fail_after(ENFORCED_SECONDS):
                    while set((before := await reached()).values()) != {"reached"}:
                        pass  # each look waits for what does not answer
                pod = (await host.launcher.status("one")).pod
                cluster.apply(policy)
                after = before
                with anyio.move_on_after(ENFORCED_SECONDS):
                    while "reached" in after.values():
                        after = await reached()
                if after == before and not node:
                    pytest.skip(
                        "the network plugin of this cluster enforces no NetworkPolicy; one that "
                        "does, such as Calico, Cilium or kube-router, shows what it keeps out"
                    )
                print(f"without the policy: {before}; with it: {after}")
                assert "reached" not in after.values(), after
                now = await host.launcher.status("one")
                assert pod
                assert now.pod
                assert now.pod.uid == pod.uid
                assert (await call(host, "one", "run_command", command="echo on"))[
                    "stdout"
                ] == "on\n"


@pytest.fixture
def proxies(environment: dict[str, str], cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Two namespaces, each with a pod `proxy` that tries what it is told."""
    names = (f"podpipe-test-{secrets.token_hex(4)}", f"podpipe-test-{secrets.token_hex(4)}")
    try:
        for name in names:
            cluster.kubectl("create", "namespace", name, everywhere=True)
            cluster.kubectl(
                "run", "proxy", "-n", name, f"--image={cluster.settings().image}",
                "--image-pull-policy=IfNotPresent", "--command", "--", "sleep", "600",
                everywhere=True,
            )  # fmt: skip
        for name in names:
            cluster.kubectl("wait", "--for=condition=Ready", "pod/proxy", "-n", name,
                            "--timeout=60s", everywhere=True)  # fmt: skip
        yield names
    finally:
        cluster.kubectl("delete", "namespace", *names, "--wait=false", everywhere=True)


@pytest.mark.breaks_node
def test_the_proxies_that_are_named_reach_gateways_and_nothing_else_does(
    environment: dict[str, str],
    tmp_path: Path,
    node: Node | None,
    proxies: tuple[str, str],
) -> None:
    named, other = proxies
    gateway = {"GATEWAY": "ingress", "BASE_DOMAIN": "apps.test"}
    with administered(environment, tmp_path, "--ingress-from", named, **gateway) as led:
        made = led.podpipe("create", "--name", "work", "--json")
        assert made.returncode == 0, made.stderr
        listening = f"setsid /usr/bin/python3 -c '{LISTEN}' >ready 2>&1 & tail -f ready | head -1"
        ready = led.podpipe("run", "work", "--", listening)
        assert ready.returncode == 0, ready.stderr
        address = ready.stdout.strip()

        def reached(namespace: str) -> list[bool]:
            """Whether a gateway, and another port of its pod."""
            said = led.kubectl(
                "exec", "proxy", "-n", namespace, "--", "/usr/bin/python3", "-c", REACH,
                f"{address}:8080:tcp", f"{address}:{PORT}:tcp",
                everywhere=True,
            )  # fmt: skip
            return [line == "reached" for line in said.splitlines()]

        try:
            before = after = reached(other)
            deadline = time.monotonic() + ENFORCED_SECONDS
            while True in after and time.monotonic() < deadline:
                after = reached(other)
            if after == [True, True] and not node:
                pytest.skip("the network plugin of this cluster enforces no NetworkPolicy")
            print(f"another namespace: {before}, with the policy in force: {after}")
            assert after == [False, False]
            assert reached(named) == [True, False]
        finally:
            led.podpipe("destroy", "work", "--purge-home", "--yes")
