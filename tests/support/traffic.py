"""Constant requests over both protocols from threads of their own, every answer checked."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.clients import ProtocolClient
from support.serving import RunningServer

JOIN_TIMEOUT_S = 30.0
_MOST_FAILURES_KEPT = 5


class Traffic:
    """What was asked and what went wrong, so far. Numbers may be read from any thread."""

    def __init__(self) -> None:
        self.num_answered = 0
        self.num_failed = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def record(self, failure: Exception | None) -> None:
        with self._lock:
            if failure is None:
                self.num_answered += 1
                return
            self.num_failed += 1
            if len(self.failures) < _MOST_FAILURES_KEPT:
                self.failures.append(f"{type(failure).__name__}: {failure}")

    def check(self) -> None:
        """Fail unless requests were answered, every one of them."""
        assert self.num_failed == 0, f"{self.num_failed} of {self.num_answered + self.num_failed}: {self.failures}"
        assert self.num_answered > 0, "nothing was asked"


@contextmanager
def traffic(
    server: RunningServer,
    protocols: tuple[type[ProtocolClient], ...],
    ask: Callable[[ProtocolClient, int], None],
    *,
    num_clients: int = 2,
) -> Iterator[Traffic]:
    """While the block runs, `num_clients` clients of each protocol call `ask(client, number)` without a pause.

    `number` is different in every call. What `ask` raises is a failed request.
    """
    seen = Traffic()
    numbers = itertools.count()
    has_ended = threading.Event()

    def run(protocol: type[ProtocolClient]) -> None:
        with protocol(server) as client:
            while not has_ended.is_set():
                try:
                    ask(client, next(numbers))
                except Exception as error:
                    seen.record(error)
                else:
                    seen.record(None)

    threads = [
        threading.Thread(target=run, args=(protocol,), name=f"traffic {protocol.name} {index}")
        for protocol in protocols
        for index in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        has_ended.set()
        for thread in threads:
            thread.join(JOIN_TIMEOUT_S)
