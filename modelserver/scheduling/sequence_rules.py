"""What a config says about sequences: the options of the sequence batcher."""

from __future__ import annotations

from dataclasses import dataclass

from modelserver.config.defaults import DEFAULT_SEQUENCE_IDLE_US
from modelserver.config.schema import ModelConfig, ModelSequenceBatching, SequenceStrategyDirect
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
        oldest = _oldest(batching, config.max_batch_size)
        candidates = batching.oldest.max_candidate_sequences if batching.oldest is not None else 0
        return cls(
            num_slots=max_rows if oldest is None else candidates or max_rows,
            idle_ns=idle_us * _NS_PER_US,
            direct=DirectRules.from_config(batching.direct or SequenceStrategyDirect()),
            oldest=oldest,
            is_iterative=batching.iterative_sequence,
            has_variable_state=any(-1 in state.dims for state in batching.state),
        )


def _oldest(batching: ModelSequenceBatching, max_batch_size: int) -> BatchingRules | None:
    oldest = batching.oldest
    if oldest is None:
        return None
    max_rows = max(1, max_batch_size)
    return BatchingRules(
        max_rows=max_rows,
        preferred_rows=tuple(sorted(set(oldest.preferred_batch_size))) or (max_rows,),
        max_delay_ns=oldest.max_queue_delay_microseconds * _NS_PER_US,
        keep_order=oldest.preserve_ordering,
        is_single=max_batch_size == 0,
    )
