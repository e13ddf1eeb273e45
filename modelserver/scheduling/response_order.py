"""Releases responses in the order in which their requests were accepted (`preserve_ordering`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from modelserver.core.request import Delivery, InFlightRequest
from modelserver.core.response import InferResponse


class ResponseOrder:
    """Holds back responses until every request accepted before has its final one. Event loop thread only."""

    def __init__(self) -> None:
        self._held: OrderedDict[InFlightRequest, list[InferResponse]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, request: InFlightRequest) -> None:
        """The request was accepted: what comes after waits for it."""
        self._held[request] = []

    def forget(self, request: InFlightRequest) -> list[Delivery]:
        """The request is answered elsewhere, out of order; what only waited for it may go."""
        self._held.pop(request, None)
        return self._release()

    def arrange(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Hold these back, and return what may go now, in order."""
        for request, response in deliveries:
            self._held[request].append(response)
        return self._release()

    def _release(self) -> list[Delivery]:
        released: list[Delivery] = []
        while self._held:
            request, responses = next(iter(self._held.items()))
            released += [(request, response) for response in responses]
            if not responses or not responses[-1].is_final:
                responses.clear()
                break
            del self._held[request]
        return released
