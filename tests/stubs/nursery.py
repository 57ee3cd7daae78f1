"""Daemons for the pods of the stub, forked by one process that has imported all that they need.

An interpreter of its own costs each half a second of work, and the tests start very many. The
daemons of tests/in_pod_server and of real pods are started as the contract says.

usage: nursery.py SOCKET, until stdin ends. A request is one line of JSON, {"argv", "env", "stderr"};
the answer is the daemon's process id.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import in_pod_server.daemon
import in_pod_server.server  # noqa: F401 - for those that are forked
from in_pod_server.__main__ import main


def serve(path: str) -> dict[str, Any] | None:
    """Answer until stdin ends; in a daemon that was forked, return what it is to run."""
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as ready:
        listener.bind(path)
        listener.listen(64)
        ready.register(listener, selectors.EVENT_READ)
        ready.register(0, selectors.EVENT_READ)
        print("ready", flush=True)
        while not any(key.fd == 0 for key, _ in ready.select()):
            with listener.accept()[0] as asked, asked.makefile("rb") as lines:
                line = lines.readline()  # nothing, of a kubectl that was killed meanwhile
                if line.endswith(b"\n") and forked_twice(asked):
                    request: dict[str, Any] = json.loads(line)
                    return request
    return None


def forked_twice(asked: socket.socket) -> bool:
    """Whether this is the daemon. Its parent is gone at once, so nobody has to wait for it."""
    if between := os.fork():
        os.waitpid(between, 0)
        return False
    if daemon := os.fork():
        with suppress(OSError):  # likewise
            asked.sendall(b"%d" % daemon)
        os._exit(0)
    return True


def become(request: dict[str, Any]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(request["stderr"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for ours, fd in ((null, 0), (null, 1), (log, 2)):
        os.dup2(ours, fd)
    os.close(null)
    os.close(log)


if __name__ == "__main__":
    found = serve(sys.argv[1])
    if found is None:
        Path(sys.argv[1]).unlink()
    else:
        become(found)
        sys.exit(main(found["argv"]))
