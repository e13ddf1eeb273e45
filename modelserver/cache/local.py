"""Answers in the memory of this process: up to a limit of bytes; the least recently used are evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from modelserver.cache.store import CachedAnswer, Found, RequestKey, StoreCounts, response_size
from modelserver.core.clock import Clock, SystemClock
from modelserver.core.response import InferResponse

# An entry beside its tensors and its head: objects, keys and places in tables; measured, rounded up.
_ENTRY_OVERHEAD = 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer and the proof of its request; `num_bytes` is their total size."""

    answer: CachedAnswer
    head: bytes
    check: bytes
    num_bytes: int


class LocalStore:
    """Least recently used answers, within `max_bytes`, each for at most `ttl_s` (None: no limit)."""

    is_shared = False

    def __init__(self, max_bytes: int, *, ttl_s: float | None = None, clock: Clock | None = None) -> None:
        self.counts = StoreCounts(max_bytes=max_bytes)
        self._max_bytes = max_bytes
        self._ttl_ns = None if ttl_s is None else int(ttl_s * 1e9)
        self._now_ns: Callable[[], int] = (clock or SystemClock()).now_ns
        # By digest, the least recently used first: the entry, and the time at which it is too old.
        self._entries: OrderedDict[bytes, tuple[Entry, int]] = OrderedDict()
        self._by_generation: dict[bytes, set[bytes]] = {}
        self._generation_of: dict[bytes, bytes] = {}

    def look_up(self, key: RequestKey, found: Found) -> None:
        found(self.find(key))

    def find(self, key: RequestKey) -> CachedAnswer | None:
        """The answer to an equal request, which is now the most recently used."""
        began_ns = self._now_ns()
        counts = self.counts
        counts.lookups += 1
        answer = None
        found = self._entries.get(key.digest)
        if found is not None:
            entry, ends_ns = found
            if began_ns >= ends_ns:
                self._remove(key.digest)
            elif key.is_equal(entry.head, entry.check):
                self._entries.move_to_end(key.digest)
                counts.hits += 1
                answer = entry.answer
        counts.lookup_ns += self._now_ns() - began_ns
        return answer

    def pack(self, key: RequestKey, response: InferResponse) -> Entry | None:
        if response_size(response) > self._max_bytes:
            return None
        answer = CachedAnswer.of(response)
        return Entry(answer, key.head, key.check, answer.num_bytes + len(key.head) + _ENTRY_OVERHEAD)

    def insert(self, key: RequestKey, packed: Entry) -> None:
        began_ns = self._now_ns()
        if packed.num_bytes > self._max_bytes:
            return
        digest = key.digest
        if digest in self._entries:
            self._remove(digest)
        counts = self.counts
        while counts.num_bytes + packed.num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))
            counts.evictions += 1
        ends_ns = began_ns + self._ttl_ns if self._ttl_ns is not None else 1 << 63
        self._entries[digest] = (packed, ends_ns)
        self._by_generation.setdefault(key.generation, set()).add(digest)
        self._generation_of[digest] = key.generation
        counts.num_entries += 1
        counts.num_bytes += packed.num_bytes
        counts.insertion_ns += self._now_ns() - began_ns

    def forget(self, generation: bytes) -> None:
        for digest in list(self._by_generation.get(generation, ())):
            self._remove(digest)

    async def close(self) -> None:
        """Does nothing."""

    def _remove(self, digest: bytes) -> None:
        entry, _ = self._entries.pop(digest)
        generation = self._generation_of.pop(digest)
        digests = self._by_generation[generation]
        digests.discard(digest)
        if not digests:
            del self._by_generation[generation]
        self.counts.num_entries -= 1
        self.counts.num_bytes -= entry.num_bytes
