"""What an HTTP/2 connection of the bench says to the owners of its streams."""

from __future__ import annotations

from typing import Protocol

from modelserver.bench.h2_heads import Head
from modelserver.wire.http2.frame import ErrorCode


class Stream(Protocol):
    """What a connection tells the owner of a stream."""

    def on_open(self, stream_id: int) -> None:
        """The stream, which had to wait for its connection, has started."""

    def on_head(self, head: Head, now_ns: int) -> None: ...

    def on_data(self, buffer: bytes, start: int, end: int, now_ns: int) -> None: ...

    def on_end(self, head: Head | None, now_ns: int, problem: str | None) -> None:
        """The stream is over: with its last fields, or for a problem of the connection."""


def code_name(payload: bytes) -> str:
    code = int.from_bytes(payload, "big")
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"code {code}"
