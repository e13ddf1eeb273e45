"""Pings of both sides."""

from __future__ import annotations

import pytest

from modelserver.wire.http2.abuse_limits import Keepalive, PingStrikes, Pulse
from modelserver.wire.limits import KeepaliveLimits


def count(strikes: PingStrikes, times_s: list[float], *, has_streams: bool = True) -> list[bool]:
    return [strikes.count(now_s, has_streams=has_streams) for now_s in times_s]


def test_the_fourth_ping_in_a_row_is_too_many() -> None:
    assert count(PingStrikes(KeepaliveLimits()), [0, 1, 2, 3]) == [True, True, True, False]


def test_pings_at_the_allowed_interval_are_none_too_many() -> None:
    assert all(count(PingStrikes(KeepaliveLimits()), [300.0 * index for index in range(100)]))


def test_data_that_was_sent_forgives() -> None:
    strikes = PingStrikes(KeepaliveLimits())
    for index in range(100):
        assert all(count(strikes, [index, index + 0.1, index + 0.2]))
        strikes.forgive()


def test_without_calls_only_two_hours_are_enough() -> None:
    assert count(PingStrikes(KeepaliveLimits()), [0, 400, 800, 1200], has_streams=False)[-1] is False
    assert all(count(PingStrikes(KeepaliveLimits()), [7200.0 * index for index in range(9)], has_streams=False))
    permitted = PingStrikes(KeepaliveLimits(ping_without_calls=True))
    assert all(count(permitted, [400.0 * index for index in range(9)], has_streams=False))


def test_zero_strikes_means_any_number() -> None:
    assert all(count(PingStrikes(KeepaliveLimits(max_ping_strikes=0)), [0.0] * 100))


LIMITS = KeepaliveLimits(ping_after_s=60, ping_timeout_s=20)


@pytest.mark.parametrize(("now_s", "pulse"), [(59, Pulse.FINE), (60, Pulse.PING)])
def test_a_silent_peer_is_pinged(now_s: float, pulse: Pulse) -> None:
    assert Keepalive(LIMITS, 0).check(now_s, has_streams=True) is pulse


def test_a_ping_is_sent_once_and_waited_for() -> None:
    keepalive = Keepalive(LIMITS, 0)
    pulses = [keepalive.check(now_s, has_streams=True) for now_s in (60, 61, 79, 80)]
    assert pulses == [Pulse.PING, Pulse.FINE, Pulse.FINE, Pulse.DEAD]


def test_whatever_comes_is_an_answer() -> None:
    keepalive = Keepalive(LIMITS, 0)
    keepalive.check(60, has_streams=True)
    keepalive.heard(70)
    assert [keepalive.check(now_s, has_streams=True) for now_s in (80, 129, 130)] == [
        Pulse.FINE,
        Pulse.FINE,
        Pulse.PING,
    ]


def test_a_connection_without_calls_is_left_alone() -> None:
    assert Keepalive(LIMITS, 0).check(10_000, has_streams=False) is Pulse.FINE
    always = KeepaliveLimits(ping_after_s=60, ping_without_calls=True)
    assert Keepalive(always, 0).check(60, has_streams=False) is Pulse.PING


def test_pings_without_data_between_them_are_few() -> None:
    """As gRPC's core does: a connection that carries nothing is not worth more."""
    keepalive = Keepalive(KeepaliveLimits(ping_after_s=60, ping_timeout_s=20, max_pings_without_data=2), 0)
    pulses = []
    for minute in range(1, 6):
        pulses.append(keepalive.check(60.0 * minute, has_streams=True, has_sent=minute == 5))
        keepalive.heard(60.0 * minute)
    assert pulses == [Pulse.PING, Pulse.PING, Pulse.FINE, Pulse.FINE, Pulse.PING]
