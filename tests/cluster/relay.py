"""A server of this machine under another of its addresses, where pods of the node provider find it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def relay(address: str, target: tuple[str, int] | None = None) -> Iterator[int]:
    """A port on an address of this machine that leads to a server, or to nobody."""
    stop = threading.Event()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(65536):
                sink.sendall(chunk)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve(server: socket.socket) -> None:
        while not stop.is_set():
            try:
                client, _ = server.accept()
            except OSError:
                return
            if target is None:
                client.close()
                continue
            behind = socket.create_connection(target, timeout=10)
            with client, behind:
                up = threading.Thread(target=pump, args=(client, behind))
                up.start()
                pump(behind, client)
                up.join()

    with socket.create_server((address, 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
