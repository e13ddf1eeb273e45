"""What drives an instance: a thread of its own, or, for instances that never block, the event loop itself.

On the loop, a model that forms batches is run in turns of the loop, so that requests of one turn can share
a batch; one that does not is run where its requests are submitted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from modelserver.core.clock import Clock
from modelserver.core.request import Delivery, InferRequest
from modelserver.core.response import InferResponse
from modelserver.execution.executor import Executor
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.direct import DirectScheduler
from modelserver.scheduling.seat import ThreadSeat
from modelserver.telemetry.statistics import BatchTiming, FailureReason, ModelStatistics

# How long inline execution may keep the event loop before others get their turn.
_INLINE_BUDGET_NS = 1_000_000
# Batches that travel to an instance together: so many at most, and so long by what the last ones took,
# because the answers of the first wait for the last.
_MAX_TOGETHER = 16
_TOGETHER_BUDGET_NS = 1_000_000


class BatchRunner:
    """Runs a batch on an instance and records it; shared by both kinds of worker.

    `is_busy` and `num_executions` may be read from any thread.
    """

    def __init__(self, executor: Executor, statistics: ModelStatistics, clock: Clock) -> None:
        self.is_busy = False
        self.num_executions = 0
        self._mean_ns = float(_TOGETHER_BUDGET_NS)
        self._takes_several = executor.takes_several_batches
        self._executor = executor
        self._statistics = statistics
        self._now_ns = clock.now_ns

    def run(self, batch: Batch) -> list[Delivery]:
        """Execute the batch, record it, and return what is to be delivered."""
        self.is_busy = True
        self.num_executions += 1
        responses, timing = self._executor.execute(batch.requests, batch.taken_ns)
        self._record(batch, responses, timing)
        self.is_busy = False
        return list(zip(batch.requests, responses, strict=True))

    def run_lone(self, request: InferRequest, enqueue_ns: int, taken_ns: int) -> InferResponse:
        """As `run`, for a batch of one request, with less around it."""
        self.is_busy = True
        self.num_executions += 1
        response, prepared_ns, called_ns, done_ns = self._executor.execute_lone(request)
        infer_ns = called_ns - prepared_ns
        if response.error is None:
            self._statistics.record_lone(
                request.rows,
                prepared_ns - taken_ns,
                infer_ns,
                done_ns - called_ns,
                taken_ns - enqueue_ns,
                done_ns - request.arrival_ns,
            )
        else:
            failed_ns = done_ns or self._now_ns()
            self._statistics.record_failures(FailureReason.BACKEND, (failed_ns - request.arrival_ns,))
            if done_ns:
                timing = BatchTiming(prepared_ns - taken_ns, infer_ns, done_ns - called_ns)
                self._statistics.record_batch(request.rows, timing, queue_ns=(), request_ns=())
        self.is_busy = False
        return response

    @property
    def num_further(self) -> int:
        """Batches that may be run together with another one; 0 where that brings nothing or takes too long."""
        if not self._takes_several:
            return 0
        return max(1, min(_MAX_TOGETHER, int(_TOGETHER_BUDGET_NS / self._mean_ns))) - 1

    def run_together(self, batches: Sequence[Batch]) -> list[Delivery]:
        """As `run`, for batches that travel to the instance together."""
        self.is_busy = True
        self.num_executions += len(batches)
        results = self._executor.execute_batches([batch.requests for batch in batches], batches[0].taken_ns)
        deliveries: list[Delivery] = []
        for batch, (responses, timing) in zip(batches, results, strict=True):
            self._record(batch, responses, timing)
            deliveries += zip(batch.requests, responses, strict=True)
        self.is_busy = False
        return deliveries

    def _record(self, batch: Batch, responses: Sequence[InferResponse], timing: BatchTiming | None) -> None:
        taken_ns = batch.taken_ns
        now_ns = self._now_ns() if timing is None else taken_ns + timing.total_ns
        request_ns = [now_ns - request.arrival_ns for request in batch.requests]
        queue_ns = [taken_ns - enqueue_ns for enqueue_ns in batch.enqueue_ns]
        failed = [position for position, response in enumerate(responses) if response.error is not None]
        if failed:
            self._statistics.record_failures(FailureReason.BACKEND, [request_ns[position] for position in failed])
            succeeded = [position for position, response in enumerate(responses) if response.error is None]
            request_ns = [request_ns[position] for position in succeeded]
            queue_ns = [queue_ns[position] for position in succeeded]
        if timing is not None:
            # A running mean that forgets within some ten batches, and a slow one at once.
            self._mean_ns = max(
                1, timing.compute_infer_ns, self._mean_ns + (timing.compute_infer_ns - self._mean_ns) / 8
            )
            self._statistics.record_batch(batch.rows, timing, queue_ns=queue_ns, request_ns=request_ns)


class Worker:
    """A thread that pulls batches for one instance until its seat is closed, and then ends.

    `may_take` is asked before every batch, from that thread.
    """

    def __init__(self, name: str, batcher: Batcher, runner: BatchRunner, may_take: Callable[[], bool]) -> None:
        self.runner = runner
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
        self._batcher.post(self._batcher.deliver, deliveries)
        return True


class InlineWorker:
    """Runs batches in turns of the event loop, each turn within a time budget, so that the loop stays responsive.

    It is its own seat. Turns belong to the event loop thread; every method may be called from any thread.
    """

    def __init__(self, batcher: Batcher, runner: BatchRunner, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self.runner = runner
        self.is_parked = False
        self.is_woken = False
        self.is_closed = False
        self.is_left = False
        self._batcher = batcher
        self._loop = loop
        self._loop_thread_id: int | None = None  # known from the first turn on
        self._now_ns = clock.now_ns
        self._has_ended = threading.Event()

    def start(self) -> None:
        self._batcher.post(self._take_turn)

    def wake(self) -> None:
        if threading.get_ident() == self._loop_thread_id:
            self._loop.call_soon(self._take_turn)
        else:
            self._batcher.post(self._take_turn)

    def settle(self) -> None:
        """The signal is a turn; one too many does no harm."""

    def close(self) -> None:
        self._batcher.close_seat(self)

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the turn in progress. On the loop's own thread, or when it does not run, there is none."""
        if threading.get_ident() == self._loop_thread_id or not self._loop.is_running():
            return True
        return self._has_ended.wait(timeout_s)

    def _take_turn(self) -> None:
        self._loop_thread_id = threading.get_ident()
        budget_ends_ns = self._now_ns() + _INLINE_BUDGET_NS
        while True:
            batch, wait_until_ns = self._batcher.try_take(self)
            if batch is None:
                break
            self._batcher.deliver(self.runner.run(batch))
            if self._now_ns() >= budget_ends_ns:
                self._loop.call_soon(self._take_turn)
                return
        if self.is_left:
            self._has_ended.set()
        elif wait_until_ns is not None:
            self._loop.call_later(max(0, wait_until_ns - self._now_ns()) / 1e9, self._take_turn)


class DirectWorker:
    """An instance of a `DirectScheduler`. `start`, `close` and `join` may be called from any thread."""

    def __init__(self, scheduler: DirectScheduler, runner: BatchRunner, loop: asyncio.AbstractEventLoop) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._loop = loop
        self._run = runner.run_lone  # one bound method, so that it can be found again
        self._has_ended = threading.Event()

    def start(self) -> None:
        self._scheduler.attach(self._run)

    def close(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._leave)
        except RuntimeError:  # the loop is closed, and with it every call of the instance
            self._has_ended.set()

    def join(self, timeout_s: float | None) -> bool:
        """Wait until the loop has left the instance; a loop that does not run is not in it."""
        if not self._loop.is_running():
            return True
        return self._has_ended.wait(timeout_s)

    def _leave(self) -> None:
        self._scheduler.detach(self._run)
        self._has_ended.set()
