"""What a worker asks of the scheduler that feeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from modelserver.core.request import Delivery
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.seat import Seat, ThreadSeat


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
