"""A request whose head was read and whose body is being received."""

from __future__ import annotations

from modelserver.core.tensor import Buffer
from modelserver.wire.assembly import AssemblyBudget
from modelserver.wire.body import BodyCollector
from modelserver.wire.http1.chunked import ChunkedBody
from modelserver.wire.http1.head import RequestHead


class Incoming:
    """`feed`, or `room` and `filled`, until `is_complete` or `collector.error`; `collector.drop` if it never ends."""

    __slots__ = ("_chunks", "_num_chunk_bytes", "collector", "is_invited", "request")

    def __init__(self, request: RequestHead, max_bytes: int, budget: AssemblyBudget, owner: str = "") -> None:
        length = None if request.is_chunked else request.content_length
        self.request = request
        self.collector = BodyCollector(length, request.json_length, max_bytes, budget, owner)
        self._chunks = ChunkedBody(self.collector) if request.is_chunked else None
        self._num_chunk_bytes = 0
        # A client that expects 100-continue sends its body after that.
        self.is_invited = not request.expects_continue

    def feed(self, data: bytes, at: int) -> int:
        """Take the body's part of `data`, from `at` on; returns where it ended. Raises RefusedError."""
        if at == len(data):
            return at
        self.is_invited = True
        if self._chunks is not None:
            self._num_chunk_bytes += len(data) - at
            return self._chunks.feed(data, at)
        piece = data[at : at + self.request.content_length - self.collector.num_bytes]
        self.collector.add(piece)
        return at + len(piece)

    @property
    def num_bytes(self) -> int:
        """The bytes received, of the body and its framing."""
        return self.collector.num_bytes if self._chunks is None else self._num_chunk_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the body is complete."""
        return self.collector.is_full if self._chunks is None else self._chunks.is_complete

    def finish(self) -> Buffer:
        """The body, once it is complete and has no error."""
        self.collector.finish()
        return self.collector.body()
