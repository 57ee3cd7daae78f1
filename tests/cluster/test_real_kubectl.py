"""The real kubectl over an API server that misbehaves, and with credential plugins that do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from host_client.errors import ApiUnreachable, Forbidden, KubectlError, StillStarting
from host_client.host import Host
from host_client.kubectl import Kubectl
from tests import canaries
from tests.host_client.conftest import STUB_KUBECTL, StubCluster
from tests.stubs.api_server import Answer, ApiServer, Ending, Stream, served

BOUND = 90
TOKEN = {
    "apiVersion": "client.authentication.k8s.io/v1",
    "kind": "ExecCredential",
    "status": {"token": "t"},
}


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubCluster]:
    cluster = StubCluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
async def api(stub: StubCluster, environment: dict[str, str]) -> AsyncIterator[ApiServer]:
    """The real kubectl for pipes, the stub for objects; `real` is the real one for all."""
    real = environment["PODPIPE_KUBECTL"]
    mixed = stub.folder / "mixed"
    mixed.write_text(
        f'#!/bin/sh\ncase " $* " in *" exec "*) exec {real} "$@" ;; esac\n'
        f'exec {stub.folder / "kubectl"} "$@"\n',
        encoding="utf-8",
    )
    mixed.chmod(0o755)
    stub.environment["PODPIPE_KUBECTL"] = str(mixed)
    async with served(stub.folder, STUB_KUBECTL, os.environ | stub.environment) as api:
        log_in(stub, api, {"token": "t"})
        yield api


def log_in(stub: StubCluster, api: ApiServer, user: dict[str, Any]) -> None:
    stub.kubeconfig.write_text(json.dumps(api.kubeconfig(user)), encoding="utf-8")


def plugin(stub: StubCluster, script: str, name: str = "login", **facts: Any) -> dict[str, Any]:
    """A credential plugin, found through PATH; `token` in its script stands for a right answer."""
    folder = stub.folder / "plugins"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(
        f"#!/bin/sh\ntoken() {{ echo '{json.dumps(TOKEN)}'; }}\n{script}\n", encoding="utf-8"
    )
    path.chmod(0o755)
    stub.environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    login = {"apiVersion": TOKEN["apiVersion"], "command": name, "interactiveMode": "IfAvailable"}
    return {"exec": login | facts}


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_token_reaches_the_api_server_and_nothing_that_is_written(
    stub: StubCluster,
    api: ApiServer,
    environment: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    refuses: bool,
) -> None:
    """From a credential plugin, whose environment in the kubeconfig holds a secret too."""
    secret = {"name": "PASSPHRASE", "value": f"{canaries.MARK}-plugin"}
    answer = json.dumps(TOKEN | {"status": {"token": canaries.TOKEN}})
    script = f"echo logged in >&2\necho '{answer}'"
    log_in(stub, api, plugin(stub, script, env=[secret]))
    if refuses:
        api.answers = [Answer("/api", 401, "Unauthorized")]
    settings = stub.settings(PODPIPE_KUBECTL=environment["PODPIPE_KUBECTL"])
    caplog.set_level("DEBUG", "host_client")
    async with Host(settings) as host:
        try:
            with host.audit.call("get", None, {}):
                await host.kubectl.json("get", "pods", "x", "-o", "json")
            said = ""
        except KubectlError as error:
            said = f"{error} {error.argv} {error.stderr}"
    assert bool(said) == refuses
    sent = [request.headers.get("authorization", "") for request in api.requests]
    assert f"Bearer {canaries.TOKEN}" in sent
    assert not canaries.leaked(said + caplog.text)
    assert canaries.leaks(stub.folder) == []


def real(stub: StubCluster, environment: dict[str, str]) -> Kubectl:
    return Kubectl(stub.settings(PODPIPE_KUBECTL=environment["PODPIPE_KUBECTL"]))


async def run(host: Host, command: str) -> dict[str, Any]:
    answer = await host.sessions.call("work", "run_command", {"command": command})
    assert not answer.get("isError"), answer
    facts: dict[str, Any] = answer["structuredContent"]
    return facts


def execs(api: ApiServer) -> int:
    return sum("/exec" in request.target for request in api.requests)


@pytest.mark.parametrize("ending", ["cut", "close", "freeze"])
@pytest.mark.parametrize("after", [0, 1000, 100_000])
async def test_a_stream_that_ends_untold_loses_no_answer_and_runs_nothing_twice(
    stub: StubCluster, api: ApiServer, ending: Ending, after: int, monkeypatch: Any
) -> None:
    """L10: a close without a status was success; before the hello, in it and amid an answer."""
    monkeypatch.setattr("host_client.session.HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr("host_client.session.HEARTBEAT_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("host_client.session.HELLO_SECONDS", 3.0)
    api.streams = [Stream(ending, after)]
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            facts = await run(host, "echo id >> ran; seq 1 40000")
            assert (facts["exit_code"], facts["stdout_bytes"]) == (0, 228_894)
            assert (await run(host, "cat ran"))["stdout"] == "id\n"
    assert execs(api) == 2


@pytest.mark.parametrize(
    ("status", "reason"),
    [(404, "NotFound"), (409, "Conflict"), (429, "TooManyRequests"), (500, "InternalError"),
     (503, "ServiceUnavailable")],
)  # fmt: skip
async def test_an_upgrade_that_is_refused_for_now_is_asked_for_again(
    stub: StubCluster, api: ApiServer, status: int, reason: str
) -> None:
    """L31: exec too early; and what an API server answers that is overloaded or just starting."""
    api.answers = [Answer("/exec", status, reason, times=3)]
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            assert (await run(host, "echo ok"))["stdout"] == "ok\n"


async def test_a_refused_websocket_and_a_spdy_that_works_not_either_is_told_by_its_reason(
    stub: StubCluster, api: ApiServer
) -> None:
    """The fall-back's error must not hide what was refused: the verb on pods/exec."""
    api.answers = [Answer("/exec", 403, "Forbidden")]
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            began = time.monotonic()
            with pytest.raises(Forbidden, match=r"get and create.*pods/exec.*podpipe doctor"):
                await host.launcher.create(name="work")
            assert time.monotonic() - began < 20


async def test_a_proxy_that_takes_no_websocket_is_no_end(stub: StubCluster, api: ApiServer) -> None:
    api.answers = [Answer("/exec", 403, "Forbidden", websocket=True, times=2)]
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            assert (await run(host, "echo ok"))["stdout"] == "ok\n"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer("/pods", 403, "Forbidden"), Forbidden),
        (Answer("/pods", 401, "Unauthorized"), Forbidden),
        (Answer("/pods", 503, "ServiceUnavailable"), ApiUnreachable),
        (Answer("/pods", 504, "Timeout"), ApiUnreachable),
        (Answer("/pods", 429, "TooManyRequests", headers={"Retry-After": "0"}), ApiUnreachable),
        (Answer("/pods"), ApiUnreachable),
        (Answer("/pods", 500, "InternalError"), KubectlError),
    ],
    ids=lambda value: getattr(value, "reason", "") or "drops it",
)
async def test_what_a_failing_api_server_answers_is_told_as_what_it_is(
    stub: StubCluster,
    api: ApiServer,
    environment: dict[str, str],
    answer: Answer,
    kind: type[KubectlError],
) -> None:
    api.answers = [answer]
    with anyio.fail_after(BOUND):
        with pytest.raises(KubectlError) as failed:
            await real(stub, environment).select("pods", "a=b")
    assert type(failed.value) is kind, failed.value


async def test_an_overloaded_api_server_is_waited_for(
    stub: StubCluster, api: ApiServer, environment: dict[str, str]
) -> None:
    api.answers = [Answer("/pods", 429, "TooManyRequests", headers={"Retry-After": "0"}, times=2)]
    with anyio.fail_after(BOUND):
        assert await real(stub, environment).select("pods", "a=b") == []


async def test_a_slow_list_is_waited_for_and_a_frozen_one_is_not(
    stub: StubCluster, api: ApiServer, environment: dict[str, str], monkeypatch: Any
) -> None:
    kubectl = real(stub, environment)
    with anyio.fail_after(BOUND):
        api.answers = [Answer("/pods", delay=1)]
        assert await kubectl.select("pods", "a=b") == []
        api.answers = [Answer("/pods", delay=60)]
        with pytest.raises(ApiUnreachable, match="no answer from kubectl within 1 s"):
            await kubectl.run("get", "pods", timeout=1)
        monkeypatch.setattr("host_client.kubectl.REQUEST_TIMEOUT_SECONDS", 1)
        with pytest.raises(ApiUnreachable, match="does not answer"):
            await kubectl.select("pods", "a=b")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'log in again: run corp-login' >&2; exit 1", "log in again: run corp-login"),
        ("echo 'Welcome to Corp'; token", "getting credentials"),
        ("read answer || { echo 'nobody to ask' >&2; exit 1; }; token", "nobody to ask"),
        ("echo 'waiting for the browser' >&2; exec sleep 60", "waiting for the browser"),
        ("kill -9 $$", "getting credentials"),
    ],
    ids=["dies", "banner", "asks", "hangs", "is killed"],
)
async def test_a_credential_plugin_that_gives_none_is_told_with_what_it_said(
    stub: StubCluster, api: ApiServer, environment: dict[str, str], script: str, said: str
) -> None:
    """L40: within 10 s, and with the plugin's own words."""
    log_in(stub, api, plugin(stub, script))
    began = time.monotonic()
    with anyio.fail_after(BOUND):
        with pytest.raises(ApiUnreachable, match=said):
            await real(stub, environment).select("pods", "a=b")
    assert time.monotonic() - began < 12  # ten, and what a busy machine needs


async def test_a_credential_plugin_takes_nothing_of_what_is_meant_for_the_pod(
    stub: StubCluster, api: ApiServer
) -> None:
    """L40: found through PATH, wordy on stderr, and greedy: it reads all the input that it gets."""
    log_in(stub, api, plugin(stub, "cat > /dev/null; yes noise | head -c 300000 >&2; token"))
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            assert (await run(host, "echo ok"))["stdout"] == "ok\n"


async def test_a_plugin_that_must_ask_is_told_before_anything_is_sent(
    stub: StubCluster, api: ApiServer, environment: dict[str, str]
) -> None:
    log_in(stub, api, plugin(stub, "token", interactiveMode="Always"))
    with anyio.fail_after(BOUND):
        with pytest.raises(ApiUnreachable, match="interactive mode"):
            await real(stub, environment).select("pods", "a=b")


async def test_credentials_that_run_out_leave_the_open_pipe_and_are_asked_for_by_the_next(
    stub: StubCluster, api: ApiServer
) -> None:
    """L40: expired in the middle."""
    over = stub.folder / "over"
    log_in(stub, api, plugin(stub, f"[ -e {over} ] && {{ echo 'expired' >&2; exit 1; }}; token"))
    with anyio.fail_after(BOUND):
        async with Host(stub.settings()) as host:
            await host.launcher.create(name="work")
            over.touch()
            assert (await run(host, "echo ok"))["stdout"] == "ok\n"
            session = host.sessions.existing("work")
            assert session
            await host.sessions.forget(session.sandbox.id)
            with pytest.raises(StillStarting, match="expired"):
                await host.sessions.open("work", wait=3)
            over.unlink()
            assert (await run(host, "echo ok"))["stdout"] == "ok\n"


async def test_a_context_that_is_switched_or_in_a_second_file_stays_the_first(
    stub: StubCluster, api: ApiServer, environment: dict[str, str]
) -> None:
    """L41: with KUBECONFIG=a:b, plugin and all, and without any of it in our own environment."""
    first = stub.folder / "first"
    whole = api.kubeconfig(plugin(stub, "token"))
    second = stub.folder / "second"
    second.write_text(json.dumps(whole | {"current-context": ""}), encoding="utf-8")
    first.write_text(json.dumps({"current-context": "stub"}), encoding="utf-8")
    kubectl = Kubectl(
        stub.settings(
            KUBECONFIG=f"{first}:{second}", PODPIPE_KUBECTL=environment["PODPIPE_KUBECTL"]
        )
    )
    first.write_text(json.dumps({"current-context": "nonesuch"}), encoding="utf-8")
    with anyio.fail_after(BOUND):
        assert await kubectl.select("pods", "a=b") == []
    assert "KUBECONFIG" not in os.environ or os.environ["KUBECONFIG"] != f"{first}:{second}"
