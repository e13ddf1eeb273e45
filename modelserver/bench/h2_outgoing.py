"""What an HTTP/2 connection of the bench sends with its next write."""

from __future__ import annotations

import asyncio

# Above this, buffers are written one by one instead of being joined.
JOIN_BYTES = 65536


class Outgoing:
    """Frames, and parts of frames, in order. Who adds to `parts` a buffer above `JOIN_BYTES` sets `has_large`."""

    __slots__ = ("has_large", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.has_large = False

    def flush(self, transport: asyncio.WriteTransport) -> None:
        """Write what there is."""
        parts = self.parts
        if not parts:
            return
        self.parts = []
        if self.has_large:
            self.has_large = False
            transport.writelines(parts)
        else:
            transport.write(parts[0] if len(parts) == 1 else b"".join(parts))
