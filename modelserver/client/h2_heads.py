"""Header blocks of HTTP/2 (RFC 7541) as a client has them: those of answers, read, and those of requests, written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
from modelserver.wire.http2.hpack import Decoder, HeaderListTooLargeError, HpackError, literal
from modelserver.wire.http2.hpack_tables import STATIC_TABLE, Field

# Of one head, as it comes and uncompressed.
MAX_HEAD_BYTES: Final = 2**20
MAX_REMEMBERED_HEADS: Final = 256
_STATUS_OK: Final = b"\x88"
_TABLE_BYTES: Final = 4096
_ENTRY_OVERHEAD: Final = 32


class AnswerBlock:
    """The head of an answer, or the trailers that end a call. Equal blocks share one: never change it.

    The statuses are None where the block has none.
    """

    __slots__ = ("_block", "_fields", "grpc_message", "grpc_status", "http_status", "pushback_ms")

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self._fields = fields
        self._block = b""
        found = dict(fields)
        self.http_status = _number_of(found.get(b":status", b""))
        self.grpc_status = _number_of(found.get(b"grpc-status", b""))
        self.grpc_message = found.get(b"grpc-message", b"")
        self.pushback_ms = _number_of(found.get(b"grpc-retry-pushback-ms", b""))

    @property
    def block(self) -> bytes:
        """The same fields for any other connection."""
        if not self._block:
            written = [_STATUS_OK if field == (b":status", b"200") else literal(*field) for field in self._fields]
            self._block = b"".join(written)
        return self._block


def _number_of(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) < 10 else None


class AnswerReader:
    """Decodes blocks; `known` has those that came before, as long as they left the dynamic table as it was."""

    __slots__ = ("_decoder", "_fragment", "_generation", "known")

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_HEAD_BYTES)
        self._generation = 0
        self.known: dict[bytes, AnswerBlock] = {}
        # Of a head in several frames: its stream, its flags, and what has come of its block.
        self._fragment: tuple[int, int, bytes] | None = None

    def read(self, block: bytes) -> AnswerBlock:
        """Raises ConnectionFault."""
        try:
            head = AnswerBlock(self._decoder.decode(block))
        except (HpackError, HeaderListTooLargeError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        if self._decoder.generation != self._generation or len(self.known) >= MAX_REMEMBERED_HEADS:
            self._generation = self._decoder.generation
            self.known.clear()
        else:
            self.known[block] = head
        return head

    def read_part(self, kind: int, flags: int, stream_id: int, payload: bytes) -> tuple[AnswerBlock, bool] | None:
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
    """The content of a frame without its padding. Raises ConnectionFault for padding that does not fit."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise protocol_fault("a padded frame without the length of its padding, or with more padding than bytes")
    return payload[1 : len(payload) - payload[0]]


class RequestBlocks:
    """The block of the first request of a connection, and that of all others: a few indexes, as real clients send."""

    __slots__ = ("again", "first")

    def __init__(self, fields: Sequence[Field], *, has_table: bool = True) -> None:
        """Where the peer has no table of the usual size, or the fields do not fit, they are sent as literals."""
        kept = [field for field in fields if field not in STATIC_TABLE]
        is_kept = has_table and sum(len(name) + len(value) + _ENTRY_OVERHEAD for name, value in kept) <= _TABLE_BYTES
        first, again = [], []
        # The newest entry of the dynamic table has the lowest index.
        index = len(STATIC_TABLE) + len(kept)
        for field in fields:
            if field in STATIC_TABLE:
                first.append(_index(STATIC_TABLE.index(field) + 1))
                again.append(first[-1])
                continue
            # The peer adds the first literal to its table (6.2.1): the same bits with another first octet.
            first.append(b"\x40" + literal(*field)[1:] if is_kept else literal(*field))
            again.append(_index(index) if is_kept else first[-1])
            index -= 1
        self.first = b"".join(first)
        self.again = b"".join(again)


def _index(number: int) -> bytes:
    """An indexed field (6.1)."""
    if number < 0x7F:
        return bytes([0x80 | number])
    # Tables of 4096 bytes have no more than 61 + 128 entries.
    return bytes([0xFF, number - 0x7F])
