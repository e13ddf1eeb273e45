"""Calls of other models from within a model: `InferenceRequest.exec` and `async_exec`."""

from __future__ import annotations

import contextvars
import enum
from collections.abc import AsyncIterator, Iterator

from modelserver.backend import InferRequest, InferResponse, ServerError
from modelserver.backend.child import Responses

from .pb_error import TritonError, TritonModelException
from .pb_response import InferenceResponse
from .pb_tensor import Tensor


class Phase(enum.Enum):
    """The phase of a model: other models may be called only from `execute` on."""

    STARTING = 0
    SERVING = 1
    FINISHING = 2


class Execution:
    """The batch in progress: the model, the number of its first request, and the number of requests."""

    phase = Phase.STARTING
    model_name = ""
    requests = (0, 1)


# The requests that a coroutine answers, where many run at once.
current_requests: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("current_requests")


class ResponseIterator:
    """The responses of one call of a decoupled model, as they come; the last may be empty."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._ahead: list[InferResponse | ServerError | None] = []  # the first one, if it was waited for

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        response = self._ahead.pop() if self._ahead else self._responses.next()
        if response is None:
            raise StopIteration
        return response_of(response)

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        response = self._ahead.pop() if self._ahead else await self._responses.next_async()
        if response is None:
            raise StopAsyncIteration
        return response_of(response)

    async def begin(self) -> None:
        """Wait for the first response, so that a coroutine that goes on with `for` does not stop its loop for it."""
        try:
            self._ahead.append(await self._responses.next_async())
        except BaseException:
            self._responses.cancel()
            raise

    def cancel(self) -> None:
        """No further response is wanted."""
        self._responses.cancel()


def call(request: InferRequest, *, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """Let the server answer a request; blocks until the response is there, unless `decoupled`."""
    responses = _begin(request, decoupled=decoupled, is_async=False)
    if decoupled:
        return ResponseIterator(responses)
    return _only(responses.next())


async def call_async(request: InferRequest, *, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """As `call`, for a coroutine; of a decoupled call the first response is there, as with Triton."""
    responses = _begin(request, decoupled=decoupled, is_async=True)
    if decoupled:
        iterator = ResponseIterator(responses)
        await iterator.begin()
        return iterator
    try:
        return _only(await responses.next_async())
    finally:
        responses.cancel()


def response_of(response: InferResponse | ServerError) -> InferenceResponse:
    """The model's view of a response."""
    if isinstance(response, ServerError):
        return InferenceResponse(error=TritonError.of(response))
    if response.error is not None:
        return InferenceResponse(error=TritonError.of(response.error))
    parameters = dict(response.parameters) if response.parameters else None
    return InferenceResponse([Tensor.of(tensor) for tensor in response.outputs], parameters=parameters)


def _begin(request: InferRequest, *, decoupled: bool, is_async: bool) -> Responses:
    if Execution.phase is not Phase.SERVING:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    parents = current_requests.get(Execution.requests)
    try:
        return Responses(request, is_decoupled=decoupled, parents=parents, is_async=is_async)
    except ServerError as error:
        raise TritonModelException(error.message) from error


def _only(response: InferResponse | ServerError | None) -> InferenceResponse:
    if response is None:
        return InferenceResponse(error=TritonError("An error occurred while performing BLS request."))
    return response_of(response)
