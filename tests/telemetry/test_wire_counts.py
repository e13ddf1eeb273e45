"""What the wire counts, as families of the metrics."""

from __future__ import annotations

from modelserver.telemetry.wire_counts import (
    FrontGauges,
    Protocol,
    Violation,
    WireCounts,
    front_families,
    wire_families,
)
from tests.support.metrics_pages import render_text


def text_of(counts: WireCounts) -> str:
    return render_text(wire_families(counts)).decode()


def test_connections_count_by_what_they_speak() -> None:
    counts = WireCounts()
    counts.opened(Protocol.UNKNOWN)
    counts.closed(Protocol.UNKNOWN)
    counts.opened(Protocol.HTTP2)
    counts.opened(Protocol.HTTP2)
    counts.closed(Protocol.HTTP2)
    counts.open_streams = 3
    text = text_of(counts)
    assert 'modelserver_connections_total{protocol="http2"} 2' in text
    assert 'modelserver_open_connections{protocol="http2"} 1' in text
    assert 'modelserver_open_connections{protocol="unknown"} 0' in text
    assert 'modelserver_open_connections{protocol="http1"} 0' in text
    assert "modelserver_open_streams 3" in text


def test_violations_that_can_be_begin_at_zero() -> None:
    counts = WireCounts()
    before = text_of(counts)
    assert 'modelserver_peer_violations_total{protocol="http1",reason="slow_body"} 0' in before
    assert 'reason="too_many_resets"} 0' in before
    assert 'protocol="http1",reason="too_many_resets"' not in before, "HTTP/1.1 has no resets"
    counts.violated(Protocol.HTTP1, Violation.SLOW_BODY)
    counts.violated(Protocol.HTTP1, Violation.TOO_MANY_RESETS)
    after = text_of(counts)
    assert 'modelserver_peer_violations_total{protocol="http1",reason="slow_body"} 1' in after
    assert 'modelserver_peer_violations_total{protocol="http1",reason="too_many_resets"} 1' in after, "counted is shown"


def test_every_violation_is_possible_somewhere() -> None:
    text = text_of(WireCounts())
    assert not [violation for violation in Violation if f'reason="{violation.value}"}} 0' not in text]


def test_wire_processes_have_gauges_of_their_own() -> None:
    fronts = [
        FrontGauges("wire-0", 12, is_serving=True, num_connections=5, num_inflight=3, num_restarts=0),
        FrontGauges("wire-1", None, is_serving=False, num_connections=0, num_inflight=0, num_restarts=2),
    ]
    text = render_text(front_families(fronts)).decode()
    assert 'modelserver_wire_process_up{process="wire-0"} 1' in text
    assert 'modelserver_wire_process_up{process="wire-1"} 0' in text
    assert 'modelserver_wire_process_connections{process="wire-0"} 5' in text
    assert 'modelserver_wire_process_inflight_requests{process="wire-0"} 3' in text
    assert 'modelserver_wire_process_restarts_total{process="wire-1"} 2' in text


def test_without_wire_processes_there_are_no_such_families() -> None:
    assert front_families([]) == []
