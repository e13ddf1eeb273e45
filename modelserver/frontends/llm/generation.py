"""The infer requests of one call, sent and cancelled together, and their responses as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.stream import ResponseStream
from modelserver.errors import CancelledError

if TYPE_CHECKING:
    from modelserver.planes.data import AnyDataPlane

# The number of a request among those of its call, and one of its responses.
Arrival = tuple[int, InferResponse]


class Generation:
    """A context manager: at its end nothing of it goes on, whatever the reason. Event loop thread only."""

    def __init__(self, dataplane: AnyDataPlane, requests: Sequence[InferRequest]) -> None:
        self._dataplane = dataplane
        self._requests = requests
        self._lines = [_Line(self, index) for index in range(len(requests))]
        self._arrived: list[Arrival] = []
        self._num_open = len(requests)
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False

    def __enter__(self) -> Generation:
        """Hand all requests to their model. Raises ServerError when one is refused; then none goes on."""
        try:
            for request, line in zip(self._requests, self._lines, strict=True):
                request.stream = line
                self._dataplane.infer(request)
        except BaseException:
            self.cancel()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Nobody wants to know any more. Safe to repeat."""
        self._is_over = True
        for index, _ in self._arrived:
            self._lines[index].has_read()
        self._arrived = []
        for request, line in zip(self._requests, self._lines, strict=True):
            if not line.is_finished:
                request.cancel()

    async def arrivals(self) -> AsyncIterator[list[Arrival]]:
        """All that has come since the last time, until every request has ended.

        What was yielded counts as read when the next is asked for: a slow reader makes its models wait. Raises the
        first error; what came before it is yielded first.
        """
        while True:
            batch, self._arrived = self._arrived, []
            failed = next((at for at, (_, response) in enumerate(batch) if response.error is not None), None)
            if batch and failed != 0:
                yield batch if failed is None else batch[:failed]
            for index, _ in batch:
                self._lines[index].has_read()
            if failed is not None:
                error = batch[failed][1].error
                assert error is not None, "it was found by its error"
                raise error
            if self._arrived:
                continue
            if self._num_open == 0:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self, index: int, response: InferResponse) -> None:
        """A response of request `index`. Called by its stream."""
        if response.is_final:
            self._num_open -= 1
        if self._is_over:
            self._lines[index].has_read()
            return
        self._arrived.append((index, response))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Line(ResponseStream):
    """Where the responses of one of the requests arrive."""

    __slots__ = ("_generation", "_index")

    protocol = "HTTP"
    reads_later = True

    def __init__(self, generation: Generation, index: int) -> None:
        super().__init__()
        self._generation = generation
        self._index = index

    def deliver(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        self.is_finished = response.is_final
        self._generation.take(self._index, response)


async def only_response(dataplane: AnyDataPlane, request: InferRequest) -> InferResponse:
    """The response of a request that has one. Raises its error, or CancelledError when there is none."""
    return (await only_responses(dataplane, [request]))[0]


async def only_responses(dataplane: AnyDataPlane, requests: Sequence[InferRequest]) -> list[InferResponse]:
    """The same of several, sent together."""
    found: dict[int, InferResponse] = {}
    with Generation(dataplane, requests) as generation:
        async for batch in generation.arrivals():
            found.update({index: response for index, response in batch if response.outputs})
    for index, request in enumerate(requests):
        if index not in found:
            raise CancelledError(f"model '{request.model_name}' ended without an answer")
    return [found[index] for index in range(len(requests))]
