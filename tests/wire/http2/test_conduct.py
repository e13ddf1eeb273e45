"""What is borne of a peer."""

from __future__ import annotations

import pytest

from modelserver.telemetry.wire import Violation
from modelserver.wire.http2.conduct import Conduct
from modelserver.wire.http2.frame import ConnectionFault, ErrorCode
from modelserver.wire.limits import Http2Limits, WireLimits

LIMITS = WireLimits(
    http2=Http2Limits(resets_burst=2, resets_per_s=0, glitches_burst=20, glitches_per_s=0, max_control_frames=2)
)


def test_resets_and_glitches_have_accounts_of_their_own() -> None:
    conduct = Conduct(LIMITS)
    conduct.count_reset()
    conduct.count_reset()
    conduct.count_glitches(19)
    conduct.count_glitches()
    with pytest.raises(ConnectionFault) as caught:
        conduct.count_reset()
    assert (caught.value.code, caught.value.violation) == (ErrorCode.ENHANCE_YOUR_CALM, Violation.TOO_MANY_RESETS)
    with pytest.raises(ConnectionFault, match="too_many_glitches"):
        conduct.count_glitches()


def test_answers_that_the_peer_took_are_forgotten() -> None:
    conduct = Conduct(LIMITS)
    for _ in range(5):
        conduct.count_answer()
        conduct.count_answer()
        conduct.forget_answers()
    conduct.count_answer()
    conduct.count_answer()
    with pytest.raises(ConnectionFault, match="too_many_control_frames"):
        conduct.count_answer()


def test_pings_are_an_offence_only_without_progress() -> None:
    conduct = Conduct(LIMITS)
    for step in range(100):
        conduct.count_ping(0.0, has_streams=True, progress=(step, 0))
    for _ in range(2):
        conduct.count_ping(0.0, has_streams=True, progress=(99, 0))
    with pytest.raises(ConnectionFault, match="too_many_pings"):
        conduct.count_ping(0.0, has_streams=True, progress=(99, 0))
