"""A source of batches for an instance that needs resources to execute: none is taken before it has them.

So requests wait in their queue, where they can be cancelled, expire, and be joined by others, and other instances of
the model may take them. A worker that comes back for more is done with what it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from modelserver.core.request import Delivery
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.parked_workers import WaitingWorker
from modelserver.scheduling.rate_limit import Claim, RateLimiter
from modelserver.scheduling.source import BatchSource


class LimitedSource:
    """Stands before the source of one worker."""

    takes_ahead = False  # resources are granted for one execution

    def __init__(self, source: BatchSource, limiter: RateLimiter, claim: Claim) -> None:
        self._source = source
        self._limiter = limiter
        self._claim = claim
        self._is_executing = False
        self.is_shared = source.is_shared

    def try_take(self, worker: WaitingWorker) -> tuple[Batch | None, int | None]:
        """As `BatchSource.try_take`; None and None while the instance waits for resources: these wake the worker.

        A worker that is closed needs none: it only ends, or ends its sequences.
        """
        has_executed, self._is_executing = self._is_executing, False
        if worker.is_closed:
            self._limiter.release(self._claim, has_executed=has_executed)
        elif not self._limiter.acquire(self._claim, _ignore, has_executed=has_executed):
            # Passed on first: that may take back a signal to the worker, which must not be the limiter's.
            self._source.pass_on(worker)
            if not self._limiter.acquire(self._claim, worker.wake):
                if _is_closed(worker):
                    # It was closed in between, when it did not count as asleep.
                    self._limiter.nudge(self._claim)
                return None, None
        batch, wait_until_ns = self._source.try_take(worker)
        self._is_executing = batch is not None
        if batch is None:
            self._limiter.release(self._claim, has_executed=False)
        return batch, wait_until_ns

    def pass_on(self, worker: WaitingWorker) -> None:
        """As `BatchSource.pass_on`; nothing is held meanwhile."""
        has_executed, self._is_executing = self._is_executing, False
        self._limiter.release(self._claim, has_executed=has_executed)
        self._source.pass_on(worker)

    def take_more(self, worker: WaitingWorker, limit: int) -> list[Batch]:  # noqa: ARG002
        """Nothing: what was granted is for one execution."""
        return []

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        self._source.deliver(deliveries)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        self._source.post(callback, *args)

    def give_up(self) -> None:
        self._source.give_up()

    def close_worker(self, worker: WaitingWorker) -> None:
        self._source.close_worker(worker)
        self._limiter.nudge(self._claim)


def _is_closed(worker: WaitingWorker) -> bool:
    """As it is now: another thread may have closed it since it was looked at."""
    return worker.is_closed


def _ignore() -> None:
    """The caller asks again at once."""
