"""A request as seen by an instance in a child process, and the responses that its model sends by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

from modelserver.backend import InferResponse, ResponseSender, ResponseStream, ServerError
from modelserver.core.request import InFlightRequest
from modelserver.core.sender import ResponseTarget, check_send
from modelserver.execution.process.messages import RequestRecord, Sent
from modelserver.execution.process.packing import Payload, response_record, unpack
from modelserver.execution.process.server_connection import ServerConnection
from modelserver.execution.process.shared_buffer import ByteView


class HostedResponses(ResponseTarget):
    """The target of a `ResponseSender` in a child process. `_lock` keeps the responses of a request in order."""

    __slots__ = ("_connection", "_is_closed", "_is_decoupled", "_is_ended", "_lock", "_num_sent", "_number")

    def __init__(self, connection: ServerConnection, number: int, *, is_decoupled: bool) -> None:
        self._connection = connection
        self._number = number
        self._is_decoupled = is_decoupled
        self._lock = threading.Lock()
        self._num_sent = 0
        self._is_ended = False
        self._is_closed = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_ended or self._connection.is_cancelled(self._number)

    @property
    def has_room(self) -> bool:
        return self._is_ended or self._connection.has_room(self._number)

    def watch(self, *, on_cancel: Callable[[], None] | None, on_room: Callable[[], None] | None) -> None:
        if not self._is_ended:
            self._connection.watch(self._number, on_cancel=on_cancel, on_room=on_room)

    def send(self, response: InferResponse | ServerError | None, *, is_final: bool, wait: bool) -> None:
        if wait:
            self._connection.wait_for_room(self._number)
        with self._lock:
            if self._is_closed or not self._is_decoupled:
                check_send(response, is_final=is_final, is_closed=self._is_closed, num_sent=self._num_sent)
            if self._is_ended:  # by the one response of a model that is not decoupled
                self._is_closed = True
                return
            self._put(response, is_ended=is_final or not self._is_decoupled)
            self._num_sent += response is not None
            self._is_closed = is_final
            self._is_ended = is_final or not self._is_decoupled
        if self._is_ended:
            self._connection.close_request(self._number)

    def _put(self, response: InferResponse | ServerError | None, *, is_ended: bool) -> None:
        response_batch = self._connection.response_batch
        if response_batch is not None:
            response_batch.add(self._number, response, is_final=is_ended)
            return
        payload = Payload()
        record = None if response is None else response_record(response, payload)
        self._connection.send(Sent(number=self._number, response=record, is_final=is_ended), payload)

    def note(self, event: str, time_ns: int) -> None:
        response_batch = self._connection.response_batch
        if response_batch is not None:
            response_batch.message.notes.append((self._number, event, time_ns))

    def drop(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._connection.post(Sent(number=self._number, is_final=True, is_dropped=True))


_NO_STREAM = ResponseStream()


class HostedRequest(InFlightRequest, kw_only=True, eq=False):
    """A request in a child process. The server, which knows the caller, says whether it is cancelled."""

    number: int
    connection: ServerConnection
    taken_sender: ResponseSender | None = None

    @property  # type: ignore[misc]  # over the field of the same name
    def is_cancelled(self) -> bool:
        return self.connection.is_cancelled(self.number)

    @is_cancelled.setter
    def is_cancelled(self, _value: bool) -> None:
        """Ignored: the server decides."""

    @property
    def sender(self) -> ResponseSender:
        """The sender for answers later, or many: as in the server, but it may be taken at any time."""
        return self.taken_sender or self.take_sender()

    @property
    def has_taken_sender(self) -> bool:
        return self.taken_sender is not None

    def take_sender(self) -> ResponseSender:
        """Make the sender, once."""
        self.connection.keep_request(self.number)
        self.taken_sender = ResponseSender(
            HostedResponses(self.connection, self.number, is_decoupled=self.is_decoupled)
        )
        return self.taken_sender


def hosted_request(connection: ServerConnection, record: RequestRecord, payload: bytearray | ByteView) -> HostedRequest:
    """The request of a record. All share one stream, which is not used: streams are in the server."""
    return HostedRequest(
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
        rows=record.rows,
        is_decoupled=record.is_decoupled,
        arrival_ns=record.arrival_ns,
        trace_parent=record.trace_parent,
        adapters=record.adapters,
        stream=_NO_STREAM,
        number=record.number,
        connection=connection,
    )
