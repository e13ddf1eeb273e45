"""The batching decision: (candidates, now) -> plan. Pure: no clock, no queue, no thread.

It knows rows and ages only. The queue knows which requests may share a batch, and their order; the batcher takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.config.schema import ModelConfig, ModelDynamicBatching, SequenceStrategyOldest

_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class BatchingRules:
    """What a config says about forming batches.

    `preferred_rows` is ascending, never empty, and within `max_rows`. `is_single` means one request per
    batch, whatever its rows: a model without dynamic batching. With `keep_order`, a request that does
    not fit closes the batch; without it, later ones that fit overtake it, this once.
    """

    max_rows: int = 1
    preferred_rows: tuple[int, ...] = (1,)
    max_delay_ns: int = 0
    keep_order: bool = False
    is_single: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig) -> BatchingRules:
        if config.dynamic_batching is None:
            max_rows = max(1, config.max_batch_size)
            return cls(max_rows, (max_rows,), is_single=True)
        return cls.of(config.dynamic_batching, config.max_batch_size)

    @classmethod
    def of(cls, batching: ModelDynamicBatching | SequenceStrategyOldest, max_batch_size: int) -> BatchingRules:
        """The rules of a batcher's options."""
        max_rows = max(1, max_batch_size)
        return cls(
            max_rows=max_rows,
            preferred_rows=tuple(sorted(set(batching.preferred_batch_size))) or (max_rows,),
            max_delay_ns=batching.max_queue_delay_microseconds * _NS_PER_US,
            keep_order=batching.preserve_ordering,
            # Without a batch dimension requests cannot be joined.
            is_single=max_batch_size == 0,
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Requests that could share the next batch, best first: their rows, and when the oldest was queued.

    `is_closed`: nothing that arrives later can join them.
    """

    rows: Sequence[int]
    oldest_ns: int
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Take the first `num_considered` candidates except those at `skipped`; or none, and look again at a time."""

    num_considered: int = 0
    num_rows: int = 0
    skipped: tuple[int, ...] = ()
    wait_until_ns: int | None = None


def plan_batch(rules: BatchingRules, candidates: Candidates, now_ns: int) -> BatchPlan:
    """The batch to run now, or how long to wait for company. There must be a candidate.

    A preferred size is sent as soon as it is met. Else the batch goes when it cannot grow to one, or when
    its oldest request has waited out the queue delay; then it takes all that fits.
    """
    if rules.is_single:
        return BatchPlan(1, candidates.rows[0])
    ready_ns = candidates.oldest_ns + rules.max_delay_ns
    total = sum(candidates.rows)
    if total <= rules.max_rows and rules.preferred_rows[0] == rules.max_rows:
        # The usual case, and the hot one: all fit, and the only preferred size is the largest.
        everything, preferred, is_closed = BatchPlan(len(candidates.rows), total), None, candidates.is_closed
    else:
        everything, preferred, is_closed = _fill(rules, candidates)
    is_overdue = rules.max_delay_ns > 0 and now_ns >= ready_ns
    if preferred is not None and not is_overdue:
        return preferred
    is_complete = is_closed or everything.num_rows >= rules.preferred_rows[-1]
    if is_complete or is_overdue or rules.max_delay_ns == 0:
        return everything
    return BatchPlan(wait_until_ns=ready_ns)


def _fill(rules: BatchingRules, candidates: Candidates) -> tuple[BatchPlan, BatchPlan | None, bool]:
    """All that fits, the last preferred size met on the way, and whether something did not fit.

    If the next candidate would exceed every preferred size and none was met, the candidates so far count as preferred,
    because waiting cannot improve them.
    """
    largest_preferred = rules.preferred_rows[-1]
    total = num_considered = 0
    is_closed = candidates.is_closed
    skipped: list[int] = []
    preferred: BatchPlan | None = None
    for position, rows in enumerate(candidates.rows):
        if total > 0 and preferred is None and total + rows > largest_preferred:
            preferred = BatchPlan(num_considered, total, _before(skipped, num_considered))
        if total + rows > rules.max_rows:
            is_closed = True
            if rules.keep_order:
                break
            skipped.append(position)
            continue
        total += rows
        num_considered = position + 1
        if total in rules.preferred_rows:
            preferred = BatchPlan(num_considered, total, tuple(skipped))
        if total == rules.max_rows:
            break
    return BatchPlan(num_considered, total, _before(skipped, num_considered)), preferred, is_closed


def _before(positions: list[int], end: int) -> tuple[int, ...]:
    return tuple(position for position in positions if position < end)
