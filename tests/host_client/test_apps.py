"""Published apps as a host sees them: kept in the record, opened by tokens of which hashes are kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mcp import Client

from host_client.apps import Grants, apps_of, hash_of, new_token, version_of
from host_client.clock import timestamp, utc_now
from host_client.config import Settings
from host_client.errors import SandboxNotFound, UsageError
from host_client.host import Host
from host_client.server import build_server
from in_pod_server import contract as c
from in_pod_server.gateway.access import cookie_of
from tests.host_client.conftest import Podpipe, StubCluster
from tests.in_pod_server.gateways import Place, free_port, web_app
from tests.in_pod_server.gateways import hash_of as hash_in_the_pod
from tests.in_pod_server.support import Wire

PORT = 3000


@pytest.fixture
def gateway(stub: StubCluster) -> int:
    """Pods of this stub publish apps, on this port."""
    port = free_port()
    stub.faults(gateway={"port": port})
    return port


@pytest.fixture
async def host(stub: StubCluster, gateway: int) -> AsyncIterator[Host]:
    async with Host(stub.settings()) as opened:
        yield opened


@pytest.fixture(scope="module")
def app() -> Iterator[int]:
    with web_app() as port:
        yield port


def notes(stub: StubCluster, kind: str = "ConfigMap") -> dict[str, str]:
    """The annotations of the one record, or of the newest pod."""
    found = [o for key, o in sorted(stub.objects.items()) if key.startswith(f"{kind}/")]
    annotations: dict[str, str] = found[-1]["metadata"]["annotations"]
    return annotations


def recorded(stub: StubCluster) -> dict[str, int]:
    return dict(apps_of(notes(stub).get(c.ANNOTATION_APPS, "")))


async def expose(host: Host, name: str, port: int = PORT) -> dict[str, Any]:
    result = await host.sessions.call("work", "expose_port", {"internal_port": port, "name": name})
    assert not result.get("isError"), result
    facts: dict[str, Any] = result["structuredContent"]
    return facts


def place_of(port: int, sandbox_id: str, token: str) -> Place:
    return Place(("127.0.0.1", port), token, sandbox_id)


async def status(place: Place, app: str = "web") -> int:
    reply = await anyio.to_thread.run_sync(lambda: place.ask("GET", "/", place.bearer, app=app))
    return reply.status


async def test_what_is_exposed_is_recorded_and_there_again_after_resume(
    host: Host, stub: StubCluster, gateway: int, app: int
) -> None:
    made = await host.launcher.create(name="work")
    opened = await host.apps.grant("work")
    await expose(host, "web", app)
    await expose(host, "down", PORT)
    assert recorded(stub) == {"web": app, "down": PORT}
    place = place_of(gateway, made.sandbox.id, opened.token)
    assert await status(place) == 200
    await host.launcher.suspend("work")
    await host.sessions.forget("work")
    await host.sessions.open("work")
    assert await status(place) == 200
    assert await status(place, "down") == 503
    await host.sessions.call("work", "unexpose_port", {"name": "down"})
    assert recorded(stub) == {"web": app}
    assert notes(stub, "Pod")[c.ANNOTATION_APPS], "the pod was made with them"


async def test_hosts_that_expose_at_once_lose_nothing(stub: StubCluster, host: Host) -> None:
    """L52: of two who wrote at once one lost a route."""
    await host.launcher.create(name="work")
    async with AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(Host(stub.settings())) for _ in range(4)]

        async def work(number: int, one: Host) -> None:
            for count in range(6):
                await expose(one, f"h{number}-{count}", PORT + count)
                if count % 2:
                    await one.sessions.call("work", "unexpose_port", {"name": f"h{number}-{count}"})

        async with anyio.create_task_group() as tasks:
            for number, one in enumerate(hosts):
                tasks.start_soon(work, number, one)
    assert recorded(stub) == {
        f"h{number}-{count}": PORT + count for number in range(4) for count in (0, 2, 4)
    }


async def test_what_a_bare_connection_exposed_is_recorded_by_the_next_call(
    stub: StubCluster, host: Host
) -> None:
    await host.launcher.create(name="work")
    await host.sessions.open("work")
    (pod,) = [o for key, o in stub.objects.items() if key.startswith("Pod/")]
    socket = Path("/tmp") / f"stub-{pod['metadata']['uid'][:13]}.sock"
    with Wire(socket) as wire:
        assert not wire.call(1, "expose_port", internal_port=PORT, name="bare").get("isError")
    assert recorded(stub) == {}
    async with Host(stub.settings()) as another:
        await another.sessions.call("work", "list_processes", {})
    assert recorded(stub) == {"bare": PORT}


async def test_a_record_that_cannot_be_written_is_written_with_the_next_call(
    stub: StubCluster, host: Host, gateway: int
) -> None:
    await host.launcher.create(name="work")
    await host.sessions.open("work")
    stub.faults(
        gateway={"port": gateway}, patch={"stderr": "the server said no", "code": 1, "times": 1}
    )
    await expose(host, "web")
    assert recorded(stub) == {}
    await host.sessions.call("work", "list_processes", {})
    assert recorded(stub) == {"web": PORT}


async def test_an_older_table_never_replaces_a_newer_one(stub: StubCluster, host: Host) -> None:
    """L53: a second start wiped the first one's routes."""
    made = await host.launcher.create(name="work")
    await expose(host, "web")
    await expose(host, "more")
    old = json.dumps({"version": 1, "apps": {"web": PORT}})
    kept = await host.apps.keep(made.sandbox, old)
    assert apps_of(kept.apps) == recorded(stub) == {"web": PORT, "more": PORT}


async def test_a_sandbox_made_again_under_its_name_gets_no_apps_of_the_old(
    stub: StubCluster, host: Host
) -> None:
    made = await host.launcher.create(name="work")
    await expose(host, "web")
    await host.launcher.destroy("work")
    await host.sessions.forget(made.sandbox.id)
    await host.launcher.create(name="work")
    late = json.dumps({"version": 9, "apps": {"late": PORT}})
    await host.apps.keep(made.sandbox, late)
    assert recorded(stub) == {}


async def test_a_token_opens_at_once_and_rotation_clears_all_at_once(
    host: Host, stub: StubCluster, gateway: int, app: int
) -> None:
    made = await host.launcher.create(name="work")
    await expose(host, "web", app)
    await expose(host, "other", app)
    first = await host.apps.grant("work")
    share = await host.apps.grant("work", app="web", seconds=3600)
    for opened, other in ((first, 200), (share, 401)):
        place = place_of(gateway, made.sandbox.id, opened.token)
        assert await status(place) == 200
        assert await status(place, "other") == other
    fresh = await host.apps.grant("work", rotate=True)
    for opened, expected in ((first, 401), (share, 401), (fresh, 200)):
        assert await status(place_of(gateway, made.sandbox.id, opened.token)) == expected


async def test_tokens_outlive_suspension_and_may_be_made_meanwhile(
    host: Host, gateway: int, app: int
) -> None:
    made = await host.launcher.create(name="work")
    await expose(host, "web", app)
    before = await host.apps.grant("work")
    await host.launcher.suspend("work")
    await host.sessions.forget("work")
    meanwhile = await host.apps.grant("work")
    assert (await host.launcher.status("work")).phase == "suspended", "a token resumes nothing"
    await host.sessions.open("work")
    for opened in (before, meanwhile):
        assert await status(place_of(gateway, made.sandbox.id, opened.token)) == 200


async def test_only_hashes_are_written(host: Host, stub: StubCluster, app: int) -> None:
    await host.launcher.create(name="work")
    await expose(host, "web", app)
    opened = await host.apps.grant("work")
    secrets = [opened.token.encode(), cookie_of(opened.token).encode()]
    files = [path for path in stub.folder.rglob("*") if path.is_file()]
    assert not [p for p in files if any(secret in p.read_bytes() for secret in secrets)]
    assert hash_of(opened.token) in notes(stub)[c.ANNOTATION_ACCESS]
    assert hash_of(opened.token) in notes(stub, "Pod")[c.ANNOTATION_ACCESS]


async def test_grants_of_nobody_s_sandbox_and_of_no_app_are_refused(host: Host) -> None:
    with pytest.raises(SandboxNotFound):
        await host.apps.grant("work")
    await host.launcher.create(name="work")
    with pytest.raises(UsageError, match="is no app's name"):
        await host.apps.grant("work", app="A.b")


async def test_a_grant_meets_another_change_of_the_record(host: Host, stub: StubCluster) -> None:
    await host.launcher.create(name="work")
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(host.apps.grant, "work")
        tasks.start_soon(host.sessions.extend, "work", 90)
    assert len(Grants.from_json(notes(stub)[c.ANNOTATION_ACCESS]).entries) == 5


def test_both_ends_hash_a_token_alike() -> None:
    token = new_token()
    assert hash_of(token) == hash_in_the_pod(token)
    assert len(token) >= 43


def test_what_has_run_out_is_forgotten_and_there_are_so_many_tokens_and_no_more() -> None:
    now = utc_now()
    grants = Grants().with_token("old", now, until=timestamp(now - timedelta(seconds=1)))
    for number in range(c.MAX_GRANTS):
        grants = grants.with_token(f"t{number}", now)
    assert hash_of("old") not in grants.to_json()
    with pytest.raises(UsageError, match="--rotate"):
        grants.with_token("more", now)
    assert grants.cleared().version == grants.version + 1
    assert Grants.from_json(grants.to_json()) == grants


@example('{"apps": [["web", 1], [false, 2]]}')
@given(st.one_of(st.text(max_size=30), st.builds(json.dumps, st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["version", "apps", "grants", "hash"]), inner, max_size=3),
))))  # fmt: skip
def test_annotations_that_somebody_spoilt_are_nothing(text: str) -> None:
    assert isinstance(version_of(text), int)
    assert isinstance(apps_of(text), dict)
    assert isinstance(Grants.from_json(text).entries, list | tuple)


async def test_the_tools_tell_addresses_and_the_token_once(
    stub: StubCluster, gateway: int, app: int
) -> None:
    port = free_port()
    settings = stub.settings(PODPIPE_OPEN_PORT=str(port))
    async with Host(settings) as host, Client(build_server(host)) as client:

        async def call(tool: str, **arguments: Any) -> dict[str, Any]:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result
            assert result.structured_content
            return dict(result.structured_content)

        made = await call("create_sandbox", name="work")
        assert made["url"] == f"http://{made['sandbox_id']}.sandbox.localhost:{port}/"
        exposed = await call("expose_port", sandbox_id="work", internal_port=app, name="web")
        url = f"http://web.{made['sandbox_id']}.sandbox.localhost:{port}/"
        assert exposed["url"] == url
        assert "table" not in exposed
        listed = await call("list_apps", sandbox_id="work")
        assert listed["apps"] == [
            {"name": "web", "internal_port": app, "answers": True, "url": url}
        ]
        shown = await call("get_sandbox_status", sandbox_id="work")
        assert (shown["url"], shown["token"]) == (made["url"], "redacted")
        assert await status(place_of(gateway, made["sandbox_id"], made["token"])) == 200
        assert "get_sandbox_access" not in {t.name for t in (await client.list_tools()).tools}
        assert (await client.call_tool("get_sandbox_access", {"sandbox_id": "work"})).is_error


async def test_a_trusted_gateway_may_ask_for_access(stub: StubCluster, gateway: int) -> None:
    settings = stub.settings(PODPIPE_ACCESS_TOOL="on")
    async with Host(settings) as host, Client(build_server(host)) as client:
        await host.launcher.create(name="work")
        result = await client.call_tool("get_sandbox_access", {"sandbox_id": "work"})
        assert result.structured_content
        assert set(result.structured_content["apps"]) == {"page"}
        place = place_of(
            gateway, result.structured_content["sandbox_id"], result.structured_content["token"]
        )
        assert await status(place, "") == 200


def test_the_commands_publish_list_and_open(
    podpipe: Podpipe, stub: StubCluster, gateway: int, app: int
) -> None:
    made = json.loads(podpipe("create", "--name", "work", "--json").stdout)
    place = place_of(gateway, made["sandbox_id"], made["token"])
    exposed = podpipe("expose", "work", str(app), "web")
    assert exposed.stdout == f"http://web.{made['sandbox_id']}.sandbox.localhost:8790/\n"
    assert "`podpipe open work/web` runs" in exposed.stderr, "nothing serves that address yet"
    assert place.ask("GET", "/", place.bearer).status == 200
    assert "web" in podpipe("apps", "work").stdout
    refused = podpipe("expose", "work", "8080", "gate")
    assert (refused.returncode, "gateway's own" in refused.stderr) == (1, True)
    made = json.loads(podpipe("access", "work", "--app", "web", "--for", "1h", "--json").stdout)
    assert made["links"] == {
        "web": f"http://web.{made['sandbox_id']}.sandbox.localhost:8790/?token={made['token']}"
    }
    assert podpipe("access", "work", "--for", "soon").returncode == 2
    podpipe("suspend", "work")
    listed = json.loads(podpipe("apps", "work", "--json").stdout)
    assert listed["phase"] == "suspended"
    assert [each["name"] for each in listed["apps"]] == ["web"]
    assert podpipe("unexpose", "work", "web").returncode == 0
    assert json.loads(podpipe("apps", "work", "--json").stdout)["apps"] == []


def test_settings_of_apps_are_read() -> None:
    settings = Settings.from_env({"PODPIPE_USER": "a", "PODPIPE_OPEN_PORT": "9000"})
    assert (settings.gateway.port, settings.access_tool) == (9000, False)
    with pytest.raises(UsageError, match="PODPIPE_OPEN_PORT"):
        Settings.from_env({"PODPIPE_USER": "a", "PODPIPE_OPEN_PORT": "80"})
