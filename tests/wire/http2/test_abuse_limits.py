"""What is borne of a peer."""

from __future__ import annotations

import pytest

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2.abuse_limits import AbuseLimits
from modelserver.wire.http2.frame import ConnectionFault, ErrorCode
from modelserver.wire.limits import Http2Limits, WireLimits

LIMITS = WireLimits(
    http2=Http2Limits(resets_burst=2, resets_per_s=0, glitches_burst=20, glitches_per_s=0, max_control_frames=2)
)


def test_resets_and_glitches_have_accounts_of_their_own() -> None:
    abuse_limits = AbuseLimits(LIMITS)
    abuse_limits.count_reset()
    abuse_limits.count_reset()
    abuse_limits.count_glitches(19)
    abuse_limits.count_glitches()
    with pytest.raises(ConnectionFault) as caught:
        abuse_limits.count_reset()
    assert (caught.value.code, caught.value.violation) == (ErrorCode.ENHANCE_YOUR_CALM, Violation.TOO_MANY_RESETS)
    with pytest.raises(ConnectionFault, match="too_many_glitches"):
        abuse_limits.count_glitches()


def test_answers_that_the_peer_took_are_forgotten() -> None:
    abuse_limits = AbuseLimits(LIMITS)
    for _ in range(5):
        abuse_limits.count_answer()
        abuse_limits.count_answer()
        abuse_limits.forget_answers()
    abuse_limits.count_answer()
    abuse_limits.count_answer()
    with pytest.raises(ConnectionFault, match="too_many_control_frames"):
        abuse_limits.count_answer()


def test_pings_are_an_offence_only_without_progress() -> None:
    abuse_limits = AbuseLimits(LIMITS)
    for step in range(100):
        abuse_limits.count_ping(0.0, has_streams=True, progress=(step, 0))
    for _ in range(2):
        abuse_limits.count_ping(0.0, has_streams=True, progress=(99, 0))
    with pytest.raises(ConnectionFault, match="too_many_pings"):
        abuse_limits.count_ping(0.0, has_streams=True, progress=(99, 0))
