"""What drives an instance in a child process, on the event loop: no thread of the server waits for the answer.

A request goes from the loop to the child and back to the loop; only the child wakes up in between.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from modelserver.core.clock import Clock
from modelserver.core.request import Delivery, InferRequest
from modelserver.core.response import InferResponse
from modelserver.errors import InternalError, ServerError
from modelserver.execution.executor import Executor
from modelserver.execution.loop_seat import LoopSeat
from modelserver.execution.process.busy_wait import BusyWait
from modelserver.execution.process.in_flight_batch import OnDone, Result
from modelserver.execution.runner import BatchRunner
from modelserver.execution.sending import Line
from modelserver.execution.sending_runner import SendingRunner
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.source import BatchSource
from modelserver.telemetry.process_restarts import ProcessRestarts
from modelserver.telemetry.statistics import BatchTiming

logger = logging.getLogger(__name__)

# How long an instance whose process is being restarted leaves the queue to the others before it looks again.
_AWAY_S = 0.02
# Messages on their way to a process that is quick: while it executes one, the next is there already.
_MESSAGES_AHEAD = 2
# Batches that travel together: so many at most, and so long by what the last ones took, because what is behind others
# waits for them.
_MAX_TOGETHER = 16
_TOGETHER_BUDGET_NS = 1_000_000
# An answer that comes within such a time is waited for awake.
_SOON_NS = 50_000


@runtime_checkable
class HostedElsewhere(Protocol):
    """An instance that executes without keeping its caller: `ProcessInstance`."""

    loop: asyncio.AbstractEventLoop
    busy_wait_us: int
    is_stepped: bool

    def begin(self, requests: Sequence[InferRequest], on_done: OnDone) -> None: ...

    def flush(self) -> None: ...

    def can_execute(self) -> bool: ...

    def count_restarts(self, restarts: ProcessRestarts) -> None: ...

    def kill(self, why: str) -> None: ...


class AnsweredExecutor(Executor):
    """An executor whose instance has answered already: what runners call finishes a batch, and records it."""

    result: Result = ()
    input_ns = 0
    infer_ns = 0

    def execute(
        self,
        requests: Sequence[InferRequest],
        start_ns: int,  # noqa: ARG002
    ) -> tuple[list[InferResponse], BatchTiming | None]:
        return self.finished(requests, self.result, self.input_ns, self.infer_ns)

    def execute_lone(self, request: InferRequest) -> tuple[InferResponse, tuple[int, int, int] | None]:
        result = self.result
        called_ns = self.now_ns()
        try:
            if isinstance(result, ServerError):
                raise result
            [response] = self._finish([request], result)
        except ServerError as error:
            return InferResponse(error=error), None
        except Exception as error:
            return self._failed(error, [request])[0], None
        return response, (called_ns - self.infer_ns, called_ns, self.now_ns())


class HostedWorker(LoopSeat):
    """Sends batches to one instance, and delivers what comes back. It is its own seat.

    `may_take` is asked before every batch. `sends_ahead`: batches may be sent while others are executed, if those are
    known to be short; not where another instance might be free for them. Everything but `start`, `close` and `join`
    runs on the event loop thread.
    """

    def __init__(
        self,
        source: BatchSource,
        instance: HostedElsewhere,
        executor: AnsweredExecutor,
        runner: BatchRunner,
        clock: Clock,
        *,
        may_take: Callable[[], bool],
        sends_ahead: Callable[[], bool],
    ) -> None:
        super().__init__(source, runner, instance.loop, clock)
        self._instance = instance
        self._executor = executor
        self._may_take = may_take
        self._sends_ahead = sends_ahead
        self._sending = runner if isinstance(runner, SendingRunner) else None
        self._busy_wait = BusyWait(instance.busy_wait_us)
        self._num_out = 0  # batches
        self._num_messages = 0
        self._mean_ns = float(_TOGETHER_BUDGET_NS)  # that the child takes for a batch
        # Batches that may go together with another one: as many as the child executes within the budget. An instance
        # that goes in steps only takes them on, and the more of them its next step has the better.
        self._is_stepped = instance.is_stepped
        self._num_further = _MAX_TOGETHER - 1 if self._is_stepped else 0

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the batches on their way. From any thread but the loop's."""
        if not self._loop.is_running():
            return True
        return self._has_ended.wait(timeout_s)

    def _take_turn(self) -> None:
        if self._loop_thread_id is None:
            self._loop_thread_id = threading.get_ident()
        while self._has_room():
            if not self._may_take() and isinstance(self._source, Batcher):
                self._source.pass_on(self)
                if not self.is_left:
                    self._loop.call_later(_AWAY_S, self._take_turn)
                break
            batch, wait_until_ns = self._source.try_take(self)
            if batch is None:
                if wait_until_ns is not None:
                    self._loop.call_later(max(0, wait_until_ns - self._now_ns()) / 1e9, self._take_turn)
                break
            batches = [batch]
            if self._num_further:
                batches += self._source.take_more(self, self._num_further)
            self._begin(batches)
        if self.is_left and not self._num_out:
            self._has_ended.set()

    def _has_room(self) -> bool:
        if self.is_left:
            return False
        if not self._num_messages:
            return True
        return self._num_messages < _MESSAGES_AHEAD and self._num_further > 0 and self._sends_ahead()

    def _begin(self, batches: list[Batch]) -> None:
        self.runner.is_busy = True
        self._num_out += len(batches)
        self._num_messages += 1
        message = _Message(len(batches))
        sending = self._sending
        for batch in batches:
            lines: Sequence[Line] = ()
            if sending is not None:
                lines = sending.desk.open(batch.requests, batch.enqueue_ns, batch.taken_ns)
            try:
                requests = self._executor.prepare(batch.requests)
            except ServerError as error:
                self._on_done(message, batch, lines, error)
            except Exception as error:
                logger.exception("a batch cannot be prepared")
                self._on_done(message, batch, lines, InternalError(f"a batch cannot be prepared: {error!r}"))
            else:
                self._instance.begin(requests, partial(self._on_done, message, batch, lines))
        message.sent_ns = self._now_ns()
        self._instance.flush()
        if self._num_messages == 1 and self._mean_ns < _SOON_NS and self._busy_wait.begin():
            self._loop.call_soon(self._stay_awake)

    def _stay_awake(self) -> None:
        """Let the loop look for events, the answer among them, instead of sleeping until one comes."""
        if not self._num_out:
            self._busy_wait.end(has_come=True)
        elif self._busy_wait.go_on():
            self._loop.call_soon(self._stay_awake)
        else:
            self._busy_wait.end(has_come=False)

    def _on_done(
        self, message: _Message, batch: Batch, lines: Sequence[Line], result: Result, duration_ns: int = 0
    ) -> None:
        """A batch has its result: record and deliver it, and see to the next."""
        self._num_out -= 1
        message.num_out -= 1
        if duration_ns and not self._is_stepped:
            # A running mean that forgets within some ten batches, and a slow one at once.
            self._mean_ns = max(duration_ns, self._mean_ns + (duration_ns - self._mean_ns) / 8)
            self._num_further = max(1, min(_MAX_TOGETHER, int(_TOGETHER_BUDGET_NS / self._mean_ns))) - 1
        executor = self._executor
        now_ns = self._now_ns()
        # Each batch of a message is given its share of the time that the message took.
        executor.infer_ns = max(0, now_ns - message.sent_ns) // message.size
        executor.input_ns = max(0, message.sent_ns - batch.taken_ns)
        executor.result = result
        deliveries: Sequence[Delivery] = ()
        if self._sending is not None:
            self._sending.num_executions += 1
            entries: Any
            entries, timing = executor.execute(batch.requests, batch.taken_ns)
            self._sending.settle(batch, lines, entries, timing)
        else:
            deliveries = self.runner.run(batch)
        self.runner.is_busy = self._num_out > 0
        self._source.deliver(deliveries)
        executor.result = ()
        if not message.num_out:
            self._num_messages -= 1
            if not self.is_parked:
                self._take_turn()


class _Message:
    """Batches that were sent together."""

    __slots__ = ("num_out", "sent_ns", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_out = size
        self.sent_ns = 0
