"""How much abuse of a peer is tolerated before its connection ends: resets, useless frames, unread answers, pings."""

from __future__ import annotations

from modelserver.telemetry.wire import Violation
from modelserver.wire.http2.frame import too_much
from modelserver.wire.http2.keepalive import PingStrikes
from modelserver.wire.http2.protection import TokenBucket
from modelserver.wire.limits import WireLimits


class AbuseLimits:
    """Keeps the accounts of one peer. All methods raise ConnectionFault when it is too much."""

    __slots__ = ("_glitches", "_max_answers", "_num_answers", "_progress", "_resets", "_strikes")

    def __init__(self, limits: WireLimits) -> None:
        http2 = limits.http2
        self._resets = TokenBucket(http2.resets_burst, http2.resets_per_s)
        self._glitches = TokenBucket(http2.glitches_burst, http2.glitches_per_s)
        self._max_answers = http2.max_control_frames
        self._num_answers = 0
        self._strikes = PingStrikes(limits.keepalive)
        # What had been sent at the last ping.
        self._progress = (0, 0)

    def count_reset(self) -> None:
        """A stream ended without an answer."""
        if not self._resets.take():
            raise too_much(Violation.TOO_MANY_RESETS)

    def count_glitches(self, number: int = 1) -> None:
        """A frame without effect arrived."""
        if not self._glitches.take(number):
            raise too_much(Violation.TOO_MANY_GLITCHES)

    def count_answer(self) -> None:
        """A control frame arrived that we must answer."""
        self._num_answers += 1
        if self._num_answers > self._max_answers:
            raise too_much(Violation.TOO_MANY_CONTROL_FRAMES)

    def forget_answers(self) -> None:
        """The peer took the answers to everything that it had sent."""
        self._num_answers = 0

    def count_ping(self, now_s: float, *, has_streams: bool, progress: tuple[int, int]) -> None:
        """A PING arrived. `progress` changes when HEADERS or DATA are sent: pings between those are allowed."""
        if progress != self._progress:
            self._progress = progress
            self._strikes.forgive()
        if not self._strikes.count(now_s, has_streams=has_streams):
            raise too_much(Violation.TOO_MANY_PINGS)
