"""The demand for a pool, as its routers count it: requests that are with a replica or wait for one."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from modelserver.client.server_client import ServerClient
from modelserver.errors import ServerError

PENDING: Final = re.compile(rb"^modelserver_router_pending_requests (\S+)", re.MULTILINE)
_INTERVAL_S: Final = 0.5
_ASK_TIMEOUT_S: Final = 1.0
# An older number says nothing any more.
_VALID_S: Final = 5.0


class RouterGauges:
    """Asks routers in a thread of its own, so that one that does not answer delays nothing else."""

    def __init__(self, routers: Callable[[], Sequence[str]]) -> None:
        """`routers` returns the addresses to ask."""
        self._routers = routers
        # By address: when it answered, and its requests.
        self._seen: dict[str, tuple[float, int]] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="router-gauges", daemon=True)
        self._thread.start()

    def pending(self, routers: Sequence[str]) -> int | None:
        """The requests in all of the routers that answer; None when none does."""
        now_s = time.monotonic()
        numbers = [self._seen[url][1] for url in routers if url in self._seen and now_s - self._seen[url][0] < _VALID_S]
        return sum(numbers) if numbers else None

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.wait(_INTERVAL_S):
            for url in self._routers():
                try:
                    found = PENDING.search(ServerClient(url, timeout_s=_ASK_TIMEOUT_S).metrics())
                except ServerError:
                    continue
                if found is not None:
                    self._seen[url] = time.monotonic(), int(float(found[1]))
