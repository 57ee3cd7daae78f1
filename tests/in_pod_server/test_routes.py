"""The table of apps, and whom a host, a token and an origin belong to: for any text at all."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from in_pod_server import contract
from in_pod_server.errors import ArgumentError
from in_pod_server.gateway.access import Access, cookie_of
from in_pod_server.gateway.auth import COOKIE, UPSTREAM, Gatekeeper, Request
from in_pod_server.gateway.routes import Routes, Table
from tests.in_pod_server.gateways import access

TOKEN = "a-token"
NAMES = st.from_regex(rf"\A{contract.APP_NAME}\Z", alphabet="abcxyz019-")
PORTS = st.integers(1024, 65535).filter(lambda port: port not in contract.RESERVED_PORTS)
ASCII = st.text(st.characters(codec="latin-1", exclude_characters="\r\n"), max_size=40)


def keeper(**apps: int) -> Gatekeeper:
    known = Access()
    known.take(access(1, (TOKEN, "", "")))
    return Gatekeeper("s1", known, apps.get, lambda app, port, _: f"{app}:{port}", "unix//page")


def ask(host: str, uri: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = keeper(web=3000).decide(Request(method, uri, {"host": host, **named}))
    return answer.status, answer.headers.get(UPSTREAM, "")


@given(st.lists(st.tuples(st.booleans(), NAMES, PORTS), max_size=20))
def test_the_table_is_what_was_done_to_it_and_is_found_again(
    steps: list[tuple[bool, str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "apps.json"
        routes, expected, version = Routes(path, "s1"), dict[str, int](), 0
        for publishes, name, port in steps:
            before = dict(expected)
            if publishes:
                expected[name] = port
                routes.publish(name, port)
            elif name in expected:
                del expected[name]
                routes.close(name)
            version += expected != before
            assert routes.table == Table(version, expected)
        assert Routes(path, "s1").table == routes.table
        assert Table.from_json(routes.table.to_json()) == routes.table


@given(st.text(max_size=60))
def test_only_labels_become_names(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        routes = Routes(Path(folder) / "apps.json", "s1")
        label = name.isascii() and name.strip("-") == name and 0 < len(name) <= 40
        if label and all(c.isdigit() or c.islower() or c == "-" for c in name) and name != "s1":
            assert routes.publish(name, 3000).apps == {name: 3000}
        else:
            with pytest.raises(ArgumentError, match="is no name for an app"):
                routes.publish(name, 3000)


@given(
    st.one_of(
        st.text(max_size=40),
        st.builds(
            json.dumps,
            st.fixed_dictionaries(
                {},
                optional={
                    "version": st.one_of(st.integers(-2, 5), st.text(max_size=3), st.booleans()),
                    "apps": st.one_of(
                        st.dictionaries(st.text(max_size=5), st.integers(-1, 70000), max_size=3),
                        st.lists(st.integers(), max_size=2),
                    ),
                },
            ),
        ),
    )
)
def test_a_table_is_read_as_what_could_be_published_or_not_at_all(text: str) -> None:
    try:
        table = Table.from_json(text)
    except ValueError:
        return
    assert table.version >= 0
    for name, port in table.apps.items():
        assert 1024 <= port <= 65535
        assert name.islower() or name.replace("-", "").isdigit()


def test_of_the_seed_and_the_kept_table_the_newer_counts(tmp_path: Path) -> None:
    path = tmp_path / "apps.json"
    for seed, kept, wins in ((3, 5, 5), (5, 3, 5), (4, 0, 4)):
        path.write_text(Table(kept, {"kept": 3000}).to_json())
        routes = Routes(path, "s1", Table(seed, {"seed": 3000}).to_json())
        assert routes.table.version == wins
    path.write_text("{ half a ta")
    assert Routes(path, "s1", Table(2, {"seed": 3000}).to_json()).table.version == 2


@given(ASCII)
def test_any_host_leads_to_its_own_app_or_nowhere(host: str) -> None:
    status, upstream = ask(host, authorization=f"Bearer {TOKEN}")
    labels = host.lower().split(".")
    if status == 200:
        assert labels[:2] == ["web", "s1"] or labels[0] == "s1"
        assert upstream == ("web:3000" if labels[0] == "web" else "unix//page")
    else:
        assert status == 404


@given(st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "BREW"]), ASCII, ASCII, ASCII, ASCII)
def test_nothing_but_the_token_and_the_documentation_is_let_through(
    method: str, path: str, authorization: str, cookie: str, origin: str
) -> None:
    status, upstream = ask(
        "web.s1.x",
        f"/{path}",
        method,
        authorization=authorization,
        cookie=f"{COOKIE}={cookie}",
        origin=origin,
    )
    public = {"docs", "redoc", "openapi.json"}
    if status == 200:
        assert method == "GET"
        assert path.partition("?")[0] in public or "%" in path
    else:
        assert not upstream


@given(ASCII)
def test_only_the_sandboxs_own_origins_write_with_the_cookie(origin: str) -> None:
    cookie = f"{COOKIE}={cookie_of(TOKEN)}"
    for sent in (origin, f"http://{origin}", f"https://{origin}.s1.x", f"http://s1.x{origin}"):
        status, _ = ask("web.s1.x", "/", "POST", cookie=cookie, origin=sent)
        if status == 200:
            host = sent.lower().partition("://")[2].partition(":")[0]
            assert host == "s1.x" or host.split(".")[1:] == ["s1", "x"]
