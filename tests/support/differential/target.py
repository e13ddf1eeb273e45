"""A server as the differential tests see it, ours or the real Triton: asked in the words of the protocols."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2, service_pb2_grpc

TIMEOUT_S = 30.0
LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class HttpReply:
    """A whole answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def head(self) -> bytes:
        """The JSON part of a binary answer, the body of others."""
        length = self.headers.get(LENGTH.lower())
        return self.body if length is None else self.body[: int(length)]

    @property
    def blobs(self) -> bytes:
        return self.body[len(self.head) :]

    def document(self) -> Any:
        """The JSON of the answer; the text itself when it is none."""
        try:
            return json.loads(self.head)
        except ValueError:
            return self.head.decode(errors="replace")


@dataclass(frozen=True)
class RpcReply:
    """How a call ended, and its message when it ended well."""

    code: str
    text: str = ""
    message: Any = None

    def document(self) -> Any:
        return None if self.message is None else MessageToDict(self.message, preserving_proto_field_name=True)


@dataclass(frozen=True)
class StreamReply:
    """All that a stream of requests brought, and how it ended."""

    messages: Sequence[Any]
    code: str
    text: str


class Target:
    """`is_triton` tells which one it is. A context manager; usable from one thread."""

    # Where its files are, for cases that change them.
    repository: Path | None = None

    def __init__(self, *, is_triton: bool, http_port: int, grpc_port: int, metrics_port: int) -> None:
        self.is_triton = is_triton
        self.http_port = http_port
        self.grpc_port = grpc_port
        self.metrics_port = metrics_port
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.channel.close()
        # grpcio's poller thread lives as long as a channel does.
        del self.channel, self.stub

    @property
    def http_url(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def http(
        self,
        method: str,
        path: str,
        body: bytes | str | Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        port: int | None = None,
    ) -> HttpReply:
        """One request on a connection of its own. A mapping is sent as JSON."""
        if isinstance(body, Mapping):
            body = json.dumps(body)
        data = body.encode() if isinstance(body, str) else body
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http_port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, data, dict(headers or {}))
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return HttpReply(reply.status, found, reply.read())
        finally:
            connection.close()

    def rpc(self, name: str, message: Message, metadata: Mapping[str, str] | None = None) -> RpcReply:
        """One unary call."""
        try:
            reply = getattr(self.stub, name)(message, timeout=TIMEOUT_S, metadata=list((metadata or {}).items()))
        except grpc.RpcError as error:
            return RpcReply(error.code().name, error.details() or "")
        return RpcReply("OK", message=reply)

    def stream(
        self, requests: Iterable[service_pb2.ModelInferRequest], metadata: Mapping[str, str] | None = None
    ) -> StreamReply:
        """A stream that sends these, says that there are no more, and reads to the end."""
        call = self.stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S, metadata=list((metadata or {}).items()))
        messages = []
        try:
            messages.extend(call)
        except grpc.RpcError as error:
            return StreamReply(messages, error.code().name, error.details() or "")
        return StreamReply(messages, "OK", "")

    def metrics(self) -> str:
        return self.http("GET", "/metrics", port=self.metrics_port).body.decode()
