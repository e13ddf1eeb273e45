"""How much abuse of a peer is tolerated before its connection ends: resets, useless frames, unread answers, pings."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2.frame import too_much
from modelserver.wire.limits import KeepaliveLimits, WireLimits

# Pings: limits on the peer's, and our own to find out whether a silent peer is still there.
#
# The rules are those of all gRPC servers (gRPC's "Keepalive User Guide", proposal A8).

# How often a peer without calls may ping that is not allowed to.
_WITHOUT_CALLS_S = 7200.0


class PingStrikes:
    """Counts pings that come too soon after the one before.

    Senders of HEADERS or DATA call `forgive`: clients measure the bandwidth with pings while data flows.
    """

    __slots__ = ("_last_s", "_limits", "_num_strikes")

    def __init__(self, limits: KeepaliveLimits) -> None:
        self._limits = limits
        self._last_s: float | None = None
        self._num_strikes = 0

    def count(self, now_s: float, *, has_streams: bool) -> bool:
        """A ping arrived; returns whether it is still acceptable."""
        limits = self._limits
        is_allowed = has_streams or limits.ping_without_calls
        interval_s = limits.min_ping_interval_s if is_allowed else max(_WITHOUT_CALLS_S, limits.min_ping_interval_s)
        if self._last_s is not None and now_s - self._last_s < interval_s:
            self._num_strikes += 1
        self._last_s = now_s
        # As in gRPC's core, 0 means any number.
        return not limits.max_ping_strikes or self._num_strikes <= limits.max_ping_strikes

    def forgive(self) -> None:
        """Data was sent."""
        self._last_s = None
        self._num_strikes = 0


class Pulse(enum.Enum):
    """The results of `Keepalive.check`."""

    FINE = "fine"
    PING = "send a ping"
    DEAD = "the peer does not answer"


class Keepalive:
    """When to ping a peer that has been silent, and when to give it up."""

    __slots__ = ("_heard_s", "_limits", "_num_pings", "_pinged_s")

    def __init__(self, limits: KeepaliveLimits, now_s: float) -> None:
        self._limits = limits
        self._heard_s = now_s
        self._pinged_s: float | None = None
        # Since data was sent last.
        self._num_pings = 0

    def heard(self, now_s: float) -> None:
        """The peer sent something."""
        self._heard_s = now_s
        self._pinged_s = None

    def check(self, now_s: float, *, has_streams: bool, has_sent: bool = False) -> Pulse:
        """The action to take; the caller takes it. `has_sent` says that data was sent since the last call."""
        limits = self._limits
        if has_sent:
            self._num_pings = 0
        if self._pinged_s is not None:
            return Pulse.DEAD if now_s - self._pinged_s >= limits.ping_timeout_s else Pulse.FINE
        if limits.max_pings_without_data and self._num_pings >= limits.max_pings_without_data:
            return Pulse.FINE
        is_silent = now_s - self._heard_s >= limits.ping_after_s
        if is_silent and (has_streams or limits.ping_without_calls):
            self._pinged_s = now_s
            self._num_pings += 1
            return Pulse.PING
        return Pulse.FINE


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
        # The data sent at the last ping.
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


# Streams beyond this number are not waited for.
_MAX_WAITED_FOR: Final = 100
# For a client that goes on sending: it may have our answer unread before it, and curl 7.88 drops that when the stream
# is reset. What it sends meanwhile is bounded by the stream's window.
_READING_S: Final = 0.05


class UnendedStreams:
    """Asks the client to stop (RFC 9113, 8.1): soon if it sends more, or if it has not ended its side in `linger_s`.

    Not at once: most are about to end, and HAProxy discards the buffered part of an answer when the stream is reset
    after it.
    """

    __slots__ = ("_ask_to_stop", "_due_s", "_linger_s", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, linger_s: float, ask_to_stop: Callable[[int], object]) -> None:
        self._loop = loop
        self._linger_s = linger_s
        self._ask_to_stop = ask_to_stop
        # Until when each is waited for, the oldest first.
        self._due_s: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream_id: int) -> None:
        """Our side has ended, and the client's has not."""
        self._due_s[stream_id] = self._loop.time() + self._linger_s
        if len(self._due_s) > _MAX_WAITED_FOR:
            self._stop(next(iter(self._due_s)))
        if self._timer is None:
            self._timer = self._loop.call_later(self._linger_s, self._look)

    def go_on(self, stream_id: int) -> None:
        """The client sends more on a stream that was closed."""
        due_s = self._loop.time() + _READING_S
        if self._due_s.get(stream_id, 0.0) > due_s:
            self._due_s[stream_id] = due_s
            self._set_timer()

    def end(self, stream_id: int) -> bool:
        """The client has ended its side, or reset it; returns whether it was waited for."""
        return self._due_s.pop(stream_id, None) is not None

    def close(self) -> None:
        """The connection ends."""
        self._due_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now_s = self._loop.time()
        for stream_id in [stream_id for stream_id, due_s in self._due_s.items() if due_s <= now_s]:
            self._stop(stream_id)
        self._set_timer()

    def _set_timer(self) -> None:
        """Look again when the next one is due."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(self._due_s.values()), self._look) if self._due_s else None

    def _stop(self, stream_id: int) -> None:
        del self._due_s[stream_id]
        self._ask_to_stop(stream_id)
