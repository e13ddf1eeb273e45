"""A thread of its own for an instance, which takes batches and executes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from modelserver.execution.host_policy import Cores, on_cores
from modelserver.execution.runner import BatchRunner
from modelserver.scheduling.seat import ThreadSeat
from modelserver.scheduling.source import BatchSource


class Worker:
    """A thread that pulls batches for one instance until its seat is closed, and then ends.

    `may_take` is asked before every batch, from that thread.
    """

    def __init__(
        self,
        name: str,
        batcher: BatchSource,
        runner: BatchRunner,
        may_take: Callable[[], bool],
        *,
        cores: Cores | None = None,
    ) -> None:
        """The thread runs on these cores; None: on any."""
        self.runner = runner
        self._cores = cores
        self._batcher = batcher
        self._seat = ThreadSeat(may_take)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take no further batch. Returns at once; from any thread."""
        self._batcher.close_seat(self._seat)

    def join(self, timeout_s: float | None) -> bool:
        """Wait until the batch in progress is done; False if it still is not. From any thread but the worker's own."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        with on_cores(self._cores):
            while self._run_next():
                pass

    def _run_next(self) -> bool:
        # A method of its own, so that no request is kept alive while the thread waits for the next.
        batch = self._batcher.take(self._seat)
        if batch is None:
            return False
        further = (
            self._batcher.take_more(self._seat, num_further) if (num_further := self.runner.num_further) > 0 else []
        )
        deliveries = self.runner.run_together([batch, *further]) if further else self.runner.run(batch)
        if deliveries:
            self._batcher.post(self._batcher.deliver, deliveries)
        return True
