"""How long a client waits for the next refusal: one that is refused again and again gets a bounded share of the loop.

A request without a valid key costs the server a connection, a look at its head, and the bytes of its body that the
client sends before it reads the answer. A client that comes back at once could repeat this hundreds of times a second.
Only refused requests wait: a valid key from the same address is not delayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

# Refusals of a client that are answered at once, and how many more each second.
_BURST: Final = 50
_PER_S: Final = 50
# Bytes of refused bodies that count as much as one refusal.
_BYTES_PER_REFUSAL: Final = 1 << 20
# The longest wait. It also bounds for how long a client is remembered.
_MAX_WAIT_S: Final = 5.0
_MAX_CLIENTS: Final = 4096


class RefusedPeers:
    """Counts refusals by client. Event loop thread only."""

    __slots__ = ("_clock", "_paid_until_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # For each client, when it will have waited for all of its refusals so far.
        self._paid_until_s: dict[str, float] = {}

    def wait_s(self, client: str) -> float:
        """A request of `client` is refused by its head: how long its answer must wait, in seconds."""
        now_s = self._clock()
        return max(0.0, self._charge(client, 1.0, now_s) - now_s - _BURST / _PER_S)

    def dropped(self, client: str, num_bytes: int) -> None:
        """A refused client has sent that much of a body, which was read and dropped."""
        if num_bytes >= _BYTES_PER_REFUSAL:
            self._charge(client, num_bytes / _BYTES_PER_REFUSAL, self._clock())

    def _charge(self, client: str, cost: float, now_s: float) -> float:
        known = self._paid_until_s
        before_s = max(now_s, known.pop(client, now_s))
        if len(known) >= _MAX_CLIENTS:
            self._forget(now_s)
        until_s = min(before_s + cost / _PER_S, now_s + _BURST / _PER_S + _MAX_WAIT_S)
        known[client] = until_s
        return until_s

    def _forget(self, now_s: float) -> None:
        """Forget the clients that have waited, and at least the one that was refused the longest ago."""
        known = self._paid_until_s
        del known[next(iter(known))]
        for client in [client for client, until_s in known.items() if until_s <= now_s]:
            del known[client]
