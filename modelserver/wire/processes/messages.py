"""The messages between a front process and the core: msgpack records, many in one datagram.

A call is one request of a client. The front numbers it; answers carry that number. Every call ends with exactly one
final message from the core, also after a `Cancel`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Blob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Bytes that are too large for a datagram: a lease of the sender's arena."""

    offset: int
    nbytes: int


# Small bytes are in the record itself.
Content = bytes | Blob


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all messages."""

    call: int


# From the front to the core.


class Infer(Message, tag=1):
    """An inference request; answered by `Inferred` or `Failed`.

    `head` is a serialized `RequestRecord` without id and deadline, so that equal requests have equal heads. With
    `is_paced` the front gives a `Credit` for each response that is on its way to the client.
    """

    head: bytes
    id: bytes
    deadline_ns: int | None
    content: Content
    is_paced: bool = False
    caller: str = ""


class Cancel(Message, tag=2):
    """The client no longer wants the answer."""


class Exchange(Message, tag=3):
    """A whole HTTP request; answered by `Responded`, or by `Started`, pieces and `Ended`."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: Content
    peer: str = ""
    names: dict[str, str] = {}


class Unary(Message, tag=4):
    """A whole gRPC call; answered by `Replied` or `Ended`."""

    path: str
    metadata: dict[str, Any]
    deadline_ns: int | None
    content: Content
    peer: str = ""


class Open(Message, tag=5):
    """A streaming gRPC call begins. Its messages follow as pieces; the core ends it with `Ended`."""

    path: str
    metadata: dict[str, Any]
    deadline_ns: int | None


class HalfClose(Message, tag=6):
    """The client's last message of a streaming call has been sent."""


class ShortCall(Message, tag=8):
    """A `ModelInfer` call whose metadata is not used; answered by `ShortReply` or `ShortFailure`."""

    deadline_ns: int | None
    message: bytes


class ShortExchange(Message, tag=9):
    """An HTTP infer call; answered by `ShortResponse`. `head` is a serialized `ShortHead`."""

    head: bytes
    body: bytes


class ShortHead(msgspec.Struct, array_like=True, frozen=True):
    """The relevant parts that infer calls of equal heads share; the method is POST."""

    path: str
    query: str
    headers: dict[str, str]


class Report(msgspec.Struct, array_like=True, tag=7):
    """A front's report: connections taken over since its start and open now, and its counts since the last report.

    `counts` has one entry per port.
    """

    num_received: int
    num_open: int
    counts: list[PortCounts]


class PortCounts(msgspec.Struct, array_like=True, frozen=True):
    """Growth of the `WireCounts` of a port: by protocol, and by protocol and violation (their values)."""

    opened: dict[str, int]
    open: dict[str, int]
    open_streams: int
    violations: list[tuple[str, str, int]]


# Both ways.


class Piece(Message, tag=11):
    """The next part of a streamed request or answer."""

    content: Content


class Credit(Message, tag=12):
    """The receiver has room for `num_pieces` more."""

    num_pieces: int


class Spilled(msgspec.Struct, array_like=True, tag=13, frozen=True):
    """The datagram itself is too large: it lies in the sender's arena."""

    offset: int
    nbytes: int


# From the core to the front.


class Inferred(Message, tag=21):
    """A response to `Infer`. `head` is a serialized `ResponseRecord`, `version` that of the model that answered."""

    version: int | None
    head: bytes
    is_final: bool
    content: Content
    is_decoupled: bool = False


class Failed(Message, tag=22):
    """A response to `Infer` is an error, by its code's value; a `retry_after_s` of 0 says nothing."""

    code: str
    text: str
    is_final: bool = True
    is_decoupled: bool = False
    retry_after_s: float = 0.0


class Responded(Message, tag=23):
    """The whole answer to an `Exchange`."""

    status: int
    headers: list[tuple[str, str]]
    body: Content


class Started(Message, tag=24):
    """The head of an answer to an `Exchange` whose body follows as pieces."""

    status: int
    headers: list[tuple[str, str]]


class Replied(Message, tag=25):
    """The reply message of a `Unary` call."""

    content: Content


class Ended(Message, tag=26):
    """The end of a call with a gRPC status; of an HTTP body, with status 0."""

    status: int
    text: str
    retry_ms: int = 0


class ShortReply(Message, tag=30):
    """The reply message of a `ShortCall`."""

    content: Content


class ShortFailure(Message, tag=31):
    """A `ShortCall` has failed."""

    status: int
    text: str
    retry_ms: int


class ShortResponse(Message, tag=32):
    """The whole answer to a `ShortExchange`. `head` is a serialized `ShortResponseHead`: many answers have the same."""

    head: bytes
    body: Content


class ShortResponseHead(msgspec.Struct, array_like=True, frozen=True):
    """The parts that answers share."""

    status: int
    headers: tuple[tuple[str, str], ...]


class Drain(msgspec.Struct, array_like=True, tag=27, frozen=True):
    """Serve what is in flight and exit, after `grace_s` at the latest."""

    grace_s: float


class Retire(msgspec.Struct, array_like=True, tag=29, frozen=True):
    """Ask clients to send their next requests elsewhere."""


class LogLevel(msgspec.Struct, array_like=True, tag=28, frozen=True):
    """Log from this level of `logging` on."""

    level: int


FromFront = (
    Infer | ShortCall | ShortExchange | Cancel | Exchange | Unary | Open | HalfClose | Report | Piece | Credit | Spilled
)
FromCore = (
    Inferred
    | Failed
    | ShortReply
    | ShortFailure
    | ShortResponse
    | Responded
    | Started
    | Replied
    | Ended
    | Drain
    | Retire
    | LogLevel
    | Piece
    | Credit
    | Spilled
)


class FrontBundle(msgspec.Struct, array_like=True, gc=False):
    """One datagram to the core. `released` are leases of the core's arena that the front no longer uses."""

    released: list[int]
    messages: list[FromFront]


class CoreBundle(msgspec.Struct, array_like=True, gc=False):
    """One datagram to a front."""

    released: list[int]
    messages: list[FromCore]


def portable(text: str) -> str:
    """`text` without characters that UTF-8 lacks: a lone surrogate, say of a file's name, could not be sent."""
    return text if text.isascii() else text.encode(errors="replace").decode()
