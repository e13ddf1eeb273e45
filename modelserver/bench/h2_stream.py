"""What an HTTP/2 connection of the bench says of its streams, and what it keeps of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from modelserver.wire.http2.frame import ErrorCode
from modelserver.wire.http2.static_table import Field


class Stream(Protocol):
    """What a connection tells the owner of a stream."""

    def on_open(self, stream_id: int) -> None:
        """The stream, which had to wait for its connection, has started."""

    def on_head(self, head: Head, now_ns: int) -> None: ...

    def on_data(self, buffer: bytes, start: int, end: int, now_ns: int) -> None: ...

    def on_end(self, head: Head | None, now_ns: int, problem: str | None) -> None:
        """The stream is over: with its last fields, or for a problem of the connection."""


class Head:
    """Decoded fields of an answer's head or end."""

    __slots__ = ("grpc_message", "grpc_status", "http_status")

    def __init__(self, fields: Sequence[Field]) -> None:
        found = dict(fields)
        status = found.get(b":status", b"")
        self.http_status = int(status) if status.isdigit() else None
        code = found.get(b"grpc-status", b"")
        self.grpc_status = int(code) if code.isdigit() else None
        self.grpc_message = found.get(b"grpc-message", b"")


class Upload:
    """What of a stream's data waits for the peer's windows."""

    __slots__ = ("ends", "parts", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.parts: deque[memoryview] = deque()
        self.ends = False


def code_name(payload: bytes) -> str:
    code = int.from_bytes(payload, "big")
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"code {code}"
