"""The interface of a store of answers, and its counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from modelserver.cache.answer import CachedAnswer
from modelserver.cache.key import RequestKey
from modelserver.core.response import InferResponse


@dataclass(slots=True)
class StoreCounts:
    """Numbers since the server's start; times in ns. `num_bytes` of `max_bytes` are used if the store knows them."""

    num_entries: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    lookups: int = 0
    hits: int = 0
    evictions: int = 0
    failures: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0

    @property
    def misses(self) -> int:
        return self.lookups - self.hits


Found = Callable[[CachedAnswer | None], None]


class AnswerStore(Protocol):
    """Keeps answers by key. Event loop thread, except `pack`. No method ever fails a request.

    `is_shared`: answers outlive the process, and other servers find them; so a model's generation must identify the
    model's content.
    """

    @property
    def counts(self) -> StoreCounts: ...

    @property
    def is_shared(self) -> bool: ...

    def look_up(self, key: RequestKey, found: Found) -> None:
        """Call `found` once, now or later, with the answer to an equal request, or None."""

    def pack(self, key: RequestKey, response: InferResponse) -> Any:
        """The argument of `insert`, or None if the answer must not be stored. From any thread; slow: it copies."""

    def insert(self, key: RequestKey, packed: Any) -> None:
        """Store a packed answer, replacing an existing one."""

    def forget(self, generation: bytes) -> None:
        """Drop the answers of a model that no longer serves, if the store is not shared."""

    async def close(self) -> None:
        """Close connections."""
