"""What the server and a child process say to each other: small msgpack records, never pickles.

Tensors are described here (`TensorRecord`) and travel beside the record, see `channel.py`. Records hold no cycles, so
that the garbage collector need not look at them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from modelserver.core.request import Transfer
from modelserver.core.response import ParameterValue
from modelserver.errors import CancelledError, ErrorCode, InternalError, ServerError
from modelserver.telemetry.measurement import Measurement

# Codes whose errors are told apart by their class.
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
    """The part of an InFlightRequest that an instance may see."""

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
    # By which either side names the request later; 0 where neither does.
    number: int = 0
    is_decoupled: bool = False
    # Of what comes from a client, between the processes of a server.
    transfer: Transfer | None = None
    trace_parent: str = ""
    # By the system's monotonic clock, which all processes share.
    arrival_ns: int = 0


class ResponseRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One InferResponse; or the wish to execute the request again."""

    outputs: list[TensorRecord]
    error: ErrorRecord | None
    parameters: dict[str, ParameterValue] | None
    is_reschedule: bool = False


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


# ---- server to child


class Begin(Message, tag=1):
    """Build the instance, or call the function, that `target` ("module:function") names.

    `busy_wait_us` is how long the child may look for the next message before it sleeps.
    """

    target: str = ""
    arguments: dict[str, Any] = {}
    python_path: list[str] = []
    is_call: bool = False
    busy_wait_us: int = 0


class Execute(Message, tag=2):
    """Execute batches one after the other; each is answered within an `Executed`.

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
    """A response, with tensors, of what the model asked for by the `Call` of this number."""

    number: int = 0
    response: ResponseRecord | None = None
    is_final: bool = True


class Told(Message, tag=10):
    """The answer to an `Ask`: a value, or an error."""

    number: int = 0
    value: Any = None
    error: ErrorRecord | None = None


class SequenceEnded(Message, tag=19):
    """The instance sees no more of a sequence. No answer."""

    correlation_id: int | str = 0
    reason: str = ""


class Released(Message, tag=4):
    """Only brings back leases, when nothing else is to be said."""


# ---- child to server


class Began(Message, tag=11):
    """The instance stands, or the call has returned `result`; or `error` says why not."""

    result: Any = None
    error: ErrorRecord | None = None
    has_readiness: bool = False
    answers_later: bool = False
    is_stepped: bool = False


class Executed(Message, tag=12):
    """Batches from `number` on: for each an error or None; and one entry for each request of those without, in order.

    The entry None leaves the answer to `Sent` messages. `durations_ns` are the times that they took in the child.
    """

    responses: list[ResponseRecord | None] = []
    errors: list[ErrorRecord | None] = []
    number: int = 0
    durations_ns: list[int] = []


class Readiness(Message, tag=13):
    number: int = 0
    is_ready: bool = True


class Sent(Message, tag=14):
    """A response that a model sent by itself. `is_dropped`: the model let go of the request without ending it."""

    number: int = 0
    response: ResponseRecord | None = None
    is_final: bool = False
    is_dropped: bool = False


class SentTogether(Message, tag=21):
    """What instances that go in steps send within one: of each response the number of its request, its record, and
    whether it is the last; and `notes` for traces, each with the number of its request, event and time."""

    notes: list[tuple[int, str, int]] = []
    sent: list[tuple[int, ResponseRecord | None, bool]] = []


class Measured(Message, tag=22):
    """What the instance says of itself for the metrics page, as of now."""

    measurements: list[MeasurementRecord] = []


class Call(Message, tag=15):
    """The model wants another model, or itself, to answer a request; `Reply` messages bring the responses."""

    number: int = 0
    request: RequestRecord | None = None
    is_decoupled: bool = False
    # The request in whose answer this is a step, or the first of so many of which it may be any; 0 if there is none.
    parent: int = 0
    num_parents: int = 1


class CancelCall(Message, tag=16):
    """The model no longer wants the responses of a `Call`."""

    number: int = 0


class CallRead(Message, tag=20):
    """The model has read so many more responses of a `Call` of a decoupled model."""

    number: int = 0
    count: int = 0


class Ask(Message, tag=17):
    """Something about the server that is not inference; answered by `Told` unless the number is 0."""

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
