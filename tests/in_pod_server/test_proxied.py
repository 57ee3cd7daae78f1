"""A gateway behind a proxy: what it believes of the way that a request came, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.in_pod_server.gateways import Place, gateway, web_app

HTML = {"Accept": "text/html"}
TLS = {"X-Forwarded-Proto": "https"}


@pytest.fixture(scope="module")
def place(short_module_path: Path) -> Iterator[Place]:
    with web_app() as port, gateway(short_module_path, proxied=True) as local:
        local.call("expose_port", internal_port=port, name="web")
        yield local


@pytest.mark.parametrize(
    ("headers", "secure"),
    [
        (TLS, True),
        ({"X-Forwarded-Proto": "wss"}, True),
        ({"X-Forwarded-Proto": "http"}, False),
        ({"X-Forwarded-Proto": "HTTPS"}, False),
        ({"X-Forwarded-Proto": "https evil"}, False),
        ({"Forwarded": "proto=https"}, False),
        ({}, False),
    ],
)
def test_a_cookie_is_for_tls_alone_where_the_client_speaks_it(
    place: Place, headers: dict[str, str], secure: bool
) -> None:
    for accept, status in ((HTML, 303), ({}, 200)):
        reply = place.ask("GET", f"/?token={place.token}", headers | accept)
        assert reply.status == status
        ours = [c for c in reply.set_cookies if c.startswith(place.cookie)]
        assert [c.endswith("; Secure") for c in ours] == [secure]


def test_the_app_is_told_scheme_host_and_client_as_the_proxy_knows_them(place: Place) -> None:
    told = TLS | {"X-Forwarded-For": "192.0.2.7"}
    seen = place.seen("/x", place.bearer | told)["headers"]
    assert seen["x-forwarded-proto"] == "https"
    assert seen["x-forwarded-host"] == seen["host"] == place.host()
    assert seen["x-forwarded-for"] == "192.0.2.7, 127.0.0.1"


def test_nothing_else_that_came_with_a_request_is_passed_on_as_the_proxys_word(
    place: Place,
) -> None:
    forged = {
        "X-Forwarded-Host": "evil",
        "X-Forwarded-Port": "666",
        "X-Forwarded-Prefix": "/evil",
        "X-Real-IP": "6.6.6.6",
        "Forwarded": "for=6.6.6.6;host=evil",
        "X-Podpipe-Set-Cookie": "evil=1",
    }
    seen = place.seen("/x", place.bearer | forged)["headers"]
    assert not {name for name in seen if name.startswith("x-")} - {
        "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"
    }  # fmt: skip
    assert "evil" not in str(seen)
    assert "6.6.6.6" not in str(seen)


@pytest.mark.parametrize(
    "forged",
    [
        {"X-Forwarded-Uri": "/docs"},
        {"X-Forwarded-Method": "GET", "X-Forwarded-Uri": "/docs", "X-Forwarded-Host": "{other}"},
        {"X-Forwarded-Host": "nope", "X-Original-URL": "/docs"},
        {"X-Forwarded-For": "127.0.0.1"},
        {"Connection": "close, X-Forwarded-Proto, X-Forwarded-Uri, X-Podpipe-Ask"},
    ],
)
def test_what_is_said_of_the_way_opens_nothing(place: Place, forged: dict[str, str]) -> None:
    sent = {name: value.format(other=place.host("other")) for name, value in forged.items()}
    assert place.ask("GET", "/", TLS | sent).status == 401
    assert place.ask("POST", "/docs", TLS | sent).status == 401
    assert place.ask("GET", "/", place.bearer | sent, app="other").status == 404


def test_the_page_leads_to_an_app_by_the_scheme_that_the_client_speaks(place: Place) -> None:
    cookie = {"Cookie": place.cookie}
    for headers, scheme in ((TLS, "https"), ({}, "http")):
        gone = place.ask("GET", "/go/web", cookie | headers, app="")
        assert gone.headers["location"].startswith(f"{scheme}://{place.host()}/?token=")


def test_pages_of_the_sandbox_may_write_over_tls_and_foreign_ones_may_not(place: Place) -> None:
    cookie = {"Cookie": place.cookie} | TLS
    for origin, status in (
        (f"https://{place.host()}", 200),
        (f"https://web.{place.base}", 200),
        ("https://web.s2.sandbox.localhost", 403),
    ):
        assert place.ask("POST", "/x", cookie | {"Origin": origin}, body=b"x").status == status
