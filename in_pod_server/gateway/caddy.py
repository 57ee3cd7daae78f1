"""Caddy, a child of the daemon: it listens for the clients and moves the bytes.

Its configuration is fixed, and asks the daemon about every request, so publishing an app changes
nothing in it: no connection is lost by that, there is nothing to be filled again after a restart, and
it needs no administration socket that a command could use. The listening socket is ours and is
handed down: while Caddy starts anew its clients wait and are not refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
from pathlib import Path
from typing import Final

import anyio

from in_pod_server.gateway.auth import PATH, QUERY, SET_COOKIE, UPSTREAM
from in_pod_server.gateway.endpoint import ASK, CHECK, DOWN, UPGRADE

PROGRAM: Final = "caddy"
RESTART_SECONDS: Final = (0.05, 1.0)
"""Pause before it is started again: at first, and at most."""
HEALTHY_SECONDS: Final = 5.0
END_SECONDS: Final = 2.0
WATCH_SECONDS: Final = 0.05
"""On a kernel without pidfds: between two looks at whether it has ended."""

_CADDYFILE: Final = """\
{
	admin off
	persist_config off
	auto_https off
	grace_period 1s
	storage file_system @FOLDER@
	servers {
		protocols h1
		timeouts {
			read_header 10s
			idle 5m
		}
		max_header_size 32KB
		@TRUSTED@
	}
	# It would quote requests, and with them tokens.
	log default {
		output discard
	}
}
http:// {
	bind fd/@LISTENER@
	route {
		header -Via
		request_header -X-Podpipe-*
		request_header -X-Real-IP
		request_header -Forwarded
		@FORWARDED@
		forward_auth unix/@ENDPOINT@ {
			# One that no client can guess: a GET whose address is the same goes on with its body.
			uri /{http.request.uuid}
			header_up @ASK@ @CHECK@
			header_up @UPGRADE@ {http.request.header.Upgrade}
			header_up -Upgrade
			header_up -Via
			copy_headers @UPSTREAM@ @SET_COOKIE@ @PATH@ @QUERY@ Authorization Cookie
			@TRANSPORT@
		}
		# Of Caddy's ways to change an address the two that write what they are given; `uri query` sorts,
		# decodes and leaves out. The first one empties the path.
		@clean header @QUERY@ *
		rewrite @clean {http.request.header.@QUERY@}
		uri @clean path_regexp ^.*$ {http.request.header.@PATH@}
		@cookie header @SET_COOKIE@ *
		vars upstream {http.request.header.@UPSTREAM@}
		vars @cookie cookie {http.request.header.@SET_COOKIE@}
		header @cookie {
			+Set-Cookie {http.vars.cookie}
			Referrer-Policy no-referrer
			defer
		}
		request_header -X-Podpipe-*
		reverse_proxy {http.vars.upstream} {
			header_up -Via
			transport http {
				dial_timeout 2s
				compression off
				# So that each connection is one request that is open.
				keepalive off
			}
		}
	}
	handle_errors 502 503 504 {
		header -Via
		# Which sends no body on, whatever the request has, and makes the refusal the reply.
		forward_auth unix/@ENDPOINT@ {
			uri /{http.request.uuid}
			header_up @ASK@ @DOWN@
			header_up -Upgrade
			header_up -Via
			header_up -Cookie
			header_up -Authorization
			@TRANSPORT@
		}
	}
}
"""

_NOBODY: Final = ("", "request_header -X-Forwarded-*")
_PROXY: Final = (
    # Who reaches us at all is for the network policy to say, not for addresses of pods.
    "trusted_proxies static 0.0.0.0/0 ::/0",
    """\
vars scheme http
		@https header_regexp X-Forwarded-Proto ^(https|wss)$
		vars @https scheme https
		vars client {http.request.header.X-Forwarded-For}
		request_header -X-Forwarded-*
		request_header X-Forwarded-Proto {http.vars.scheme}
		request_header X-Forwarded-For {http.vars.client}""",
)
"""Whose word is taken for the way that a request came: no client's, and of a proxy only scheme and client."""

_TRANSPORT: Final = """\
transport http {
				# Any number of clients may come at once, and each connection is a descriptor of the daemon.
				max_conns_per_host 32
			}"""

logger = logging.getLogger(__name__)


def program() -> str | None:
    """Path of the Caddy that the Python environment brings; None where it has none."""
    beside = Path(sysconfig.get_path("scripts")) / PROGRAM
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(PROGRAM)


def caddyfile(listener: int, endpoint: Path, folder: Path, *, proxied: bool) -> str:
    """The configuration.

    Args:
        listener: descriptor of the listening socket, as Caddy inherits it.
        endpoint: the daemon's own socket.
        folder: what it may call its storage; nothing is put there.
        proxied: whether its clients are a proxy's, which tells the way that they came.
    """
    text = _CADDYFILE
    trusted, forwarded = _PROXY if proxied else _NOBODY
    for name, value in (
        ("@TRUSTED@", trusted),
        ("@FORWARDED@", forwarded),
        ("@TRANSPORT@", _TRANSPORT),
        ("@LISTENER@", str(listener)),
        ("@ENDPOINT@", str(endpoint)),
        ("@FOLDER@", str(folder)),
        ("@ASK@", ASK),
        ("@CHECK@", CHECK),
        ("@DOWN@", DOWN),
        ("@UPGRADE@", UPGRADE),
        ("@UPSTREAM@", UPSTREAM),
        ("@SET_COOKIE@", SET_COOKIE),
        ("@PATH@", PATH),
        ("@QUERY@", QUERY),
    ):
        text = text.replace(name, value)
    return text


class Caddy:
    """One Caddy at a time, started again whenever it ends.

    Args:
        program: its path.
        listener: where its clients connect to.
        endpoint: the daemon's own socket.
        folder: for nothing that lasts.
        proxied: as for `caddyfile`.
    """

    def __init__(
        self,
        program: str,
        listener: socket.socket,
        endpoint: Path,
        folder: Path,
        *,
        proxied: bool = False,
    ) -> None:
        self._program = program
        self._listener = listener
        self._endpoint = endpoint
        self._folder = folder
        self._proxied = proxied
        self._child: subprocess.Popen[bytes] | None = None
        self._wanted = anyio.Event()

    def want(self) -> None:
        """Have it started, if it does not run yet."""
        self._wanted.set()

    async def run(self) -> None:
        """Start it when it is wanted or somebody connects, and keep it running; never returns."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._first_client)
            await self._wanted.wait()
            tasks.cancel_scope.cancel()
        pause = RESTART_SECONDS[0]
        while True:
            began = anyio.current_time()
            try:
                await self._once()
            except OSError as error:
                logger.error("Caddy cannot be started: %s", error)  # noqa: TRY400 - nothing to trace
            pause = RESTART_SECONDS[0] if anyio.current_time() - began > HEALTHY_SECONDS else pause
            await anyio.sleep(pause)
            pause = min(2 * pause, RESTART_SECONDS[1])

    async def _first_client(self) -> None:
        await anyio.wait_readable(self._listener)
        self._wanted.set()

    def _started(self) -> subprocess.Popen[bytes]:
        with (self._folder / "caddy.log").open("wb") as said:
            child = subprocess.Popen(
                [
                    *_dying_with_us(),
                    self._program,
                    "run",
                    "--config",
                    "-",
                    "--adapter",
                    "caddyfile",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd="/",
                env={"HOME": str(self._folder), "PATH": os.defpath},
                pass_fds=[self._listener.fileno()],
                start_new_session=True,
            )
        config = caddyfile(
            self._listener.fileno(), self._endpoint, self._folder, proxied=self._proxied
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(config.encode())  # less than a pipe holds
        logger.info("Caddy runs as process %d", child.pid)
        return child

    async def _once(self) -> None:
        child = self._child = self._started()
        try:
            await _ended(child)
        finally:
            self._child = None
            if child.poll() is None:
                child.terminate()
                with anyio.CancelScope(shield=True), anyio.move_on_after(END_SECONDS):
                    await _ended(child)
                child.kill()
            child.wait()
        last = (self._folder / "caddy.log").read_text("utf-8", "replace").strip()[-500:]
        logger.warning("Caddy ended with code %d: %s", child.returncode, last)


def _dying_with_us() -> list[str]:
    """A prefix by which it gets KILL when the daemon is killed, where the system has it."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", signal.SIGKILL.name.removeprefix("SIG")] if setpriv else []


async def _ended(child: subprocess.Popen[bytes]) -> None:
    try:
        fd = os.pidfd_open(child.pid)
    except OSError:
        while child.poll() is None:  # noqa: ASYNC110 - such a kernel tells nobody
            await anyio.sleep(WATCH_SECONDS)
        return
    try:
        while child.poll() is None:
            await anyio.wait_readable(fd)
    finally:
        os.close(fd)
