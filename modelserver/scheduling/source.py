"""What a worker asks of the scheduler that feeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from modelserver.core.request import Delivery
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.seat import Seat, ThreadSeat

# How long a worker that may not take a batch stays away before it asks again.
_AWAY_NS = 20_000_000


class BatchSource(Protocol):
    """Batches for one worker: `Batcher`, which all workers share, or one instance's part of a `SequenceBatcher`."""

    def take(self, seat: ThreadSeat) -> Batch | None:
        """Wait for the next batch; None once the seat is closed. Called from the worker's thread."""

    def try_take(self, seat: Seat) -> tuple[Batch | None, int | None]:
        """The next batch; or None, and when to look again (ns) if nobody wakes the seat before."""

    def pass_on(self, seat: Seat) -> None:
        """The worker takes nothing for a while: nobody is to wake it, and what it was woken for is another's."""

    def take_more(self, seat: Seat, limit: int) -> list[Batch]:
        """Batches that could run now together with the one just taken."""

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Hand responses to their requests' streams. Called from the event loop thread."""

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the event loop thread. From any thread."""

    def close_seat(self, seat: Seat) -> None:
        """The seat's worker is to end. From any thread."""


def wait_for_batch(source: BatchSource, seat: ThreadSeat, now_ns: Callable[[], int]) -> Batch | None:
    """The next batch for a worker thread that may be told to leave what there is to others; None once it has left."""
    while True:
        if not seat.may_take():
            source.pass_on(seat)
            if seat.is_left:
                return None
            seat.sleep(_AWAY_NS)
            continue
        batch, wait_until_ns = source.try_take(seat)
        if batch is not None or seat.is_left:
            return batch
        seat.sleep(None if wait_until_ns is None else wait_until_ns - now_ns())
