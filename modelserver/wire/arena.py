"""The one receive buffer that all connections of an event loop share."""

from __future__ import annotations

# The kernel hands over up to about this much at once; more would only be read in a further call.
ARENA_BYTES = 320 * 1024


class Arena:
    """Memory that every connection of a loop receives into, so that an idle one owns none.

    All transports, ours and the loops', ask a `BufferedProtocol` for its buffer, fill it and call `buffer_updated`
    in one go, without anything else of the loop running in between. Whoever gets the bytes must therefore have taken
    what it wants to keep when `buffer_updated` returns: afterwards they are somebody else's. `view` is what
    `get_buffer` returns; `memory` are the same bytes, for `find` and the like.
    """

    __slots__ = ("memory", "view")

    def __init__(self, num_bytes: int = ARENA_BYTES) -> None:
        self.memory = bytearray(num_bytes)
        self.view = memoryview(self.memory)
