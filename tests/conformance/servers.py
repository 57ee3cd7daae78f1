"""The test builds of both servers, with the suite's fixtures on them, each behind a unix socket.

    python -m tests.conformance.servers serve|daemon SOCKET FOLDER
    python -m tests.conformance.servers command SOCKET ARGV…       any other stdio server

The host's is a fork for each connection, which is its stdin and stdout: a new `podpipe serve`, less
the second that its imports take.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio

from host_client import server as host_server
from host_client.config import Settings
from host_client.host import Host
from in_pod_server import daemon
from in_pod_server import server as daemon_server
from tests.conformance.fixtures import add_fixtures


def serve_host(path: str) -> None:
    """Fork a `podpipe serve` for each connection until terminated."""
    build = host_server.build_server

    def with_fixtures(host: Host) -> Any:
        server = build(host)
        add_fixtures(server)
        return server

    host_server.build_server = with_fixtures
    settings = Settings.from_env()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            if os.fork():
                connection.close()
                continue
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in (0, 1):
                os.dup2(connection.fileno(), number)
            connection.close()
            anyio.run(host_server.serve_stdio, settings)
            os._exit(0)


def serve_daemon(path: str, folder: Path) -> None:
    """Be the daemon of a pod until terminated."""
    build = daemon_server.build_server

    def with_fixtures(**options: Any) -> Any:
        server = build(**options)
        add_fixtures(server)
        return server

    daemon_server.build_server = with_fixtures
    home = folder / "home"
    home.mkdir()
    paths = daemon.Paths(
        socket=Path(path),
        home=home,
        workspace=home,
        run_dir=folder / "run",
        log_dir=folder / "log",
        podinfo=folder / "podinfo",
    )
    daemon.serve(paths, daemon.Options(max_file_bytes=1 << 20))


def serve_command(path: str, argv: list[str]) -> None:
    """Start a stdio server for each connection until terminated."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listener.accept()
            with connection:
                fd = connection.fileno()
                subprocess.Popen(argv, stdin=fd, stdout=fd)


if __name__ == "__main__":
    if sys.argv[1] == "command":
        serve_command(sys.argv[2], sys.argv[3:])
    elif sys.argv[1] == "serve":
        serve_host(sys.argv[2])
    else:
        serve_daemon(sys.argv[2], Path(sys.argv[3]))
