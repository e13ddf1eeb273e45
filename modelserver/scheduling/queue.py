"""The requests of one model that wait: ordered by priority level and arrival, grouped into buckets.

It knows order and membership, not time and not threads: the batcher holds its lock around every call.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from modelserver.config.schema import ModelConfig
from modelserver.core.request import InFlightRequest
from modelserver.scheduling.parked_workers import Place

# At most this many requests that do not fit are skipped in search of ones that do.
_MAX_LOOKAHEAD = 64


class QueueEntry:
    """A queued request. Only entries with the same `key` may share a batch.

    `level` is its priority level; a delayed entry comes after all others of its level. `enqueue_ns`
    counts for queue delay and statistics. `is_queued` until it is taken or dropped: the code that removes
    an entry from the queue answers its request. `tag` is its place in a queue that callers share by weight. It waits
    for the instance at `place`; None: for any.
    """

    __slots__ = ("delays", "enqueue_ns", "is_delayed", "is_queued", "key", "level", "place", "request", "rows", "tag")

    def __init__(
        self, request: InFlightRequest, level: int, enqueue_ns: int, key: Hashable = None, delays: bool = False
    ) -> None:
        self.request = request
        self.rows = request.rows
        self.level = level
        self.enqueue_ns = enqueue_ns
        self.key = key
        self.delays = delays
        self.is_delayed = False
        self.is_queued = False
        self.tag = 0.0
        self.place: Place | None = None

    @property
    def rank(self) -> int:
        """Position of its lane: each level has one for entries on time and one, after it, for delayed ones."""
        return 2 * self.level + self.is_delayed


class Lane(Protocol):
    """Entries of one rank by their requests, in the order in which they are served."""

    def __len__(self) -> int: ...

    def __contains__(self, request: object, /) -> bool: ...

    def __getitem__(self, request: InFlightRequest, /) -> QueueEntry: ...

    def __setitem__(self, request: InFlightRequest, entry: QueueEntry, /) -> None: ...

    def __delitem__(self, request: InFlightRequest, /) -> None: ...

    def values(self) -> Iterable[QueueEntry]: ...


class EntryOrder:
    """Entries in the order in which they are served: lane by lane, first in first out within a lane.

    Every operation is O(1), but for the number of lanes in use.
    """

    __slots__ = ("_lanes", "_ranks", "num_entries", "rows")

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}
        self._ranks: list[int] = []
        self.num_entries = 0
        self.rows = 0

    def add(self, entry: QueueEntry) -> None:
        rank = 2 * entry.level + entry.is_delayed
        lane = self._lanes.get(rank)
        if lane is None:
            lane = self._lanes[rank] = self._make_lane()
            insort(self._ranks, rank)
        lane[entry.request] = entry
        self.num_entries += 1
        self.rows += entry.rows

    def _make_lane(self) -> Lane:
        return OrderedDict()

    def remove(self, entry: QueueEntry) -> None:
        rank = 2 * entry.level + entry.is_delayed
        lane = self._lanes[rank]
        del lane[entry.request]
        self.num_entries -= 1
        self.rows -= entry.rows
        # The last lane stays, so that a queue with one level does not make one for every request.
        if not lane and len(self._ranks) > 1:
            del self._lanes[rank]
            self._ranks.remove(rank)

    def clear(self) -> None:
        """Remove all entries."""
        self._lanes.clear()
        self._ranks.clear()
        self.num_entries = self.rows = 0

    def find(self, request: InFlightRequest) -> QueueEntry | None:
        for lane in self._lanes.values():
            if request in lane:
                return lane[request]
        return None

    def level_len(self, level: int) -> int:
        return sum(len(lane) for rank, lane in self._lanes.items() if rank // 2 == level)

    def len_through(self, level: int) -> int:
        """The entries of this level and of those that are served before it."""
        return sum(len(lane) for rank, lane in self._lanes.items() if rank // 2 <= level)

    def __iter__(self) -> Iterator[QueueEntry]:
        if len(self._ranks) == 1:
            return iter(self._lanes[self._ranks[0]].values())
        return (entry for rank in self._ranks for entry in self._lanes[rank].values())

    def heads(self) -> list[QueueEntry]:
        """The first entry of each level, most urgent level first."""
        heads: list[QueueEntry] = []
        for rank in self._ranks:
            head = next(iter(self._lanes[rank].values()), None)
            if head is not None and not (heads and heads[-1].level == head.level):
                heads.append(head)
        return heads

    def oldest_ns(self) -> int:
        """When the entry that waits longest was queued. There must be one."""
        return min(next(iter(lane.values())).enqueue_ns for lane in self._lanes.values() if lane)


class RequestQueue:
    """All queued entries, and buckets of those with the same key.

    With `keep_order` there are no buckets: a run of candidates ends at the first entry with another key.
    A bucket of at least `ripe_rows` rows may be worth taking before its oldest entry has waited.
    """

    def __init__(self, *, max_rows: int = 1, ripe_rows: int = 1, keep_order: bool = False) -> None:
        self._max_rows = max_rows
        self._ripe_rows = ripe_rows
        self._keep_order = keep_order
        self._all = self._make_order()
        self._buckets: dict[Hashable, EntryOrder] = {}
        self._ripe: dict[Hashable, None] = {}

    def _make_order(self) -> EntryOrder:
        return EntryOrder()

    def __len__(self) -> int:
        return self._all.num_entries

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter(self._all)

    @property
    def rows(self) -> int:
        return self._all.rows

    def level_len(self, level: int) -> int:
        return self._all.level_len(level)

    def len_through(self, level: int) -> int:
        return self._all.len_through(level)

    def find(self, request: InFlightRequest) -> QueueEntry | None:
        return self._all.find(request)

    def first(self) -> QueueEntry | None:
        return next(iter(self._all), None)

    def add(self, entry: QueueEntry) -> None:
        entry.is_queued = True
        self._all.add(entry)
        if entry.key is None or self._keep_order:
            return
        bucket = self._buckets.get(entry.key)
        if bucket is None:
            bucket = self._buckets[entry.key] = self._make_order()
        bucket.add(entry)
        if bucket.rows >= self._ripe_rows:
            self._ripe[entry.key] = None

    def remove(self, entry: QueueEntry) -> None:
        """Remove a queued entry. The caller answers its request."""
        entry.is_queued = False
        self._all.remove(entry)
        if entry.key is None or self._keep_order:
            return
        bucket = self._buckets[entry.key]
        bucket.remove(entry)
        if bucket.rows < self._ripe_rows:
            self._ripe.pop(entry.key, None)
        if bucket.num_entries == 0:
            del self._buckets[entry.key]

    def delay(self, entry: QueueEntry) -> None:
        """Put the entry behind all others of its level."""
        self.remove(entry)
        entry.is_delayed = True
        self.add(entry)

    def bucket_of(self, entry: QueueEntry) -> EntryOrder:
        return self._all if entry.key is None or self._keep_order else self._buckets[entry.key]

    def is_ripe(self, entry: QueueEntry) -> bool:
        """Whether the entry's bucket has rows enough to be worth a look."""
        return self.bucket_of(entry).rows >= self._ripe_rows

    def heads(self) -> list[QueueEntry]:
        """An entry of each bucket from which the next batch may come, best first.

        The first of each level leads, because it waits longest there; the ripe buckets follow.
        """
        heads = self._all.heads()
        if self._ripe:
            seen = {head.key for head in heads}
            ripe = [next(iter(self._buckets[key])) for key in self._ripe if key not in seen]
            heads += sorted(ripe, key=lambda entry: (entry.rank, entry.enqueue_ns))
        return heads

    def candidates(self, bucket: EntryOrder) -> tuple[list[QueueEntry], bool]:
        """Entries that could share a batch, in order, and whether nothing later can join them.

        They hold at least as many rows as the batch can take, if the bucket does. Entries that do not
        fit are among them, a bounded number: the policy decides what becomes of them.
        """
        if bucket.rows <= self._max_rows and not self._keep_order:
            return list(bucket), self._has_others_behind(bucket)  # the usual case: all fit
        entries: list[QueueEntry] = []
        total = num_misfits = 0
        for entry in bucket:
            if self._keep_order and entries and entry.key != entries[0].key:
                return entries, True
            entries.append(entry)
            if total + entry.rows <= self._max_rows:
                total += entry.rows
            else:
                num_misfits += 1
            if total >= self._max_rows or num_misfits > _MAX_LOOKAHEAD:
                break
        return entries, not self._keep_order and self._has_others_behind(bucket)

    @property
    def is_mixed(self) -> bool:
        """Whether there are entries of several buckets."""
        return len(self._buckets) > 1

    def _has_others_behind(self, bucket: EntryOrder) -> bool:
        """Whether the best entry is of this bucket, and others wait behind it: then it does not wait for more."""
        return self.is_mixed and self.bucket_of(next(iter(self._all))) is bucket

    def remove_all(self, entries: Sequence[QueueEntry]) -> None:
        """Remove several entries, each as `remove` does. They must be distinct."""
        if len(entries) < self._all.num_entries:
            for entry in entries:
                self.remove(entry)
            return
        # The usual batch takes everything.
        for entry in entries:
            entry.is_queued = False
        self._all.clear()
        self._buckets.clear()
        self._ripe.clear()


BucketKey = Callable[[InFlightRequest], Hashable]


def bucket_key(config: ModelConfig) -> BucketKey | None:
    """A function that tells which of the model's requests fit together; None when all of them do.

    The key holds what may differ between two valid requests and must not within a batch: which optional
    inputs are present, the sizes of variable dimensions without the batch dimension, and the contents of
    shape tensors. Ragged inputs may differ.
    """
    optional = tuple(spec.name for spec in config.input if spec.optional)
    variable = tuple(spec.name for spec in config.input if -1 in spec.dims and not spec.allow_ragged_batch)
    by_content = tuple(spec.name for spec in config.input if spec.is_shape_tensor)
    if not optional and not variable and not by_content:
        return None

    if len(variable) == 1 and not optional and not by_content:
        # The usual case among models that need a key.
        [only] = variable
        return lambda request: request.inputs[only].data.shape[1:]

    def key(request: InFlightRequest) -> Hashable:
        inputs = request.inputs
        parts: list[Hashable] = [name in inputs for name in optional]
        parts += [inputs[name].data.shape[1:] for name in variable if name in inputs]
        parts += [inputs[name].data.tobytes() for name in by_content if name in inputs]
        return tuple(parts)

    return key
