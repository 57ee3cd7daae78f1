"""What happens to the gateway over time: routes come and go, tokens run out, Caddy dies."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from in_pod_server import contract
from in_pod_server.gateway.access import cookie_of
from in_pod_server.gateway.auth import COOKIE
from tests.in_pod_server.gateways import Local, Streams, access, ends, free_port, gateway, web_app
from tests.in_pod_server.support import PATIENCE, eventually


@pytest.fixture(scope="module")
def app() -> Iterator[int]:
    with web_app() as port:
        yield port


@pytest.fixture(scope="module")
def empty(short_module_path: Path) -> Iterator[Local]:
    """For calls that change nothing."""
    with gateway(short_module_path) as local:
        yield local


@pytest.fixture
def place(short_path: Path) -> Iterator[Local]:
    with gateway(short_path) as local:
        yield local


def test_caddy_runs_only_when_there_is_somebody_to_serve(place: Local, app: int) -> None:
    children = Path(f"/proc/{place.daemon_pid}/task/{place.daemon_pid}/children")
    assert not children.read_text().split()
    assert place.ask("GET", "/").status == 404
    assert place.caddy()


def test_an_app_is_there_with_the_answer_of_expose_port_and_gone_with_that_of_unexpose(
    place: Local, app: int
) -> None:
    for _ in range(3):
        place.call("expose_port", internal_port=app, name="web")
        assert place.ask("GET", "/", place.bearer).status == 200
        place.call("unexpose_port", name="web")
        assert place.ask("GET", "/", place.bearer).status == 404


def test_a_name_that_is_published_again_leads_to_the_new_port(place: Local, app: int) -> None:
    place.call("expose_port", internal_port=free_port(), name="web")
    assert place.ask("GET", "/", place.bearer).status == 503
    assert place.call("expose_port", internal_port=app, name="web")["answers"]
    assert place.ask("GET", "/", place.bearer).status == 200


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", "A", "a.b", "a_b", "ä", "a" * 41, "s1abc", "a b", "a\n", "{x}", "../x"]
)
def test_names_that_are_no_label_are_refused(empty: Local, name: str) -> None:
    assert "is no name for an app" in empty.refused("expose_port", internal_port=3000, name=name)


@pytest.mark.parametrize("port", [-1, 0, 22, 80, 443, 1023, 2019, 8080, 65536, 10**9])
def test_ports_that_are_not_for_apps_are_refused(empty: Local, port: int) -> None:
    said = empty.refused("expose_port", internal_port=port, name="web")
    assert "cannot be published" in said
    assert "another port" in said
    assert empty.call("list_apps")["apps"] == []


def test_what_is_not_published_cannot_be_closed(empty: Local) -> None:
    assert "there are: none" in empty.refused("unexpose_port", name="web")


def test_there_are_so_many_apps_and_no_more(place: Local) -> None:
    for number in range(contract.MAX_APPS):
        place.call("expose_port", internal_port=3000, name=f"app-{number}")
    assert "unexpose_port one" in place.refused("expose_port", internal_port=3000, name="more")


def test_list_apps_says_which_answer(place: Local, app: int) -> None:
    place.call("expose_port", internal_port=app, name="up")
    place.call("expose_port", internal_port=free_port(), name="down")
    listed = place.call("list_apps")["apps"]
    assert [(each["name"], each["answers"]) for each in listed] == [("down", False), ("up", True)]
    assert listed[1]["host"] == "up.s1abc"


def test_a_table_that_cannot_be_kept_is_not_changed(place: Local, app: int) -> None:
    place.call("expose_port", internal_port=app, name="web")
    (place.folder / "run" / "apps.new").mkdir()
    assert "nothing was changed" in place.refused("expose_port", internal_port=app, name="more")
    assert "nothing was changed" in place.refused("unexpose_port", name="web")
    assert place.ask("GET", "/", place.bearer).status == 200
    assert place.ask("GET", "/", place.bearer, app="more").status == 404


def ask_again(place: Local, name: str) -> int:
    """The status that a client gets which tries again once, if its connection was cut."""
    try:
        return place.ask("GET", "/", place.bearer, app=name).status
    except (ConnectionError, http.client.HTTPException):
        return place.ask("GET", "/", place.bearer, app=name).status


def test_an_app_that_is_published_while_caddy_is_away_is_there_with_the_others(
    place: Local, app: int
) -> None:
    """L53: what was changed meanwhile failed for ever."""
    place.call("expose_port", internal_port=app, name="web")
    assert place.ask("GET", "/", place.bearer).status == 200
    place.kill_caddy()
    place.call("expose_port", internal_port=app, name="more")
    for name in ("web", "more"):
        assert ask_again(place, name) == 200
    place.kill_caddy()
    place.call("unexpose_port", name="more")
    assert [ask_again(place, name) for name in ("web", "more")] == [200, 404]


def test_caddy_ends_with_the_daemon_even_if_that_is_killed(short_path: Path, app: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with gateway(short_path) as place:
            place.call("expose_port", internal_port=app, name="web")
            caddy = place.caddy()
            os.kill(place.daemon_pid, number)
            eventually(lambda pid=caddy: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
        (short_path / "d.sock").unlink(missing_ok=True)


def test_apps_and_grants_outlive_a_restart_of_the_container(short_path: Path, app: int) -> None:
    """L53: what starts again has all that was there."""
    with gateway(short_path) as place:
        place.call("expose_port", internal_port=app, name="web")
    with gateway(short_path) as again:
        assert again.ask("GET", "/", again.bearer).status == 200
        hello = again.wire.request(
            "hello-2", "initialize", {"protocolVersion": "2025-11-25", "capabilities": {},
            "clientInfo": {"name": "t", "version": "0"}},
        )  # fmt: skip
        known = hello["result"]["capabilities"]["experimental"][contract.HELLO]
        assert json.loads(known[contract.HELLO_APPS])["apps"] == {"web": app}


def test_a_new_pod_begins_with_the_apps_that_it_was_made_with(short_path: Path, app: int) -> None:
    """L53: from the record, whose table is one with the cluster's state."""
    with gateway(short_path) as place:
        token = place.token
    table = json.dumps({"version": 7, "apps": {"web": app}})
    notes = {
        contract.ANNOTATION_APPS: table,
        contract.ANNOTATION_ACCESS: access(1, (token, "", "")),
    }
    lines = "".join(f"{name}={json.dumps(value)}\n" for name, value in notes.items())
    with gateway(short_path, notes=lines) as again:
        bearer = {"Authorization": f"Bearer {token}"}
        assert again.ask("GET", "/", bearer).status == 200
        assert json.loads(again.call("expose_port", internal_port=app, name="x")["table"]) == {
            "version": 8,
            "apps": {"web": app, "x": app},
        }


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_publishing_a_name_on_another_port_ends_what_was_open_on_the_first(
    place: Local, app: int, opened: contextlib.ExitStack
) -> None:
    for name in ("web", "other"):
        place.call("expose_port", internal_port=app, name=name)
    moved, kept = (Streams(opened, place, name, place.token) for name in ("web", "other"))
    place.call("expose_port", internal_port=app, name="web")
    assert moved.go_on(), "it is published as it was"
    with web_app() as another:
        place.call("expose_port", internal_port=another, name="web")
        assert moved.end()
        assert kept.go_on()
        assert place.ask("GET", "/", place.bearer).status == 200


def test_streams_take_all_descriptors_but_those_that_tools_need(short_path: Path, app: int) -> None:
    few = ("bash", "-c", 'ulimit -Sn 256; ulimit -Hn 640; exec "$@"', "bash")
    with gateway(short_path, under=few) as place, contextlib.ExitStack() as streams:
        place.call("expose_port", internal_port=app, name="web")
        sockets = [
            streams.enter_context(place.websocket(headers=place.bearer))[0] for _ in range(64)
        ]
        refused = place.ask("GET", "/", place.bearer)
        assert (refused.status, refused.headers["retry-after"]) == (503, "2")
        soon = "until [ $(ulimit -S -n) = 256 ]; do :; done; echo ok"
        assert place.call("run_command", command=soon)["stdout"] == "ok\n"
        for each in sockets:
            each.send("still there")
        assert [each.recv(10) for each in sockets] == ["still there"] * 64
        streams.close()
        eventually(lambda: place.ask("GET", "/", place.bearer).status == 200)


def test_as_many_as_may_come_at_once_are_all_answered(place: Local, app: int) -> None:
    place.call("expose_port", internal_port=app, name="web")
    request = f"GET / HTTP/1.1\r\nHost: {place.host()}\r\nConnection: close\r\n\r\n".encode()
    with contextlib.ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection(place.address, PATIENCE))
            for _ in range(900)
        ]
        for client in clients:
            client.sendall(request)
        answers = Counter(client.recv(12) for client in clients)
    assert answers == {b"HTTP/1.1 401": 900}


def test_rotating_ends_what_the_old_tokens_opened(
    place: Local, app: int, opened: contextlib.ExitStack
) -> None:
    for name in ("web", "other"):
        place.call("expose_port", internal_port=app, name=name)
    fresh = secrets.token_urlsafe(32)
    old = [Streams(opened, place, name, place.token) for name in ("web", "other")]
    place.tell(access(2, (fresh, "", "")))
    assert all(streams.end() for streams in old)
    assert place.ask("GET", "/", place.bearer).status == 401
    assert place.ask("GET", "/", {"Cookie": place.cookie}).status == 401
    assert place.ask("GET", "/", {"Authorization": f"Bearer {fresh}"}).status == 200


def test_a_token_that_is_taken_back_ends_what_it_opened_and_no_others(
    place: Local, app: int, opened: contextlib.ExitStack
) -> None:
    place.call("expose_port", internal_port=app, name="web")
    shared = secrets.token_urlsafe(32)
    place.tell(access(2, (place.token, "", ""), (shared, "web", "")))
    theirs = Streams(opened, place, "web", shared)
    kept = Streams(opened, place, "web", place.token)
    by_cookie = opened.enter_context(place.websocket(headers={"Cookie": place.cookie}))[0]
    by_link = opened.enter_context(place.websocket(f"/ws?token={shared}"))[0]
    place.tell(access(3, (place.token, "", "")))
    assert theirs.end()
    assert ends(by_link)
    assert kept.go_on()
    by_cookie.send("still there")
    assert by_cookie.recv(10) == "still there"


def test_of_two_cookies_the_one_that_lasts_keeps_a_stream(
    place: Local, app: int, opened: contextlib.ExitStack
) -> None:
    place.call("expose_port", internal_port=app, name="web")
    shared = secrets.token_urlsafe(32)
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    place.tell(access(2, (shared, "web", until), (place.token, "", "")))
    both = {"Cookie": f"{COOKIE}={cookie_of(shared)}; {place.cookie}"}
    socket = opened.enter_context(place.websocket(headers=both))[0]
    place.tell(access(3, (place.token, "", "")))
    socket.send("still there")
    assert socket.recv(10) == "still there"


def test_another_token_beside_the_first_cuts_nothing(place: Local, app: int) -> None:
    place.call("expose_port", internal_port=app, name="web")
    fresh = secrets.token_urlsafe(32)
    with place.websocket(headers=place.bearer) as (opened, _):
        place.tell(access(2, (place.token, "", ""), (fresh, "", "")))
        for token in (place.token, fresh):
            assert place.ask("GET", "/", {"Authorization": f"Bearer {token}"}).status == 200
        opened.send("still there")
        assert opened.recv(10) == "still there"


def test_what_is_older_or_unreadable_changes_no_grant(place: Local, app: int) -> None:
    place.call("expose_port", internal_port=app, name="web")
    other = secrets.token_urlsafe(32)
    for told in (
        access(0, (other, "", "")),
        access(1, (other, "", "")),
        "{",
        "[]",
        '{"version": 9, "grants": [{"hash": "x"}]}',
        '{"version": 9, "grants": [null]}',
        '{"version": "9", "grants": []}',
        "[" * 100_000,
    ):
        place.tell(told)
        assert place.ask("GET", "/", place.bearer).status == 200
        assert place.ask("GET", "/", {"Authorization": f"Bearer {other}"}).status == 401


def test_a_grant_of_one_app_opens_no_other_and_no_page(place: Local, app: int) -> None:
    for name in ("web", "other"):
        place.call("expose_port", internal_port=app, name=name)
    shared = secrets.token_urlsafe(32)
    place.tell(access(2, (place.token, "", ""), (shared, "web", "")))
    bearer = {"Authorization": f"Bearer {shared}"}
    assert place.ask("GET", "/", bearer).status == 200
    assert place.ask("GET", "/", bearer, app="other").status == 401
    assert place.ask("GET", "/", bearer, app="").status == 401
    seen = place.seen("/x", bearer | {"Cookie": place.cookie}, app="other")
    assert "authorization" not in seen["headers"], "the other app does not see it either"


def test_a_grant_that_runs_out_opens_nothing_and_ends_its_streams(
    place: Local, app: int, opened: contextlib.ExitStack
) -> None:
    place.call("expose_port", internal_port=app, name="web")
    shared = secrets.token_urlsafe(32)
    until = (datetime.now(UTC) + timedelta(seconds=2)).isoformat()
    place.tell(access(2, (place.token, "", ""), (shared, "web", until)))
    bearer = {"Authorization": f"Bearer {shared}"}
    kept = Streams(opened, place, "web", place.token)
    assert Streams(opened, place, "web", shared).end()
    assert place.ask("GET", "/", bearer).status == 401
    assert place.ask("GET", "/", place.bearer).status == 200
    assert kept.go_on()


def test_the_kubelets_file_is_taken_up_too(place: Local, app: int) -> None:
    place.call("expose_port", internal_port=app, name="web")
    fresh = secrets.token_urlsafe(32)
    told = json.dumps(access(2, (fresh, "", "")))
    file = place.folder / "podinfo" / contract.PODINFO_ANNOTATIONS
    file.write_text(f"{contract.ANNOTATION_ACCESS}={told}\n")
    bearer = {"Authorization": f"Bearer {fresh}"}
    eventually(lambda: place.ask("GET", "/", bearer).status == 200)
    assert place.ask("GET", "/", place.bearer).status == 401


def test_the_page_shows_what_runs_with_its_last_lines_as_text(place: Local) -> None:
    command = "printf 'first\\n%s\\n' '<b>last</b>' >&2; sleep 60"
    began = place.call("start_background", command=command)
    eventually(
        lambda: b"&lt;b&gt;last&lt;/b&gt;" in place.ask("GET", "/live", place.bearer, app="").body
    )
    page = place.ask("GET", "/live", place.bearer, app="").body
    assert b"<b>last" not in page
    assert b"sleep 60</code>" in page
    place.call("stop_process", process_id=began["process_id"])
    assert b"None." in place.ask("GET", "/live", place.bearer, app="").body


def test_no_token_is_written_anywhere(place: Local, app: int) -> None:
    place.call("expose_port", internal_port=app, name="web")
    place.ask("GET", f"/?token={place.token}")
    place.ask("GET", "/", place.bearer)
    place.ask("GET", "/", {"Cookie": place.cookie})
    place.call("unexpose_port", name="web")
    place.call("expose_port", internal_port=free_port(), name="web")
    assert place.ask("GET", f"/?token={place.token}").status == 503
    os.kill(place.caddy(), signal.SIGTERM)
    assert ask_again(place, "web") == 503
    secrets_of_it = [place.token.encode(), place.cookie.partition("=")[2].encode()]
    looked = 0
    for path in place.folder.rglob("*"):
        if path.is_file():
            looked += 1
            assert not any(secret in path.read_bytes() for secret in secrets_of_it), path
    assert looked > 3
    for pid in (place.daemon_pid, place.caddy()):
        for what in ("cmdline", "environ"):
            with contextlib.suppress(PermissionError):
                found = Path(f"/proc/{pid}/{what}").read_bytes()
                assert not any(secret in found for secret in secrets_of_it)


def test_a_port_that_is_taken_is_told_to_who_publishes(short_path: Path, app: int) -> None:
    """L53: a second start wiped the first one's routes."""
    with gateway(short_path) as first:
        port = first.address[1]
        other = short_path / "other"
        other.mkdir()
        with gateway(other, port=port) as second:
            said = second.refused("expose_port", internal_port=3000, name="web")
            assert f"port {port} is the gateway's" in said
            assert "suspend and resume" in said
        assert first.call("list_apps")["apps"] == []
        first.call("expose_port", internal_port=app, name="web")
        with gateway(other, port=port) as second:
            assert second.call("list_apps")["apps"] == []
            assert first.ask("GET", "/", first.bearer).status == 200


def test_a_visited_sandbox_is_in_use_and_an_unvisited_one_is_not(
    short_path: Path, app: int
) -> None:
    with gateway(short_path, idle_seconds=2) as place:
        place.call("expose_port", internal_port=app, name="web")
        with place.websocket(headers=place.bearer) as (opened, _):
            place.wire.close()
            began = time.monotonic()
            while time.monotonic() - began < 4:
                opened.send("x")
                opened.recv(10)
                time.sleep(0.2)
            assert place.runs()
        while time.monotonic() - began < 7:
            assert place.ask("GET", "/", place.bearer).status == 200
            time.sleep(0.2)
        assert place.runs()
        eventually(lambda: not place.runs())


def test_who_is_not_let_in_does_not_keep_the_sandbox(short_path: Path, app: int) -> None:
    with gateway(short_path, idle_seconds=2) as place:
        place.call("expose_port", internal_port=app, name="web")
        place.wire.close()

        def knock() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                place.ask("GET", "/")
            return not place.runs()

        eventually(knock)
