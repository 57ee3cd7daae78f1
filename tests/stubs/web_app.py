"""An app as an agent would write one: it tells what it saw of each request. `web_app.py PORT`.

GET /sse streams events, /endless sends zeros for as long as they are read, /slow answers when it is let
go by /go, an upgrade to a WebSocket is echoed; everything else is told as JSON. Standard library only: it runs in a sandbox too.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import struct
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
go = threading.Event()
counting = threading.Lock()
counts: Counter[str] = Counter()


class App(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        if "websocket" in self.headers.get("Upgrade", "").lower():
            self.echo_frames()
        elif self.path.startswith("/sse"):
            self.stream_events()
        elif self.path.startswith("/endless"):
            self.send_zeros()
        else:
            if self.path == "/slow":
                go.wait(30)
            elif self.path == "/go":
                go.set()
            self.tell()

    def tell(self) -> None:
        size, digest = self.read_body()
        with counting:
            counts[self.command] += 1
        body = json.dumps(
            {
                "method": self.command,
                "path": self.requestline.split(" ")[1],
                "headers": {name.lower(): value for name, value in self.headers.items()},
                "size": size,
                "sha256": digest,
                "counts": counts,
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Set-Cookie", "mine=1; Path=/")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read_body(self) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while count := int(self.rfile.readline().split(b";")[0], 16):
                digest.update(self.rfile.read(count))
                size += count
                self.rfile.readline()
            self.rfile.readline()
        left = int(self.headers.get("Content-Length") or 0)
        while left and (data := self.rfile.read(min(1 << 20, left))):
            digest.update(data)
            size, left = size + len(data), left - len(data)
        return size, digest.hexdigest()

    def stream_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.close_connection = True
        count = 0
        while True:
            try:
                self.wfile.write(f"data: {count}\n\n".encode())
                self.wfile.flush()
            except OSError:
                return
            count += 1
            time.sleep(0.05)

    def send_zeros(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 16))

    def echo_frames(self) -> None:
        key = self.headers["Sec-WebSocket-Key"].encode()
        accept = base64.b64encode(hashlib.sha1(key + MAGIC).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        self.close_connection = True
        seen = {name.lower(): value for name, value in self.headers.items()}
        self.send_frame(1, json.dumps({"path": self.path, "headers": seen}).encode())
        while True:
            opcode, data = self.read_message()
            if opcode == 8:
                self.send_frame(8, data)
                return
            self.send_frame(opcode, data)

    def read_message(self) -> tuple[int, bytes]:
        kind, whole = 0, b""
        while True:
            head = self.rfile.read(2)
            if len(head) < 2:
                return 8, b""
            opcode, size = head[0] & 15, head[1] & 127
            if size == 126:
                (size,) = struct.unpack(">H", self.rfile.read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self.rfile.read(8))
            mask = self.rfile.read(4)
            data = self.rfile.read(size)
            stream = (mask * (size // 4 + 1))[:size]
            data = (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(
                size, "big"
            )
            kind, whole = kind or opcode, whole + data
            if head[0] & 128:
                return kind, whole

    def send_frame(self, opcode: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            head = struct.pack(">BB", 128 | opcode, size)
        elif size < 1 << 16:
            head = struct.pack(">BBH", 128 | opcode, 126, size)
        else:
            head = struct.pack(">BBQ", 128 | opcode, 127, size)
        self.wfile.write(head + data)
        self.wfile.flush()


for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
    setattr(App, f"do_{method}", App.answer)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: object) -> None:
        """A client that went away is nothing to tell."""


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), App).serve_forever()
