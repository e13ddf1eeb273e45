"""Pings: limits on the peer's, and our own to find out whether a silent peer is still there.

The rules are those of all gRPC servers (gRPC's "Keepalive User Guide", proposal A8).
"""

from __future__ import annotations

import enum

from modelserver.wire.limits import KeepaliveLimits

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
