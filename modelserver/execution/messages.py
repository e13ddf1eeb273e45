"""What the server and a child process say to each other: small msgpack records, never pickles.

Tensors are described here (`TensorRecord`) and travel beside the record, see `channel.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from modelserver.core.response import ParameterValue
from modelserver.errors import ErrorCode, InternalError, ServerError


class TensorRecord(msgspec.Struct, array_like=True, frozen=True):
    """Where a tensor lies in the payload of its message."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ErrorRecord(msgspec.Struct, array_like=True, frozen=True):
    """A ServerError; codes travel by value."""

    code: str
    message: str

    @classmethod
    def of(cls, error: ServerError) -> ErrorRecord:
        return cls(error.code.value, error.message)

    def error(self) -> ServerError:
        code = ErrorCode(self.code)
        return InternalError(self.message) if code is ErrorCode.INTERNAL else ServerError(self.message, code=code)


class RequestRecord(msgspec.Struct, array_like=True, frozen=True):
    """The part of an InferRequest that an instance may see."""

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


class ResponseRecord(msgspec.Struct, array_like=True, frozen=True):
    """One InferResponse."""

    outputs: list[TensorRecord]
    error: ErrorRecord | None
    parameters: dict[str, ParameterValue] | None


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages. `released` names the leases of the receiver's arena that the sender no longer uses."""

    released: list[int] = []


# ---- server to child


class Begin(Message, tag=1):
    """Build the instance, or call the function, that `target` ("module:function") names."""

    target: str = ""
    arguments: dict[str, Any] = {}
    python_path: list[str] = []
    is_call: bool = False


class Execute(Message, tag=2):
    """Execute batches one after the other; answered by one `Executed`, possibly after `Query` messages.

    `sizes` are the numbers of requests in each, which follow each other in `requests`.
    """

    requests: list[RequestRecord] = []
    sizes: list[int] = []


class AskReady(Message, tag=3):
    """Ask the instance whether it is ready; answered by `Readiness`."""

    number: int = 0


class Answer(Message, tag=4):
    """The server's answer to a `Query`."""

    value: Any = None


class Trim(Message, tag=6):
    """There is no traffic: give back memory. No answer."""


class Finish(Message, tag=5):
    """Close the instance and exit."""


# ---- child to server


class Began(Message, tag=11):
    """The instance stands, or the call has returned `result`; or `error` says why not."""

    result: Any = None
    error: ErrorRecord | None = None
    has_readiness: bool = False


class Executed(Message, tag=12):
    """For each batch an error or None; and one response for each request of those without, in order."""

    responses: list[ResponseRecord] = []
    errors: list[ErrorRecord | None] = []


class Readiness(Message, tag=13):
    number: int = 0
    is_ready: bool = True


class Query(Message, tag=14):
    """A question about the batches in execution: `topic` "is_cancelled" with the index of the request among all."""

    topic: str = ""
    argument: Any = None


AnyMessage = Begin | Execute | AskReady | Answer | Trim | Finish | Began | Executed | Readiness | Query
