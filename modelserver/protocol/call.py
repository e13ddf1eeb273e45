"""One gRPC call, as the handlers see it: no socket, no grpcio, serialized messages only.

A wire makes a `UnaryCall` of its own kind or a `StreamCall` and hands it to the method's handler on the event
loop. Unary handlers answer through `reply` or `fail`, from a callback where they can.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from google.protobuf.descriptor import FileDescriptor

from modelserver.auth.access import Admitted, ApiGroup
from modelserver.auth.api_keys import Scope
from modelserver.auth.guard import KeyUse, Needs
from modelserver.core.tensor import Buffer

Metadata = Mapping[str, str | bytes]
# One serialized message in pieces that are sent one after the other, without being joined; they never change.
Parts = Sequence[Buffer]


class UnaryCall(abc.ABC):
    """A call with one request message. Wires extend this.

    `message` is valid as long as there are references to it. `metadata` has lower-case keys, those that end in `-bin`
    with bytes; of equal keys the last counts. `deadline_ns` is monotonic (None: the client waits for ever). `on_cancel`
    is set by a handler that has work to stop when the client cancels, leaves, or its deadline passes; the wire calls it
    at most once.
    """

    __slots__ = ("deadline_ns", "message", "metadata", "on_cancel")

    message: Buffer
    metadata: Metadata
    deadline_ns: int | None
    on_cancel: Callable[[], None] | None

    @property
    def peer(self) -> str:
        """The address that the call comes from; empty where the wire does not know."""
        return ""

    @abc.abstractmethod
    def reply(self, parts: Parts) -> None:
        """End the call with this message. Exactly one of `reply` and `fail` is called, once."""

    @abc.abstractmethod
    def fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        """End the call with a gRPC status code other than OK, and with `retry_ms`, say when to try again."""


@dataclass(slots=True)
class StreamCall:
    """A bidirectional call: `messages` ends when the client half-closes; `send` waits for room.

    `send_now`, of wires that have it, sends a message if it can do so without waiting; otherwise it returns False and
    does nothing. It is never called while a `send` is in progress, and does not raise. `peer` is as of unary calls.
    """

    messages: AsyncIterator[Buffer]
    send: Callable[[Parts], Awaitable[None]]
    metadata: Metadata = field(default_factory=dict)
    deadline_ns: int | None = None
    send_now: Callable[[Parts], bool] | None = None
    peer: str = ""


class RpcError(Exception):
    """Raised by a streaming handler to end the call with a gRPC status other than OK."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


# Called with a call's metadata and the address of its client, before its message comes. Raises RpcError.
CheckHead = Callable[[Metadata, str], Admitted]


@dataclass(frozen=True, slots=True)
class Method:
    """An entry of the method table: a unary handler (called, answers by callback) or a streaming one (awaited).

    `group`, `scope` and `key` are the requirements, as for HTTP routes. `check_head` refuses calls by their heads; the
    handler checks again later, as keys may change meanwhile. `relay`, in place of a handler, makes the stream itself:
    it is called with the wire's connection, the stream's id and its route, and gets frames as they arrive.
    """

    unary: Callable[[UnaryCall], None] | None = None
    stream: Callable[[StreamCall], Awaitable[Any]] | None = None
    group: ApiGroup = ApiGroup.METADATA
    scope: Scope | None = None
    key: KeyUse = KeyUse.NEEDED
    check_head: CheckHead | None = None
    relay: Callable[..., Any] | None = None
    needs: Needs = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", Needs.of(self.group, self.scope, self.key))

    def of(self, group: ApiGroup, key: KeyUse = KeyUse.NEEDED) -> Method:
        """The same method in that group."""
        return replace(self, group=group, key=key)


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service as data: its full name, its methods by their names, and the files that declare it.

    `files` name each file after those that it imports. `drain` is called once, when open streams are to end.
    """

    name: str
    methods: Mapping[str, Method]
    files: tuple[FileDescriptor, ...] = ()
    drain: Callable[[], None] | None = None


class GrpcHandler(Protocol):
    """A gRPC frontend as wires see it: handlers by full method name (`/package.Service/Method`)."""

    @property
    def methods(self) -> Mapping[str, Method]: ...

    def drain(self) -> None:
        """Open streams soon take no more requests, and end when those in flight are answered. Called once."""
