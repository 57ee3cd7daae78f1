"""An app at its local address, beside the same app through `kubectl port-forward`."""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from host_client.errors import PodpipeError
from host_client.gateway import Gateway
from in_pod_server.contract import CONTAINER, GATEWAY_PORT
from tests.bench.harness import Row, Sample, Sides
from tests.bench.lab import Lab, checked
from tests.bench.row_run import PODPIPE

LARGE_BYTES = 100 << 20
REQUESTS = 200
PORT, LARGE_PORT, OPEN_PORT = 3000, 3001, 8797
MANY = 32
APP = """
import asyncio
async def handle(reader, writer):
    try:
        while await reader.readuntil(b"\\r\\n\\r\\n"):
            writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    async with await asyncio.start_server(handle, "127.0.0.1", %d) as server:
        await server.serve_forever()
asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class _Ways:
    """Two ports of this machine that lead to one gateway, and how to ask it."""

    pod: str
    host: str
    token: str
    ours: int
    forwarded: int

    def request(self, app: str, path: str) -> bytes:
        """One for an app, on a connection that stays."""
        lines = [f"GET {path} HTTP/1.1", f"Host: {app}.{self.host}"]
        return "\r\n".join([*lines, f"Authorization: Bearer {self.token}", "", ""]).encode("ascii")


@asynccontextmanager
async def _ways(lab: Lab) -> AsyncIterator[_Ways]:
    session = await lab.sandbox()
    box, pod = session.sandbox.id, session.pod.name
    call = lab.host.sessions.call
    checked(await call(box, "write_file", {"path": "bench-web.py", "content": APP % PORT}))
    make = f"head -c {LARGE_BYTES} /dev/zero > /tmp/large"
    checked(await call(box, "run_command", {"command": make}))
    commands = [
        "python3 bench-web.py",
        f"cd /tmp && python3 -m http.server -b 127.0.0.1 {LARGE_PORT}",
    ]
    servers = [
        checked(await call(box, "start_background", {"command": command})) for command in commands
    ]
    for name, port in (("web", PORT), ("large", LARGE_PORT)):
        ready = f"until (echo >/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.1; done"
        checked(await call(box, "run_command", {"command": ready}))
        checked(await call(box, "expose_port", {"internal_port": port, "name": name}))
    grant = await lab.host.apps.grant(box)
    environment = dict(lab.settings.environment)
    environment |= {"PODPIPE_USER": lab.settings.user, "PODPIPE_OPEN_PORT": str(OPEN_PORT)}
    forward = lab.kubectl.argv("port-forward", f"pod/{pod}", f":{GATEWAY_PORT}")
    # A process of its own, as kubectl is: the one that asks is not to be the one that carries.
    async with (
        _says([str(PODPIPE), "open"], environment, r"served"),
        _says(forward, lab.kubectl.environment, r"127\.0\.0\.1:(\d+) ->") as found,
    ):
        host = Gateway(port=OPEN_PORT).address(box).removeprefix("http://").rstrip("/")
        yield _Ways(pod, host, grant.token, OPEN_PORT, int(found[1]))
    for server in servers:
        checked(await call(box, "stop_process", {"process_id": server["process_id"]}))


@asynccontextmanager
async def _says(
    argv: list[str], environment: dict[str, str], pattern: str
) -> AsyncIterator[re.Match[str]]:
    """A process that has said what matches a pattern."""
    process = await anyio.open_process(
        argv, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        assert process.stdout
        said = BufferedByteReceiveStream(process.stdout)
        with anyio.fail_after(60):
            while True:
                line = (await said.receive_until(b"\n", 4096)).decode()
                if found := re.search(pattern, line):
                    break
        yield found
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        with anyio.CancelScope(shield=True):
            await process.wait()
            await process.aclose()


async def _small(ways: _Ways, connections: int, to: int | Path) -> Sample:
    """The median of requests on connections that stay open, to a port or a socket."""
    taken: list[float] = []
    request = ways.request("web", "/")

    async def one() -> None:
        if isinstance(to, Path):
            reader, writer = await asyncio.open_unix_connection(to)
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", to)
        for _ in range(REQUESTS // connections + 1):
            began = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            taken.append(time.perf_counter() - began)
            if b" 200 " not in head:
                raise PodpipeError(head.decode())
        writer.close()
        await writer.wait_closed()

    async with anyio.create_task_group() as tasks:
        for _ in range(connections):
            tasks.start_soon(one)
    return Sample(statistics.median(taken))


async def _large(ways: _Ways, port: int) -> Sample:
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ways.request("large", "/large"))
    head = await reader.readuntil(b"\r\n\r\n")
    left = LARGE_BYTES
    while left and (chunk := await reader.read(1 << 20)):
        left -= len(chunk)
    writer.close()
    if left or b" 200 " not in head:
        raise PodpipeError(f"{left} bytes are missing: {head.decode()}")
    return Sample(time.perf_counter() - began)


def _asked(connections: int) -> Callable[[Lab], AbstractAsyncContextManager[Sides]]:
    @asynccontextmanager
    async def sides(lab: Lab) -> AsyncIterator[Sides]:
        ways = await lab.once(_ways)
        yield Sides(
            partial(_small, ways, connections, ways.ours),
            partial(_small, ways, connections, ways.forwarded),
        )

    return sides


@asynccontextmanager
async def _by_ssh(lab: Lab) -> AsyncIterator[Sides]:
    """The least that a way of OpenSSH can take: its client alone, with nothing of ours after it."""
    ways = await lab.once(_ways)
    environment = dict(lab.settings.environment) | {"PODPIPE_USER": lab.settings.user}
    box = ways.host.split(".")[0]
    entry = await anyio.run_process([str(PODPIPE), "ssh-config", box], env=environment)
    with tempfile.TemporaryDirectory() as folder:
        config, socket = Path(folder, "config"), Path(folder, "socket")
        await anyio.Path(config).write_bytes(entry.stdout)
        argv = ["ssh", "-F", str(config), "-L", f"{socket}:127.0.0.1:{GATEWAY_PORT}"]
        async with _says([*argv, f"podpipe-{box}", "echo through; cat"], environment, "through"):
            yield Sides(partial(_small, ways, 1, socket), partial(_small, ways, 1, ways.forwarded))


@asynccontextmanager
async def _downloaded(lab: Lab) -> AsyncIterator[Sides]:
    ways = await lab.once(_ways)
    argv = lab.kubectl.argv("exec", ways.pod, "-c", CONTAINER, "--", "cat", "/tmp/large")

    async def cat() -> Sample:
        began = time.perf_counter()
        await anyio.run_process(
            argv, env=lab.kubectl.environment, stdout=subprocess.DEVNULL, start_new_session=True
        )
        return Sample(time.perf_counter() - began)

    yield Sides(partial(_large, ways, ways.ours), cat)


ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="address",
        ours=f"a request to an app at its local address, median of {REQUESTS}",
        baseline="the same through kubectl port-forward",
        sides=_asked(1),
        runs=7,
        target=1.1,
    ),
    Row(
        name="address-ssh",
        ours="the same by ssh-config's entry: OpenSSH alone, its client's socket",
        baseline="the same through kubectl port-forward",
        sides=_by_ssh,
        runs=7,
    ),
    Row(
        name=f"address-{MANY}",
        ours=f"likewise, {MANY} connections at once",
        baseline="the same through kubectl port-forward",
        sides=_asked(MANY),
        runs=7,
        target=1.1,
    ),
    Row(
        name="address-large",
        ours="100 MiB from an app at its local address",
        baseline="kubectl exec cat of as much",
        sides=_downloaded,
        runs=5,
        target=2.0,
    ),
)
