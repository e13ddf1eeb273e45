"""A collector of OpenTelemetry traces: takes OTLP over HTTP in its JSON encoding, and keeps the spans."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OtlpReceiver:
    """What was received: `requests` are whole documents, `spans` those of all of them."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.url = ""

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [
            span
            for document in self.requests
            for resource in document["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def take(self, path: str, kind: str, body: bytes) -> None:
        if path != "/v1/traces" or kind != "application/json":
            self.problems.append(f"{path} {kind}")
        self.requests.append(json.loads(body))


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver on a port of its own until the block ends."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.take(self.path, self.headers["Content-Type"], body)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    receiver.url = f"127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
