"""What is kept for a while: responses, so that the next one can follow them, and conversations. Each belongs to the key
that made it."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from modelserver.auth.api_keys import caller_name
from modelserver.errors import NotFoundError
from modelserver.frontends.openai.responses.background import BackgroundRun

Document = dict[str, Any]

_MAX_ENTRIES = 1000
_MAX_BYTES = 64 << 20
_MAX_AGE_S = 3600.0


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """`num_bytes` is about its size as JSON. Whoever makes it, in the context of the caller, owns it."""

    id: str
    num_bytes: int
    owner: str = field(default_factory=caller_name)
    until_s: float = 0.0

    def drop(self) -> None:
        """It is not kept any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class StoredResponse(Kept):
    """`items` are those of its input, with all that it followed; `made` is the answer. `run` makes it in the
    background, or has made it."""

    made: Document
    items: list[Document]
    run: BackgroundRun | None = None

    @property
    def document(self) -> Document:
        """The response as it is now."""
        return self.made if self.run is None else self.run.document

    def drop(self) -> None:
        if self.run is not None:
            self.run.cancel()


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation(Kept):
    """`items` are those of its turns, in their order, each with an id."""

    created_s: int
    metadata: Document
    items: list[Document] = field(default_factory=list)

    def described(self) -> Document:
        """As its routes tell it."""
        return {"id": self.id, "object": "conversation", "created_at": self.created_s, "metadata": self.metadata}


Entry = TypeVar("Entry", bound=Kept)


class OwnedStore(Generic[Entry]):
    """At most 1,000 entries of 64 MiB together, each for an hour since it was last added or used.

    Where there is no room, the owner that has most loses the oldest of its entries, so that no key takes the room of
    the others. Event loop thread only.
    """

    def __init__(self, noun: str, advice: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`noun` and `advice` are for the error about one that is not there."""
        self._noun, self._advice = noun, advice
        self._clock = clock
        # The longest unused first.
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._total_bytes = 0
        # By owner: how many entries it has, and how many bytes.
        self._num_entries: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()

    def add(self, entry: Entry) -> None:
        """Keep it."""
        self._entries[entry.id] = entry
        self._num_entries[entry.owner] += 1
        self._count(entry, entry.num_bytes)
        self.use(entry)

    def get(self, entry_id: str) -> Entry:
        """Raises NotFoundError, also for an entry of another caller."""
        self._forget()
        found = self._entries.get(entry_id)
        if found is None or found.owner != caller_name():
            raise NotFoundError(f"{self._noun} with id '{entry_id:.100}' not found: {self._advice}")
        return found

    def use(self, entry: Entry, num_bytes: int = 0) -> None:
        """It is larger by that now (smaller, if negative), and kept for another hour if it is kept at all."""
        entry.num_bytes += num_bytes
        if entry.id in self._entries:
            self._count(entry, num_bytes)
            entry.until_s = self._clock() + _MAX_AGE_S
            self._entries.move_to_end(entry.id)
            self._forget()

    def remove(self, entry_id: str) -> None:
        """Raises as `get`."""
        self.get(entry_id)
        self._drop(entry_id)

    def _forget(self) -> None:
        now_s = self._clock()
        while self._entries and next(iter(self._entries.values())).until_s <= now_s:
            self._drop(next(iter(self._entries)))
        while len(self._entries) > _MAX_ENTRIES:
            self._drop_of(self._num_entries)
        while self._total_bytes > _MAX_BYTES:
            self._drop_of(self._num_bytes)

    def _drop_of(self, sizes: Counter[str]) -> None:
        """Drop the oldest entry of the owner that has most."""
        owner = max(sizes, key=sizes.__getitem__)
        self._drop(next(entry.id for entry in self._entries.values() if entry.owner == owner))

    def _drop(self, entry_id: str) -> None:
        entry = self._entries.pop(entry_id)
        self._num_entries[entry.owner] -= 1
        self._count(entry, -entry.num_bytes)
        if not self._num_entries[entry.owner]:
            del self._num_entries[entry.owner], self._num_bytes[entry.owner]
        entry.drop()

    def _count(self, entry: Entry, num_bytes: int) -> None:
        self._num_bytes[entry.owner] += num_bytes
        self._total_bytes += num_bytes
