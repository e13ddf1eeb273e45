"""Responses that are kept for a while, so that the next one can follow them. Each belongs to the key that made it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from modelserver.auth.api_keys import CALLER
from modelserver.errors import NotFoundError

Document = dict[str, Any]

_MAX_RESPONSES = 1000
_MAX_BYTES = 64 << 20
_MAX_AGE_S = 3600.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`items` are those of its input, with all that it followed; `document` is the answer."""

    document: Document
    items: list[Document]
    owner: str
    num_bytes: int
    until_s: float


class ResponseStore:
    """At most 1,000 responses of 64 MiB together, for an hour; the oldest ones go first. Event loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def add(self, document: Document, items: list[Document], num_bytes: int) -> None:
        """Keep a response of the current caller; `num_bytes` is about the size of both as JSON."""
        until_s = self._clock() + _MAX_AGE_S
        self._responses[document["id"]] = StoredResponse(document, items, _owner(), num_bytes, until_s)
        self._num_bytes += num_bytes
        self._forget()

    def get(self, response_id: str) -> StoredResponse:
        """Raises NotFoundError, also for a response of another caller."""
        self._forget()
        found = self._responses.get(response_id)
        if found is None or found.owner != _owner():
            raise NotFoundError(
                f"Response with id '{response_id:.100}' not found: the server keeps the last {_MAX_RESPONSES} "
                "responses for an hour, except those with store: false"
            )
        return found

    def remove(self, response_id: str) -> None:
        """Raises as `get`."""
        self.get(response_id)
        self._drop(response_id)

    def _forget(self) -> None:
        now_s = self._clock()
        while self._responses:
            oldest_id, oldest = next(iter(self._responses.items()))
            is_room = len(self._responses) <= _MAX_RESPONSES and self._num_bytes <= _MAX_BYTES
            if is_room and oldest.until_s > now_s:
                return
            self._drop(oldest_id)

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._responses.pop(response_id).num_bytes


def _owner() -> str:
    key = CALLER.get()
    return "" if key is None else key.name
