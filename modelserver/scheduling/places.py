"""Which instance of a model a request had better go to: one that has computed what it begins with, or has least to do.

For instances that go in steps. Each works on many requests at once, so that more than one has room for a request; and
each may keep what it has computed of a beginning that requests share, as language models do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from modelserver.core.request import InFlightRequest
from modelserver.endpoints.choice import load_bound
from modelserver.endpoints.learned_prefixes import BLOCK_BYTES, MAX_BLOCKS, LearnedPrefixes, chained_blocks
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.parked_workers import Place, WaitingWorker
from modelserver.scheduling.queue import QueueEntry, RequestQueue

# A request that has waited this long for its place is anyone's.
PATIENCE_NS = 100_000_000
# At most this many requests of other places are skipped in search of one.
_MAX_LOOKAHEAD = 64


class Places:
    """Every call is made under the batcher's lock, but `choose`, which is the event loop's.

    `inputs`: the texts or numbers that a request begins with are in the first of these inputs that it has.
    """

    def __init__(self, inputs: Sequence[str]) -> None:
        self._inputs = inputs
        self._places: dict[WaitingWorker, Place] = {}
        self._of: dict[InFlightRequest, Place] = {}
        self._learned: LearnedPrefixes[Place] = LearnedPrefixes()
        self._number = 0

    def choose(self, request: InFlightRequest) -> Place | None:
        """The place of a request that comes; None where there is nothing to choose.

        The one that knows most of the request's beginning, unless its load is much above the others'; else the one with
        the least load.
        """
        places = [place for place in list(self._places.values()) if place.is_open]
        if len(places) < 2:
            return None
        chosen = min(places, key=lambda place: (place.load, place.last_number))
        blocks = self._blocks_of(request)
        bound = load_bound(sum(place.load for place in places), len(places))
        chosen = self._learned.better(blocks, chosen, [place for place in places if place.load <= bound]) or chosen
        self._learned.learn(blocks, chosen)
        self._number += 1
        chosen.last_number = self._number
        return chosen

    def add(self, entry: QueueEntry, place: Place) -> WaitingWorker | None:
        """The entry is in the queue, for this place: its worker, if that is to be woken."""
        self._move(entry, place)
        return place.worker if place.worker is not None and place.worker.is_parked else None

    def _move(self, entry: QueueEntry, place: Place) -> None:
        if entry.place is not None:
            entry.place.load -= 1
        entry.place = self._of[entry.request] = place
        place.load += 1

    def end(self, requests: Iterable[InFlightRequest]) -> None:
        """These requests are answered."""
        for request in requests:
            place = self._of.pop(request, None)
            if place is not None:
                place.load -= 1

    def see(self, worker: WaitingWorker) -> None:
        """The worker takes requests from now on."""
        place = self._places.get(worker)
        if place is None:
            place = self._places[worker] = Place(worker)
        place.is_away = False

    def leave(self, worker: WaitingWorker) -> None:
        """It takes none for now; or never again, once it is closed."""
        place = self._places.get(worker)
        if place is not None:
            place.is_away = True
            if worker.is_closed:
                place.worker = None
                del self._places[worker]

    def take(self, queue: RequestQueue, worker: WaitingWorker, now_ns: int) -> tuple[Batch | None, int | None]:
        """The first request that the worker may have; or None, and when to look again."""
        place = self._places.get(worker)
        until_ns: int | None = None
        for entry in islice(queue, _MAX_LOOKAHEAD):
            other = entry.place
            anyones_ns = entry.enqueue_ns + PATIENCE_NS
            if other is None or other is place or not other.is_open or now_ns >= anyones_ns:
                queue.remove(entry)
                if other is not place and other is not None and place is not None:
                    self._move(entry, place)
                return Batch([entry.request], [entry.enqueue_ns], entry.rows, now_ns), None
            until_ns = anyones_ns if until_ns is None else min(until_ns, anyones_ns)
        return None, until_ns

    def _blocks_of(self, request: InFlightRequest) -> Sequence[int]:
        for name in self._inputs:
            tensor = request.inputs.get(name)
            if tensor is None or not tensor.data.size:
                continue
            data = tensor.data.reshape(-1)
            first = data[0]
            if isinstance(first, bytes | str):
                most = first[: MAX_BLOCKS * BLOCK_BYTES]
                return chained_blocks(name.encode(), most.encode() if isinstance(most, str) else most)
            return chained_blocks(name.encode(), data[: MAX_BLOCKS * BLOCK_BYTES // data.itemsize].tobytes())
        return ()
