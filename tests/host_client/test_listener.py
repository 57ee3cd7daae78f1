"""The local address of published apps: which sandbox a connection reaches, and which it never does.

The pods of the stub are this machine, so a server here stands for the gateway of all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
from mcp import Client

from host_client import listener as listening
from host_client import loopback
from host_client.errors import PortTaken, SandboxExpired, SessionLost
from host_client.gateway import DOMAIN
from host_client.host import Host
from host_client.interrupts import EXIT_INTERRUPTED
from host_client.listener import WHO, Listener, OnDemand
from host_client.server import build_server
from in_pod_server.contract import ANNOTATION_ACCESS
from tests.host_client.conftest import Podpipe, StubCluster, runs
from tests.host_client.test_forward import free_port
from tests.host_client.test_ssh import PATIENCE, runtime, separation
from tests.in_pod_server.gateways import web_app
from tests.in_pod_server.support import eventually

__all__ = ["runtime", "separation"]


class Gateway(BaseHTTPRequestHandler):
    """Answers with the host that it was asked for, and with what was sent."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/large"):
            body = bytes(int(self.path.rpartition("=")[2]))
        said = json.dumps({"host": self.headers["Host"], "path": self.path}).encode() + b"\n" + body
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(autouse=True)
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        server.daemon_threads = True
        monkeypatch.setattr(listening, "GATEWAY_PORT", server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Address:
    """A listener of one user, and a client of it."""

    def __init__(self, host: Host, port: int, first: bool, listener: Listener) -> None:
        self.host = host
        self.port = port
        self.first = first
        self.listener = listener

    async def ask(
        self, host: str, path: str = "/", body: bytes = b"", head: str = ""
    ) -> tuple[int, bytes]:
        """Status and body of one request for a host."""
        request = (
            f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n{head}\r\n"
        )
        return await self.say(request.encode("latin-1") + body)

    async def say(self, data: bytes) -> tuple[int, bytes]:
        async with await anyio.connect_tcp("127.0.0.1", self.port) as stream:
            await stream.send(data)
            said = b"".join([chunk async for chunk in stream])
        head, _, rest = said.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, rest


@asynccontextmanager
async def listened(
    stub: StubCluster, runtime: Path, port: int = 0, **environment: str
) -> AsyncIterator[Address]:
    port = port or free_port()
    settings = stub.settings(XDG_RUNTIME_DIR=str(runtime.parent), **environment)
    with anyio.fail_after(90):
        async with Host(settings) as host, anyio.create_task_group() as tasks:
            listener = Listener(host, port, tasks)
            first = await tasks.start(listener.serve)
            yield Address(host, port, first, listener)
            tasks.cancel_scope.cancel()


async def made(address: Address, name: str) -> str:
    status = await address.host.launcher.create(name=name)
    return status.sandbox.id


async def test_a_request_reaches_the_gateway_unchanged_and_its_answer_comes_back(
    stub: StubCluster, runtime: Path
) -> None:
    async with listened(stub, runtime) as address:
        box = await made(address, "work")
        url = address.listener.url(box, "web")
        assert url == f"http://web.{box}.{DOMAIN}:{address.port}/"
        host = url.removeprefix("http://").rstrip("/")
        body = os.urandom(1_000_000)
        status, said = await address.ask(host, "/a%20b?token=x&y", body)
        line, _, echoed = said.partition(b"\n")
        assert status == 200
        assert json.loads(line) == {"host": host, "path": "/a%20b?token=x&y"}
        assert echoed == body


async def test_every_sandbox_of_the_user_has_its_address_and_no_other_user_one(
    stub: StubCluster, runtime: Path
) -> None:
    async with listened(stub, runtime) as address:
        boxes = [await made(address, name) for name in ("one", "two")]
        async with Host(stub.settings(PODPIPE_USER="bob")) as bob:
            foreign = (await bob.launcher.create(name="his")).sandbox.id
        for box in boxes:
            assert (await address.ask(f"web.{box}.{DOMAIN}"))[0] == 200
            assert (await address.ask(f"{box.upper()}.{DOMAIN}:1"))[0] == 200, (
                "the page of a sandbox"
            )
        execs = stub.execs()
        for absent in (foreign, "his", "one", "nonesuch"):
            assert (await address.ask(f"web.{absent}.{DOMAIN}"))[0] == 404
        assert stub.execs() == execs


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost:8790",
        "127.0.0.1",
        "[::1]:80",
        DOMAIN,
        f"a.b.work.{DOMAIN}",
        f"work.{DOMAIN}.",
        f"work.{DOMAIN}.evil.example",
        f"evil.example/.work.{DOMAIN}",
        f".{DOMAIN}",
        f"-.work-.{DOMAIN}",
        f"x_y.{DOMAIN}@evil",
        "",
    ],
)
async def test_a_host_that_is_no_sandboxs_is_refused_and_asks_no_cluster(
    stub: StubCluster, runtime: Path, host: str
) -> None:
    """A name of somebody else's that leads to this machine: DNS rebinding."""
    async with listened(stub, runtime) as address:
        status, said = await address.ask(host)
        assert status in (400, 421)
        assert b"work" not in said
    assert not (stub.folder / "calls.jsonl").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + b"x" * 40_000,
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    ],
    ids=["no host", "two hosts", "http2", "tls", "endless", "space"],
)
async def test_what_is_no_request_with_one_host_is_answered_with_an_error(
    stub: StubCluster, runtime: Path, data: bytes
) -> None:
    async with listened(stub, runtime) as address:
        assert (await address.say(data))[0] in (400, 431, 505)
        async with await anyio.connect_tcp("127.0.0.1", address.port) as silent:
            await silent.send_eof()


async def test_a_connection_stays_with_its_sandbox_whatever_it_asks_for_later(
    stub: StubCluster, runtime: Path
) -> None:
    """The second request is its gateway's to refuse: it never reaches another's."""
    async with listened(stub, runtime) as address:
        one, two = [await made(address, name) for name in ("one", "two")]
        assert (await address.ask(f"web.{one}.{DOMAIN}"))[0] == 200
        execs = stub.execs()
        requests = (
            f"GET / HTTP/1.1\r\nHost: web.{one}.{DOMAIN}\r\n\r\n"
            f"GET / HTTP/1.1\r\nHost: web.{two}.{DOMAIN}\r\nConnection: close\r\n\r\n"
        )
        _, said = await address.say(requests.encode("ascii"))
        assert said.count(b'"host"') == 2
        assert stub.execs() == execs, "nothing was opened into the other one"


async def test_many_connections_share_one_carrier_and_a_slow_one_stalls_nobody(
    stub: StubCluster, runtime: Path
) -> None:
    async with listened(stub, runtime) as address:
        host = f"web.{await made(address, 'work')}.{DOMAIN}"
        assert (await address.ask(host))[0] == 200
        execs = stub.execs()
        async with await anyio.connect_tcp("127.0.0.1", address.port) as slow:
            await slow.send(f"GET /large=60000000 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("ascii"))
            await slow.receive()
            answered: list[int] = []

            async def ask() -> None:
                answered.extend([(await address.ask(host))[0] for _ in range(3)])

            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(ask)
            assert answered == [200] * 60
        assert stub.execs() == execs


async def test_where_no_gateway_answers_the_client_is_told_to_try_again(
    stub: StubCluster, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L62: what leads nowhere does not look open."""
    monkeypatch.setattr(listening, "GATEWAY_PORT", free_port())
    async with listened(stub, runtime) as address:
        host = f"web.{await made(address, 'work')}.{DOMAIN}"
        status, said = await address.ask(host)
        assert status == 503
        assert b"expose a port there first" in said


async def test_a_suspended_sandbox_is_resumed_by_a_request_unless_that_is_by_request_only(
    stub: StubCluster, runtime: Path
) -> None:
    async with listened(stub, runtime) as address:
        box = await made(address, "work")
        host = f"web.{box}.{DOMAIN}"
        assert (await address.ask(host))[0] == 200
        await address.host.launcher.suspend(box)
        assert (await address.ask(host))[0] == 200
        await address.host.launcher.suspend(box)
    async with listened(stub, runtime, PODPIPE_RESUME="manual") as address:
        status, said = await address.ask(host)
        assert (status, b"suspended" in said) == (503, True)


async def test_an_unused_carrier_ends_and_the_next_request_opens_another(
    stub: StubCluster, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox that nobody uses is to end itself, though its address is still served."""
    from host_client import tunnel

    monkeypatch.setattr(tunnel, "IDLE_SECONDS", 0.5)
    async with listened(stub, runtime) as address:
        host = f"web.{await made(address, 'work')}.{DOMAIN}"
        assert (await address.ask(host))[0] == 200
        while list(runtime.glob("ssh-*")):  # noqa: ASYNC110, ASYNC240
            await anyio.sleep(0.05)
        assert (await address.ask(host))[0] == 200


async def test_two_of_one_user_share_the_port_and_the_second_takes_over(
    stub: StubCluster, runtime: Path
) -> None:
    async with listened(stub, runtime) as first:
        assert first.first
        box = await made(first, "work")
        async with (
            Host(stub.settings(XDG_RUNTIME_DIR=str(runtime.parent))) as host,
            anyio.create_task_group() as tasks,
        ):
            second = Listener(host, first.port, tasks)
            assert await tasks.start(second.serve) is False
            first.listener._tasks.cancel_scope.cancel()
            while True:
                try:
                    status, _ = await first.ask(f"web.{box}.{DOMAIN}")
                    break
                except OSError:
                    await anyio.sleep(0.1)
            assert status == 200
            tasks.cancel_scope.cancel()


async def test_the_second_waits_for_a_first_that_is_stopped_for_a_while(
    stub: StubCluster, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ctrl-Z, say: the second took it for another program, and ended."""
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(listening, "TAKE_OVER_SECONDS", 0.1)
    looks = 0

    async def stopped(_: object) -> None:
        nonlocal looks
        looks += 1
        await anyio.sleep_forever()

    async with (
        listened(stub, runtime) as first,
        Host(stub.settings(XDG_RUNTIME_DIR=str(runtime.parent))) as host,
        anyio.create_task_group() as tasks,
    ):
        assert await tasks.start(Listener(host, first.port, tasks).serve) is False
        monkeypatch.setattr(first.listener, "_lead", stopped)
        while looks < 3:  # noqa: ASYNC110 - the other's loop does it
            await anyio.sleep(0.05)
        first.listener._tasks.cancel_scope.cancel()
        while True:
            try:
                status, _ = await first.ask(DOMAIN, WHO)
                break
            except OSError:
                await anyio.sleep(0.1)
        assert status == 200
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("other", ["another user", "another program", "a silent program"])
async def test_a_port_that_another_has_is_told_with_the_setting(
    stub: StubCluster, runtime: Path, other: str, gateway: ThreadingHTTPServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(listening, "HEAD_SECONDS", 1.0)
    async with listened(stub, runtime) as address, Host(stub.settings(PODPIPE_USER="bob")) as bob:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = {
                "another user": address.port,
                "another program": gateway.server_port,
                "a silent program": silent.getsockname()[1],
            }[other]
            with pytest.raises(PortTaken, match="PODPIPE_OPEN_PORT"):
                await listening_alone(bob, port)


async def listening_alone(host: Host, port: int) -> None:
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(Listener(host, port, tasks).serve)
            tasks.cancel_scope.cancel()
    except* PortTaken as group:
        raise group.exceptions[0] from None


@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [
        (ExceptionGroup("", [SandboxExpired("it is over")]), 410, b"it is over"),
        (SessionLost("ssh did not get through", sent=False), 502, b"ssh did not get through"),
        (RuntimeError("a secret of the request"), 500, b"internal error of podpipe"),
    ],
    ids=["expired", "lost", "unforeseen"],
)
async def test_whatever_fails_for_one_connection_is_told_and_ends_no_other(
    stub: StubCluster,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    status: int,
    said: bytes,
) -> None:
    async def fail(*_: object) -> None:
        raise failure

    async with listened(stub, runtime) as address:
        host = f"web.{await made(address, 'work')}.{DOMAIN}"
        with monkeypatch.context() as patch:
            patch.setattr(Listener, "_tunnel", fail)
            answer = await address.ask(host)
            assert answer[0] == status
            assert said in answer[1]
            assert b"secret" not in answer[1]
        assert (await address.ask(host))[0] == 200


async def test_so_many_connections_are_open_and_others_wait_for_a_place(
    stub: StubCluster, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback, "MAX_OPEN", 3)
    async with listened(stub, runtime) as address, contextlib.AsyncExitStack() as silent:
        for _ in range(5):
            await silent.enter_async_context(await anyio.connect_tcp("127.0.0.1", address.port))
        with anyio.move_on_after(0.5) as waited:
            await address.ask("elsewhere")
        assert waited.cancelled_caught
        await silent.aclose()
        assert (await address.ask("elsewhere"))[0] == 421


def test_connections_that_take_every_descriptor_keep_nobody_waiting_for_good(
    podpipe: Podpipe, stub: StubCluster, runtime: Path
) -> None:
    port = free_port()
    process = podpipe.start("open", "--no-browser", PODPIPE_OPEN_PORT=str(port))
    try:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        used = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 10, used + 10))
        with contextlib.ExitStack() as silent:
            for _ in range(40):
                silent.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            said = process.stderr.readline()
        assert b"no connection can be accepted for now" in said
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: elsewhere\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 421"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)


async def test_who_listens_is_told_to_the_same_domain_only(
    stub: StubCluster, runtime: Path
) -> None:
    async with listened(stub, runtime) as address:
        status, said = await address.ask(DOMAIN, WHO)
        assert (status, len(said)) == (200, 64)
        assert (await address.ask("evil.example", WHO))[0] == 421


async def test_what_a_tool_publishes_is_served_at_the_address_that_it_tells(
    stub: StubCluster, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: a model's call, this machine's port, ssh, Caddy in the pod, the app."""
    monkeypatch.setattr(listening, "GATEWAY_PORT", gate := free_port())
    stub.faults(gateway={"port": gate})
    settings = stub.settings(
        XDG_RUNTIME_DIR=str(runtime.parent), PODPIPE_OPEN_PORT=str(port := free_port())
    )
    with anyio.fail_after(60), web_app() as app:
        async with Host(settings) as host, Client(build_server(host)) as client:
            made = await client.call_tool("create_sandbox", {"name": "work"})
            asked = {"sandbox_id": "work", "internal_port": app, "name": "web"}
            told = await client.call_tool("expose_port", asked)
            assert made.structured_content
            assert told.structured_content
            assert "warning" not in told.structured_content
            url = urlsplit(told.structured_content["url"])
            assert url.port == port
            address = Address(host, port, True, await OnDemand(host).listener())
            bearer = f"Authorization: Bearer {made.structured_content['token']}\r\n"
            assert (await address.ask(url.netloc, "/"))[0] == 401
            assert (await address.ask(url.netloc, "/", head=bearer))[0] == 200
            other = url.netloc.replace("web.", "other.")
            assert (await address.ask(other, "/", head=bearer))[0] == 404


async def test_a_tool_tells_where_the_address_cannot_be_served(
    stub: StubCluster, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.5)
    stub.faults(gateway={"port": free_port()})
    with socket.create_server(("127.0.0.1", 0)) as taken, anyio.fail_after(60):
        port = str(taken.getsockname()[1])
        settings = stub.settings(PODPIPE_OPEN_PORT=port)
        async with Host(settings) as host, Client(build_server(host)) as client:
            await client.call_tool("create_sandbox", {"name": "work"})
            asked = {"sandbox_id": "work", "internal_port": 3000, "name": "web"}
            told = await client.call_tool("expose_port", asked)
        assert not told.is_error
        assert told.structured_content
        assert "PODPIPE_OPEN_PORT" in told.structured_content["warning"]


def test_open_prints_a_link_starts_no_browser_unasked_and_ends_by_ctrl_c(
    podpipe: Podpipe, stub: StubCluster, runtime: Path, tmp_path: Path
) -> None:
    port = str(free_port())
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n', encoding="utf-8")
    browser.chmod(0o755)
    stub.faults(gateway={"port": free_port()})
    podpipe("create", "--name", "work")
    assert podpipe("expose", "work", "3000", "web").returncode == 0
    for options in (["--no-browser"], ["--json"], []):
        process = podpipe.start(
            "open", "work", "web", *options, PODPIPE_OPEN_PORT=port, BROWSER=str(browser)
        )
        assert process.stdout
        said = process.stdout.readline().decode()
        if options == ["--json"]:
            while not said.endswith("}\n"):
                said += process.stdout.readline().decode()
            facts = json.loads(said)
            assert (facts["port"], facts["listening"]) == (int(port), True)
            assert facts["link"].startswith(f"{facts['url']}?token=")
            said = facts["link"]
        assert said.startswith("http://web.work-")
        assert f".{DOMAIN}:{port}/?token=" in said
        if options:
            assert not (tmp_path / "opened").exists()
        else:
            page = opened_page(tmp_path / "opened")
            assert said.split()[0] in page.read_text("utf-8"), "it is not in the browser's argv"
            assert page.stat().st_mode & 0o077 == 0
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == EXIT_INTERRUPTED
        assert not runs(process.pid)
    assert not page.exists()


def test_a_shared_link_is_made_and_nothing_is_served(
    podpipe: Podpipe, stub: StubCluster, runtime: Path
) -> None:
    stub.faults(gateway={"port": free_port()})
    podpipe("create", "--name", "work")
    podpipe("expose", "work", "3000", "web")
    assert podpipe("open", "work", "--share").returncode == 2
    assert podpipe("open", "work", "web", "--share", "--for", "soon").returncode == 2
    shared = podpipe("open", "work", "web", "--share", "--for", "1h", "--json")
    assert shared.returncode == 0, shared.stderr
    assert "`podpipe open work/web` runs" in shared.stderr
    facts = json.loads(shared.stdout)
    assert facts["link"].startswith(f"{facts['url']}?token=")
    (record,) = [o for key, o in stub.objects.items() if key.startswith("ConfigMap/")]
    grant = json.loads(record["metadata"]["annotations"][ANNOTATION_ACCESS])["grants"][-1]
    assert (grant["app"], bool(grant["until"])) == ("web", True)


def opened_page(told: Path) -> Path:
    """The file that a browser was started with."""
    eventually(lambda: told.exists() and told.stat().st_size > 0)
    return Path(told.read_text("utf-8").strip().removeprefix("file://"))


def test_open_of_what_is_not_published_says_what_is(
    podpipe: Podpipe, stub: StubCluster, runtime: Path
) -> None:
    assert podpipe("open", "nonesuch").returncode == 3
    podpipe("create", "--name", "work")
    ended = podpipe("open", "work", "web")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "publishes no app 'web'; it publishes none. Publish one with `podpipe" in ended.stderr


def shared(podpipe: Podpipe, *words: str) -> str:
    """Host and path to which a link leads that `open --share` makes."""
    made = podpipe("open", *words, "--share", "--json")
    assert made.returncode == 0, made.stderr
    link: str = json.loads(made.stdout)["url"]
    return link.removeprefix("http://")


def test_open_takes_an_app_a_sandbox_or_both_and_lists_what_is_called_alike(
    podpipe: Podpipe, stub: StubCluster, runtime: Path
) -> None:
    stub.faults(gateway={"port": free_port()})
    for name in ("one", "two"):
        podpipe("create", "--name", name)
    for box, app in (("one", "web"), ("one", "api"), ("one", "two")):
        assert podpipe("expose", box, "3000", app).returncode == 0
    for words in (("web",), ("one/web",), ("one", "web")):
        assert shared(podpipe, *words).startswith("web.one-")
    assert shared(podpipe, "one/two").startswith("two.one-")
    page = podpipe("open", "one", "--share")
    assert (page.returncode, "needs the app" in page.stderr) == (2, True)
    alike = podpipe("open", "two", "--share")
    assert alike.returncode == 2
    assert "'two' is the name of 2; choose one: `podpipe open two/`, `podpipe open one/two`" in (
        alike.stderr
    )
    twice = podpipe("open", "one/web", "web", "--share")
    assert (twice.returncode, "names the app already" in twice.stderr) == (2, True)
    assert podpipe("open", "/web", "--share").returncode == 2
    nothing = podpipe("open", "nonesuch", "--share")
    assert nothing.returncode == 3
    assert "is called 'nonesuch' or publishes an app of that name" in nothing.stderr


async def test_a_host_serves_the_address_once_it_is_asked_for_and_others_join(
    stub: StubCluster, runtime: Path
) -> None:
    port = free_port()
    settings = stub.settings(
        XDG_RUNTIME_DIR=str(runtime.parent), PODPIPE_OPEN_PORT=str(port)
    )  # fmt: skip
    with anyio.fail_after(60):
        async with Host(settings) as one, Host(settings) as other:
            box = (await one.launcher.create(name="work")).sandbox.id
            local = OnDemand(one)
            first = await local.listener()
            assert await local.listener() is first
            await OnDemand(other).listener()
            address = Address(one, port, True, first)
            assert (await address.ask(f"web.{box}.{DOMAIN}"))[0] == 200
        with pytest.raises(OSError, match="connect"):
            await anyio.connect_tcp("127.0.0.1", port)


async def test_a_port_that_is_taken_ends_nothing_but_the_address(
    stub: StubCluster, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with anyio.fail_after(60):
            async with Host(stub.settings(PODPIPE_OPEN_PORT=str(port))) as host:
                local = OnDemand(host)
                for _ in range(2):
                    with pytest.raises(PortTaken, match="PODPIPE_OPEN_PORT"):
                        await local.listener()
                assert await host.launcher.list_all() == []
        taken.close()


async def test_a_joined_host_goes_on_where_another_program_was_quicker(
    stub: StubCluster, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(listening, "TAKE_OVER_SECONDS", 0.5)
    monkeypatch.setattr(listening, "STOPPED_SECONDS", 0.0)
    port = free_port()
    settings = stub.settings(PODPIPE_OPEN_PORT=str(port))
    with anyio.fail_after(60):
        async with Host(settings) as other:
            local = OnDemand(other)
            async with Host(settings) as one:
                await OnDemand(one).listener()
                joined = await local.listener()
            with socket.create_server(("127.0.0.1", port)):
                while local._listener is joined:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                with pytest.raises(PortTaken):
                    await local.listener()
            await local.listener()
            assert await other.launcher.list_all() == []
