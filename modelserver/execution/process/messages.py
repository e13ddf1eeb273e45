"""The messages between the server and a child process: small msgpack records, never pickles.

Tensors are described here (`TensorRecord`) and travel beside the record, see `channel.py`. Records hold no cycles, so
that the garbage collector need not look at them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from modelserver.core.request import LoadedAdapter, Transfer
from modelserver.core.response import ParameterValue
from modelserver.errors import CancelledError, ErrorCode, InternalError, ServerError
from modelserver.telemetry.measurement import Measurement

# Codes that have their own error classes.
_OWN_CLASSES: dict[ErrorCode, type[ServerError]] = {
    ErrorCode.INTERNAL: InternalError,
    ErrorCode.CANCELLED: CancelledError,
}


class TensorRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a tensor lies in the payload of its message."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ErrorRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A ServerError; codes travel by value."""

    code: str
    message: str

    @classmethod
    def of(cls, error: ServerError) -> ErrorRecord:
        message = error.message
        if not message.isascii():  # a lone surrogate, of a file's name say, has no UTF-8
            message = message.encode(errors="backslashreplace").decode()
        return cls(error.code.value, message)

    def error(self) -> ServerError:
        code = ErrorCode(self.code)
        own_class = _OWN_CLASSES.get(code)
        return ServerError(self.message, code=code) if own_class is None else own_class(self.message)


class RequestRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The fields of an InFlightRequest that an instance may see."""

    model_name: str
    version: int | None
    inputs: list[TensorRecord]
    id: str
    outputs: tuple[str, ...] | None
    parameters: dict[str, ParameterValue]
    priority: int
    timeout_us: int
    deadline_ns: int | None
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    rows: int
    # Identifies the request in later messages; 0 if there are none.
    number: int = 0
    is_decoupled: bool = False
    # Set for client requests between the processes of a server.
    transfer: Transfer | None = None
    trace_parent: str = ""
    # By the monotonic clock of the system, which all processes share.
    arrival_ns: int = 0
    adapters: tuple[LoadedAdapter, ...] = ()


class ResponseRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One InferResponse; or the instruction to execute the request again."""

    outputs: list[TensorRecord]
    error: ErrorRecord | None
    parameters: dict[str, ParameterValue] | None
    is_reschedule: bool = False


class RowsRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Responses with one element in each output: `rows` has the elements of each, `numbers` that of its request."""

    names: tuple[str, ...]
    datatypes: tuple[str, ...]
    numbers: list[int]
    rows: list[list[Any]]  # `RowValue`s


class MeasurementRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A Measurement."""

    name: str
    kind: str
    text: str
    value: float
    labels: dict[str, str]
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    adds_queue: bool = False

    @classmethod
    def of(cls, measured: Measurement) -> MeasurementRecord:
        return cls(
            measured.name,
            measured.kind,
            measured.text,
            measured.value,
            dict(measured.labels),
            tuple(measured.bounds),
            tuple(measured.counts),
            measured.adds_queue,
        )

    def measurement(self) -> Measurement:
        return Measurement(
            self.name, self.kind, self.text, self.value, self.labels, self.bounds, self.counts, self.adds_queue
        )


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages. `released` names the leases of the receiver's arena that the sender no longer uses."""

    released: list[int] = []


# From the server to the child.


class Begin(Message, tag=1):
    """Build the instance, or call the function, that `target` ("module:function") names.

    `busy_wait_us` is how long the child may poll for the next message before it sleeps.
    """

    target: str = ""
    arguments: dict[str, Any] = {}
    python_path: list[str] = []
    is_call: bool = False
    busy_wait_us: int = 0


class Execute(Message, tag=2):
    """Execute batches one after the other; each is answered in an `Executed` message.

    `sizes` are the numbers of requests in each, which follow each other in `requests`. `number` is that of the
    first batch.
    """

    requests: list[RequestRecord] = []
    sizes: list[int] = []
    number: int = 0


class AskReady(Message, tag=3):
    """Ask the instance whether it is ready; answered by `Readiness`."""

    number: int = 0


class Trim(Message, tag=6):
    """There is no traffic: give back memory. No answer."""


class Finish(Message, tag=5):
    """Close the instance and exit."""


class Cancelled(Message, tag=7):
    """The caller of a request has left."""

    number: int = 0


class Room(Message, tag=8):
    """Whether more responses of a request may be sent now."""

    number: int = 0
    has_room: bool = True


class Reply(Message, tag=9):
    """A response, with tensors, to the `Call` of this number."""

    number: int = 0
    response: ResponseRecord | None = None
    is_final: bool = True


class Told(Message, tag=10):
    """The answer to an `Ask`: a value, or an error."""

    number: int = 0
    value: Any = None
    error: ErrorRecord | None = None


class SequenceEnded(Message, tag=19):
    """A sequence has ended for the instance. No answer."""

    correlation_id: int | str = 0
    reason: str = ""


class Released(Message, tag=4):
    """Only returns leases, if there is no other message to send."""


# From the child to the server.


class Began(Message, tag=11):
    """The instance is ready, or the call has returned `result`; or it failed with `error`."""

    result: Any = None
    error: ErrorRecord | None = None
    has_readiness: bool = False
    answers_later: bool = False
    is_stepped: bool = False


class Executed(Message, tag=12):
    """The results of batches from `number` on: for each an error or None; and an entry per request of those without.

    An entry None means that `Sent` messages answer. `durations_ns` are the times that the batches took in the child.
    """

    responses: list[ResponseRecord | None] = []
    errors: list[ErrorRecord | None] = []
    number: int = 0
    durations_ns: list[int] = []


class Readiness(Message, tag=13):
    number: int = 0
    is_ready: bool = True


class Sent(Message, tag=14):
    """A response that a model sent by itself. `is_dropped`: the model dropped the request without ending it."""

    number: int = 0
    response: ResponseRecord | None = None
    is_final: bool = False
    is_dropped: bool = False


class SentTogether(Message, tag=21):
    """The responses that an instance sends in one step: for each the number of its request, its record, and whether it
    is the last; and `notes` for traces: number of the request, event, and time. `rows` come before `sent`."""

    notes: list[tuple[int, str, int]] = []
    rows: list[RowsRecord] = []
    sent: list[tuple[int, ResponseRecord | None, bool]] = []


class Measured(Message, tag=22):
    """The instance's current measurements for the metrics page."""

    measurements: list[MeasurementRecord] = []


class Call(Message, tag=15):
    """The model calls another model, or itself; `Reply` messages bring the responses."""

    number: int = 0
    request: RequestRecord | None = None
    is_decoupled: bool = False
    # The request that the call is made for, or the first of `num_parents` that it may be made for; 0 if unknown.
    parent: int = 0
    num_parents: int = 1


class CancelCall(Message, tag=16):
    """The model has cancelled a `Call`."""

    number: int = 0


class CallRead(Message, tag=20):
    """The model has read `count` more responses of a `Call` of a decoupled model."""

    number: int = 0
    count: int = 0


class Ask(Message, tag=17):
    """A question to the server that is not inference; answered by `Told` unless the number is 0."""

    number: int = 0
    topic: str = ""
    arguments: dict[str, Any] = {}


AnyMessage = (
    Begin
    | Execute
    | AskReady
    | Trim
    | Finish
    | Cancelled
    | Room
    | Reply
    | Told
    | SequenceEnded
    | Released
    | Began
    | Executed
    | Readiness
    | Sent
    | SentTogether
    | Measured
    | Call
    | CancelCall
    | CallRead
    | Ask
)
