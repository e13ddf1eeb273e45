"""The one receive buffer that all connections of an event loop share."""

from __future__ import annotations

# The kernel returns up to about this much in one call.
ARENA_BYTES = 320 * 1024


class Arena:
    """Memory that every connection of a loop receives into, so that an idle one owns none.

    All transports, ours and the loops', ask a `BufferedProtocol` for its buffer, fill it and call `buffer_updated` in
    one go, without anything else of the loop running in between. So the receiver must copy the bytes that it wants to
    keep before `buffer_updated` returns: afterwards another connection overwrites them. `view` is what `get_buffer`
    returns; `memory` are the same bytes, for `find` and the like.
    """

    __slots__ = ("memory", "view")

    def __init__(self, num_bytes: int = ARENA_BYTES) -> None:
        self.memory = bytearray(num_bytes)
        self.view = memoryview(self.memory)
