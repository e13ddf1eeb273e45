"""The reading side of an HTTP/2 client: heads and ends of answers, and the interface of a stream's owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from modelserver.wire.http2.frame import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    PADDED,
    ConnectionFault,
    ErrorCode,
    protocol_fault,
)
from modelserver.wire.http2.hpack import Decoder, HeaderListTooLargeError, HpackError
from modelserver.wire.http2.hpack_tables import Field

# Of one head, as it comes and uncompressed.
MAX_HEAD_BYTES = 2**20
MAX_REMEMBERED_HEADS = 256


class Head:
    """Decoded fields of an answer's head or end."""

    __slots__ = ("grpc_message", "grpc_status", "http_status", "pushback_ms")

    def __init__(self, fields: Sequence[Field]) -> None:
        found = dict(fields)
        status = found.get(b":status", b"")
        self.http_status = int(status) if status.isdigit() else None
        code = found.get(b"grpc-status", b"")
        self.grpc_status = int(code) if code.isdigit() else None
        self.grpc_message = found.get(b"grpc-message", b"")
        pushback = found.get(b"grpc-retry-pushback-ms", b"")
        self.pushback_ms = int(pushback) if pushback.isdigit() else None


HeadOf = TypeVar("HeadOf")


class HeadReader(Generic[HeadOf]):
    """Decodes blocks; `known` has those that came before, as long as they left the dynamic table as it was.

    `make` turns the fields of a block into what is known of it.
    """

    __slots__ = ("_decoder", "_fragment", "_generation", "_make", "known")

    def __init__(self, make: Callable[[tuple[Field, ...]], HeadOf]) -> None:
        self._make = make
        self._decoder = Decoder(MAX_HEAD_BYTES)
        self._generation = 0
        self.known: dict[bytes, HeadOf] = {}
        # Of a head in several frames: its stream, its flags, and what has come of its block.
        self._fragment: tuple[int, int, bytes] | None = None

    def read(self, block: bytes) -> HeadOf:
        """Raises ConnectionFault."""
        try:
            head = self._make(self._decoder.decode(block))
        except (HpackError, HeaderListTooLargeError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        if self._decoder.generation != self._generation or len(self.known) >= MAX_REMEMBERED_HEADS:
            self._generation = self._decoder.generation
            self.known.clear()
        else:
            self.known[block] = head
        return head

    def read_part(self, kind: int, flags: int, stream_id: int, payload: bytes) -> tuple[HeadOf, bool] | None:
        """The head that a frame of type HEADERS or CONTINUATION completes, and whether it ends its stream.

        None if more of it is to come. Raises ConnectionFault.
        """
        if kind == CONTINUATION:
            if self._fragment is None or self._fragment[0] != stream_id:
                raise protocol_fault("a CONTINUATION frame that continues nothing")
            first_flags, block = self._fragment[1], self._fragment[2] + payload
        else:
            first_flags, block = flags, unpadded(flags, payload)
            if flags & HAS_PRIORITY:
                block = block[5:]
        if len(block) > MAX_HEAD_BYTES:
            raise protocol_fault(f"a head of more than {MAX_HEAD_BYTES} bytes")
        if not flags & END_HEADERS:
            self._fragment = (stream_id, first_flags, block)
            return None
        self._fragment = None
        return self.read(block), bool(first_flags & END_STREAM)


def unpadded(flags: int, payload: bytes) -> bytes:
    """The content of a frame without its padding. Raises ConnectionFault for padding without a length."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise protocol_fault("a padded frame without the length of its padding")
    return payload[1 : len(payload) - payload[0]]


class Unprocessed(str):
    """A problem of a stream that the server has not begun to work on: its request may be sent elsewhere."""

    __slots__ = ()


class Stream(Protocol):
    """The calls that the owner of a stream gets from its connection."""

    def on_open(self, stream_id: int) -> None:
        """The stream, which had to wait for its connection, has started."""

    def on_head(self, head: Head, now_ns: int) -> None: ...

    def on_data(self, buffer: bytes, start: int, end: int, now_ns: int) -> None: ...

    def on_end(self, head: Head | None, now_ns: int, problem: str | None) -> None:
        """The stream is over: with its last fields, or for a problem of the connection, which may be `Unprocessed`."""


def code_name(payload: bytes) -> str:
    code = int.from_bytes(payload, "big")
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"code {code}"
