"""Which models leave memory: pure decisions over those that are in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory that was loaded on demand, or may be. Times are seconds of any one clock.

    `can_leave` unless it is pinned, busy, or called by an ensemble that is loaded. `keep_alive_s` inf is for ever.
    """

    key: str
    num_bytes: int
    last_use_s: float
    keep_alive_s: float
    can_leave: bool

    @property
    def expires_s(self) -> float:
        return self.last_use_s + self.keep_alive_s


def idle_ones(residents: Iterable[Resident], now_s: float) -> list[str]:
    """Those that nobody has asked for as long as they are kept."""
    return [resident.key for resident in residents if resident.can_leave and resident.expires_s <= now_s]


def plan_room(residents: Iterable[Resident], needed_bytes: int, budget_bytes: int) -> tuple[str, ...] | None:
    """The least recently used ones that must leave for `needed_bytes` to fit; None: not enough may leave now."""
    everyone = list(residents)
    excess = sum(resident.num_bytes for resident in everyone) + needed_bytes - budget_bytes
    leaving: list[str] = []
    for resident in sorted(everyone, key=lambda resident: resident.last_use_s):
        if excess <= 0:
            break
        if resident.can_leave and resident.num_bytes:
            leaving.append(resident.key)
            excess -= resident.num_bytes
    return tuple(leaving) if excess <= 0 else None
