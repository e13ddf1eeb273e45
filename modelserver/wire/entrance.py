"""The parts that new connections of a port share before their protocol is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from modelserver.telemetry.wire import Protocol as Spoken
from modelserver.telemetry.wire import Violation
from modelserver.wire.context import WireContext

if TYPE_CHECKING:
    from modelserver.wire.http1.connection import Http1Connection
    from modelserver.wire.http2.connection import Http2Connection

_logger = logging.getLogger(__name__)

# A peer that repeats the same mistake must not fill the log.
_SILENCE_S = 60.0


# `begin` of a connection is called once, in place of `connection_made`, with the bytes already read.
MakeConnection = Callable[[WireContext], "Http1Connection | Http2Connection"]


class Entrance:
    """Made once per port. `http1` and `http2` make the connection that takes over when it is known what the
    client speaks; `name` is the port's in the log.
    """

    def __init__(self, context: WireContext, name: str, *, http1: MakeConnection, http2: MakeConnection) -> None:
        self.context = context
        self.http1 = http1
        self.http2 = http2
        self._name = name
        self._silent_until_s: dict[Violation, float] = {}

    def complain(self, violation: Violation, text: str) -> None:
        """Count a peer's violation before its protocol was known; log it unless a similar one was just logged."""
        self.context.counts.violated(Spoken.UNKNOWN, violation)
        now_s = self.context.loop.time()
        if now_s >= self._silent_until_s.get(violation, 0.0):
            self._silent_until_s[violation] = now_s + _SILENCE_S
            _logger.warning("%s: %s (logged at most once in %g s)", self._name, text, _SILENCE_S)
