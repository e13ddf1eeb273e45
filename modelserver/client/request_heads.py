"""Heads of requests: those of HTTP/1.1 as bytes, and those of gRPC as fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from modelserver.client.address import Address
from modelserver.client.grpc_messages import SERVICE

USER_AGENT = "modelserver-bench"


@dataclass(frozen=True, slots=True)
class HttpHead:
    address: Address
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, content_length: int, json_len: int | None = None) -> bytes:
        """The head of a request whose body has `content_length` bytes, of which `json_len` are JSON."""
        lines = [f"{self.method} {self.path} HTTP/1.1", f"Host: {self.address}", f"User-Agent: {USER_AGENT}"]
        if self.method != "GET":
            lines.append(f"Content-Length: {content_length}")
            kind = "application/json" if json_len is None else "application/octet-stream"
            if not any(name.lower() == "content-type" for name in self.headers):
                lines.append(f"Content-Type: {kind}")
        if json_len is not None:
            lines.append(f"Inference-Header-Content-Length: {json_len}")
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass(frozen=True, slots=True)
class GrpcHead:
    address: Address
    method: str
    headers: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = "none"

    @property
    def fields(self) -> tuple[tuple[bytes, bytes], ...]:
        """The fields of every request's head, in the order in which gRPC sends them."""
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"https" if self.address.tls is not None else b"http"),
            (b":path", f"/{SERVICE}/{self.method}".encode()),
            (b":authority", str(self.address).encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", USER_AGENT.encode()),
        ]
        if self.algorithm != "none":
            fields.append((b"grpc-encoding", self.algorithm.encode()))
            fields.append((b"grpc-accept-encoding", f"identity,{self.algorithm}".encode()))
        return (*fields, *((name.lower().encode(), value.encode()) for name, value in self.headers.items()))


def model_path(model: str, version: str) -> str:
    """The path of a model, or of one version."""
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
