"""One request that no client sent, executed on an instance that no worker drives."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.sender import ResponseSender, ResponseTarget
from modelserver.errors import InternalError, ServerError
from modelserver.execution.executor import Executor

# How long a model may take with the responses of one probe before it is thought to have forgotten it.
_PATIENCE_S = 300.0


def execute_probe(executor: Executor, request: InFlightRequest) -> int:
    """Execute a request to its end; how long that took, in ns. Blocking. Raises the ServerError of a response."""
    began_ns = executor.now_ns()
    if executor.answers_later:
        _execute_to_end(executor, request)
    else:
        response: InferResponse = executor.run([request]).entries[0]
        if response.error is not None:
            raise response.error
    return executor.now_ns() - began_ns


def _execute_to_end(executor: Executor, request: InFlightRequest) -> None:
    target = _ProbeTarget(executor, request)
    request.own_sender = ResponseSender(target)
    entry = executor.run([request]).entries[0]
    # Kept until its answer is there: a sender that is gone without one has dropped the request.
    sender, request.own_sender = request.own_sender, None
    if entry is not None:
        target.send(entry, is_final=True, wait=False)
    del sender
    target.wait()


class _ProbeTarget(ResponseTarget):
    """Takes the responses of a probe and keeps the first error."""

    is_cancelled = False
    has_room = True

    def __init__(self, executor: Executor, request: InFlightRequest) -> None:
        self._check = executor.assembler.check_sent
        self._request = request
        self._ended = SimpleQueue[ServerError | None]()  # `put` is safe in the garbage collector's hands
        self._error: ServerError | None = None

    def send(self, response: InferResponse | ServerError | None, *, is_final: bool, wait: bool) -> None:  # noqa: ARG002  # there is room
        if isinstance(response, ServerError):
            self._error = self._error or response
        elif response is not None:
            self._error = self._error or response.error
            self._check(self._request, response)
        if is_final:
            self._ended.put(self._error)

    def watch(self, *, on_cancel: Callable[[], None] | None, on_room: Callable[[], None] | None) -> None:
        """A probe is never cancelled, and always has room."""

    def note(self, event: str, time_ns: int) -> None:
        """A probe has no trace."""

    def drop(self) -> None:
        self._ended.put(self._error or InternalError("a response sender was dropped without finishing its request"))

    def wait(self) -> None:
        """Until the final response; raises the first error."""
        try:
            error = self._ended.get(timeout=_PATIENCE_S)
        except Empty:
            raise InternalError(f"a request was not finished within {_PATIENCE_S:.0f} s") from None
        if error is not None:
            raise error
