"""What a worker asks of the scheduler that feeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from modelserver.core.request import Delivery
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.parked_workers import WaitingWorker


class BatchSource(Protocol):
    """Batches for one worker: `Batcher`, which all workers share, or one instance's part of a `SequenceBatcher`."""

    @property
    def is_shared(self) -> bool:
        """Whether other workers of the model may take what this one leaves."""

    @property
    def takes_ahead(self) -> bool:
        """Whether a worker may take batches while its last one is being executed."""

    def try_take(self, worker: WaitingWorker) -> tuple[Batch | None, int | None]:
        """The next batch; or None, and when to look again (ns) if nobody wakes the worker before."""

    def pass_on(self, worker: WaitingWorker) -> None:
        """The worker takes nothing for a while: nobody is to wake it, and what it was woken for is another's."""

    def take_more(self, worker: WaitingWorker, limit: int) -> list[Batch]:
        """Batches that could run now together with the one just taken."""

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Hand responses to their requests' streams. Called from the event loop thread."""

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the event loop thread. From any thread."""

    def give_up(self) -> None:
        """End what the worker still waits for, because its instance is to go. From any thread."""

    def close_worker(self, worker: WaitingWorker) -> None:
        """The worker is to end. From any thread."""
