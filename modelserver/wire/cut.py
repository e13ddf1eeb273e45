"""The end of a connection whose peer reads nothing."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from modelserver.wire.context import WireContext

_DROP_UNSENT = struct.pack("ii", 1, 0)


def cut(transport: asyncio.Transport, context: WireContext) -> None:
    """Close at once with a reset, so that the peer knows; the system drops its unsent data.

    After a plain close the system would try to send the rest for minutes, and the peer would believe it is still
    connected.
    """
    context.num_given_up_bytes += transport.get_write_buffer_size()
    opened = transport.get_extra_info("socket")
    if opened is not None:
        with suppress(OSError):  # lost already
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
    transport.abort()
