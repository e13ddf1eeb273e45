"""The server's end of requests that models answer through a `ResponseSender`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from modelserver.core.clock import Clock
from modelserver.core.reading import Reading
from modelserver.core.request import InFlightRequest
from modelserver.core.response import RESCHEDULE, InferResponse
from modelserver.core.sender import ResponseSender, ResponseTarget, check_send
from modelserver.errors import CancelledError, InternalError, ServerError, UnavailableError
from modelserver.scheduling.scheduler import BatchSource
from modelserver.telemetry.statistics import BatchTiming, ModelStatistics, ResponseKind
from modelserver.telemetry.statistics_snapshot import FailureReason

logger = logging.getLogger(__name__)

# Raises ServerError for a response that its model must not send; else returns what is to be delivered.
Check = Callable[[InFlightRequest, InferResponse], InferResponse]


class ResponseDispatcher:
    """Opens a response for each request of an instance, and brings sent responses to the event loop.

    One call to the loop brings all responses that were sent before its next turn. `_lock` guards the outbox and the
    open responses; only the loop's `call_soon_threadsafe` is called while it is held.
    """

    def __init__(
        self,
        source: BatchSource,
        check: Check,
        *,
        model_name: str,
        is_decoupled: bool,
        statistics: ModelStatistics,
        clock: Clock,
        is_stepped: bool = False,
    ) -> None:
        """`is_stepped`: there are no batches; each request that succeeds is recorded as one."""
        self.is_stepped = is_stepped
        self.check = check
        self.model_name = model_name
        self.is_decoupled = is_decoupled
        self.statistics = statistics
        self.now_ns = clock.now_ns
        self._source = source
        self._lock = threading.Lock()
        self._has_closed = threading.Condition(self._lock)
        self._open: dict[InFlightRequest, OpenResponse] = {}
        self._outbox: list[tuple[OpenResponse, InferResponse]] = []
        self._is_held = False

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def open(self, requests: Sequence[InFlightRequest], enqueue_ns: Sequence[int], taken_ns: int) -> list[OpenResponse]:
        """An open response for each request, which now has a sender. Called from the worker's thread."""
        open_responses = [
            OpenResponse(self, request, taken_ns - queued_ns, taken_ns)
            for request, queued_ns in zip(requests, enqueue_ns, strict=True)
        ]
        with self._lock:
            self._open.update(zip(requests, open_responses, strict=True))
        for open_response in open_responses:
            open_response.begin()
        return open_responses

    def put(self, open_response: OpenResponse, response: InferResponse) -> None:
        """Deliver a response soon. From any thread."""
        with self._lock:
            self._outbox.append((open_response, response))
            if response.is_final:
                self._open.pop(open_response.request, None)
                if not self._open:
                    self._has_closed.notify_all()
            if len(self._outbox) == 1 and not self._is_held:
                self._source.post(self._deliver)

    def open_responses(self) -> list[OpenResponse]:
        """The open responses. From any thread."""
        with self._lock:
            return list(self._open.values())

    def open_response_of(self, request: InFlightRequest) -> OpenResponse | None:
        """The open response of a request; None if it has ended. From any thread."""
        with self._lock:
            return self._open.get(request)

    def hold(self) -> None:
        """Deliver nothing until `release`, which saves the loop calls when many responses are sent together."""
        with self._lock:
            self._is_held = True

    def release(self) -> None:
        """Deliver the responses sent since `hold`."""
        with self._lock:
            self._is_held = False
            if self._outbox:
                self._source.post(self._deliver)

    def forget(self, open_response: OpenResponse) -> None:
        """Drop the response without ending it. From any thread."""
        with self._lock:
            self._open.pop(open_response.request, None)
            if not self._open:
                self._has_closed.notify_all()

    def end_soon(self, open_response: OpenResponse) -> None:
        """End a response whose sender is gone, from the event loop. The garbage collector may call this."""
        self._source.post(open_response.end_dropped)

    def close(self, deadline_s: float) -> None:
        """Wait until all requests have ended, at most until `deadline_s` (monotonic), then end the rest. Blocking."""
        with self._lock:
            while self._open:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._has_closed.wait(left_s):
                    break
            open_responses = list(self._open.values())
        for open_response in open_responses:
            open_response.end(
                UnavailableError(f"model '{self.model_name}' was unloaded before the request was finished")
            )

    def _deliver(self) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, []
        self._source.deliver([(open_response.request, response) for open_response, response in outbox])
        for open_response, _ in outbox:
            if not open_response.request.stream.reads_later:
                open_response.reading.read()


class OpenResponse(ResponseTarget):
    """One request, from the call of `execute` to its final response. The dispatcher keeps it until then.

    `_lock` guards the state, and keeps responses in the order in which they are numbered.
    """

    __slots__ = (
        "_began_ns",
        "_dispatcher",
        "_error",
        "_is_abandoned",
        "_is_closed",
        "_is_ended",
        "_lock",
        "_num_sent",
        "_on_cancel",
        "_output_ns",
        "_queue_ns",
        "_sent_ns",
        "_taken_ns",
        "reading",
        "request",
    )

    def __init__(self, dispatcher: ResponseDispatcher, request: InFlightRequest, queue_ns: int, taken_ns: int) -> None:
        self.request = request
        self.reading = Reading()
        self._dispatcher = dispatcher
        self._lock = threading.Lock()
        self._queue_ns = queue_ns
        self._taken_ns = taken_ns
        self._began_ns = self._sent_ns = dispatcher.now_ns()
        self._output_ns = 0
        self._num_sent = 0
        self._error: ServerError | None = None  # the first one that was sent
        self._on_cancel: Callable[[InFlightRequest], None] | None = None  # the scheduler's
        self._is_abandoned = False
        self._is_ended = False  # the final response was sent
        self._is_closed = False  # ... and the model knows: it sent it, or got an error

    def begin(self) -> None:
        """Give the request its sender."""
        request = self.request
        request.own_sender = ResponseSender(self)
        self._on_cancel = request.on_cancel
        request.stream.on_read = self.reading.read
        request.on_cancel = self.reading.cancel
        if request.is_cancelled:
            self.reading.cancel()

    def note(self, event: str, time_ns: int) -> None:
        trace = self.request.trace
        if trace is not None:
            trace.note(event, time_ns)

    def settle(self, answer: object, *, has_failed: bool) -> None:
        """`execute` has returned: `answer` is the final response, or None if the sender sends it.

        `has_failed`: `execute` raised, and `answer` is the error.
        """
        sender, self.request.own_sender = self.request.own_sender, None
        if answer is RESCHEDULE:
            self._set_aside()
            return
        if answer is None or (has_failed and self._is_ended):
            return
        if self._is_ended:
            logger.error(
                "model '%s': execute() returned an answer to a request that its sender had ended, which is dropped",
                self._dispatcher.model_name,
            )
            return
        if not isinstance(answer, InferResponse | ServerError):
            text = (
                f"model '{self._dispatcher.model_name}': execute() returned an entry of type {type(answer).__name__}, "
                "expected an InferResponse, a ServerError, or None to answer later"
            )
            self.end(InternalError(text))
            return
        assert sender is not None, "only `settle` takes the sender away"
        with contextlib.suppress(ServerError):  # of a wrong answer: the client got the error
            sender.finish(answer)

    def _set_aside(self) -> None:
        """The request runs again and gets another open response: nothing can be sent through this one."""
        with self._lock:
            self._is_ended = self._is_closed = True
        self.request.on_cancel = self._on_cancel
        self._dispatcher.forget(self)

    @property
    def is_ended(self) -> bool:
        """Whether the final response was sent."""
        return self._is_ended

    # Called by senders, from any thread.

    @property
    def is_cancelled(self) -> bool:
        return self.request.is_cancelled or self._is_ended

    @property
    def has_room(self) -> bool:
        return self.reading.has_room

    def watch(self, *, on_cancel: Callable[[], None] | None, on_room: Callable[[], None] | None) -> None:
        self.reading.watch(on_cancel=on_cancel, on_room=on_room)

    def send(self, response: InferResponse | ServerError | None, *, is_final: bool, wait: bool) -> None:
        if wait and not self.reading.has_room and not _is_on_loop():
            self.reading.wait_for_room()
        with self._lock:
            if self._is_closed or not self._dispatcher.is_decoupled:
                check_send(response, is_final=is_final, is_closed=self._is_closed, num_sent=self._num_sent)
            if self._is_ended:  # by the one response of a model that is not decoupled
                self._is_closed = True
                return
            self._is_closed = is_final
            self._put(response, is_final=is_final or not self._dispatcher.is_decoupled)

    def drop(self) -> None:
        if not self._is_ended and not self._is_abandoned:
            self._dispatcher.end_soon(self)

    def abandon(self) -> None:
        """The server is about to end the request: ignore that its sender dies first."""
        self._is_abandoned = True

    def end(self, error: ServerError) -> None:
        """End the request with an error, unless it has ended."""
        with self._lock:
            if not self._is_ended:
                self._put(error, is_final=True)
            self._is_closed = True

    def end_dropped(self) -> None:
        name = self._dispatcher.model_name
        if self._dispatcher.is_decoupled and self.request.is_cancelled:
            self.end(CancelledError(f"request to model '{name}' was cancelled"))
        else:
            self.end(InternalError(f"model '{name}' dropped the response sender of a request without finishing it"))

    def _put(self, response: InferResponse | ServerError | None, *, is_final: bool) -> None:
        """Check, record and deliver. Lock held. Raises the error of a wrong response after sending it to the client."""
        called_ns = self._dispatcher.now_ns()
        refusal: ServerError | None = None
        if response is None:
            checked = InferResponse()
        elif isinstance(response, ServerError):
            checked = InferResponse(error=response)
        else:
            try:
                checked = response if response.error is not None else self._dispatcher.check(self.request, response)
            except ServerError as error:
                refusal, is_final = error, True
                checked = InferResponse(error=error)
        checked.is_final = is_final
        done_ns = self._dispatcher.now_ns()
        self._error = self._error or checked.error
        self._output_ns += done_ns - called_ns
        if self._dispatcher.is_decoupled:
            statistics = self._dispatcher.statistics
            is_usual = checked.error is None and not is_final
            kind = ResponseKind.SUCCESS if is_usual else self._kind(checked)
            statistics.record_response(self._num_sent, kind, called_ns - self._sent_ns, done_ns - called_ns)
            if not self._num_sent and kind is ResponseKind.SUCCESS:
                statistics.record_first_response(done_ns - self.request.arrival_ns)
        self._num_sent += response is not None
        self._sent_ns = done_ns
        if is_final:
            self._is_ended = True
            self._is_closed = self._is_closed or refusal is not None
            self._record(done_ns)
            self.reading.end()
        self.reading.sent()
        self._dispatcher.put(self, checked)
        if refusal is not None:
            raise refusal

    def _kind(self, response: InferResponse) -> ResponseKind:
        if response.error is not None:
            is_cancel = self.request.is_cancelled and isinstance(response.error, CancelledError)
            return ResponseKind.CANCEL if is_cancel else ResponseKind.FAIL
        if response.is_final and response.is_empty:
            return ResponseKind.EMPTY
        return ResponseKind.SUCCESS

    def _record(self, done_ns: int) -> None:
        """Record the request, which has ended."""
        if self.request.is_padding:
            return
        statistics = self._dispatcher.statistics
        request_ns = done_ns - self.request.arrival_ns
        if self._error is None:
            infer_ns = done_ns - self._began_ns - self._output_ns
            input_ns = self._began_ns - self._taken_ns
            statistics.record_ended(input_ns, infer_ns, self._output_ns, self._queue_ns, request_ns)
            if self.request.trace is not None:
                self.request.trace.note_durations(input_ns, infer_ns, self._output_ns)
            if self._dispatcher.is_stepped:
                self._record_as_batch(BatchTiming(input_ns, infer_ns, self._output_ns))
        elif self.request.is_cancelled and isinstance(self._error, CancelledError):
            statistics.record_failures(FailureReason.CANCELED, (request_ns,))
        else:
            statistics.record_failures(FailureReason.BACKEND, (request_ns,))

    def _record_as_batch(self, timing: BatchTiming) -> None:
        request, taken_ns = self.request, self._taken_ns
        self._dispatcher.statistics.record_batch(request.rows, timing, queue_ns=(), request_ns=())
        if request.trace is not None:
            prepared_ns = taken_ns + timing.compute_input_ns
            called_ns = prepared_ns + timing.compute_infer_ns
            request.trace.note_compute(taken_ns, prepared_ns, called_ns, taken_ns + timing.total_ns)


def _is_on_loop() -> bool:
    """Whether an event loop runs in this thread, which must not block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
