"""A host that models are pulled from: a registry, the hub and plain files in one, with failures on request."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from modelserver.store.manifest import CONFIG_TYPE, MANIFEST_TYPE

MODEL = "application/vnd.ollama.image.model"
_RANGE = re.compile(r"bytes=(\d+)-")


class FakeHost:
    """Serves `files` by path. The other attributes make it fail, redirect, or ask for a token."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.cuts: dict[str, list[int]] = {}  # the number of bytes after which the next answers break off
        self.statuses: dict[str, list[int]] = {}  # of the next answers
        self.gates: dict[str, threading.Event] = {}  # after half of the bytes the answer waits for it
        self.token = ""  # what clients must show, and get at /token
        self.signer: Ed25519PublicKey | None = None  # who gets the token; the others are denied
        self.ranges_ignored = False
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.uploads: dict[str, bytes] = {}
        self.counts: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """Host and port, as they are part of a model's name."""
        return self.address.removeprefix("http://")

    def add_model(
        self, path: str, layers: Mapping[str, bytes] | list[tuple[str, bytes, str]], tag: str = "latest"
    ) -> bytes:
        """Serve a model of these layers, by type or with titles; returns its manifest."""
        entries = [(kind, data, "") for kind, data in layers.items()] if isinstance(layers, Mapping) else layers
        config = self.add_blob(path, b'{"model_format":"gguf"}')
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {"mediaType": CONFIG_TYPE, **config},
            "layers": [
                {"mediaType": kind, **self.add_blob(path, data)}
                | ({"annotations": {"org.opencontainers.image.title": title}} if title else {})
                for kind, data, title in entries
            ],
        }
        return self.add_manifest(path, document, tag)

    def add_manifest(self, path: str, document: Any, tag: str = "latest") -> bytes:
        content = json.dumps(document).encode()
        self.files[f"/v2/{path}/manifests/{tag}"] = content
        return content

    def add_blob(self, path: str, data: bytes) -> dict[str, Any]:
        digest = digest_of(data)
        self.files[f"/v2/{path}/blobs/{digest}"] = data
        return {"digest": digest, "size": len(data)}

    def add_hub_model(self, repository: str, files: Mapping[str, bytes], commit: str = "c0ffee") -> None:
        """Serve a repository of the hub; files of 100 bytes or more are kept as large ones."""
        siblings = []
        for path, data in files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if len(data) >= 100:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
            self.files[f"/{repository}/resolve/{commit}/{path}"] = data
        info = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "tags": []}
        self.files[f"/api/models/{repository}"] = json.dumps(info).encode()

    def num_requests(self, method: str, path: str) -> int:
        return sum(1 for each in self.requests if each[:2] == (method, path))


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextmanager
def fake_host() -> Iterator[FakeHost]:
    """A host on a free port of this machine."""

    class Handler(_Handler):
        host: FakeHost

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    Handler.host = FakeHost(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Handler.host
    finally:
        for gate in Handler.host.gates.values():
            gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    host: FakeHost

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        host, path = self.host, urlsplit(self.path).path
        if path == "/token":
            host.requests.append(("GET", self.path, dict(self.headers)))
            if host.signer is not None and not self._is_signed(host.signer):
                self._answer(401, b"")
                return
            self._answer(200, json.dumps({"token": host.token}).encode())
            return
        if not self._begin():
            return
        if path in host.redirects:
            self._answer(307, b"", {"Location": host.redirects[path]})
        elif path in host.files:
            self._send_file(path, host.files[path])
        else:
            code = {"X-Error-Code": "RepoNotFound"} if path.startswith("/api/") else {}
            self._answer(404, b'{"errors":[{"code":"NOT_FOUND","message":"not here"}]}', code)

    def _is_signed(self, signer: Ed25519PublicKey) -> bool:
        """Whether the request shows that key, and a signature by it of this address, made now."""
        public, _, signed = self.headers.get("Authorization", "").partition(":")
        known = signer.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode().split(" ")[1]
        query = parse_qs(urlsplit(self.path).query)
        if public != known or len(query.get("nonce", [""])[0]) < 20 or query["service"] != ["fake"]:
            return False
        of_nothing = base64.b64encode(hashlib.sha256().hexdigest().encode()).decode()
        try:
            signer.verify(base64.b64decode(signed), f"GET,{self.host.address}{self.path},{of_nothing}".encode())
        except InvalidSignature:
            return False
        return abs(int(query["ts"][0]) - time.time()) < 300

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        if self._begin():
            self._read()
            self.host.counts["uploads"] += 1
            place = f"/uploads/{self.host.counts['uploads']}?state=1"
            self.host.uploads[urlsplit(place).path] = b""
            self._answer(202, b"", {"Location": place})

    def do_PATCH(self) -> None:
        if self._begin():
            path = urlsplit(self.path).path
            start = int(self.headers["Content-Range"].partition("-")[0])
            assert start == len(self.host.uploads[path])
            self.host.uploads[path] += self._read()
            self._answer(202, b"", {"Location": self.path})

    def do_PUT(self) -> None:
        if not self._begin():
            return
        parts = urlsplit(self.path)
        content = self._read()
        if "/manifests/" not in parts.path:
            content = self.host.uploads.pop(parts.path) + content
            digest = parse_qs(parts.query)["digest"][0]
            if digest_of(content) != digest:
                self._answer(400, b'{"errors":[{"code":"DIGEST_INVALID","message":"another digest"}]}')
                return
            self.host.files[f"/v2/library/tiny/blobs/{digest}"] = content
        else:
            self.host.files[parts.path] = content
        self._answer(201, b"")

    def _begin(self) -> bool:
        """Note the request; False if it is answered already."""
        host, path = self.host, urlsplit(self.path).path
        host.requests.append((self.command, path, dict(self.headers)))
        if host.token and self.headers.get("Authorization") != f"Bearer {host.token}" and path.startswith("/v2/"):
            self._read()
            realm = f'Bearer realm="{host.address}/token",service="fake",scope="repository:x:pull"'
            self._answer(401, b"", {"WWW-Authenticate": realm})
            return False
        if host.statuses.get(path):
            self._answer(host.statuses[path].pop(0), b"as asked")
            return False
        return True

    def _send_file(self, path: str, content: bytes) -> None:
        match = None if self.host.ranges_ignored else _RANGE.match(self.headers.get("Range") or "")
        start = int(match[1]) if match else 0
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if match else {}
        cut = self.host.cuts[path].pop(0) if self.command == "GET" and self.host.cuts.get(path) else None
        etag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        self._answer(206 if match else 200, content[start:], {**headers, **etag}, cut, self.host.gates.get(path))

    def _answer(
        self,
        status: int,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        cut: int | None = None,
        gate: threading.Event | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            half = len(content) // 2 if gate is not None else 0
            self.wfile.write(content[:half])
            self.wfile.flush()
            if gate is not None:
                gate.wait(60)
            self.wfile.write(content[half:] if cut is None else content[half:cut])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has left

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))
