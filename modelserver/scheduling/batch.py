"""Batches: how one is formed from the queue as the policy plans it, and the order of their responses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from modelserver.core.request import Delivery, InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.scheduling.policy import BatchingRules, BatchPlan, Candidates, plan_batch
from modelserver.scheduling.queue import QueueEntry, RequestQueue


class Batch:
    """Requests that one worker executes together, best first, and when each was queued."""

    __slots__ = ("enqueue_ns", "requests", "rows", "taken_ns")

    # Whether the batch is of sequences: then `requests` may hold `num_padding` requests of idle slots, and whatever
    # executes the batch adds to `rescheduled` the requests that run again.
    has_slots: ClassVar[bool] = False
    num_padding: int
    rescheduled: list[InFlightRequest]

    def __init__(self, requests: list[InFlightRequest], enqueue_ns: list[int], rows: int, taken_ns: int) -> None:
        self.requests = requests
        self.enqueue_ns = enqueue_ns
        self.rows = rows
        self.taken_ns = taken_ns

    @classmethod
    def of(cls, entries: Sequence[QueueEntry], rows: int, taken_ns: int) -> Batch:
        """The batch of queue entries that were just removed from the queue."""
        return cls([entry.request for entry in entries], [entry.enqueue_ns for entry in entries], rows, taken_ns)


# Takes the next batch from the queue; or None, and when to look again (None: when something arrives).
FormBatch = Callable[[RequestQueue, BatchingRules, int], tuple[Batch | None, int | None]]


def form_batch(queue: RequestQueue, rules: BatchingRules, now_ns: int) -> tuple[Batch | None, int | None]:
    """Take the next batch from the queue; or None, and when to look again (None: when something arrives)."""
    first = queue.first()
    if first is None:
        return None, None
    if rules.is_single or (len(queue) == 1 and rules.max_delay_ns == 0):
        # There is nothing to decide.
        queue.remove(first)
        return Batch([first.request], [first.enqueue_ns], first.rows, now_ns), None
    wait_until_ns: int | None = None
    for head in queue.heads():
        plan, entries = _plan(queue, rules, head, now_ns)
        if plan.wait_until_ns is None:
            taken = entries[: plan.num_considered]
            if plan.skipped:
                taken = [entry for position, entry in enumerate(taken) if position not in plan.skipped]
            queue.remove_all(taken)
            return Batch.of(taken, plan.num_rows, now_ns), None
        if wait_until_ns is None or plan.wait_until_ns < wait_until_ns:
            wait_until_ns = plan.wait_until_ns
    return None, wait_until_ns


def can_take(queue: RequestQueue, rules: BatchingRules, entry: QueueEntry, now_ns: int) -> bool:
    """Whether the policy would take something now from the bucket of a queued entry."""
    return _plan(queue, rules, entry, now_ns)[0].wait_until_ns is None


def _plan(
    queue: RequestQueue, rules: BatchingRules, head: QueueEntry, now_ns: int
) -> tuple[BatchPlan, list[QueueEntry]]:
    """The policy's plan for the bucket of `head`, and the candidates that it is about."""
    bucket = queue.bucket_of(head)
    entries, is_closed = queue.candidates(bucket)
    oldest_ns = bucket.oldest_ns() if rules.max_delay_ns else now_ns
    candidates = Candidates([entry.rows for entry in entries], oldest_ns, is_closed)
    return plan_batch(rules, candidates, now_ns), entries


class ResponseOrder:
    """Releases responses in the order in which their requests were accepted. Event loop thread only.

    A response is held back until every request accepted before has its final one.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[InFlightRequest, list[InferResponse]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, request: InFlightRequest) -> None:
        """The request was accepted: responses of later ones wait for it."""
        self._held[request] = []

    def forget(self, request: InFlightRequest) -> list[Delivery]:
        """The request is answered elsewhere, out of order. Returns the responses that only waited for it."""
        self._held.pop(request, None)
        return self._release()

    def arrange(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Add these responses, and return those that may be delivered now, in order."""
        for request, response in deliveries:
            self._held[request].append(response)
        return self._release()

    def _release(self) -> list[Delivery]:
        released: list[Delivery] = []
        while self._held:
            request, responses = next(iter(self._held.items()))
            released += [(request, response) for response in responses]
            if not responses or not responses[-1].is_final:
                responses.clear()
                break
            del self._held[request]
        return released
