"""What `kubectl proxy` serves, over the stub kubectl's objects; apart from it because http is slow to import."""

from __future__ import annotations

import email.utils
import json
import time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingUnixStreamServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


def serve(path: str, stub: dict[str, Any]) -> None:
    """Serve for ever.

    Args:
        path: of the unix socket.
        stub: the globals of the stub kubectl.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def address_string(self) -> str:
            return "client"

        def log_message(self, *_: Any) -> None:
            pass

        def date_time_string(self, timestamp: float | None = None) -> str:
            ahead = (stub["peek"]("clock") or {}).get("seconds", 0)
            return email.utils.formatdate(time.time() + ahead, usegmt=True)

        def do_GET(self) -> None:
            self.respond()

        def do_DELETE(self) -> None:
            self.respond()

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with stub["Store"]() as store:
                status, answer = self.answer(store, json.loads(body or "{}"))
            data = json.dumps(answer if status < 400 else {"message": answer}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def answer(self, store: Any, body: dict[str, Any]) -> tuple[int, Any]:
            if self.headers["Host"] != "localhost":
                return 403, "Forbidden"
            url = urlsplit(self.path)
            planned = stub["peek"]("http")
            meant = planned and planned["method"] == self.command and planned["path"] in url.path
            if meant and stub["fault"]("http"):
                return planned["status"], planned["message"]
            resource, _, name = (
                url.path.partition("/namespaces/")[2].partition("/")[2].partition("/")
            )
            kind = stub["KINDS"][resource]
            if not name:
                asked = dict(parse_qsl(url.query))
                found = [
                    each
                    for each in store.objects.values()
                    if each["kind"] == kind and stub["matches"](each, asked["labelSelector"])
                ]
                start, end = (first := int(asked.get("continue", 0))), first + int(asked["limit"])
                more = {"continue": str(end)} if end < len(found) else {}
                return 200, {"metadata": more, "items": found[start:end] or None}
            if (each := store.objects.get(f"{kind}/{name}")) is None:
                return 404, f'{resource} "{name}" not found'
            if self.command == "GET":
                return 200, each
            wanted = body["preconditions"]
            if any(each["metadata"][field] != value for field, value in wanted.items()):
                return 409, "the object is not as the preconditions say"
            store.remove(f"{kind}/{name}")
            return 200, {"status": "Success"}

    class Server(ThreadingUnixStreamServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(path, Handler) as server:
        print(f"Starting to serve on {path}", flush=True)
        server.serve_forever()
