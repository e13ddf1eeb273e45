"""The infer requests of one call, sent and cancelled together; a listener hears their responses.

A response is handed on where it is delivered, without a Task, as long as the listener has room. Else it waits for the
call's own Task, and so does its model: what waits is not read.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Sequence

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.errors import CancelledError
from modelserver.planes.authorized import AnyDataPlane


class Listener(abc.ABC):
    """Hears the responses of a call, in their order."""

    @abc.abstractmethod
    def hear(self, prompt: int, response: InferResponse) -> bool:
        """Take a response to prompt number `prompt`; False asks for `wait_for_room` before the next one."""

    async def wait_for_room(self) -> None:
        """Return when the next response may come."""


class Requests:
    """A context manager: at its end nothing of it goes on, whatever the reason. Event loop thread only."""

    def __init__(self, dataplane: AnyDataPlane, requests: Sequence[InFlightRequest], listener: Listener) -> None:
        self._dataplane = dataplane
        self._requests = requests
        self._listener = listener
        self._lines = [_Line(self, index) for index in range(len(requests))]
        # What came while the listener had no room; and those heard since that count as read when it has.
        self._arrived: deque[tuple[_Line, InferResponse]] = deque()
        self._unread: list[_Line] = []
        self._error: Exception | None = None
        self._num_open = len(requests)
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False

    def __enter__(self) -> Requests:
        """Hand all requests to their model. Raises ServerError when one is refused; then none goes on."""
        try:
            for request, line in zip(self._requests, self._lines, strict=True):
                request.stream = line
                self._dataplane.infer(request)
        except BaseException:
            self._cancel()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()
        # Each request has a line as its stream, and the line has this object: a cycle that would keep long prompts in
        # memory until the garbage collector runs.
        self._requests, self._lines, self._error = (), [], None

    async def run(self) -> None:
        """Let the listener hear everything, until every request has ended.

        Raises the first error, after the requests before it were heard.
        """
        while True:
            if self._unread and self._error is None:
                await self._listener.wait_for_room()
                self._has_read()
                while self._arrived and not self._unread:
                    self._hand_on(*self._arrived.popleft())
                continue
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self, line: _Line, response: InferResponse) -> None:
        """A response of one of the requests. Called by its stream."""
        if response.is_final:
            self._num_open -= 1
        if self._is_over or self._error is not None:
            line.has_read()
        elif self._unread:
            self._arrived.append((line, response))
            return
        else:
            self._hand_on(line, response)
        if self._num_open == 0 or self._unread or self._error is not None:
            self._wake()

    def _hand_on(self, line: _Line, response: InferResponse) -> None:
        """Let the listener hear a response. What it raises ends the call, not the model that delivers here."""
        try:
            if response.error is not None:
                raise response.error
            has_room = self._listener.hear(line.index, response)
        except Exception as error:
            self._error = error
            line.has_read()
            return
        if has_room:
            line.has_read()
        else:
            self._unread.append(line)

    def _has_read(self) -> None:
        unread, self._unread = self._unread, []
        for line in unread:
            line.has_read()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _cancel(self) -> None:
        """Nothing is heard any more. Safe to repeat."""
        self._is_over = True
        self._has_read()
        while self._arrived:
            self._arrived.popleft()[0].has_read()
        for request, line in zip(self._requests, self._lines, strict=True):
            if not line.is_finished:
                request.cancel()


class _Line(ResponseStream):
    """Where the responses of one of the requests arrive."""

    __slots__ = ("_requests", "index")

    protocol = "HTTP"
    reads_later = True

    def __init__(self, requests: Requests, index: int) -> None:
        super().__init__()
        self.index = index
        self._requests = requests

    def deliver(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        self.is_finished = response.is_final
        self._requests.take(self, response)


class _Collector(Listener):
    """Keeps the response of each request that has outputs."""

    def __init__(self) -> None:
        self.found: dict[int, InferResponse] = {}

    def hear(self, prompt: int, response: InferResponse) -> bool:
        if response.outputs:
            self.found[prompt] = response
        return True


async def responses_of(dataplane: AnyDataPlane, requests: Sequence[InFlightRequest]) -> list[InferResponse | None]:
    """The response with outputs of each request, which are sent together; None where there is none.

    Raises the first error.
    """
    collector = _Collector()
    with Requests(dataplane, requests, collector) as sent:
        await sent.run()
    return [collector.found.get(index) for index in range(len(requests))]


async def only_responses(dataplane: AnyDataPlane, requests: Sequence[InFlightRequest]) -> list[InferResponse]:
    """The same of requests that must have an answer each. Raises CancelledError for one without."""
    found = []
    for request, response in zip(requests, await responses_of(dataplane, requests), strict=True):
        if response is None:
            raise CancelledError(f"model '{request.model_name}' ended without an answer")
        found.append(response)
    return found
