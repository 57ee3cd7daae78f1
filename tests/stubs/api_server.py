"""An API server for the real kubectl, on loopback: what only its side of an exec can do wrong.

It knows one kind of object, a pod, of which it has every name. What `kubectl exec` starts is run
here, by the stub kubectl, so the other end of the stream is a real dial and a real daemon. Faults
are set on it by tests, and each says how many requests it is for.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from host_client.local.pki import Identity, issue_missing

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
STDIN, STDOUT, STDERR, STATUS, HALF_CLOSE = 0, 1, 2, 3, 255
NORMAL_CLOSURE = 1000
_ACCEPT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

Ending = Literal["cut", "close", "freeze"]


@dataclass(slots=True)
class Stream:
    """A fault of an exec's stream.

    Args:
        ending: the connection is cut without a word, or closed as if all were well but without a
            status, or nothing is passed on any more either way.
        after: bytes of the command's output that are passed on before.
        times: how many execs it is for.
    """

    ending: Ending
    after: int = 0
    times: int = 1


@dataclass(slots=True)
class Answer:
    """An answer in place of the right one.

    Args:
        path: requests whose path holds this.
        status: HTTP status; 0 for none at all.
        reason: of the API's Status object.
        delay: seconds before it.
        headers: more of them.
        times: how many requests it is for.
        websocket: only for a request that wants to become a WebSocket.
    """

    path: str
    status: int = 0
    reason: str = ""
    delay: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    times: float = math.inf
    websocket: bool = False


@dataclass(slots=True)
class Request:
    """What kubectl asked for."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def upgrades(self) -> str:
        """What it wants to become; empty for nothing."""
        return self.headers.get("upgrade", "").lower()


class ApiServer:
    """As an async context manager's value; see `served`.

    Args:
        runtime: the argv that runs a pod's command, to which kubectl's own arguments are added.
        environment: for it.
    """

    def __init__(self, runtime: Sequence[str], environment: dict[str, str]) -> None:
        self._runtime = runtime
        self._environment = environment
        self.requests: list[Request] = []
        self.answers: list[Answer] = []
        self.streams: list[Stream] = []
        self.url = ""
        self.ca = b""
        self._clients: set[asyncio.Task[None]] = set()

    def kubeconfig(self, user: dict[str, Any]) -> dict[str, Any]:
        """A kubeconfig that reaches it.

        Args:
            user: how a person logs in; anybody is let in.
        """
        cluster = {
            "server": self.url,
            "certificate-authority-data": base64.b64encode(self.ca).decode(),
        }
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "stub", "context": {"cluster": "fake", "user": "u"}}],
            "current-context": "stub",
        }

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task
        self._clients.add(task)
        try:
            while request := await _read_request(reader):
                self.requests.append(request)
                if not await self._respond(request, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._clients.discard(task)
            writer.transport.abort()

    async def _respond(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer; False where the connection is of no more use."""
        for answer in self.answers:
            if answer.path in request.target and answer.times > 0:
                if answer.websocket and request.upgrades != "websocket":
                    continue
                answer.times -= 1
                await asyncio.sleep(answer.delay)
                if answer.status:
                    failure = {"kind": "Status", "apiVersion": "v1", "status": "Failure",
                               "reason": answer.reason, "code": answer.status,
                               "message": f"{answer.reason}: a fault of the test"}  # fmt: skip
                    await _write(writer, answer.status, failure, answer.headers)
                    return not request.upgrades
                if answer.delay:
                    continue  # late, but right
                return False
        path = urlsplit(request.target).path
        if path.endswith("/exec"):
            if request.upgrades != "websocket":
                await _write(writer, 400, {"kind": "Status", "message": "WebSocket only"}, {})
            else:
                await self._exec(request, reader, writer)
            return False
        await _write(writer, 200, _object(path), {})
        return True

    async def _exec(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        url = urlsplit(request.target)
        pod = url.path.split("/")[-2]
        query = parse_qs(url.query)
        key = request.headers["sec-websocket-key"].encode()
        accept = base64.b64encode(hashlib.sha1(key + _ACCEPT).digest()).decode()
        writer.write(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Protocol: v5.channel.k8s.io\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
            .encode()
        )  # fmt: skip
        child = await asyncio.create_subprocess_exec(
            *self._runtime, "exec", "-i", "-q", pod, "-c", "sandbox", "--", *query["command"],
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=self._environment,
        )  # fmt: skip
        fault = next((each for each in self.streams if each.times > 0), None)
        if fault:
            fault.times -= 1
        try:
            async with asyncio.TaskGroup() as tasks:
                upward = tasks.create_task(_from_client(reader, writer, child))
                drained = tasks.create_task(_send_all(child.stderr, STDERR, writer))
                ending = await _downward(child, writer, fault)
                if ending == "freeze":
                    upward.cancel()
                    await asyncio.Event().wait()
                if ending == "close":
                    _frame(writer, CLOSE, struct.pack(">H", NORMAL_CLOSURE))
                    await writer.drain()
                elif ending == "cut":
                    writer.transport.abort()
                else:
                    await drained
                    _frame(writer, BINARY, bytes([STATUS]) + _status(await child.wait()))
                    _frame(writer, CLOSE, struct.pack(">H", NORMAL_CLOSURE))
                    await writer.drain()
                upward.cancel()
                drained.cancel()
        finally:
            with suppress(ProcessLookupError):
                child.kill()
            # Nobody may have read its output, and a process whose pipes are full is not waited for.
            await child.communicate()

    async def aclose(self) -> None:
        """Drop every connection."""
        for task in list(self._clients):
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)


@asynccontextmanager
async def served(
    folder: Path, runtime: Path, environment: dict[str, str]
) -> AsyncIterator[ApiServer]:
    """An API server for as long as the block lasts.

    Args:
        folder: for its certificates.
        runtime: a stub kubectl, which runs what is exec'ed.
        environment: for that.
    """
    issue_missing(folder, [Identity("server", "fake", serves=["127.0.0.1"])])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    api = ApiServer([sys.executable, "-IS", str(runtime)], environment)
    api.ca = (folder / "ca.crt").read_bytes()
    server = await asyncio.start_server(api.client, "127.0.0.1", 0, ssl=context)
    api.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield api
    finally:
        server.close()
        await api.aclose()


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode().split(" ", 2)
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, target, headers)


async def _write(
    writer: asyncio.StreamWriter, status: int, body: dict[str, Any], headers: dict[str, str]
) -> None:
    data = json.dumps(body).encode()
    lines = {"Content-Type": "application/json", "Content-Length": str(len(data))} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{head}\r\n".encode() + data)
    await writer.drain()


def _object(path: str) -> dict[str, Any]:
    """The right answer to a GET: discovery, a pod, or a list of nothing."""
    verbs = ["create", "get", "list"]
    match path.strip("/").split("/"):
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
        case ["api", "v1"]:
            kinds = {"pods": "Pod", "configmaps": "ConfigMap", "pods/exec": "PodExecOptions"}
            resources = [
                {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
                for name, kind in kinds.items()
            ]
            return {"kind": "APIResourceList", "groupVersion": "v1", "resources": resources}
        case ["version"]:
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        case [*_, "namespaces", namespace, "pods", name]:
            return {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {"containers": [{"name": "sandbox", "image": "x"}]},
                "status": {"phase": "Running"},
            }
        case _:
            return {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": []}


def _frame(writer: asyncio.StreamWriter, operation: int, data: bytes) -> None:
    size = len(data)
    if size < 126:
        head = struct.pack(">BB", 0x80 | operation, size)
    elif size < 1 << 16:
        head = struct.pack(">BBH", 0x80 | operation, 126, size)
    else:
        head = struct.pack(">BBQ", 0x80 | operation, 127, size)
    writer.write(head + data)


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first, second = await reader.readexactly(2)
    size = second & 127
    if size >= 126:
        width = 2 if size == 126 else 8
        size = int.from_bytes(await reader.readexactly(width), "big")
    mask = await reader.readexactly(4)  # a client's frames always have one
    data = await reader.readexactly(size)
    key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
    return first & 15, (int.from_bytes(data, "big") ^ key).to_bytes(size, "big")


async def _from_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, child: asyncio.subprocess.Process
) -> None:
    """What kubectl sends, until it has gone: then the command's input ends, as a kubelet ends it."""
    assert child.stdin
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            operation, data = await _read_frame(reader)
            if operation == PING:
                _frame(writer, PONG, data)
            elif operation == CLOSE or data[:2] == bytes([HALF_CLOSE, STDIN]):
                break
            elif data[:1] == bytes([STDIN]):
                child.stdin.write(data[1:])
                await child.stdin.drain()
    child.stdin.close()


async def _send_all(
    source: asyncio.StreamReader | None, channel: int, writer: asyncio.StreamWriter
) -> None:
    assert source
    while data := await source.read(16384):
        _frame(writer, BINARY, bytes([channel]) + data)
        await writer.drain()


async def _downward(
    child: asyncio.subprocess.Process, writer: asyncio.StreamWriter, fault: Stream | None
) -> Ending | None:
    """The command's output, as far as it is passed on."""
    assert child.stdout
    left = fault.after if fault else math.inf
    with suppress(OSError):
        while data := await child.stdout.read(16384):
            passed = data if len(data) <= left else data[: int(left)]
            left -= len(passed)
            _frame(writer, BINARY, bytes([STDOUT]) + passed)
            await writer.drain()
            if fault and left <= 0:
                return fault.ending
    return None


def _status(code: int) -> bytes:
    if code == 0:
        return json.dumps({"metadata": {}, "status": "Success"}).encode()
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return json.dumps(
        {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
         "message": "command terminated with non-zero exit code", "details": {"causes": causes}}
    ).encode()  # fmt: skip
