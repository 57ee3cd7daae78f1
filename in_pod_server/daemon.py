"""The daemon: it owns the socket, and with it the sandbox's processes and files.

The socket is bound before anything heavy is imported, so a client can connect, and wait, while the
daemon still starts. mcp is imported only after that: it takes longer than all the rest together.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import logging
import os
import platform
import resource
import secrets
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from in_pod_server import contract

if TYPE_CHECKING:
    from in_pod_server.streams import Streams

BACKLOG: Final = 128
FLUSH_SECONDS: Final = 1.5
"""How long connections may take to write their last replies when the daemon ends."""
MAX_SOCKET_PATH: Final = 107
JOURNAL: Final = "calls.journal"
SLICE_NANOSECONDS: Final = 100_000
"""The daemon's turn on a CPU: the shortest that Linux takes."""
_PR_SET_DUMPABLE: Final = 4
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
_SCHED_FLAG_RESET_ON_FORK: Final = 1

logger = logging.getLogger(__name__)


class DaemonError(Exception):
    """The daemon cannot start, and why."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where everything is. The pod's own places are `contract`'s; tests have others."""

    socket: Path
    home: Path
    workspace: Path
    run_dir: Path
    log_dir: Path
    podinfo: Path


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of the daemon.

    Args:
        max_file_bytes: cap of the content tools.
        idle_seconds: after which an unused sandbox ends; 0 for never.
        sandbox_id: by which the gateway knows its hosts; empty for no gateway.
        gateway_port: where it listens; 0 for no gateway.
        gateway_address: at which a proxy reaches it; empty for the loopback and no proxy.
    """

    max_file_bytes: int
    idle_seconds: float = 0.0
    sandbox_id: str = ""
    gateway_port: int = 0
    gateway_address: str = ""


def serve(paths: Paths, options: Options) -> int:
    """Run the daemon until SIGTERM or SIGINT, or until the sandbox expires or is idle for too long.

    Args:
        paths: where everything is.
        options: what is asked of it.

    Returns:
        The exit code: 0 for an end of its own, otherwise 128 and the signal's number, for Kubernetes
        forgets why it ended a pod whose container says that all went well.

    Raises:
        DaemonError: The socket cannot be had, or a folder is missing.
    """
    _close_stdin()
    _become_undumpable()
    _take_short_turns()
    open_files = _take_descriptors()
    with bound(paths.socket) as listener:
        _prepare(paths)
        # Collecting garbage while mcp builds its models costs a sixth of the start.
        gc.disable()
        import anyio

        from in_pod_server import connection, server  # noqa: F401 - the slow part, under gc.disable

        gc.freeze()
        gc.enable()
        return anyio.run(_serve, paths, listener, options, open_files)


@contextlib.contextmanager
def bound(path: Path) -> Iterator[socket.socket]:
    """Listen on `path` (0600), in place of what a dead daemon left there.

    Raises:
        DaemonError: Another daemon lives, or the path cannot be used.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise DaemonError(f"the socket's path is longer than {MAX_SOCKET_PATH} bytes: {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise DaemonError(f"the socket's folder cannot be used: {exc}") from exc
    with os.fdopen(lock, "r+"), socket.socket(socket.AF_UNIX) as listener:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DaemonError(f"another daemon serves {path}: stop it first") from None
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise DaemonError(f"{path} exists and is no socket: remove it first")
            path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError as exc:
            raise DaemonError(f"the socket {path} cannot be bound: {exc.strerror}") from exc
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _prepare(paths: Paths) -> None:
    if not paths.home.is_dir():
        raise DaemonError(f"the home {paths.home} is no folder")
    try:
        paths.run_dir.mkdir(parents=True, exist_ok=True)
        paths.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise DaemonError(f"a folder of the daemon cannot be made: {exc}") from exc


def _close_stdin() -> None:
    """Point stdin at /dev/null: nothing here may read what is meant for somebody else."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if null:
        os.close(null)


def _become_undumpable() -> None:
    """Keep our memory from the commands: they have our uid, and could ptrace us otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _take_descriptors() -> int:
    """Have as many files open as we may: each open request to an app takes two.

    Returns:
        How many we might have had unasked, for commands, of which some count on a small number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def _take_short_turns() -> None:
    """Ask the scheduler for short turns that come at once, in place of long ones that come late.

    Whoever has the shorter turn interrupts who has the longer one (Linux 6.12 and newer, man
    sched_setattr(2); older ones take no notice). Without it the daemon, which is suspended while a
    command it starts becomes its program, was woken only when a short command had ended: 0.76 ms
    instead of 0.12. Commands get the usual turns again.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return
    # struct sched_attr: size, policy (0 is the usual one), flags, nice, priority, and the turn,
    # followed by what only other policies have.
    attributes = struct.pack(
        "=IIQiIQQQ",
        48,
        0,
        _SCHED_FLAG_RESET_ON_FORK,
        os.getpriority(os.PRIO_PROCESS, 0),
        0,
        SLICE_NANOSECONDS,
        0,
        0,
    )
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def hello(podinfo: Path) -> dict[str, object]:
    """Return what the hello says: the contract, this start of the daemon, this pod."""
    try:
        uid = (podinfo / contract.PODINFO_UID).read_text("utf-8").strip()
    except OSError:
        uid = ""
    return {
        contract.HELLO_CONTRACT: contract.CONTRACT_VERSION,
        contract.HELLO_BOOT_ID: secrets.token_hex(8),
        contract.HELLO_POD_UID: uid,
    }


async def _serve(paths: Paths, listener: socket.socket, options: Options, open_files: int) -> int:
    import asyncio

    import anyio

    from in_pod_server import guard
    from in_pod_server.clients import accept
    from in_pod_server.connection import Connection
    from in_pod_server.files import Home
    from in_pod_server.gateway.gateway import Gateway
    from in_pod_server.launch import Launcher
    from in_pod_server.ledger import Ledger
    from in_pod_server.lifetime import Lifetime, say
    from in_pod_server.memory import Gauge, memory_limit
    from in_pod_server.parts import Parts, Room
    from in_pod_server.processes import ProcessTable
    from in_pod_server.server import build_server
    from in_pod_server.ssh import Ssh

    annotations = paths.podinfo / contract.PODINFO_ANNOTATIONS
    stop = anyio.Event()
    signals: list[int] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    launcher = Launcher(
        home=paths.home,
        run_dir=paths.run_dir,
        user=contract.USER,
        tmp_dir=Path(contract.TMP_DIR),
        open_files=open_files,
    )
    about = hello(paths.podinfo)
    names = [paths.home, paths.workspace]
    with (
        contextlib.ExitStack() as stack,
        Home(names) as home,
        Home([paths.workspace]) as workspace,
    ):
        async with ProcessTable(launcher, log_dir=paths.log_dir) as processes:
            gateway = Gateway(
                options.sandbox_id,
                paths.run_dir,
                paths.socket.with_suffix(".gateway"),
                annotations,
                options.gateway_port,
                options.gateway_address,
            )
            server = build_server(
                processes=processes,
                home=home,
                workspace=workspace,
                gateway=gateway,
                max_file_bytes=options.max_file_bytes,
            )
            server.ssh = Ssh(launcher, paths.run_dir / "ssh")

            def told(meta: dict[str, Any]) -> None:
                lifetime.told(meta.get(contract.META_EXPIRES_AT))
                gateway.told(meta.get(contract.META_ACCESS))

            async def handle(streams: Streams) -> None:
                connection = Connection(
                    streams,
                    max_message_bytes=contract.MAX_MESSAGE_BYTES,
                    parts=Parts(room),
                    on_told=told,
                )
                open_now.add(connection)
                try:
                    known = about | {contract.HELLO_APPS: gateway.table.to_json()}
                    await connection.serve(server, experimental={contract.HELLO: known})
                finally:
                    open_now.discard(connection)

            open_now: set[Connection] = set()
            server.lifetime = lifetime = Lifetime(
                annotations,
                idle_seconds=options.idle_seconds,
                processes=processes,
                attended=lambda: (
                    not all(connection.leased for connection in open_now)
                    or gateway.open_requests() > 0
                ),
            )
            room = Room(memory_limit())
            async with (
                gateway.running(
                    processes=processes,
                    home=paths.home,
                    expires_at=lifetime.expires_at,
                    on_use=lifetime.used,
                ),
                anyio.create_task_group() as calls,
                anyio.create_task_group() as connections,
            ):
                boot_id = str(about[contract.HELLO_BOOT_ID])
                ledger = stack.enter_context(Ledger(paths.run_dir / JOURNAL, boot_id, calls))
                server.ledger = ledger

                def on_over(reason: str) -> None:
                    logger.info("the sandbox ends: %s", reason)
                    say(reason)
                    # In this very moment: what comes from now on belongs to the next pod.
                    ledger.end()
                    stop.set()

                calls.start_soon(lifetime.watch, on_over)
                if gauge := Gauge.find():
                    calls.start_soon(guard.watch, processes, gauge)
                accepting, accepted_last = anyio.CancelScope(), anyio.Event()

                async def accept_until_the_end() -> None:
                    with accepting:
                        await accept(listener, connections, handle)
                    accepted_last.set()

                connections.start_soon(accept_until_the_end)
                logger.info("serving on %s", paths.socket)
                await stop.wait()
                ledger.end()
                for connection in open_now:
                    connections.start_soon(connection.tell_ending)
                accepting.cancel()
                await accepted_last.wait()  # nobody may wait for a socket that is closed
                listener.close()
                # Commands first: calls that wait for them are then answered, not cut off.
                await processes.stop_all()
                with anyio.move_on_after(FLUSH_SECONDS):
                    for connection in list(open_now):
                        await connection.answered()
                connections.cancel_scope.cancel()
                calls.cancel_scope.cancel()
    return 128 + signals[0] if signals else 0
