"""The decision of the strategy `direct`: (what waits in an instance's slots, now) -> plan. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from modelserver.scheduling.sequence_rules import DirectRules


@dataclass(frozen=True, slots=True)
class SlotHead:
    """The first request that waits in a slot: since when, and which others it may share a batch with."""

    enqueue_ns: int
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class DirectPlan:
    """Take the heads of these slots now; or none, and look again at a time."""

    slots: tuple[int, ...] = ()
    wait_until_ns: int | None = None


def plan_direct(rules: DirectRules, heads: Sequence[SlotHead | None], now_ns: int) -> DirectPlan:
    """What of one instance's slots to execute now. At least one of them must have a head.

    All heads go that may share a batch with the oldest one; what may not stays in its slot. With a minimum
    utilization the batch waits until so many of the slots have a head, or the oldest has waited out the delay.
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
