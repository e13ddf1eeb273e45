"""A source of batches for an instance that needs resources to execute: none is taken before it has them.

So requests wait in their queue, where they can be cancelled, expire, and be joined by others, and other instances of
the model may take them. A worker that comes back for more is done with what it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from modelserver.core.clock import Clock
from modelserver.core.request import Delivery
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.rate_limit import Claim, RateLimiter
from modelserver.scheduling.seat import Seat, ThreadSeat
from modelserver.scheduling.source import BatchSource, wait_for_batch


class LimitedSource:
    """Stands before the source of one worker, which has one seat."""

    def __init__(self, source: BatchSource, limiter: RateLimiter, claim: Claim, clock: Clock) -> None:
        self._source = source
        self._limiter = limiter
        self._claim = claim
        self._now_ns = clock.now_ns
        self._is_executing = False

    def take(self, seat: ThreadSeat) -> Batch | None:
        """As `BatchSource.take`."""
        return wait_for_batch(self, seat, self._now_ns)

    def try_take(self, seat: Seat) -> tuple[Batch | None, int | None]:
        """As `BatchSource.try_take`; None and None while the instance waits for resources, whose coming wakes the seat.

        A seat that is closed needs none: it only ends, or ends its sequences.
        """
        has_executed, self._is_executing = self._is_executing, False
        if seat.is_closed:
            self._limiter.release(self._claim, has_executed=has_executed)
        elif not self._limiter.acquire(self._claim, _ignore, has_executed=has_executed):
            # Passed on first: that may take back a signal to the seat, which must not be the limiter's.
            self._source.pass_on(seat)
            if not self._limiter.acquire(self._claim, seat.wake):
                if _is_closed(seat):
                    # In between, when nobody thought that the seat sleeps.
                    self._limiter.nudge(self._claim)
                return None, None
        batch, wait_until_ns = self._source.try_take(seat)
        self._is_executing = batch is not None
        if batch is None:
            self._limiter.release(self._claim, has_executed=False)
        return batch, wait_until_ns

    def pass_on(self, seat: Seat) -> None:
        """As `BatchSource.pass_on`; nothing is held meanwhile."""
        has_executed, self._is_executing = self._is_executing, False
        self._limiter.release(self._claim, has_executed=has_executed)
        self._source.pass_on(seat)

    def take_more(self, seat: Seat, limit: int) -> list[Batch]:  # noqa: ARG002
        """Nothing: what was granted is for one execution."""
        return []

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        self._source.deliver(deliveries)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        self._source.post(callback, *args)

    def close_seat(self, seat: Seat) -> None:
        self._source.close_seat(seat)
        self._limiter.nudge(self._claim)


def _is_closed(seat: Seat) -> bool:
    """As it is now: another thread may have closed it since it was looked at."""
    return seat.is_closed


def _ignore() -> None:
    """The caller asks again at once."""
