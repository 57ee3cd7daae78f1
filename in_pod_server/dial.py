"""What `kubectl exec -i` starts: it hands its stdin and stdout to the daemon, and stays until the end.

Run as a file under `python3 -I -S`, so it imports nothing of the package: every import here is
latency of every connection. No byte of a connection passes through it.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time

CONNECT_SECONDS = 20.0
"""How long a daemon may take to appear: it is started beside us when the container restarts."""
RETRY_SECONDS = 0.02
HANDOVER = b"\0"
"""What the descriptors are sent with; no client that speaks for itself begins so."""


def connect(path: str, patience: float = CONNECT_SECONDS) -> socket.socket:
    """Connect, waiting for a socket that is not there yet or whose daemon is just starting.

    Raises:
        OSError: The last refusal, once `patience` seconds have passed, or one that will not mend.
    """
    deadline = time.monotonic() + patience
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
            return sock
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            sock.close()
            if time.monotonic() >= deadline:
                raise
        except BaseException:
            sock.close()
            raise
        time.sleep(RETRY_SECONDS)


def can_be_waited_for(fd: int) -> bool:
    """Whether an event loop can wait for it: a pipe, a socket or a terminal, not a file."""
    kind = os.fstat(fd).st_mode
    return stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(fd)


def hand_over(sock: socket.socket, stdin: int = 0, stdout: int = 1) -> None:
    """Give the daemon both descriptors, and wait until it has done with them."""
    socket.send_fds(sock, [HANDOVER], [stdin, stdout])
    null = os.open(os.devnull, os.O_RDWR)
    for each in (stdin, stdout):
        # Held here, they would hide from either side that the other has closed.
        os.dup2(null, each)
    while sock.recv(1):
        pass


def main() -> int:
    """Run the pump on the socket named by the first argument; return the exit code."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: dial.py SOCKET\n")
        return 2
    path = sys.argv[1]
    if not can_be_waited_for(0) or not can_be_waited_for(1):
        sys.stderr.write("podpipe dial: stdin and stdout have to be pipes, sockets or a terminal\n")
        return 2
    try:
        sock = connect(path)
    except OSError as exc:
        sys.stderr.write(f"podpipe dial: no daemon answers on {path}: {exc.strerror or exc}\n")
        return 1
    with sock:
        hand_over(sock)
    return 0


if __name__ == "__main__":
    # os._exit: nothing is buffered here, and a broken stdout must not be spoken of at exit.
    os._exit(main())
