"""How a connection ends whose peer takes nothing."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from modelserver.wire.context import WireContext

_DROP_UNSENT = struct.pack("ii", 1, 0)


def cut(transport: asyncio.Transport, context: WireContext) -> None:
    """Close at once, and have the peer know: what the system holds for it is dropped, and it gets a reset.

    After a close alone the system would go on offering it what is unsent, for minutes, and the peer would take
    itself for connected.
    """
    context.num_given_up_bytes += transport.get_write_buffer_size()
    opened = transport.get_extra_info("socket")
    if opened is not None:
        with suppress(OSError):  # lost already
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
    transport.abort()
