"""gRPC messages out of the pieces of a stream (gRPC's PROTOCOL-HTTP2, "Length-Prefixed-Message")."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from modelserver.core.large_buffers import aligned_buffer, reserved_bytes
from modelserver.core.tensor import Buffer
from modelserver.protocol.call import RpcError
from modelserver.protocol.grpc_status import Status
from modelserver.wire.assembly import FREE_BYTES, AssemblyBudget, Holder

PREFIX_BYTES: Final = 5
# Below this size a message is copied into bytes when it comes in one piece.
MIN_BUFFER_BYTES: Final = 16 * 1024

# Flag and length.
_PREFIX: Final = struct.Struct(">BI")
unpack_prefix: Final = _PREFIX.unpack_from


class BudgetSpentError(RpcError):
    """Too many large messages are being received at once, and this one has to give way."""

    def __init__(self) -> None:
        super().__init__(
            Status.RESOURCE_EXHAUSTED,
            "no memory is left for this message: too many large requests arrive at once, and others came faster",
        )


class MessageAssembly(Holder):
    """The message that is being received on a stream; `add` until `is_complete`, then `take`.

    `size` is None until its prefix is known. A large message lies in memory of its own, whose end is aligned:
    that is where its last tensor ends, and so that tensor is aligned for its datatype.
    """

    __slots__ = (
        "_budget",
        "_buffer",
        "_charged",
        "_is_given_up",
        "_max_bytes",
        "_num_bytes",
        "_owner",
        "_prefix",
        "is_compressed",
        "on_given_up",
        "size",
    )

    def __init__(self, budget: AssemblyBudget, max_bytes: int, owner: str = "") -> None:
        """`owner` is the client whose share of the budget messages count towards."""
        self._budget = budget
        self._owner = owner
        self._is_given_up = False
        # Called when another request needs the memory; from then on nothing can be added.
        self.on_given_up: Callable[[], None] | None = None
        self._max_bytes = max_bytes
        self._prefix = b""
        self.size: int | None = None
        self.is_compressed = False
        self._buffer: Buffer = b""
        self._num_bytes = 0
        self._charged = 0

    @property
    def is_begun(self) -> bool:
        """Whether a part of a message has arrived."""
        return self.size is not None or bool(self._prefix)

    @property
    def num_missing(self) -> int:
        """Bytes of this message that are still to come; 0 before its size is known."""
        return 0 if self.size is None else self.size - self._num_bytes

    @property
    def is_complete(self) -> bool:
        return self._num_bytes == self.size

    def add(self, data: memoryview) -> int:
        """Take this message's part of the data; returns its number of bytes.

        Raises RpcError for a message that is too large or has an invalid prefix, before memory is allocated.
        """
        if self._is_given_up:
            raise BudgetSpentError
        start = 0
        if self.size is None:
            start = self._add_prefix(data)
            if self.size is None:
                return start
        piece = data[start : start + self.size - self._num_bytes]
        if piece:
            self._add_body(piece, self.size)
        return start + len(piece)

    def room(self) -> memoryview | None:
        """The reserved memory for the bytes still to come."""
        buffer = self._buffer
        return buffer[self._num_bytes :] if isinstance(buffer, memoryview) and self._num_bytes < len(buffer) else None

    def filled(self, num_bytes: int) -> None:
        """This many bytes were received into `room`. Raises RpcError as `add` does."""
        if self._is_given_up:
            raise BudgetSpentError
        self._charge(self._num_bytes + num_bytes)
        self._num_bytes += num_bytes

    def take(self) -> Buffer:
        """The complete message; the next one begins."""
        message = self._buffer
        self.drop()
        return message

    def drop(self) -> None:
        """Forget the received part, and return its share of the budget."""
        if self._charged:
            self._budget.release(self)
            self._charged = 0
        self._prefix = b""
        self.size = None
        self._buffer = b""
        self._num_bytes = 0

    def give_up(self) -> None:
        """Called by the budget."""
        self._is_given_up = True
        self.drop()
        if self.on_given_up is not None:
            self.on_given_up()

    def _add_prefix(self, data: memoryview) -> int:
        missing = PREFIX_BYTES - len(self._prefix)
        self._prefix += data[:missing]
        if len(self._prefix) < PREFIX_BYTES:
            return len(data)
        flag, size = unpack_prefix(self._prefix)
        self._prefix = b""
        if flag > 1:
            raise RpcError(Status.INTERNAL, f"the first byte of a message must be 0 or 1 (compressed), got {flag}")
        if size > self._max_bytes:
            raise too_large(size, self._max_bytes)
        self.is_compressed = flag == 1
        self.size = size
        return missing

    def _add_body(self, piece: memoryview, size: int) -> None:
        if len(piece) == size < MIN_BUFFER_BYTES:
            self._buffer = piece.tobytes()
            self._num_bytes = size
            return
        start, end = self._num_bytes, self._num_bytes + len(piece)
        self._charge(end)
        buffer = self._buffer
        if not isinstance(buffer, memoryview) or end > len(buffer):
            buffer = self._buffer = self._grown(buffer, end, size)
        buffer[start:end] = piece
        self._num_bytes = end

    def _grown(self, buffer: Buffer, end: int, size: int) -> memoryview:
        """Memory for at least `end` bytes."""
        length = reserved_bytes(size, end)
        grown = aligned_buffer(length, aligned_at=size)
        grown[: self._num_bytes] = memoryview(buffer)[: self._num_bytes]
        return grown

    def _charge(self, num_bytes: int) -> None:
        """Charge the message to the budget of all messages being received."""
        due = num_bytes - FREE_BYTES - self._charged
        if due <= 0:
            return
        self._charged += due
        if not self._budget.charge(due, self, self._owner):
            raise BudgetSpentError


def too_large(size: int, max_bytes: int) -> RpcError:
    return RpcError(Status.RESOURCE_EXHAUSTED, f"received message larger than max ({size} vs. {max_bytes})")
