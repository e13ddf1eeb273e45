"""What a connection remembers and counts about its peer."""

from __future__ import annotations

from modelserver.wire.http2.abuse_limits import Closed, ClosedStreams, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_passes_at_once_and_no_more() -> None:
    bucket = TokenBucket(3, 1, Clock())
    assert [bucket.take() for _ in range(5)] == [True, True, True, False, False]


def test_tokens_come_back_with_time_up_to_the_burst() -> None:
    clock = Clock()
    bucket = TokenBucket(10, 2, clock)
    assert bucket.take(10)
    clock.now_s += 3
    assert [bucket.take() for _ in range(7)] == [True] * 6 + [False]
    clock.now_s += 1000
    assert bucket.take(9)
    assert not bucket.take(5)


def test_a_steady_rate_below_the_limit_never_ends() -> None:
    clock = Clock()
    bucket = TokenBucket(2, 10, clock)
    for _ in range(1000):
        clock.now_s += 0.11
        assert bucket.take()


def test_how_streams_closed() -> None:
    closed = ClosedStreams()
    closed.ended.append(1)
    closed.add(3, Closed.ENDED)
    closed.add(5, Closed.RESET_BY_US)
    closed.add(7, Closed.RESET_BY_PEER)
    found = [closed.get(stream_id) for stream_id in (1, 3, 5, 7, 9)]
    assert found == [Closed.ENDED, Closed.ENDED, Closed.RESET_BY_US, Closed.RESET_BY_PEER, None]


def test_what_is_long_ago_is_forgotten() -> None:
    closed = ClosedStreams()
    for stream_id in range(1, 1001, 2):
        closed.add(stream_id, Closed.RESET_BY_US)
        closed.add(stream_id + 10_000, Closed.ENDED)
    assert closed.get(1) is None
    assert closed.get(10_001) is None
    assert closed.get(999) is Closed.RESET_BY_US
    assert closed.get(10_999) is Closed.ENDED
    assert sum(closed.get(stream_id) is not None for stream_id in range(1001)) == 256
