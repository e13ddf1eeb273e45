"""The data plane as the frontends of a front process see it: inference that the core answers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Final

import msgspec
import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.long_work import Result, Slices, at_once, long_work
from modelserver.core.recognition import Memory
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ParameterValue, ResponseStream
from modelserver.core.tensor import Tensor, is_long
from modelserver.errors import CancelledError, InternalError, InvalidArgumentError, ServerError
from modelserver.execution.process.messages import ErrorRecord, ResponseRecord, TensorRecord
from modelserver.execution.process.packing import Payload, Unpacker, request_record
from modelserver.execution.process.shared_buffer import ByteView
from modelserver.telemetry.access_log import note_request
from modelserver.wire.processes.link import INLINE_BYTES, Link
from modelserver.wire.processes.messages import Cancel, CoreBundle, Credit, Failed, Infer, Inferred

_logger = logging.getLogger(__name__)

# Heads of responses that are remembered; longer or more than this come from clients that vary their shapes.
_MAX_REMEMBERED: Final = 1024
_MAX_REMEMBERED_BYTES: Final = 1024

_encode = msgspec.msgpack.Encoder().encode
_decode_response = msgspec.msgpack.Decoder(ResponseRecord).decode


class AbsentTensor:
    """Placeholder for an output that the core has put into the client's region: no bytes are sent."""

    __slots__ = ("_tensor", "name")

    is_long = False

    def __init__(self, record: TensorRecord) -> None:
        datatype = Datatype(record.datatype)
        self.name = record.name
        self._tensor = Tensor(record.name, datatype, np.broadcast_to(np.zeros((), datatype.numpy), record.shape))

    def __call__(self, _payload: object) -> Tensor:
        return self._tensor


def _unpacker(record: TensorRecord) -> Unpacker | AbsentTensor:
    return AbsentTensor(record) if record.nbytes == 0 and 0 not in record.shape else Unpacker(record)


# The decoded content of equal heads of responses, and whether the tensors take long to unpack.
Head = tuple[tuple[Unpacker | AbsentTensor, ...], dict[str, ParameterValue] | None, bool]
# The head of a request, and its tensors.
Packed = tuple[bytes, Payload]


class _SentHead:
    """The head of a request of some form, which equal requests to the same model with the same priority have too.

    Not for forms with BYTES tensors, because their lengths are part of the head.
    """

    __slots__ = ("head", "of")

    def __init__(self, request: InFlightRequest, head: bytes) -> None:
        self.of = (request.model_name, request.version, request.priority)
        self.head = head


class RemoteDataPlane:
    """Sends requests to the core and passes the responses to their streams. Event loop thread only."""

    def __init__(self, link: Link[CoreBundle], numbers: count[int], *, is_on: bool = True) -> None:
        """`numbers` are those of calls, unique in this process. `is_on`: heads of responses are remembered."""
        self._link = link
        self._send = link.send
        self._next_number = numbers.__next__
        self._on_cancel = self._cancel
        self._requests: dict[int, InFlightRequest] = {}
        self._heads = Memory[bytes, Head](_MAX_REMEMBERED, is_on=is_on)
        # While a response is unpacked beside the event loop: later messages of the same call.
        self._waiting: dict[int, deque[Inferred | Failed]] = {}

    @property
    def num_inflight(self) -> int:
        """Requests that the core has not answered."""
        return len(self._requests)

    def infer(self, request: InFlightRequest) -> ResponseStream:
        """Send the request to the core; its stream brings the responses or the error.

        Raises InvalidArgumentError for a request that cannot be encoded; other errors arrive on the stream.
        """
        note_request(request)
        call = self._next_number()
        stream = request.stream
        if not request.sequence_id and is_long(request.inputs.values(), as_text=False):
            self._requests[call] = request
            request.on_cancel = self._on_cancel
            long_work().start(at_once(partial(_pack, request)), partial(self._infer_packed, call, request))
            return stream
        head, tensors = self._packed(request)
        self._requests[call] = request
        request.on_cancel = self._on_cancel
        self._send_request(call, request, head, tensors)
        return stream

    def _infer_packed(self, call: int, request: InFlightRequest, packed: Result[Packed]) -> None:
        """Send a request that was packed beside the event loop."""
        try:
            if request.is_cancelled:
                raise CancelledError("the request was cancelled")
            head, payload = packed()
        except Exception as error:
            del self._requests[call]
            if not isinstance(error, ServerError):
                _logger.exception("a request could not be packed")
                error = InternalError("the request could not be sent to the core; the server's log has the details")
            request.stream.deliver(InferResponse(error=error))
            return
        self._send_request(call, request, head, payload)

    def _send_request(self, call: int, request: InFlightRequest, head: bytes, tensors: bytes | Payload) -> None:
        request_id = request.id
        encoded_id = request_id.encode("utf-8", "surrogatepass") if request_id else b""
        stream = request.stream
        if stream.reads_later:
            stream.on_read = partial(self._has_read, call)
        deadline_ns, is_paced, caller = request.deadline_ns, stream.reads_later, request.caller
        if isinstance(tensors, bytes):
            self._send(Infer(call, head, encoded_id, deadline_ns, tensors, is_paced, caller))
            return
        self._link.send_with(
            call,
            tensors,
            lambda content: Infer(call, head, encoded_id, deadline_ns, content, is_paced, caller),
            at_once=bool(request.sequence_id),  # whose next request is another call
        )

    def check_inputs(self, request: InFlightRequest) -> None:
        """As that of the data plane; the core, which knows the models, checks in `infer`."""

    def on_inferred(self, message: Inferred) -> None:
        """A response has arrived."""
        waiting = self._waiting.get(message.call)
        if waiting is not None:
            waiting.append(message)
            return
        head = message.head
        unpackers, parameters, takes_long = self._heads.known.get(head) or self._read_head(head)
        content = message.content
        data = content if type(content) is bytes else self._link.view(content)
        if takes_long:
            self._waiting[message.call] = deque()
            long_work().start(_unpacked(unpackers, data), partial(self._take_unpacked, message, parameters))
            return
        self._deliver(
            message, InferResponse([unpack(data) for unpack in unpackers], None, parameters, message.is_final)
        )

    def _take_unpacked(
        self, message: Inferred, parameters: Mapping[str, ParameterValue] | None, outputs: Result[list[Tensor]]
    ) -> None:
        self._deliver(message, InferResponse(outputs(), None, parameters, message.is_final))
        for later in self._waiting.pop(message.call):
            if isinstance(later, Inferred):
                self.on_inferred(later)
            else:
                self.on_failed(later)

    def _deliver(self, message: Inferred, response: InferResponse) -> None:
        call = message.call
        request = self._requests.pop(call) if message.is_final else self._requests[call]
        request.version = message.version
        request.is_decoupled = message.is_decoupled
        request.stream.deliver(response)

    def on_failed(self, message: Failed) -> None:
        """The request has failed."""
        call = message.call
        waiting = self._waiting.get(call)
        if waiting is not None:
            waiting.append(message)
            return
        request = self._requests.pop(call) if message.is_final else self._requests[call]
        request.is_decoupled = message.is_decoupled
        error = ErrorRecord(message.code, message.text).error()
        error.retry_after_s = message.retry_after_s or None
        request.stream.deliver(InferResponse(error=error, is_final=message.is_final))

    def _packed(self, request: InFlightRequest) -> tuple[bytes, bytes | Payload]:
        """The part that equal requests share, and the tensors."""
        form = request.form
        inputs = request.inputs
        sent = form.signature if form is not None else None
        if isinstance(sent, _SentHead) and sent.of == (request.model_name, request.version, request.priority):
            if len(inputs) == 1:
                (tensor,) = inputs.values()
                if tensor.data.nbytes <= INLINE_BYTES:
                    return sent.head, tensor.data.tobytes()
            payload = Payload()
            for tensor in inputs.values():
                payload.add(tensor)
            return sent.head, payload
        head, payload = _pack(request)
        if form is not None and all(tensor.datatype is not Datatype.BYTES for tensor in inputs.values()):
            form.signature = _SentHead(request, head)
        return head, payload

    def _read_head(self, head: bytes) -> Head:
        record = _decode_response(head)
        unpackers = tuple(map(_unpacker, record.outputs))
        found: Head = (unpackers, record.parameters, any(unpack.is_long for unpack in unpackers))
        if len(head) <= _MAX_REMEMBERED_BYTES and not record.parameters:
            self._heads.remember(head, found)
        return found

    def _has_read(self, call: int) -> None:
        if call in self._requests:
            self._send(Credit(call, 1))

    def _cancel(self, request: InFlightRequest) -> None:
        # Requests are rarely cancelled, so there is no index for finding them.
        for call, each in self._requests.items():
            if each is request:
                self._link.send(Cancel(call))
                return


def _pack(request: InFlightRequest) -> Packed:
    payload = Payload()
    record = request_record(request, payload)
    try:
        head = _encode(
            msgspec.structs.replace(
                record, id="", deadline_ns=None, transfer=request.transfer, trace_parent=request.trace_parent
            )
        )
    except UnicodeEncodeError:
        raise InvalidArgumentError("a name or parameter of the request is not UTF-8") from None
    return head, payload


def _unpacked(unpackers: Sequence[Unpacker | AbsentTensor], data: bytes | ByteView) -> Slices[list[Tensor]]:
    tensors: list[Tensor] = []
    for unpack in unpackers:
        if isinstance(unpack, Unpacker):
            tensors.append((yield from unpack.slices(data)))
        else:
            tensors.append(unpack(data))
    return tensors
