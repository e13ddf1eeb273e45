"""The server's side of the calls of a child process: inference by other models, and control of them.

Everything here runs on the loop thread of the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from modelserver.backend import InferResponse, InternalError, ServerCalls, ServerError, UnavailableError
from modelserver.core.request import CalledRequest, CallOrigin, InFlightRequest, check_has_free_instance
from modelserver.core.response import ResponseStream
from modelserver.errors import ErrorCode
from modelserver.execution.process.messages import (
    Ask,
    Call,
    ErrorRecord,
    Message,
    Reply,
    RequestRecord,
    ResponseRecord,
    Told,
)
from modelserver.execution.process.packing import Payload, response_record, unpack
from modelserver.execution.process.shared_buffer import ByteView

logger = logging.getLogger(__name__)


class _CallStream(ResponseStream):
    """The responses of a call of a decoupled model, which waits for the calling model to read them."""

    __slots__ = ()

    reads_later: ClassVar[bool] = True


@dataclass(slots=True)
class _OpenCall:
    """A call in progress. `parents` are the requests that it may have been made for and whose callers still wait."""

    request: InFlightRequest
    parents: set[int]


class ModelCalls:
    """The unanswered calls of one child.

    `send` sends a message to the child; `find_request` finds a request that the child executes by its number.
    """

    def __init__(
        self,
        send: Callable[[Message, Payload | None], None],
        find_request: Callable[[int], InFlightRequest | None],
        server: ServerCalls | None,
        origin: CallOrigin,
    ) -> None:
        self._send = send
        self._find_request = find_request
        self._server = server
        self._origin = origin
        self._open: dict[int, _OpenCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._token = object()  # the owner of the child's metrics

    def begin(self, message: Call, payload: bytearray | ByteView) -> None:
        """Let the server answer a request of the model; each response goes back as a `Reply`."""
        number = message.number
        record = message.request
        assert record is not None, "a call without a request"
        try:
            if self._server is None:
                raise UnavailableError("models can be called from within a server only")
            request = _request_of(record, payload, self._origins(message.parent))
            if message.is_decoupled:
                request.stream = _CallStream()
            check_has_free_instance(request.model_name, request.call_origins)
            stream = self._server.infer(request)
        except ServerError as error:
            self._reply(number, _refusal(record.model_name, error), is_final=True)
            return
        if request.is_decoupled and not message.is_decoupled:
            request.cancel()
            self._reply(number, _decoupled_error(record.model_name), is_final=True)
            return
        self._open[number] = _OpenCall(request, self._waiting(message))
        self._follow(number, stream)

    def read(self, number: int, count: int) -> None:
        """The model has read `count` more of the responses."""
        call = self._open.get(number)
        if call is not None:
            for _ in range(count):
                call.request.stream.has_read()

    def cancel(self, number: int) -> None:
        """The model has cancelled the call.

        The reply wakes the child: the thread that waits for this call's responses may be the one that receives.
        """
        call = self._open.pop(number, None)
        if call is not None:
            call.request.cancel()
            self._reply(number, None, is_final=True)

    def cancel_for(self, parent: int) -> None:
        """The caller of the request `parent` has left: cancel the calls that were made for it alone."""
        for call in list(self._open.values()):
            if parent in call.parents:
                call.parents.remove(parent)
                if not call.parents:
                    call.request.cancel()

    def answer(self, message: Ask) -> None:
        """Answer a question that is not inference, now or later."""
        server = self._server
        if server is None:
            self._tell(message, error=UnavailableError(f"{message.topic} works within a server only"))
            return
        if message.topic.startswith("metric_"):
            self._answer_now(message, lambda: server.metrics.ask(self._token, message.topic, message.arguments))
            return
        task = asyncio.get_running_loop().create_task(self._answer_later(server, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        """The child is gone: cancel its calls."""
        calls, self._open = self._open, {}
        for call in calls.values():
            call.request.cancel()
        # The connection refers to its calls: without this, a cycle would keep both until a garbage collection.
        self._send, self._find_request = _drop, _find_nothing
        if self._server is not None:
            self._server.metrics.forget(self._token)

    def _follow(self, number: int, stream: ResponseStream) -> None:
        def on_response(response: InferResponse) -> None:
            if number not in self._open:
                return
            if response.is_final:
                del self._open[number]
            is_mark = response.is_final and response.error is None and not response.outputs and not response.parameters
            self._reply(number, None if is_mark else response, is_final=response.is_final)

        stream.subscribe(on_response)

    def _waiting(self, message: Call) -> set[int]:
        """The requests that the call may have been made for, without those whose callers have left."""
        parents = set(range(message.parent, message.parent + message.num_parents)) if message.parent else set()
        for number in tuple(parents) if len(parents) > 1 else ():
            request = self._find_request(number)
            if request is not None and request.is_cancelled and len(parents) > 1:
                parents.remove(number)
        return parents

    def _origins(self, parent: int) -> tuple[CallOrigin, ...]:
        request = self._find_request(parent) if parent else None
        if request is None:
            return ()
        return (*request.call_origins, self._origin)

    def _reply(self, number: int, response: InferResponse | ServerError | None, *, is_final: bool) -> None:
        payload = Payload()
        record: ResponseRecord | None = None
        try:
            record = None if response is None else response_record(response, payload)
        except ServerError as error:
            record = ResponseRecord([], ErrorRecord.of(error), None)
        self._send(Reply(number=number, response=record, is_final=is_final), payload)

    def _answer_now(self, message: Ask, call: Callable[[], Any]) -> None:
        try:
            self._tell(message, value=call())
        except ServerError as error:
            self._tell(message, error=error)

    async def _answer_later(self, server: ServerCalls, message: Ask) -> None:
        try:
            self._tell(message, value=await server.ask(message.topic, message.arguments))
        except ServerError as error:
            self._tell(message, error=error)
        except Exception as error:
            logger.exception("%s of %s failed", message.topic, self._origin.instance)
            self._tell(message, error=InternalError(f"{message.topic} failed: {type(error).__name__}: {error}"))

    def _tell(self, message: Ask, *, value: Any = None, error: ServerError | None = None) -> None:
        if message.number:
            record = ErrorRecord.of(error) if error is not None else None
            self._send(Told(number=message.number, value=value, error=record), None)
        elif error is not None:
            logger.error("%s: %s: %s", self._origin.instance, message.topic, error.message)


def _drop(_message: Message, _payload: Payload | None) -> None:
    """Send nothing: the child is gone."""


def _find_nothing(_number: int) -> None:
    return None


def _request_of(record: RequestRecord, payload: bytearray | ByteView, origins: tuple[CallOrigin, ...]) -> CalledRequest:
    return CalledRequest(
        model_name=record.model_name,
        version=record.version,
        inputs={tensor.name: unpack(tensor, payload) for tensor in record.inputs},
        id=record.id,
        outputs=record.outputs,
        parameters=record.parameters,
        priority=record.priority,
        timeout_us=record.timeout_us,
        deadline_ns=record.deadline_ns,
        sequence_id=record.sequence_id,
        sequence_start=record.sequence_start,
        sequence_end=record.sequence_end,
        trace_parent=record.trace_parent,
        call_origins=origins,
    )


def _refusal(name: str, error: ServerError) -> ServerError:
    """The error of a call that was not accepted, in the words that models look for."""
    message = error.message
    if error.code is ErrorCode.UNAVAILABLE:
        message = f"Failed for execute the inference request. Model '{name}' is not ready: {message}"
    return ServerError(f"Model {name} - Error when running inference: {message}", code=error.code)


def _decoupled_error(name: str) -> InternalError:
    return InternalError(
        f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
        "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
        "decoupled models."
    )
