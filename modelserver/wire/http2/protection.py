"""A connection's memory of its peer, used to tolerate mistakes and to end abuse."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable

# How many closed streams are remembered: enough for the frames that may be in flight.
_MAX_REMEMBERED = 256


class TokenBucket:
    """Lets `burst` tokens pass at once, and then a number per second."""

    __slots__ = ("_burst", "_clock", "_level", "_per_s", "_since_s")

    def __init__(self, burst: int, per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._clock = clock
        self._level = float(burst)
        self._since_s = clock()

    def take(self, num_tokens: int = 1) -> bool:
        """Whether there were enough tokens left; they are taken."""
        self._level -= num_tokens
        if self._level < 0:  # the clock is read only when the limit may be exceeded
            now_s = self._clock()
            before = self._level + num_tokens + (now_s - self._since_s) * self._per_s
            self._level = min(self._burst, before) - num_tokens
            self._since_s = now_s
        return self._level >= 0


class Closed(enum.Enum):
    """How a stream ended, which decides what the peer may still send on it (RFC 9113, 5.1)."""

    ENDED = "ended"
    RESET_BY_PEER = "reset by the peer"
    RESET_BY_US = "reset by us"


class ClosedStreams:
    """Recently closed streams. Ids that were skipped, or closed longer ago, are not in it.

    `ended` are streams that both sides ended: answering appends to it directly, once per request.
    """

    __slots__ = ("_resets", "ended")

    def __init__(self) -> None:
        self.ended: deque[int] = deque(maxlen=_MAX_REMEMBERED)
        self._resets: dict[int, Closed] = {}

    def add(self, stream_id: int, how: Closed) -> None:
        """Remember how a stream closed, and forget the oldest one."""
        if how is Closed.ENDED:
            self.ended.append(stream_id)
            return
        self._resets[stream_id] = how
        if len(self._resets) > _MAX_REMEMBERED:
            del self._resets[next(iter(self._resets))]

    def get(self, stream_id: int) -> Closed | None:
        """How the stream closed, if it did so recently."""
        if stream_id in self._resets:
            return self._resets[stream_id]
        return Closed.ENDED if stream_id in self.ended else None
