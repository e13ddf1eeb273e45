"""The `grpc-timeout` header: how long the client waits (gRPC's PROTOCOL-HTTP2, "Requests")."""

from __future__ import annotations

from typing import Final

_UNIT_NS: Final = {
    ord("n"): 1,
    ord("u"): 1_000,
    ord("m"): 1_000_000,
    ord("S"): 1_000_000_000,
    ord("M"): 60 * 1_000_000_000,
    ord("H"): 3600 * 1_000_000_000,
}
# Longer waits (146 years) are as good as none, and this still fits 64 bits when added to a clock.
MAX_TIMEOUT_NS: Final = 1 << 62
# The specification has 8 digits; some clients send nanoseconds with more.
_MAX_DIGITS: Final = 20


def parse_timeout(value: bytes) -> int:
    """Nanoseconds, at most MAX_TIMEOUT_NS; 0 means that the wait has already ended.

    Raises ValueError for anything but digits and one of the units H M S m u n.
    """
    digits = value[:-1]
    unit_ns = _UNIT_NS.get(value[-1]) if value else None
    if unit_ns is None or not digits.isdigit():
        raise ValueError(f"grpc-timeout {value[:40]!r} is not a number followed by one of H M S m u n")
    if len(digits) > _MAX_DIGITS:
        return MAX_TIMEOUT_NS
    return min(int(digits) * unit_ns, MAX_TIMEOUT_NS)
