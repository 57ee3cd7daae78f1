"""Connections to ports of one sandbox, all through one carrier, which is opened when it is needed.

The carrier is an ssh: it gives each connection a window of its own, so that a reader who is slow stalls
nobody else, and listens here on unix sockets in a folder of ours, one for each port. Where this machine
has no ssh it is a `kubectl port-forward`. When it has ended, by whatever cause, the next connection
opens another, and resumes the sandbox if need be; while there are none nothing of it is use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.abc
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from host_client import ssh
from host_client.errors import STDERR_TAIL, PrerequisiteError, SessionLost
from host_client.kubectl import SPDY
from in_pod_server.splice import End

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from host_client.host import Host

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
"""After the last connection has ended: a sandbox that nobody uses may then end itself."""
MAX_SOCKET_PATH = 103
"""Of the platform that takes least."""
MAX_LINE_BYTES = 4096
OPEN_SECONDS = 30.0
"""For a carrier to be through, once the sandbox has answered."""
STOP_SECONDS = 5.0
HOLD = "echo through; exec cat >/dev/null"
"""What runs in the sandbox meanwhile: it says that all is in place, and ends with our end of its stdin.
So the ssh ends with us, even where we are killed."""
OPTIONS = {
    "ExitOnForwardFailure": "yes",
    "ServerAliveCountMax": "3",
    "ServerAliveInterval": "10",
    "StreamLocalBindMask": "0177",
    "StreamLocalBindUnlink": "yes",
}
_FORWARDING = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) -> (\d+)")


class Tunnel:
    """The way to some ports of one sandbox.

    Args:
        host: whose sandbox it is.
        ref: its id or name.
        ports: of the pod's loopback.
        tasks: where carriers live; cancelling them ends these.
    """

    def __init__(
        self, host: Host, ref: str, ports: Sequence[int], tasks: anyio.abc.TaskGroup
    ) -> None:
        self._host = host
        self._ref = ref
        self._ports = tuple(dict.fromkeys(ports))
        self._tasks = tasks
        self._opening = anyio.Lock()
        self._carrier: Carrier | None = None
        self._asked = SPDY

    @asynccontextmanager
    async def connected(self, port: int) -> AsyncIterator[End]:
        """A connection to a port, for as long as the context lasts.

        One to a port on which nothing listens ends, or is lost, without a word.

        Raises:
            SessionLost: no carrier got through.
            PrerequisiteError: there is no folder for its sockets.
            PodpipeError: as `Sessions.call`.
        """
        for again in (True, False):
            carrier = await self.opened()
            carrier.users += 1
            try:
                end = await carrier.connect(port)
                break
            except OSError:
                # It has just ended, and nobody has noticed yet.
                carrier.users -= 1
                carrier.ended = True
                if not again:
                    raise
        try:
            yield end
        finally:
            end.close()
            carrier.users -= 1
            carrier.used = anyio.current_time()

    async def opened(self) -> Carrier:
        """The carrier of now, so that what is wrong can be told early. Raises as `connected`."""
        async with self._opening:
            if self._carrier is None or self._carrier.ended:
                self._carrier = await self._open()
                self._tasks.start_soon(self._carrier.live)
            return self._carrier

    async def _open(self) -> Carrier:
        if not has_ssh(self._host):
            return await by_port_forward(self._host, self._ref, self._ports)
        try:
            return await by_ssh(self._host, self._ref, self._ports, self._asked)
        except SessionLost as lost:
            if not self._asked:
                raise
            log.info("trying again by WebSockets: %s", lost)
            carrier = await by_ssh(self._host, self._ref, self._ports, {})
            self._asked = {}
            return carrier


def has_ssh(host: Host) -> bool:
    """Whether this machine has an ssh."""
    with contextlib.suppress(PrerequisiteError):
        return bool(ssh.program(host.settings.environment))
    return False


class Carrier:
    """One process that carries connections.

    Args:
        process: it.
        connect: makes a connection to one of its ports.
        files: what goes with it.
    """

    def __init__(
        self,
        process: Process,
        connect: Callable[[int], Awaitable[End]],
        files: contextlib.ExitStack,
    ) -> None:
        self._process = process
        self._files = files
        self.connect = connect
        self.ended = False
        """Whether it carries nothing more."""
        self.users = 0
        """Connections that it carries."""
        self.used = anyio.current_time()
        """When the last one of these ended."""

    async def live(self) -> None:
        """Wait until it ends or nobody has used it for `IDLE_SECONDS`, and tidy up."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_drain, self._process.stdout)
                tasks.start_soon(_drain, self._process.stderr)
                tasks.start_soon(self._watch, tasks.cancel_scope)
                await self._process.wait()
                tasks.cancel_scope.cancel()
        finally:
            self.ended = True
            await _end(self._process)
            self._files.close()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        while not self.ended:
            since = anyio.current_time() if self.users else self.used
            if (left := since + IDLE_SECONDS - anyio.current_time()) > 0:
                await anyio.sleep(left)
            else:
                self.ended = True
                scope.cancel()


async def by_ssh(host: Host, ref: str, ports: Sequence[int], asked: Mapping[str, str]) -> Carrier:
    """A carrier that is an ssh.

    Args:
        host: as of `Tunnel`.
        ref: likewise.
        ports: likewise.
        asked: of the kubectl below it, unless its environment says otherwise.

    Raises:
        SessionLost: it did not get through.
        PodpipeError: as `Tunnel.connected`.
    """
    async with AsyncExitStack() as stack:
        files = contextlib.ExitStack()
        stack.callback(files.close)
        keys = files.enter_context(ssh.own_keys(host.settings.environment))
        sockets = {port: str(keys.private.with_name(str(port))) for port in ports}
        if len(longest := max(sockets.values(), key=len)) > MAX_SOCKET_PATH:
            raise PrerequisiteError(
                f"{longest} is too long for a unix socket: set XDG_RUNTIME_DIR to a shorter folder "
                "of yours"
            )
        admission = await keys.admitted(host.sessions, ref)
        argv = [ssh.program(host.settings.environment)]
        argv += [*keys.configure(host.kubectl, admission, **OPTIONS), "-T"]
        for port, path in sockets.items():
            argv += ["-L", f"{path}:127.0.0.1:{port}"]
        process = await _started(stack, host, [*argv, ssh.HOST, HOLD], asked)
        async with _through(process, ref) as said:
            await said.receive_until(b"\n", MAX_LINE_BYTES)
        stack.pop_all()

    async def connect(port: int) -> End:
        _, end = await asyncio.get_running_loop().create_unix_connection(End, sockets[port])
        return end

    return Carrier(process, connect, files)


async def by_port_forward(host: Host, ref: str, ports: Sequence[int]) -> Carrier:
    """A carrier for machines without ssh; it is the API server's, and needs a right of its own.

    Raises:
        PrerequisiteError: the person does not have it.
        SessionLost: it did not get through.
        PodpipeError: as `Host.open`.
    """
    session = await host.open(ref)
    here: dict[int, int] = {}
    async with AsyncExitStack() as stack:
        words = [f":{port}" for port in ports]
        argv = host.kubectl.argv("port-forward", f"pod/{session.pod.name}", *words)
        process = await _started(stack, host, [*argv, "--address=127.0.0.1"], {})
        try:
            async with _through(process, ref) as said:
                while len(here) < len(ports):
                    line = await said.receive_until(b"\n", MAX_LINE_BYTES)
                    if found := _FORWARDING.match(line):
                        here[int(found[2])] = int(found[1])
        except SessionLost as lost:
            if "forbidden" not in str(lost):
                raise
            # It is not of the launcher's Role, in which exec is the only way into a pod.
            raise PrerequisiteError(
                "there is no ssh on PATH, and kubectl port-forward, which would do in its place, "
                f"needs the right to get and create pods/portforward in {host.kubectl.namespace}, which "
                "you do not have: install OpenSSH's client (Debian, Ubuntu: apt-get install "
                "openssh-client), or ask an administrator for that right"
            ) from lost
        stack.pop_all()

    async def connect(port: int) -> End:
        loop = asyncio.get_running_loop()
        _, end = await loop.create_connection(End, "127.0.0.1", here[port])
        return end

    return Carrier(process, connect, contextlib.ExitStack())


async def _started(
    stack: AsyncExitStack, host: Host, argv: Sequence[str], asked: Mapping[str, str]
) -> Process:
    """A process that goes with the stack, and gets no ctrl-C of a terminal: that is for us."""
    environment = {**asked, **host.kubectl.environment}
    process = await anyio.open_process(argv, env=environment, start_new_session=True)
    stack.push_async_callback(_end, process)
    return process


@asynccontextmanager
async def _through(process: Process, ref: str) -> AsyncIterator[BufferedByteReceiveStream]:
    """What a process says until all is in place.

    Raises:
        SessionLost: it ends before that, or takes too long.
    """
    assert process.stdout
    assert process.stderr
    why = f"it took longer than {OPEN_SECONDS:g} s"
    with anyio.move_on_after(OPEN_SECONDS):
        try:
            yield BufferedByteReceiveStream(process.stdout)
            return
        except (anyio.EndOfStream, anyio.IncompleteRead):
            said = b"".join([chunk async for chunk in process.stderr])
            why = said.decode("utf-8", "replace").strip()[-STDERR_TAIL:] or "it said nothing"
    raise SessionLost(f"no way to the ports of sandbox {ref}: {why}", sent=False)


async def _drain(said: anyio.abc.ByteReceiveStream | None) -> None:
    assert said
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async for chunk in said:
            log.info("carrier: %s", chunk.decode("utf-8", "replace").strip())


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with anyio.move_on_after(STOP_SECONDS, shield=True):
        await process.wait()
    with anyio.CancelScope(shield=True):
        await process.aclose()
