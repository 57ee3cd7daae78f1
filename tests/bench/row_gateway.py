"""What the gateway adds to a request, and how soon an app that was just exposed is reached."""

from __future__ import annotations

import http.client
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread

from host_client.errors import PodpipeError
from host_client.gateway import Gateway
from host_client.listener import OnDemand
from in_pod_server.contract import GATEWAY_PORT
from tests.bench.harness import Row, Sample, Sides
from tests.bench.lab import Lab, checked

APP = Path(__file__).parents[1] / "stubs" / "web_app.py"
PORT = 3000
REQUESTS = 200
SECONDS = 20.0

_IN_THE_POD = """
import http.client, json, statistics, sys, time
port, count, headers = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.stdin.readline())
connection = http.client.HTTPConnection("127.0.0.1", port)
taken = []
for _ in range(count):
    began = time.perf_counter()
    connection.request("GET", "/x", headers=headers)
    answer = connection.getresponse()
    answer.read()
    taken.append(time.perf_counter() - began)
    assert answer.status == 200, answer.status
print(statistics.median(taken))
"""


@asynccontextmanager
async def _published(lab: Lab) -> AsyncIterator[tuple[str, str]]:
    """The lab's sandbox with an app that is published as `web`; its id and a token."""
    session = await lab.sandbox()
    box = session.sandbox.id
    call = lab.host.sessions.call
    files = {"bench-app.py": APP.read_text("utf-8"), "bench-ask.py": _IN_THE_POD}
    for path, content in files.items():
        checked(await call(box, "write_file", {"path": path, "content": content}))
    command = f"python3 bench-app.py {PORT}"
    server = checked(await call(box, "start_background", {"command": command}))
    ready = f"until (echo >/dev/tcp/127.0.0.1/{PORT}) 2>/dev/null; do sleep 0.1; done"
    checked(await call(box, "run_command", {"command": ready, "timeout_seconds": SECONDS}))
    checked(await call(box, "expose_port", {"internal_port": PORT, "name": "web"}))
    opened = await lab.host.apps.grant(box)
    try:
        yield box, opened.token
    finally:
        checked(await call(box, "unexpose_port", {"name": "web"}))
        checked(await call(box, "stop_process", {"process_id": server["process_id"]}))


@asynccontextmanager
async def _in_the_pod(lab: Lab) -> AsyncIterator[Sides]:
    async with _published(lab) as (box, token):
        headers = f'{{"Host": "web.{box}.x", "Authorization": "Bearer {token}"}}\n'

        async def asked(port: int) -> Sample:
            arguments = {"command": f"python3 bench-ask.py {port} {REQUESTS}", "stdin": headers}
            result = checked(await lab.host.sessions.call(box, "run_command", arguments))
            if result["exit_code"]:
                raise PodpipeError(result["stderr"])
            return Sample(float(result["stdout"]))

        yield Sides(lambda: asked(GATEWAY_PORT), lambda: asked(PORT))


@asynccontextmanager
async def _soon(lab: Lab) -> AsyncIterator[Sides]:
    async with _published(lab) as (box, token):
        await OnDemand(lab.host).listener()
        port = lab.settings.gateway.port

        async def first(app: str) -> Sample:
            began = time.perf_counter()
            await anyio.to_thread.run_sync(_get, port, box, app, token)
            return Sample(time.perf_counter() - began)

        async def exposed() -> Sample:
            call = lab.host.sessions.call
            checked(await call(box, "expose_port", {"internal_port": PORT, "name": "soon"}))
            try:
                return await first("soon")
            finally:
                checked(await call(box, "unexpose_port", {"name": "soon"}))

        yield Sides(exposed, lambda: first("web"))


def _get(port: int, box: str, app: str, token: str) -> None:
    host = Gateway(port=port).address(box, app).removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", "/", headers={"Host": host, "Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise PodpipeError(f"{host} answered {answer.status}")


ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="gateway",
        ours=f"a request through the gateway, in the pod, median of {REQUESTS}",
        baseline="the same to the app's own port",
        sides=_in_the_pod,
        runs=7,
        added=0.002,
    ),
    Row(
        name="exposed",
        ours="the first answer of an app after expose_port, at its local address",
        baseline="an answer of an app that was there, at its local address",
        sides=_soon,
        runs=7,
        limit=0.5,
    ),
)
