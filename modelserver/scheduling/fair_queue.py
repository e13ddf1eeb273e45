"""A queue in which callers share the model by weight, however much each sends: start-time fair queueing.

Each request gets a tag: where its caller's last one ended, or where the queue is now, whichever is later. Its end is
the tag plus its rows, divided by the caller's weight. Requests of a priority level are served in the order of their
tags (Goyal, Vin and Cheng 1996). For a single caller that is the order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

from modelserver.core.request import InFlightRequest
from modelserver.scheduling.queue import EntryOrder, Lane, QueueEntry, RequestQueue

# At most this many callers that have nothing queued are remembered.
_MAX_IDLE_CALLERS = 1024
# How many entries of a lane, which is not in the order of arrival, are examined to find the oldest.
_MAX_LOOKED_AT = 64

_tag = attrgetter("tag")


class FairLane:
    """As the `OrderedDict` of a lane, with its entries in the order of their tags."""

    __slots__ = ("_by_request", "_sorted")

    def __init__(self) -> None:
        self._by_request: dict[InFlightRequest, QueueEntry] = {}
        self._sorted: list[QueueEntry] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, request: object) -> bool:
        return request in self._by_request

    def __getitem__(self, request: InFlightRequest) -> QueueEntry:
        return self._by_request[request]

    def __setitem__(self, request: InFlightRequest, entry: QueueEntry) -> None:
        self._by_request[request] = entry
        insort(self._sorted, entry, key=_tag)

    def __delitem__(self, request: InFlightRequest) -> None:
        entry = self._by_request.pop(request)
        position = bisect_left(self._sorted, entry.tag, key=_tag)
        while self._sorted[position] is not entry:  # of equal tags
            position += 1
        del self._sorted[position]

    def values(self) -> Sequence[QueueEntry]:
        return self._sorted

    def num_before(self, tag: float) -> int:
        """The entries that are served before one of this tag."""
        return bisect_left(self._sorted, tag, key=_tag)


class FairOrder(EntryOrder):
    """Lanes of entries by tags."""

    __slots__ = ()

    def _make_lane(self) -> Lane:
        return FairLane()

    def oldest_ns(self) -> int:
        """As in `EntryOrder`, but only among the entries that are served next: the first ones of each lane."""
        lanes = [lane.values() for lane in self._lanes.values() if lane]
        return min(entry.enqueue_ns for lane in lanes for entry in list(lane)[:_MAX_LOOKED_AT])

    def num_before(self, entry: QueueEntry) -> int:
        """The entries that are served before this one, which is not here yet."""
        return sum(
            len(lane) if rank < entry.rank else lane.num_before(entry.tag)
            for rank, lane in self._lanes.items()
            if rank <= entry.rank and isinstance(lane, FairLane)
        )


class _Caller:
    """A caller's requests in the queue by level, in the order of arrival, and the tag at which the last one ends."""

    __slots__ = ("end", "levels", "num_entries", "rows")

    def __init__(self) -> None:
        self.end = 0.0
        self.num_entries = 0
        self.levels: dict[int, OrderedDict[QueueEntry, None]] = {}
        self.rows: dict[int, int] = {}

    def add(self, entry: QueueEntry) -> None:
        self.levels.setdefault(entry.level, OrderedDict())[entry] = None
        self.rows[entry.level] = self.rows.get(entry.level, 0) + entry.rows
        self.num_entries += 1

    def remove(self, entry: QueueEntry) -> None:
        entries = self.levels[entry.level]
        del entries[entry]
        self.rows[entry.level] -= entry.rows
        self.num_entries -= 1
        if not entries:
            del self.levels[entry.level], self.rows[entry.level]

    def part(self, level: int) -> float:
        """Its rows in the queue at a level, divided by its weight."""
        entries = self.levels.get(level)
        return self.rows[level] / next(iter(entries)).request.share if entries else 0.0


class FairQueue(RequestQueue):
    """As `RequestQueue`, shared by callers."""

    def __init__(self, *, max_rows: int = 1, ripe_rows: int = 1, keep_order: bool = False) -> None:
        super().__init__(max_rows=max_rows, ripe_rows=ripe_rows, keep_order=keep_order)
        self._now = 0.0  # the tag up to which the queue has been served
        self._callers: dict[str, _Caller] = {}

    def _make_order(self) -> EntryOrder:
        return FairOrder()

    def num_before(self, entry: QueueEntry) -> int:
        """The entries that would be served before this one if it came now."""
        assert isinstance(self._all, FairOrder), "made here"
        self._set_tag(entry)
        return self._all.num_before(entry)

    def add(self, entry: QueueEntry) -> None:
        caller = self._callers.get(entry.request.caller)
        if not entry.is_delayed:  # else it goes behind the others with the tag that it has
            self._set_tag(entry)
        if caller is None:
            caller = self._callers[entry.request.caller] = _Caller()
        caller.end = max(caller.end, entry.tag + entry.rows / entry.request.share)
        caller.add(entry)
        super().add(entry)

    def remove(self, entry: QueueEntry) -> None:
        if self.first() is entry:
            self._now = max(self._now, entry.tag)
        super().remove(entry)
        self._callers[entry.request.caller].remove(entry)
        if not len(self):
            # The queue is empty: the next caller begins where all have ended.
            self._now = max(caller.end for caller in self._callers.values())
            self._callers.clear()
        elif len(self._callers) > _MAX_IDLE_CALLERS:
            self._forget_idle()

    def remove_all(self, entries: Sequence[QueueEntry]) -> None:
        for entry in entries:
            self.remove(entry)

    def last_of_hog(self, newcomer: QueueEntry) -> QueueEntry | None:
        """The last entry of the caller with most rows by weight at this level; None if it would not have more."""
        level, own = newcomer.level, newcomer.request.caller
        name, hog = max(self._callers.items(), key=lambda item: item[1].part(level), default=("", None))
        if hog is None or name == own:
            return None
        has = self._callers[own].part(level) if own in self._callers else 0.0
        if has + newcomer.rows / newcomer.request.share >= hog.part(level):
            return None
        return next(reversed(hog.levels[level]))

    def _set_tag(self, entry: QueueEntry) -> None:
        caller = self._callers.get(entry.request.caller)
        entry.tag = self._now if caller is None else max(self._now, caller.end)

    def _forget_idle(self) -> None:
        idle = [name for name, each in self._callers.items() if not each.num_entries and each.end <= self._now]
        for name in idle:
            del self._callers[name]
