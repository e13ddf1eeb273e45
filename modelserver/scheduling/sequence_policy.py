"""The options of the sequence batcher, and the decision of the strategy `direct`.

The decision is pure: (what waits in an instance's slots, now) -> plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from modelserver.config.defaults import DEFAULT_SEQUENCE_IDLE_US
from modelserver.config.schema import ModelConfig, SequenceStrategyDirect
from modelserver.scheduling.policy import BatchingRules

_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class DirectRules:
    """The strategy `direct`: a batch waits for `min_utilization` of an instance's slots, at most `max_delay_ns`."""

    min_utilization: float = 0.0
    max_delay_ns: int = 0

    @classmethod
    def from_config(cls, direct: SequenceStrategyDirect) -> DirectRules:
        return cls(direct.minimum_slot_utilization, direct.max_queue_delay_microseconds * _NS_PER_US)


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """`num_slots` is the number of sequences that one instance holds. Without `oldest` the strategy is `direct`.

    `is_iterative`: each request is a sequence of its own, executed until the model is done with it.
    """

    num_slots: int
    idle_ns: int
    direct: DirectRules
    oldest: BatchingRules | None
    is_iterative: bool
    has_variable_state: bool

    @classmethod
    def from_config(cls, config: ModelConfig) -> SequenceRules:
        batching = config.sequence_batching
        assert batching is not None, "only models with sequence_batching have a sequence batcher"
        max_rows = max(1, config.max_batch_size)
        idle_us = batching.max_sequence_idle_microseconds or DEFAULT_SEQUENCE_IDLE_US
        oldest = batching.oldest
        return cls(
            num_slots=(oldest.max_candidate_sequences if oldest is not None else 0) or max_rows,
            idle_ns=idle_us * _NS_PER_US,
            direct=DirectRules.from_config(batching.direct or SequenceStrategyDirect()),
            oldest=None if oldest is None else BatchingRules.of(oldest, config.max_batch_size),
            is_iterative=batching.iterative_sequence,
            has_variable_state=any(-1 in state.dims for state in batching.state),
        )


@dataclass(frozen=True, slots=True)
class SlotHead:
    """The first request that waits in a slot: when it was queued, and the key of requests that may share its batch."""

    enqueue_ns: int
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class DirectPlan:
    """Take the heads of these slots now; or none, and look again at a time."""

    slots: tuple[int, ...] = ()
    wait_until_ns: int | None = None


def plan_direct(rules: DirectRules, heads: Sequence[SlotHead | None], now_ns: int) -> DirectPlan:
    """Which of one instance's slots to execute now. At least one of them must have a head.

    All heads that may share a batch with the oldest one are taken; the others stay in their slots. With a minimum
    utilization the batch waits until that share of the slots has a head, or the oldest has waited out the delay.
    """
    waiting = [(head.enqueue_ns, slot) for slot, head in enumerate(heads) if head is not None]
    oldest_ns, first_slot = min(waiting)
    if rules.min_utilization > 0 and rules.max_delay_ns > 0:
        ready_ns = oldest_ns + rules.max_delay_ns
        if len(waiting) / len(heads) < rules.min_utilization and now_ns < ready_ns:
            return DirectPlan(wait_until_ns=ready_ns)
    first = heads[first_slot]
    assert first is not None, "the oldest head is one of the heads"
    return DirectPlan(tuple(slot for slot, head in enumerate(heads) if head is not None and head.key == first.key))
