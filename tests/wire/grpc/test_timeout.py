"""The grpc-timeout header."""

from __future__ import annotations

import pytest

from modelserver.wire.http2.head import MAX_TIMEOUT_NS, parse_timeout


@pytest.mark.parametrize(
    ("value", "timeout_ns"),
    [
        (b"0n", 0),
        (b"1n", 1),
        (b"5u", 5_000),
        (b"100m", 100_000_000),
        (b"5S", 5_000_000_000),
        (b"2M", 120_000_000_000),
        (b"1H", 3_600_000_000_000),
        (b"00000001S", 1_000_000_000),
        (b"99999999n", 99_999_999),
        (b"4999123456n", 4_999_123_456),
        (b"99999999H", MAX_TIMEOUT_NS),
        (b"9" * 16000 + b"n", MAX_TIMEOUT_NS),
    ],
)
def test_timeouts(value: bytes, timeout_ns: int) -> None:
    assert parse_timeout(value) == timeout_ns


@pytest.mark.parametrize(
    "value", [b"", b"5", b"S", b"5s", b"-5S", b"+5S", b"5.0S", b" 5S", b"5 S", b"5SS", b"1_0S", b"\xb25S"]
)
def test_what_is_no_timeout(value: bytes) -> None:
    with pytest.raises(ValueError, match="is not a number followed by"):
        parse_timeout(value)
