"""One gRPC call, as the handlers see it: no socket, no grpcio, serialized messages only.

A wire makes a `UnaryCall` or a `StreamCall` and hands it to the method's handler on the event loop.
Unary handlers answer through `reply` or `fail`, from a callback where they can.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelserver.core.tensor import Buffer

Metadata = Mapping[str, str | bytes]


@dataclass(slots=True)
class UnaryCall:
    """A call with one request message. `reply` or `fail` is called exactly once.

    `deadline_ns` is monotonic (None: the client waits for ever). `status` of `fail` is a gRPC status code number.
    """

    message: Buffer
    reply: Callable[[Buffer], None]
    fail: Callable[[int, str], None]
    metadata: Metadata = field(default_factory=dict)
    deadline_ns: int | None = None
    # Set by a handler that has work to stop when the client cancels or its deadline passes.
    on_cancel: Callable[[], None] | None = None


@dataclass(slots=True)
class StreamCall:
    """A bidirectional call: `messages` ends when the client half-closes; `send` waits for room."""

    messages: AsyncIterator[Buffer]
    send: Callable[[Buffer], Awaitable[None]]
    metadata: Metadata = field(default_factory=dict)
    deadline_ns: int | None = None


class RpcError(Exception):
    """Raised by a streaming handler to end the call with a gRPC status other than OK."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Method:
    """An entry of the method table: a unary handler (called, answers by callback) or a streaming one (awaited)."""

    unary: Callable[[UnaryCall], None] | None = None
    stream: Callable[[StreamCall], Awaitable[Any]] | None = None
