"""Published apps behind a proxy that speaks TLS, as a real browser has them there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from in_pod_server.gateway.auth import COOKIE
from tests.browser.chromium import Tab, chromium
from tests.browser.test_apps import seen
from tests.in_pod_server.gateways import Local, free_port, gateway, proxy, web_app

pytestmark = pytest.mark.browser

_CADDYFILE = """\
{{
	admin off
	persist_config off
	skip_install_trust
	auto_https disable_redirects
	storage file_system {folder}
}}
https://{base}:{port}, https://*.{base}:{port} {{
	bind 127.0.0.1
	tls internal
	reverse_proxy 127.0.0.1:{behind}
}}
"""


@contextlib.contextmanager
def tls(place: Local, folder: Path) -> Iterator[Local]:
    """The same place by https, with a certificate that nobody else knows."""
    port = free_port()
    config = _CADDYFILE.format(folder=folder, base=place.base, port=port, behind=place.address[1])
    with proxy(config, port):
        yield replace(place, address=("127.0.0.1", port))


@pytest.fixture(scope="module")
def place(short_module_path: Path) -> Iterator[Local]:
    with web_app() as port, gateway(short_module_path, proxied=True) as local:
        local.call("expose_port", internal_port=port, name="web")
        with tls(local, short_module_path / "certificates") as secure:
            yield secure


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with chromium(tmp_path / "profile", "--ignore-certificate-errors") as opened:
        yield opened


def test_a_link_leads_to_the_clean_address_and_its_cookie_is_for_tls_alone(
    tab: Tab, place: Local
) -> None:
    address = f"https://{place.host('web')}"
    assert tab.go(f"{address}/deep?token={place.token}") == f"{address}/deep"
    (ours,) = (c for c in tab.ask("Network.getCookies")["cookies"] if c["name"] == COOKIE)
    assert (ours["secure"], ours["httpOnly"], ours["domain"]) == (
        True, True, f"web.{place.base}"
    )  # fmt: skip
    assert tab.go(f"{address}/again") == f"{address}/again"
    headers = seen(tab)["headers"]
    assert headers["x-forwarded-proto"] == "https"
    assert headers["x-forwarded-host"] == place.host("web")
    assert COOKIE not in json.dumps(headers)


def test_its_pages_write_and_open_websockets_and_foreign_ones_do_not(
    tab: Tab, place: Local
) -> None:
    target = place.host("web")
    post = f"fetch('https://{target}/x', {{method: 'POST', credentials: 'include', body: 'x'}})"
    echo = (
        f"new Promise(done => {{ const s = new WebSocket('wss://{target}/ws'); let n = 0;"
        "s.onerror = () => done('refused');"
        "s.onmessage = e => { if (n++) { s.close(); done(e.data) } else s.send('hello') } })"
    )
    tab.go(f"https://{target}/?token={place.token}")
    assert tab.run(f"{post}.then(r => r.status)") == 200
    assert tab.run(echo) == "hello"
    tab.go("data:text/html,elsewhere")
    assert tab.run(echo) == "refused"


def test_the_page_of_the_sandbox_leads_to_its_apps_by_https(tab: Tab, place: Local) -> None:
    page = f"https://{place.host('')}/"
    assert tab.go(f"{page}?token={place.token}") == page
    assert tab.go(f"{page}go/web") == f"https://{place.host('web')}/"
