"""Many clients of one gateway at once: what one of them does, and what happens to Caddy, hurts no other.

As in `test_gateway`, nothing here knows where the gateway is.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection

from tests.in_pod_server.gateways import Served, Streams, free_port, gateway, web_app
from tests.in_pod_server.support import eventually

MANY = 50


@pytest.fixture(scope="module")
def app() -> Iterator[int]:
    """The port of the app, where its sandbox has it."""
    with web_app() as port:
        yield port


@pytest.fixture(scope="module")
def place(short_module_path: Path, app: int) -> Iterator[Served]:
    with gateway(short_module_path) as local:
        for name in ("web", "other"):
            local.call("expose_port", internal_port=app, name=name)
        yield local


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def many(stack: contextlib.ExitStack, place: Served, app: str) -> list[ClientConnection]:
    return [
        stack.enter_context(place.websocket(headers=place.bearer, app=app))[0] for _ in range(MANY)
    ]


def all_echo(sockets: list[ClientConnection]) -> bool:
    for each in sockets:
        each.send("still there")
    return [each.recv(10) for each in sockets] == ["still there"] * len(sockets)


def test_fifty_websockets_stay_open_while_apps_come_and_go(
    place: Served, app: int, opened: contextlib.ExitStack
) -> None:
    """L51: a change of the routes dropped the WebSockets of others."""
    sockets = many(opened, place, "web")
    events, response = place.open("GET", "/sse", place.bearer)
    opened.callback(events.close)
    for number in range(5):
        place.call("expose_port", internal_port=app, name=f"more-{number}")
        assert place.ask("GET", "/", place.bearer, app=f"more-{number}").status == 200
    for number in range(5):
        place.call("unexpose_port", name=f"more-{number}")
    assert all_echo(sockets)
    assert response.readline().startswith(b"data:")


def test_closing_an_app_ends_its_streams_and_no_others(
    place: Served, app: int, opened: contextlib.ExitStack
) -> None:
    """L51: nor does one that takes a route away."""
    place.call("expose_port", internal_port=app, name="closed")
    closed = Streams(opened, place, "closed", place.token)
    kept = Streams(opened, place, "other", place.token)
    sockets = many(opened, place, "other")
    began = time.monotonic()
    place.call("unexpose_port", name="closed")
    assert closed.end()
    assert time.monotonic() - began < 5, "at once, where nobody else is at work"
    assert kept.go_on()
    assert all_echo(sockets)
    assert place.ask("GET", "/", place.bearer, app="closed").status == 404
    assert place.ask("GET", "/", place.bearer, app="other").status == 200


def test_a_request_under_way_is_not_disturbed_by_another_app(place: Served) -> None:
    """L51: nor is a request cut that is still to be answered."""
    statuses: list[int] = []
    slow = threading.Thread(
        target=lambda: statuses.append(place.ask("GET", "/slow", place.bearer).status)
    )
    slow.start()
    place.call("expose_port", internal_port=free_port(), name="more")
    place.call("unexpose_port", name="more")
    assert place.ask("GET", "/go", place.bearer).status == 200
    slow.join(20)
    assert statuses == [200]


def test_four_clients_that_expose_and_close_at_once_leave_the_exact_table(place: Served) -> None:
    """L52: of two who wrote at once one lost a route."""
    before = place.table()
    failed: list[object] = []

    def work(client: int) -> None:
        with place.client() as wire:
            for number in range(25):
                name = f"c{client}-{number % 5}"
                port = 3000 + 100 * client + number
                done = [("expose_port", {"internal_port": port, "name": name})]
                done += [("unexpose_port", {"name": name})] * (number % 2)
                for tool, arguments in done:
                    result = wire.call(secrets.token_hex(4), tool, **arguments)
                    failed.extend([result] if result.get("isError") else [])

    clients = [threading.Thread(target=work, args=(client,)) for client in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    expected = {
        f"c{client}-{number % 5}": 3000 + 100 * client + number
        for client in range(4)
        for number in range(20, 25)
        if not number % 2
    }
    table = place.table()
    for name in expected:
        place.call("unexpose_port", name=name)
    assert not failed
    assert table["apps"] == before["apps"] | expected
    assert table["version"] == before["version"] + 4 * (25 + 12)


def test_a_caddy_killed_in_traffic_is_soon_back_with_all_apps(place: Served) -> None:
    """L53: a Caddy that was started again had no routes."""
    statuses: list[int] = []
    over = threading.Event()

    def status(app: str) -> int:
        """0 for a connection that was cut."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return place.ask("GET", "/", place.bearer, app=app).status
        return 0

    def traffic() -> None:
        while not over.is_set():
            statuses.append(status("web"))

    clients = [threading.Thread(target=traffic) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        for _ in range(3):
            eventually(lambda: statuses[-4:] == [200] * 4)
            place.kill_caddy()
            began = time.monotonic()
            for app in ("web", "other"):
                eventually(lambda app=app: status(app) == 200)  # type: ignore[misc]
            assert time.monotonic() - began < 5, "under two seconds where nobody else is at work"
    finally:
        over.set()
        for client in clients:
            client.join(20)
    # 503 is the local address's, of a connection that was cut before its answer.
    assert set(statuses) <= {200, 0, 503}
