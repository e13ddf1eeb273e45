"""Drives an instance in a child process, on the event loop: no thread of the server waits for the answer.

A request goes from the loop to the child and back to the loop; only the child wakes up in between.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

from modelserver.core.clock import Clock
from modelserver.execution.executor import Outcome
from modelserver.execution.instances import LoadedInstance
from modelserver.execution.process.channel import BusyWait
from modelserver.execution.process.in_flight_batch import Result
from modelserver.execution.process.instance import ProcessInstance
from modelserver.execution.response_dispatcher import OpenResponse
from modelserver.execution.runner import MAX_TOGETHER, TOGETHER_BUDGET_NS, Runner
from modelserver.execution.workers import AWAY_NS, LoopWorker, Peers
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.scheduler import BatchSource

logger = logging.getLogger(__name__)

# Messages in flight to a quick process: while it executes one, it already has the next.
_MESSAGES_AHEAD = 2
# Answers expected within this time are polled for.
_SOON_NS = 50_000


class ProcessWorker(LoopWorker):
    """Sends batches to one instance, and delivers the results.

    Batches are sent while others are executed, if those are known to be short, and no other instance could take
    them.
    """

    def __init__(
        self,
        source: BatchSource,
        instance: ProcessInstance,
        runner: Runner,
        clock: Clock,
        *,
        loaded: LoadedInstance,
        peers: Peers,
    ) -> None:
        super().__init__(source, runner, clock, instance.loop)
        self._child = instance.child
        self._loaded = loaded
        self._peers = peers
        self._busy_wait = BusyWait(instance.busy_wait_us)
        self._num_out = 0  # batches
        self._num_messages = 0
        self._mean_ns = float(TOGETHER_BUDGET_NS)  # that the child takes for a batch
        # How many batches may travel with another one: as many as the child executes within the budget. An instance
        # that works in steps only accepts them, and its next step profits from as many as possible.
        self._is_stepped = instance.is_stepped
        self._num_further = MAX_TOGETHER - 1 if self._is_stepped else 0

    def _take_turn(self) -> None:
        if self._loop_thread_id is None:
            self._loop_thread_id = threading.get_ident()
        source = self._source
        while self._has_room():
            if source.is_shared and not self._peers.may_take(self._loaded):
                source.pass_on(self)
                if not self.is_left:
                    self._loop.call_later(AWAY_NS / 1e9, self._take_turn)
                break
            batch, wait_until_ns = source.try_take(self)
            if batch is None:
                if wait_until_ns is not None:
                    self._loop.call_later(max(0, wait_until_ns - self._now_ns()) / 1e9, self._take_turn)
                break
            self._send([batch, *source.take_more(self, self._num_further)] if self._num_further else [batch])
        if self.is_left and not self._num_out:
            self._has_ended.set()

    def _has_room(self) -> bool:
        if self.is_left:
            return False
        if not self._num_messages:
            return True
        is_ahead_useful = self._num_messages < _MESSAGES_AHEAD and self._num_further > 0
        return is_ahead_useful and self._source.takes_ahead and len(self._peers.instances) == 1

    def _send(self, batches: list[Batch]) -> None:
        """Send batches to the child in one message."""
        self._num_out += len(batches)
        self._num_messages += 1
        message = _Message(len(batches))
        runner = self.runner
        for batch in batches:
            open_responses = runner.begin(batch)
            try:
                requests = runner.executor.prepare(batch.requests)
            except Exception as error:
                self._end(message, batch, open_responses, runner.executor.failure(batch.requests, error))
            else:
                self._child.begin(requests, partial(self._on_done, message, batch, open_responses))
        message.sent_ns = self._now_ns()
        self._child.flush()
        if self._num_messages == 1 and self._mean_ns < _SOON_NS and self._busy_wait.begin():
            self._loop.call_soon(self._stay_awake)

    def _stay_awake(self) -> None:
        """Let the loop poll for events, such as the answer, instead of sleeping."""
        if not self._num_out:
            self._busy_wait.end(has_come=True)
        elif self._busy_wait.go_on():
            self._loop.call_soon(self._stay_awake)
        else:
            self._busy_wait.end(has_come=False)

    def _on_done(
        self,
        message: _Message,
        batch: Batch,
        open_responses: Sequence[OpenResponse],
        result: Result,
        duration_ns: int = 0,
    ) -> None:
        """The child has answered a batch, or will not answer it."""
        if duration_ns and not self._is_stepped:
            # A running mean over about ten batches, which follows a slow batch at once.
            self._mean_ns = max(duration_ns, self._mean_ns + (duration_ns - self._mean_ns) / 8)
            self._num_further = max(1, min(MAX_TOGETHER, int(TOGETHER_BUDGET_NS / self._mean_ns))) - 1
        # Each batch of a message counts an equal share of the time that the message took.
        infer_ns = max(0, self._now_ns() - message.sent_ns) // message.size
        self._end(message, batch, open_responses, self.runner.executor.conclude(batch.requests, result, infer_ns))

    def _end(self, message: _Message, batch: Batch, open_responses: Sequence[OpenResponse], outcome: Outcome) -> None:
        """Record and deliver a batch, and take the next."""
        self._num_out -= 1
        message.num_out -= 1
        deliveries = self.runner.end(batch, open_responses, outcome)
        self.runner.is_busy = self._num_out > 0
        self._source.deliver(deliveries)
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
