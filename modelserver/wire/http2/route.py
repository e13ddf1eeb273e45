"""The destination of requests with a certain head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from modelserver.auth.access import EVERYBODY, Admitted
from modelserver.core.tensor import Buffer
from modelserver.protocol.call import CheckHead
from modelserver.wire.http2.head import RequestHead

if TYPE_CHECKING:
    from modelserver.wire.http2.connection import Http2Connection
    from modelserver.wire.http2.stream import Http2Stream


class Refusal:
    """An answer that needs no handler: a header block, and a body for clients of HTTP."""

    __slots__ = ("block", "body")

    def __init__(self, block: bytes, body: Sequence[Buffer] = ()) -> None:
        self.block = block
        self.body = body


class Route:
    """The data derived from a head, for all requests with that head. Never changed.

    `open` makes the stream, and `handle` is the handler, which gets the stream or its call. A head that leads to no
    handler has a `Refusal` instead. `encoding` compresses answers, unless it is None. `admitted` is the frontend's
    decision on the head; `check_head` says for a gRPC call whether it still holds.
    """

    __slots__ = ("admitted", "check_head", "content_length", "encoding", "handle", "head", "open", "timeout_ns")

    def __init__(
        self,
        head: RequestHead,
        open_stream: Callable[[Http2Connection, int, Route], Http2Stream],
        handle: Callable[[Any], Any],
        encoding: bytes | None = None,
        admitted: Admitted = EVERYBODY,
        check_head: CheckHead | None = None,
    ) -> None:
        self.head = head
        self.open = open_stream
        self.handle = handle
        self.encoding = encoding
        self.admitted = admitted
        self.check_head = check_head
        # Copied: these are read for each request.
        self.content_length = head.content_length
        self.timeout_ns = head.timeout_ns
