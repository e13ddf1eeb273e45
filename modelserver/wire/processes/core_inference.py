"""The core's side of inference: requests that a front has decoded, and their responses on their way back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import msgspec

from modelserver.core.datatype import Datatype
from modelserver.core.long_work import Result, Slices, at_once, long_work
from modelserver.core.recognition import Memory
from modelserver.core.request import InFlightRequest, RequestForm
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor, is_long
from modelserver.errors import CancelledError, InternalError, ServerError
from modelserver.execution.process.messages import RequestRecord, ResponseRecord, TensorRecord
from modelserver.execution.process.packing import Payload, Unpacker, response_record
from modelserver.execution.process.shared_buffer import ByteView
from modelserver.planes.data import DataPlane
from modelserver.wire.processes.link import INLINE_BYTES, Link
from modelserver.wire.processes.messages import Credit, Failed, FrontBundle, Infer, Inferred, portable

_logger = logging.getLogger(__name__)

# Heads that are remembered; longer or more than this come from clients that vary their requests.
_MAX_REMEMBERED: Final = 1024
_MAX_REMEMBERED_BYTES: Final = 1024

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(RequestRecord).decode

# The decoded content of equal heads, and whether the tensors take long to unpack.
Head = tuple[RequestRecord, tuple[Unpacker, ...], RequestForm | None, bool]
# The record of a response, encoded, and its tensors.
Packed = tuple[bytes, Payload]


class RemoteRequests:
    """The requests of one front that are in flight. Event loop thread only."""

    def __init__(self, dataplane: DataPlane, link: Link[FrontBundle], *, is_on: bool = True) -> None:
        """`is_on`: requests that repeat are recognised."""
        self._dataplane = dataplane
        self._link = link
        self._send = link.send
        self._requests: dict[int, InFlightRequest] = {}
        self._heads = Memory[bytes, Head](_MAX_REMEMBERED, is_on=is_on)
        # While a response is packed beside the event loop: the call's later responses.
        self._waiting: dict[int, deque[InferResponse]] = {}

    @property
    def num_inflight(self) -> int:
        return len(self._requests)

    def infer(self, message: Infer) -> None:
        """Have a request executed; its responses go back over the link."""
        call = message.call
        try:
            record, unpackers, form, is_long = self._heads.known.get(message.head) or self._read_head(message.head)
            if is_long:
                self._infer_long(message, record, unpackers)
                return
            data = self._data(message)
            inputs = {unpack.name: unpack(data) for unpack in unpackers}
            request = self._request(message, record, form, inputs)
            # Before the request is submitted: it may be answered within that call.
            self._requests[call] = request
            self._dataplane.infer(request)
        except Exception as error:
            self._requests.pop(call, None)
            self._link.send(_failed(call, error))

    def _infer_long(self, message: Infer, record: RequestRecord, unpackers: Sequence[Unpacker]) -> None:
        """As `infer`, for a request that is unpacked beside the event loop once its shapes are found valid."""
        call = message.call
        inputs = {unpack.name: unpack.placeholder() for unpack in unpackers}
        request = self._request(message, record, None, inputs)
        self._dataplane.check_inputs(request)
        self._requests[call] = request

        def take(result: Result[dict[str, Tensor]]) -> None:
            try:
                request.inputs = result()
                if request.is_cancelled:
                    raise CancelledError("the request was cancelled")
                self._dataplane.infer(request)
            except Exception as error:
                if self._requests.pop(call, None) is not None:
                    self._link.send(_failed(call, error))

        long_work().start(_unpacking(unpackers, self._data(message)), take)

    def _data(self, message: Infer) -> bytes | ByteView:
        content = message.content
        return content if type(content) is bytes else self._link.view(content)

    def cancel(self, call: int) -> bool:
        """The client left; whether `call` is one of these requests."""
        request = self._requests.get(call)
        if request is not None:
            request.cancel()
        return request is not None

    def credit(self, message: Credit) -> bool:
        """The client has been sent responses; whether `message` is about one of these requests."""
        request = self._requests.get(message.call)
        if request is None:
            return False
        for _ in range(message.num_pieces):
            request.stream.has_read()
        return True

    def close(self) -> None:
        """The front is gone, and with it all its clients."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.cancel()

    def answer(self, call: int, response: InferResponse) -> None:
        """Send a response on its way, unless its client has left."""
        waiting = self._waiting.get(call)
        if waiting is not None:
            waiting.append(response)
        elif is_long(response.outputs, as_text=False) and call in self._requests:
            self._waiting[call] = deque()
            placed = self._placed(self._requests[call])
            long_work().start(at_once(partial(_pack, response, placed)), partial(self._answer_packed, call, response))
        else:
            self._answer(call, response)

    def _answer_packed(self, call: int, response: InferResponse, packed: Result[Packed]) -> None:
        self._answer(call, response, packed)
        for later in self._waiting.pop(call):
            self.answer(call, later)

    def _answer(self, call: int, response: InferResponse, packed: Result[Packed] | None = None) -> None:
        request = self._requests.pop(call, None) if response.is_final else self._requests.get(call)
        if request is None:
            return
        if response.error is not None:
            self._link.send(
                _failed(call, response.error, is_final=response.is_final, is_decoupled=request.is_decoupled)
            )
            return
        try:
            tensors: bytes | Payload
            head, tensors = self._packed(response, self._placed(request)) if packed is None else packed()
            if not isinstance(tensors, bytes):
                version, is_final, is_decoupled = request.version, response.is_final, request.is_decoupled
                self._link.send_with(
                    call, tensors, lambda content: Inferred(call, version, head, is_final, content, is_decoupled)
                )
                return
        except Exception as error:
            self._requests.pop(call, None)
            request.cancel()
            self._link.send(_failed(call, error))
            return
        self._send(Inferred(call, request.version, head, response.is_final, tensors, request.is_decoupled))

    @staticmethod
    def _placed(request: InFlightRequest) -> Collection[str]:
        """The outputs that the client finds in shared memory."""
        return () if request.transfer is None else request.transfer.placed

    def _packed(self, response: InferResponse, placed: Collection[str]) -> tuple[bytes, bytes | Payload]:
        outputs = response.outputs
        if len(outputs) == 1 and not response.parameters and not placed:
            (tensor,) = outputs
            data = tensor.data
            # A quarter of the work for most small answers.
            if data.nbytes <= INLINE_BYTES and tensor.datatype is not Datatype.BYTES:
                record = TensorRecord(tensor.name, tensor.datatype.value, data.shape, 0, data.nbytes)
                return _encode(ResponseRecord([record], None, None)), data.tobytes()
        return _pack(response, placed)

    def _request(
        self, message: Infer, record: RequestRecord, form: RequestForm | None, inputs: dict[str, Tensor]
    ) -> InFlightRequest:
        return InFlightRequest(
            model_name=record.model_name,
            version=record.version,
            inputs=inputs,
            id=message.id.decode("utf-8", "surrogatepass") if message.id else "",
            outputs=record.outputs,
            parameters=record.parameters,
            priority=record.priority,
            timeout_us=record.timeout_us,
            deadline_ns=message.deadline_ns,
            sequence_id=record.sequence_id,
            sequence_start=record.sequence_start,
            sequence_end=record.sequence_end,
            stream=(_PacedAnswerStream if message.is_paced else _AnswerStream)(self, message.call),
            form=form,
            transfer=record.transfer,
            trace_parent=record.trace_parent,
            caller=message.caller,
        )

    def _read_head(self, head: bytes) -> Head:
        record = _decode_request(head)
        unpackers = tuple(map(Unpacker, record.inputs))
        # A sequence's requests keep their order.
        is_long = not record.sequence_id and any(unpack.is_long for unpack in unpackers)
        if len(head) > _MAX_REMEMBERED_BYTES or record.parameters:
            return record, unpackers, None, is_long
        has_bytes = any(tensor.datatype == Datatype.BYTES.value for tensor in record.inputs)
        found: Head = (record, unpackers, None if has_bytes else RequestForm(), is_long)
        self._heads.remember(head, found)
        return found


def _unpacking(unpackers: Sequence[Unpacker], data: bytes | ByteView) -> Slices[dict[str, Tensor]]:
    inputs: dict[str, Tensor] = {}
    for unpack in unpackers:
        inputs[unpack.name] = yield from unpack.slices(data)
    return inputs


def _pack(response: InferResponse, placed: Collection[str]) -> Packed:
    """The response without the bytes of the outputs in `placed`."""
    payload = Payload()
    if not placed:
        return _encode(response_record(response, payload)), payload
    records = [
        TensorRecord(tensor.name, tensor.datatype.value, tensor.shape, 0, 0)
        if tensor.name in placed
        else payload.add(tensor)
        for tensor in response.outputs
    ]
    parameters = dict(response.parameters) if response.parameters is not None else None
    return _encode(ResponseRecord(records, None, parameters)), payload


class _AnswerStream(ResponseStream):
    """Sends what is delivered to it."""

    __slots__ = ("_call", "_requests")

    def __init__(self, requests: RemoteRequests, call: int) -> None:
        self._requests = requests
        self._call = call
        self.is_finished = False
        self.on_read = None

    def deliver(self, response: InferResponse) -> None:
        if not self.is_finished:
            self.is_finished = response.is_final
            self._requests.answer(self._call, response)


class _PacedAnswerStream(_AnswerStream):
    """Learns from the front how far the client has read."""

    __slots__ = ()

    reads_later = True


def _failed(call: int, error: Exception, *, is_final: bool = True, is_decoupled: bool = False) -> Failed:
    if not isinstance(error, ServerError):
        _logger.error("unexpected error while handling an inference request", exc_info=error)
        error = InternalError(f"internal error: {type(error).__name__}; the server's log has the details")
    text = portable(error.message)
    return Failed(call, error.code.value, text, is_final, is_decoupled, error.retry_after_s or 0.0)
