"""The byte pump that `kubectl exec -i` starts: its stdin and stdout, joined to the daemon's socket.

Run as a file under `python3 -I -S`, so it imports nothing of the package: every import here is
latency of every connection. It owns no protocol. One chunk per direction is in memory at a time;
a side that does not take its chunk is the only thing waited for, so nothing piles up.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

CONNECT_SECONDS = 20.0
"""How long a daemon may take to appear: it is started beside us when the container restarts."""
RETRY_SECONDS = 0.02
LINGER_SECONDS = 5.0
"""How long a reader of stdout may take nothing, once the daemon has closed, before it is given up:
a frozen kubectl would keep this process for ever."""
CHUNK = 65536


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


class Direction:
    """One way of the pump. It waits either to fill its one chunk or to be rid of it."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self.sink = sink
        self.chunk = memoryview(b"")
        self.open = True

    def wants(self) -> tuple[int, int]:
        """Return what to poll for: a descriptor and an event mask."""
        return (self.sink, select.POLLOUT) if self.chunk else (self.source, select.POLLIN)

    def move(self) -> bool:
        """Do the step that poll reported as possible; return False at the source's end.

        What was read is written at once: the sink has nearly always room, and a poll is latency.
        """
        if not self.chunk:
            data = os.read(self.source, CHUNK)
            if not data:
                return False
            self.chunk = memoryview(data)
        self.chunk = self.chunk[os.write(self.sink, self.chunk) :]
        return True


def pump(sock: socket.socket, stdin: int = 0, stdout: int = 1) -> None:
    """Copy both ways until the daemon closes. The end of stdin is passed on as a half-close.

    Raises:
        BrokenPipeError: Nobody reads our stdout any more.
    """
    fd = sock.fileno()
    for each in (stdin, stdout, fd):
        os.set_blocking(each, False)
    up, down = Direction(stdin, fd), Direction(fd, stdout)
    while down.open:
        poller = select.poll()
        wanted: dict[int, int] = {}
        for way in (up, down):
            if way.open:
                where, mask = way.wants()
                wanted[where] = wanted.get(where, 0) | mask
        # The reader of stdout going away must end us even while both sides are silent.
        wanted.setdefault(stdout, 0)
        wanted.setdefault(fd, 0)
        for where, mask in wanted.items():
            poller.register(where, mask)
        ready = dict(poller.poll())
        if ready.get(stdout, 0) & select.POLLERR:
            return
        if down.chunk and ready == {fd: ready.get(fd, 0) & select.POLLHUP}:
            # Closed by the daemon while nobody takes what it said.
            poller = select.poll()
            poller.register(stdout, select.POLLOUT)
            if not poller.poll(LINGER_SECONDS * 1000):
                return
        for way in (up, down):
            if not way.open or not ready.get(way.wants()[0], 0):
                continue
            try:
                more = way.move()
            except BlockingIOError:
                continue
            except ConnectionError:
                if way is down:
                    return
                more = False  # the daemon is gone; what it still said is read by the other way
            if not more:
                way.open = False
                if way is up:
                    way.chunk = memoryview(b"")
                    try:  # noqa: SIM105 - contextlib would be one more import
                        sock.shutdown(socket.SHUT_WR)
                    except OSError:
                        pass  # already closed by the daemon


def main() -> int:
    """Run the pump on the socket named by the first argument; return the exit code."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: dial.py SOCKET\n")
        return 2
    path = sys.argv[1]
    try:
        sock = connect(path)
    except OSError as exc:
        sys.stderr.write(f"podpipe dial: no daemon answers on {path}: {exc.strerror or exc}\n")
        return 1
    with sock:
        pump(sock)
    return 0


if __name__ == "__main__":
    # os._exit: nothing is buffered here, and a broken stdout must not be spoken of at exit.
    os._exit(main())
