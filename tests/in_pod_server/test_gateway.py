"""Who gets where through the gateway: each request against real Caddy, a real daemon and a real app.

Nothing here knows where the gateway is: `place` may be any sandbox's, with apps `web` and `other` that
run and an app `down` that does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from in_pod_server.gateway.auth import COOKIE
from tests.in_pod_server.gateways import Place, free_port, gateway, web_app

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket"}
FOREIGN = "http://evil.s2.sandbox.localhost"


@pytest.fixture(scope="module")
def place(short_module_path: Path) -> Iterator[Place]:
    with web_app() as port, gateway(short_module_path) as local:
        local.call("expose_port", internal_port=port, name="web")
        local.call("expose_port", internal_port=port, name="other")
        local.call("expose_port", internal_port=free_port(), name="down")
        yield local


def unseen(place: Place, seen: object) -> None:
    """Nothing of the credential reached the app."""
    text = str(seen)
    assert place.token not in text
    assert COOKIE not in text
    assert "podpipe" not in text.lower()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer nope"},
        {"Authorization": "Bearer {token}x"},
        {"Authorization": "Bearer {cut}"},
        {"Authorization": "Bearer {swapped}"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic {token}"},
        {"Authorization": "{token}"},
        {"Cookie": "{name}=bad"},
        {"Cookie": "{name}={token}"},
        {"Cookie": "x{cookie}"},
        {"Cookie": "{cookie}x"},
        {"X-Podpipe-Upstream": "localhost:1"},
        {"X-Podpipe-Ask": "down"},
        {"X-Forwarded-Uri": "/docs"},
        {"X-Forwarded-Method": "GET", "X-Forwarded-Uri": "/docs"},
        {"Connection": "close, X-Forwarded-Uri, X-Forwarded-Method, X-Podpipe-Ask, Host"},
        {"Connection": "X-Podpipe-Upgrade, X-Forwarded-Uri", "X-Forwarded-Uri": "/docs"},
    ],
)
def test_what_is_no_token_of_the_sandbox_is_refused(place: Place, headers: dict[str, str]) -> None:
    words = {
        "token": place.token,
        "cut": place.token[:-1],
        "swapped": place.token.swapcase(),
        "cookie": place.cookie,
        "name": COOKIE,
    }
    sent = {name: value.format(**words) for name, value in headers.items()}
    reply = place.ask("GET", "/", sent)
    assert reply.status == 401
    assert reply.headers["www-authenticate"].startswith("Bearer")
    assert reply.headers["cache-control"] == "no-store"
    assert reply.json() == {"error": "token required"}


@pytest.mark.parametrize("target", ["/x?token=wrong", "/x?TOKEN={token}", "/x?xtoken={token}"])
def test_what_is_no_token_of_the_sandbox_in_the_query_is_refused(place: Place, target: str) -> None:
    assert place.ask("GET", target.format(token=place.token)).status == 401


def test_a_browser_without_a_token_gets_a_page(place: Place) -> None:
    reply = place.ask("GET", "/", HTML)
    assert reply.status == 401
    assert reply.headers["content-type"].startswith("text/html")
    assert b'name="token"' in reply.body
    assert place.ask("GET", "/", HTML | UPGRADE).json() == {"error": "token required"}


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_a_bearer_token_opens_and_is_not_seen(place: Place, scheme: str) -> None:
    seen = place.seen("/x?y=1", {"Authorization": f"{scheme} {place.token}"})
    assert seen["path"] == "/x?y=1"
    assert "authorization" not in seen["headers"]
    unseen(place, seen)


def test_a_token_in_the_query_opens_sets_its_cookie_and_is_not_seen(place: Place) -> None:
    reply = place.ask("GET", f"/x?a=1&token={place.token}&b=2")
    assert reply.status == 200
    assert reply.json()["path"] == "/x?a=1&b=2"
    (ours,) = (cookie for cookie in reply.set_cookies if cookie.startswith(COOKIE))
    assert ours.startswith(f"{place.cookie}; Path=/; HttpOnly; SameSite=Lax")
    assert "mine=1; Path=/" in reply.set_cookies, "the app's own cookie stays"
    unseen(place, reply.json())


@pytest.mark.parametrize(
    ("target", "clean"),
    [
        ("/x?a=1&token={token}&b=2", "/x?a=1&b=2"),
        ("/?token={token}", "/"),
        ("/a%2fb/%7e?flag&x=%7e&token={token}", "/a%2fb/%7e?flag&x=%7e"),
        ("/x?token=own&token={token}", "/x?token=own"),
        ("/x?%74oken={token}", "/x"),
    ],
)
def test_a_browser_is_sent_to_the_clean_address(place: Place, target: str, clean: str) -> None:
    reply = place.ask("GET", target.format(token=place.token), HTML)
    assert (reply.status, reply.headers["location"]) == (303, clean)
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["cache-control"] == "no-store"
    assert [c.partition(";")[0] for c in reply.set_cookies] == [place.cookie]


@pytest.mark.parametrize(
    "target",
    ["//evil.com/?token={token}", "/\\evil.com?token={token}", "/%5cevil.com?token={token}"],
)
def test_nobody_is_redirected_to_another_host(place: Place, target: str) -> None:
    reply = place.ask("GET", target.format(token=place.token), HTML)
    assert reply.status == 400
    assert "location" not in reply.headers


def test_a_token_of_the_app_beside_ours_stays(place: Place) -> None:
    target = f"/x?token=a%26b&token={place.token}"
    assert place.seen(target, {})["path"] == "/x?token=a%26b"


@pytest.mark.parametrize(
    ("target", "clean"),
    [
        ("/x?z=1&{token}&a=2", "/x?z=1&a=2"),
        ("/x?{token}&a=%7e&b=%2F&c=+", "/x?a=%7e&b=%2F&c=+"),
        ("/x?a=1;b=2&{token}&c=%zz&d&e=", "/x?a=1;b=2&c=%zz&d&e="),
        ("/x?token=1&{token}&token=2&{token}", "/x?token=1&token=2"),
        ("/a%2Fb/$1$$/../c//d?{token}&e=$1?f", "/a%2Fb/$1$$/../c//d?e=$1?f"),
        ("/%25zz%3f?{token}", "/%25zz%3f"),
        ("/x?next=http://web/?a=b==&{token}", "/x?next=http://web/?a=b=="),
    ],
)
def test_what_is_beside_a_token_in_the_query_goes_through_as_it_is(
    place: Place, target: str, clean: str
) -> None:
    seen = place.seen(target.format(token=f"token={place.token}"), {})
    assert seen["path"] == clean


@pytest.mark.parametrize(
    ("cookies", "left"),
    [
        ("{cookie}", None),
        ("a=1; {cookie}; b=2", "a=1; b=2"),
        ("{cookie}; b=2", "b=2"),
        ("{name}=bad; {cookie}; z=1", "z=1"),
    ],
)
def test_the_cookie_opens_and_only_the_apps_own_are_seen(
    place: Place, cookies: str, left: str | None
) -> None:
    header = cookies.format(cookie=place.cookie, name=COOKIE)
    seen = place.seen("/x", {"Cookie": header})
    assert seen["headers"].get("cookie") == left
    unseen(place, seen)


def test_what_is_the_apps_own_goes_through_untouched(place: Place) -> None:
    headers = {"Cookie": f"{place.cookie}; s=1", "Authorization": "Bearer app-jwt"}
    seen = place.seen("/reset?token=apptoken&x=%7e", headers)
    assert seen["path"] == "/reset?token=apptoken&x=%7e"
    assert seen["headers"]["authorization"] == "Bearer app-jwt"
    assert seen["headers"]["cookie"] == "s=1"


@pytest.mark.parametrize("target", ["//double/x", "/a//b", "/static/../x", "/a%2Fb?q=%41", "/./x"])
def test_paths_go_through_as_they_are(place: Place, target: str) -> None:
    assert place.seen(target, place.bearer)["path"] == target


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_pages_of_the_sandbox_may_write_with_the_cookie(place: Place, method: str) -> None:
    cookie = {"Cookie": place.cookie}
    for origin in (
        {},
        {"Origin": f"http://{place.host()}"},
        {"Origin": f"http://{place.host('other')}"},
    ):
        assert place.ask(method, "/x", cookie | origin, body=b"x").status == 200, origin


@pytest.mark.parametrize(
    "origin", [FOREIGN, "null", "http://evil.com", "https://s1abc.sandbox.localhost.evil.com", ""]
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_foreign_pages_may_not_write_with_the_cookie(
    place: Place, method: str, origin: str
) -> None:
    headers = {"Cookie": place.cookie, "Origin": origin}
    assert place.ask(method, "/x", headers, body=b"x").status == 403


def test_a_foreign_page_that_has_the_token_may_write(place: Place) -> None:
    assert (
        place.ask("POST", "/x", place.bearer | {"Origin": "http://evil"}, body=b"x").status == 200
    )


@pytest.mark.parametrize("target", ["/docs", "/redoc", "/openapi.json", "/docs?x=1", "/%64ocs"])
def test_the_documentation_is_public(place: Place, target: str) -> None:
    assert place.seen(target, {})["path"] == target


def test_a_stale_cookie_of_ours_is_not_seen_by_public_pages(place: Place) -> None:
    assert "cookie" not in place.seen("/docs", {"Cookie": f"{COOKIE}=old"})["headers"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"])
def test_the_documentation_is_public_to_get_only(place: Place, method: str) -> None:
    assert place.ask(method, "/docs").status == 401


def test_a_websocket_is_not_public_documentation(place: Place) -> None:
    assert place.ask("GET", "/docs", UPGRADE).status == 401
    with pytest.raises(InvalidStatus, match="401"), place.websocket("/docs"):
        pass


@pytest.mark.parametrize(
    "target",
    [
        "/docs/", "/DOCS", "/docsx", "/docs/x", "/x/../docs", "/docs/../x", "/docs%2f..%2fx", "/docs%00",
        "/docs;x", "/./docs", "/openapi.json/", "/docs%3f",
    ],
)  # fmt: skip
def test_nothing_but_exactly_the_documentation_is_public(place: Place, target: str) -> None:
    assert place.ask("GET", target).status == 401


def test_a_path_that_leads_away_is_not_public(place: Place) -> None:
    assert place.ask("GET", "//docs").status == 400


@pytest.mark.parametrize(
    "host",
    [
        "nope.{base}", "web.s2.sandbox.localhost", "127.0.0.1", "web.{base}.", "web", "", "web..{id}.x",
        "{id}", "a.web.{base}", "x.web.{id}", "web.{id}",
    ],
)  # fmt: skip
def test_a_host_that_is_no_app_of_the_sandbox_is_not_found(place: Place, host: str) -> None:
    named = host.format(base=place.base, id=place.sandbox_id)
    for target in ("/", "/docs"):
        reply = place.ask("GET", target, place.bearer, host=named)
        assert reply.status in (404, 400 if not named else 404), named


@pytest.mark.parametrize("host", ["WEB.{base}", "web.{base}:99999", "web.{id}.apps.example.com"])
def test_case_port_and_domain_of_a_host_say_nothing(place: Place, host: str) -> None:
    named = host.format(
        base=place.base.upper() if "WEB" in host else place.base, id=place.sandbox_id
    )
    assert place.ask("GET", "/", host=named).status == 401
    assert place.ask("GET", "/", place.bearer, host=named).status == 200


def test_what_a_client_says_of_the_way_it_came_is_not_believed(place: Place) -> None:
    spoofed = {
        "X-Forwarded-For": "6.6.6.6",
        "X-Forwarded-Host": "evil",
        "X-Forwarded-Proto": "https",
        "X-Real-IP": "6.6.6.6",
        "Forwarded": "for=6.6.6.6",
        "X-Podpipe-Set-Cookie": "evil=1",
    }
    reply = place.ask("GET", "/x", place.bearer | spoofed)
    assert not {"6.6.6.6", "evil"} & set(reply.json()["headers"].values())
    assert reply.json()["headers"]["x-forwarded-proto"] == "http"
    assert "evil" not in str(reply.set_cookies)


def test_an_app_that_is_not_up_yet_is_told_so_and_to_whom_it_is_open_only(place: Place) -> None:
    reply = place.ask("GET", "/", place.bearer, app="down")
    assert (reply.status, reply.headers["retry-after"]) == (503, "2")
    assert reply.json() == {"error": "app is not answering on its port (yet)"}
    page = place.ask("GET", "/", place.bearer | HTML, app="down")
    assert page.status == 503
    assert b'http-equiv="refresh"' in page.body
    assert place.ask("POST", "/", place.bearer, app="down", body=b"x" * 100_000).status == 503
    assert place.ask("GET", "/", place.bearer, app="down", body=b"x" * 100_000).status == 503
    assert place.ask("GET", "/", app="down").status == 401
    assert place.ask("GET", "/docs", app="down").status == 503


def test_websockets_open_by_token_query_and_cookie(place: Place) -> None:
    own = f"http://{place.host()}"
    for target, headers, origin in (
        ("/ws", place.bearer, None),
        ("/ws", place.bearer, FOREIGN),
        (f"/ws?a=1&token={place.token}", {}, None),
        ("/ws", {"Cookie": f"x=1; {place.cookie}"}, None),
        ("/ws", {"Cookie": place.cookie}, own),
    ):
        with place.websocket(target, headers, origin=origin) as (opened, seen):
            unseen(place, seen)
            opened.send("hello")
            assert opened.recv() == "hello"


@pytest.mark.parametrize(
    ("target", "cookie", "origin", "status"),
    [
        ("/ws", False, None, 401),
        ("/ws?token=bad", False, None, 401),
        ("/ws", True, FOREIGN, 403),
        ("/ws", True, "null", 403),
    ],
)
def test_websockets_of_others_do_not_open(
    place: Place, target: str, cookie: bool, origin: str | None, status: int
) -> None:
    headers = {"Cookie": place.cookie} if cookie else {}
    with (
        pytest.raises(InvalidStatus, match=str(status)),
        place.websocket(target, headers, origin=origin),
    ):
        pass


def test_a_target_that_names_another_host_goes_by_that_host_alone(place: Place) -> None:
    target = f"http://{place.host('down')}/x"
    assert place.ask("GET", target, place.bearer, app="web").status == 503
    assert place.ask("GET", target, app="web").status == 401
    assert place.ask("CONNECT", place.host()).status == 401


def test_large_frames_come_back_whole(place: Place) -> None:
    with place.websocket(headers=place.bearer) as (opened, _):
        data = bytes(range(256)) * 4096
        opened.send(data)
        assert opened.recv() == data


def test_a_large_upload_arrives_whole(place: Place) -> None:
    body = bytes(range(256)) * (64 * 4096)
    reply = place.ask("POST", "/up", place.bearer, body=body)
    assert reply.json()["size"] == len(body)
    assert reply.json()["headers"]["content-length"] == str(len(body))


@pytest.mark.parametrize("target", ["/", "/x"])
def test_what_is_asked_with_a_body_arrives_whole(place: Place, target: str) -> None:
    reply = place.ask("GET", target, place.bearer, body=b"x" * 100_000)
    assert reply.status == 200
    assert reply.json()["size"] == 100_000


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_the_body_of_who_is_refused_is_no_part_of_what_others_ask(
    place: Place, method: str
) -> None:
    body = b"GET / HTTP/1.1\r\nX-Podpipe-Ask: x\r\nX: "
    for target in ("/", "/x", "/docs"):
        assert place.ask(method, target, body=body).status in (200, 401)
        for _ in range(3):
            assert place.ask("POST", "/x", place.bearer, body=b"x").status == 200
            assert place.ask("POST", "/x", body=b"x").status == 401


def test_events_arrive_as_they_are_sent(place: Place) -> None:
    connection, response = place.open("GET", "/sse", place.bearer)
    try:
        lines = [response.readline().strip() for _ in range(6)]
    finally:
        connection.close()
    assert lines == [b"data: 0", b"", b"data: 1", b"", b"data: 2", b""]


def test_the_page_of_the_sandbox_needs_the_token_and_shows_the_apps(place: Place) -> None:
    assert place.ask("GET", "/", app="").status == 401
    assert place.ask("GET", "/docs", app="").status == 401
    for path in ("/", "/live"):
        page = place.ask("GET", path, {"Cookie": place.cookie}, app="")
        assert page.status == 200
        assert b">web</a>" in page.body
        assert b"does not answer" in page.body, "of the app that is down"
    assert place.ask("POST", "/", place.bearer, app="").status == 405
    assert place.ask("GET", "/nope", place.bearer, app="").status == 404


def test_the_page_leads_to_an_app_once_without_showing_the_token(place: Place) -> None:
    gone = place.ask("GET", "/go/web", {"Cookie": place.cookie}, app="")
    assert gone.status == 303
    where = gone.headers["location"]
    assert where.startswith(f"http://{place.host()}/?token=")
    assert place.token not in where
    target = where.removeprefix(f"http://{place.host()}")
    assert place.ask("GET", target, HTML, app="other").status == 401, "it is the other app's"
    again = place.ask("GET", "/go/web", {"Cookie": place.cookie}, app="").headers["location"]
    target = again.removeprefix(f"http://{place.host()}")
    first = place.ask("GET", target, HTML)
    assert (first.status, first.headers["location"]) == (303, "/")
    assert first.set_cookies[0].startswith(place.cookie)
    assert place.ask("GET", target, HTML).status == 401, "a second time"
    assert place.ask("GET", "/go/nope", place.bearer, app="").status == 404
