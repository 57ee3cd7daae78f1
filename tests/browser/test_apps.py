"""Published apps and the sandbox's page, as a real browser has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Tab, chromium
from tests.in_pod_server.gateways import Served, gateway, web_app
from tests.in_pod_server.support import eventually

pytestmark = pytest.mark.browser

PICTURES = Path(__file__).parents[2] / "build" / "browser"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    """The port of a server that is no sandbox's."""
    with web_app() as port:
        yield port


@pytest.fixture(scope="module")
def place(short_module_path: Path, elsewhere: int) -> Iterator[Served]:
    with gateway(short_module_path) as local:
        for name in ("web", "other"):
            local.call("expose_port", internal_port=elsewhere, name=name)
        yield local


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with chromium(tmp_path / "profile") as opened:
        yield opened


def link(place: Served, app: str, path: str = "/") -> str:
    return f"http://{place.host(app)}{path}?token={place.token}"


def seen(tab: Tab) -> dict[str, Any]:
    """What the app says that it saw of the page's own request."""
    said: dict[str, Any] = json.loads(tab.run("document.body.innerText"))
    return said


def test_a_link_leads_to_the_clean_address_and_its_cookie_stays(tab: Tab, place: Served) -> None:
    assert tab.go(link(place, "web", "/deep/page")) == f"http://{place.host('web')}/deep/page"
    assert "token" not in tab.run("document.referrer")
    assert "cookie" not in seen(tab)["headers"]
    assert tab.run("document.cookie") == "mine=1", "the app's own; ours is not for scripts"
    again = tab.go(f"http://{place.host('web')}/again?x=1")
    assert again == f"http://{place.host('web')}/again?x=1"
    assert seen(tab)["headers"]["cookie"] == "mine=1"


def test_without_a_link_there_is_a_page_that_takes_the_token(tab: Tab, place: Served) -> None:
    tab.go(f"http://{place.host('web')}/")
    assert tab.run("document.title") == "A token is needed"
    tab.run(f"document.querySelector('input').value = {json.dumps(place.token)}")
    tab.run("document.querySelector('form').requestSubmit()")
    eventually(lambda: tab.run("document.title") != "A token is needed")
    eventually(lambda: tab.run("document.body?.innerText ?? ''").startswith("{"))
    assert tab.run("location.href") == f"http://{place.host('web')}/"


def test_absolute_paths_events_and_websockets_work_unchanged(tab: Tab, place: Served) -> None:
    tab.go(link(place, "web"))
    asset = "fetch('/static/js/main.js?v=1').then(r => r.json()).then(j => j.path)"
    assert tab.run(asset) == "/static/js/main.js?v=1"
    event = "new Promise(done => { const s = new EventSource('/sse'); s.onmessage = e => { s.close(); done(e.data) } })"
    assert tab.run(event) == "0"
    echo = (
        "new Promise((done, fail) => { const s = new WebSocket(`ws://${location.host}/ws`); let n = 0;"
        "s.onerror = fail; s.onmessage = e => { if (n++) { s.close(); done(e.data) } else s.send('hello') } })"
    )
    assert tab.run(echo) == "hello"


def test_apps_are_beside_each_other_each_with_its_own_cookies(tab: Tab, place: Served) -> None:
    tab.go(link(place, "web"))
    tab.run("document.cookie = 'who=web; path=/'")
    tab.go(f"http://{place.host('other')}/")
    assert tab.run("document.title") == "A token is needed", "a cookie is one host's own"
    tab.go(link(place, "other"))
    assert "who=web" not in seen(tab)["headers"].get("cookie", "")
    tab.go(f"http://{place.host('web')}/")
    assert "who=web" in seen(tab)["headers"]["cookie"]


def test_pages_of_another_sandbox_cannot_write_or_open_a_websocket(
    tab: Tab, place: Served, elsewhere: int
) -> None:
    target = f"http://{place.host('web')}"
    post = f"fetch('{target}/x', {{method: 'POST', mode: 'no-cors', credentials: 'include', body: 'x'}})"
    socket = (
        f"new Promise(done => {{ const s = new WebSocket('ws://{place.host('web')}/ws');"
        "s.onopen = () => done('open'); s.onerror = () => done('refused') })"
    )
    tab.go(link(place, "web"))
    before = seen(tab)["counts"].get("POST", 0)
    tab.run(f"{post}.then(() => 1)")
    assert tab.run(socket) == "open"
    tab.go(f"http://evil.s2.sandbox.localhost:{elsewhere}/")
    tab.run(f"{post}.then(() => 1)")
    assert tab.run(socket) == "refused"
    tab.go(f"http://{place.host('web')}/")
    assert seen(tab)["counts"]["POST"] == before + 1, "that of its own page"


def test_the_page_of_the_sandbox_is_live_and_leads_to_its_apps(tab: Tab, place: Served) -> None:
    assert tab.go(link(place, "")) == f"http://{place.host('')}/"
    assert (
        tab.run("[...document.querySelectorAll('a')].map(a => a.innerText).join()") == "other,web"
    )
    began = place.call("start_background", command="echo '<i>once</i>'; sleep 60")
    eventually(lambda: "<i>once</i>" in tab.run("document.body.innerText"))
    for name, width, dark in (
        ("page", 900, False),
        ("page-dark", 900, True),
        ("phone", 390, False),
    ):
        tab.picture(PICTURES / f"{name}.png", width, 760, dark=dark)
        assert tab.run("document.documentElement.scrollWidth") <= width
    place.call("stop_process", process_id=began["process_id"])
    eventually(lambda: "<i>once</i>" not in tab.run("document.body.innerText"))
    tab.run("document.querySelector('a[href=\"/go/web\"]').removeAttribute('target')")
    tab.run("document.querySelector('a[href=\"/go/web\"]').click()")
    eventually(lambda: tab.run("location.href") == f"http://{place.host('web')}/")
    eventually(lambda: tab.run("document.body?.innerText ?? ''").startswith("{"))
    assert "podpipe" not in json.dumps(seen(tab))
