"""Ends a batch that is being executed when nobody waits for its answers any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from modelserver.backend import Array, TensorInstance
from modelserver.core.request import InFlightRequest
from modelserver.errors import CancelledError


class Interruption:
    """Stands between an executor and an instance that can be interrupted. Executor's thread, but for `_note`.

    While a batch is executed its requests report here when they are cancelled, and then to whom they reported before.
    """

    def __init__(self, instance: TensorInstance) -> None:
        self._instance = instance
        self._lock = threading.Lock()  # guards what follows
        # Requests of the batch in progress whose clients are there; None: there is no batch.
        self._waiting: set[InFlightRequest] | None = None
        self._is_interrupted = False
        self._inner: Callable[[InFlightRequest], None] | None = None

    def run(self, requests: Sequence[InFlightRequest], inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """`instance.run`. Raises CancelledError when every request is cancelled before it is done."""
        own = [request for request in requests if not request.is_padding]
        inner = own[0].on_cancel if own else None
        try:
            self._begin(own, inner)
            return self._instance.run(inputs)
        finally:
            self._end(own, inner)

    def _begin(self, own: Sequence[InFlightRequest], inner: Callable[[InFlightRequest], None] | None) -> None:
        with self._lock:
            self._waiting = set(own)
            self._inner = inner
        note = self._note  # one bound method, not one per request
        for request in own:
            request.on_cancel = note
        # Those that were cancelled before that moment reported elsewhere, and in vain: they had left the queue.
        gone = [request for request in own if request.is_cancelled]
        with self._lock:
            self._waiting.difference_update(gone)
            if own and not self._waiting:
                self._waiting = None
                raise CancelledError("the requests of the batch were cancelled before it was executed")

    def _end(self, own: Sequence[InFlightRequest], inner: Callable[[InFlightRequest], None] | None) -> None:
        for request in own:
            request.on_cancel = inner
        with self._lock:
            self._waiting = None
            if self._is_interrupted:
                self._is_interrupted = False
                self._instance.interrupt(False)

    def _note(self, request: InFlightRequest) -> None:
        """`InFlightRequest.on_cancel`. Called from the event loop thread."""
        with self._lock:
            inner = self._inner
            if self._waiting is not None and request in self._waiting:
                self._waiting.remove(request)
                if not self._waiting:
                    self._is_interrupted = True
                    self._instance.interrupt(True)
        if inner is not None:
            inner(request)
