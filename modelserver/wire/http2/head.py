"""The content of a request's header block, checked once (RFC 9113, 8.2 and 8.3; gRPC's PROTOCOL-HTTP2).

Clients repeat their heads, so everything here depends on the fields only and is never changed: connections keep
heads and share them between requests.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final

from modelserver.core.recognition import Memory
from modelserver.protocol.call import Metadata
from modelserver.protocol.exchange import HttpHead
from modelserver.protocol.grpc_status import Status
from modelserver.wire.http2.hpack_tables import Field


def make_http_head(method: bytes, path: bytes, authority: bytes, fields: tuple[Field, ...]) -> HttpHead:
    """The shared head of the HTTP frontend; a repeated field becomes one (RFC 9110, 5.2; RFC 9113, 8.2.3)."""
    target, _, query = path.decode("latin-1").partition("?")
    headers: dict[str, str] = {"host": authority.decode("latin-1")} if authority else {}
    for name_bytes, value_bytes in fields:
        if name_bytes.startswith(b":") or name_bytes == b"host":  # the authority is the host
            continue
        name, value = name_bytes.decode("ascii"), value_bytes.decode("latin-1")
        if name in headers:
            value = f"{headers[name]}{'; ' if name == 'cookie' else ', '}{value}"
        headers[name] = value
    return HttpHead(method.decode("ascii"), target, headers, query)


Problem = tuple[int, str]
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
# Fields of HTTP/1.1 connections, which must not come over HTTP/2 (RFC 9113, 8.2.2).
_CONNECTION_FIELDS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
# Fields whose repetition would be ambiguous.
_SINGLE: Final = _PSEUDO | {b"host", b"content-length", b"content-type", b"te", b"grpc-timeout", b"grpc-encoding"}
_TOKEN: Final = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
_PATH_CHARACTERS: Final = bytes(range(0x21, 0x7F))
# A number of more digits is not a length.
_MAX_LENGTH_DIGITS: Final = 19
_GRPC: Final = b"application/grpc"
_TIMEOUT: Final = b"grpc-timeout"
# Heads that a connection remembers.
_MAX_KNOWN: Final = 64
_MAX_KNOWN_BYTES: Final = 2048


class MalformedError(Exception):
    """The fields are not a valid request or trailers: a stream error PROTOCOL_ERROR, before any handler runs."""


class RequestHead:
    """The head of a request. Requests may share one: never change it.

    `problem` is a gRPC status with which the call must be answered; `http_status` is the `:status` of that answer
    and of one for a content type that only resembles gRPC's (415). `timeout_ns` and `encoding` (b"" for identity)
    are gRPC's. `memo` is what the connection has derived from the head (see `keep`).
    """

    __slots__ = (
        "_http",
        "_metadata",
        "_original",
        "accept_encodings",
        "authority",
        "content_length",
        "content_type",
        "encoding",
        "fields",
        "http_status",
        "is_grpc",
        "memo",
        "method",
        "path",
        "problem",
        "timeout_ns",
    )

    def __init__(
        self, fields: tuple[Field, ...], *, method: bytes, path: bytes, authority: bytes, content_type: bytes
    ) -> None:
        self.fields = fields
        self.method = method
        self.path = path
        self.authority = authority
        self.content_type = content_type
        self.content_length: int | None = None
        self.is_grpc = False
        self.timeout_ns: int | None = None
        self.encoding = b""
        self.accept_encodings: tuple[bytes, ...] = ()
        self.problem: Problem | None = None
        self.http_status = 200
        self.memo: object = None
        self._http: HttpHead | None = None
        self._metadata: Metadata | None = None
        # The head that this one differs from only in its timeout, and which holds the derived values.
        self._original: RequestHead | None = None

    @property
    def metadata(self) -> Metadata:
        """The custom metadata of a gRPC call."""
        original = self._original or self
        if original._metadata is None:
            original._metadata = decode_metadata(original.fields)
        return original._metadata

    @property
    def http(self) -> HttpHead:
        """The head as HTTP handlers see it."""
        original = self._original or self
        if original._http is None:
            original._http = make_http_head(original.method, original.path, original.authority, original.fields)
        return original._http

    def keep(self, memo: object) -> None:
        """Set `memo`, here and in heads that will differ from this one in their timeout only."""
        self.memo = memo
        if self._original is not None:
            self._original.memo = memo

    def with_timeout(self, timeout_ns: int) -> RequestHead:
        """A head that differs in its timeout only."""
        head = RequestHead.__new__(RequestHead)
        head.fields = self.fields
        head.method = self.method
        head.path = self.path
        head.authority = self.authority
        head.content_type = self.content_type
        head.content_length = self.content_length
        head.is_grpc = self.is_grpc
        head.timeout_ns = timeout_ns
        head.encoding = self.encoding
        head.accept_encodings = self.accept_encodings
        head.problem = self.problem
        head.http_status = self.http_status
        head.memo = self.memo
        head._original = self
        return head


class HeadReader:
    """Reads the heads of one connection, and remembers those of gRPC calls apart from their timeouts.

    Some clients send a new timeout with each call, so that no two header blocks are equal.
    """

    __slots__ = ("_memory", "_timeout_at")

    def __init__(self, *, is_on: bool = True) -> None:
        self._memory = Memory[tuple[Field, ...], RequestHead](_MAX_KNOWN, is_on=is_on)
        # Where the last timeout was.
        self._timeout_at = 0

    def read(self, fields: tuple[Field, ...]) -> RequestHead:
        """The request head; raises MalformedError as `read_request_head` does."""
        at = self._timeout_at
        if at >= len(fields) or fields[at][0] != _TIMEOUT:
            at = self._timeout_at = next((at for at, field in enumerate(fields) if field[0] == _TIMEOUT), 0)
        if at < len(_PSEUDO):  # there is none, or it may precede a pseudo-header
            return read_request_head(fields)
        rest = fields[:at] + fields[at + 1 :]
        known = self._memory.known.get(rest)
        if known is None:
            known = self._remember(rest)
        if known is not None:
            try:
                return known.with_timeout(parse_timeout(fields[at][1]))
            except ValueError:
                pass  # found again below
        return read_request_head(fields)

    def _remember(self, fields: tuple[Field, ...]) -> RequestHead | None:
        """The head of these fields without a timeout, if other calls may share it."""
        head = read_request_head(fields)
        num_bytes = sum([len(name) + len(value) for name, value in fields])
        if not head.is_grpc or head.problem or head.timeout_ns is not None or num_bytes > _MAX_KNOWN_BYTES:
            return None
        self._memory.remember(fields, head)
        return head


def read_request_head(fields: tuple[Field, ...]) -> RequestHead:
    """Check the fields of a request and read those that concern the wire.

    Raises MalformedError for an invalid HTTP request; an error that concerns only gRPC becomes the head's `problem`.
    """
    by_name = dict(fields)
    if len(by_name) != len(fields):
        _check_single(fields)
    num_pseudo = _check_pseudo(fields, by_name)
    _check_fields(fields, num_pseudo)
    authority = by_name.get(b":authority") or by_name.get(b"host", b"")
    if by_name.get(b"host", authority).lower() != authority.lower():
        raise MalformedError("host differs from :authority")  # RFC 9113, 8.3.1
    head = RequestHead(
        fields,
        method=by_name[b":method"],
        path=by_name[b":path"],
        authority=authority,
        content_type=by_name.get(b"content-type", b""),
    )
    if (length := by_name.get(b"content-length")) is not None:
        head.content_length = _content_length(length)
    if by_name.get(b"te", b"trailers").lower() != b"trailers":
        raise MalformedError("the only value of te is 'trailers'")
    if head.content_type.startswith(_GRPC):
        _read_grpc(head, by_name)
    return head


def check_trailers(fields: tuple[Field, ...]) -> None:
    """Raises MalformedError unless these may follow the body of a request."""
    _check_fields(fields, num_pseudo=0)


def _check_pseudo(fields: tuple[Field, ...], by_name: dict[bytes, bytes]) -> int:
    """Check the pseudo-headers, each of which occurs at most once, and return how many there must be."""
    for name in (b":method", b":scheme", b":path"):
        if name not in by_name:
            raise MalformedError(f"the request has no {name.decode()}")
    num_pseudo = 4 if b":authority" in by_name else 3
    for name, _ in fields[:num_pseudo]:
        if name not in _PSEUDO:
            raise MalformedError("a pseudo-header comes after other fields")
    method, path = by_name[b":method"], by_name[b":path"]
    if method == b"CONNECT" or method.lower().translate(None, _TOKEN) or not method:
        raise MalformedError(f"the method {method[:40]!r} is not supported")
    if (path[:1] != b"/" or path.translate(None, _PATH_CHARACTERS)) and (method, path) != (b"OPTIONS", b"*"):
        raise MalformedError(f":path {path[:40]!r} is not a path")
    return num_pseudo


def _check_single(fields: tuple[Field, ...]) -> None:
    seen: set[bytes] = set()
    for name, _ in fields:
        if name in _SINGLE and name in seen:
            raise MalformedError(f"{name.decode()} is there more than once")
        seen.add(name)


def _check_fields(fields: tuple[Field, ...], num_pseudo: int) -> None:
    """Check the rules for every field, all at once, because that is several times faster than one by one."""
    if not fields:
        return
    names, values = zip(*fields, strict=True)
    # The colon of each pseudo-header remains.
    if b"".join(names).translate(None, _TOKEN) != b":" * num_pseudo or b"" in names:
        raise MalformedError(
            "field names are lower-case tokens, and pseudo-headers are :method :scheme :path :authority"
        )
    if not _CONNECTION_FIELDS.isdisjoint(names):
        raise MalformedError("there is a field of HTTP/1.1 connections")
    lines = b"\n" + b"\n".join(values) + b"\n"
    if lines.count(b"\n") != len(values) + 1 or b"\r" in lines or b"\0" in lines:
        raise MalformedError("a field value has a line end or a zero byte")
    if b"\n " in lines or b" \n" in lines or b"\n\t" in lines or b"\t\n" in lines:
        raise MalformedError("a field value begins or ends with a blank")


def _content_length(value: bytes) -> int:
    if not value.isdigit() or len(value) > _MAX_LENGTH_DIGITS:
        raise MalformedError(f"content-length {value[:40]!r} is not a length")
    return int(value)


def _read_grpc(head: RequestHead, by_name: dict[bytes, bytes]) -> None:
    if head.content_type[len(_GRPC) : len(_GRPC) + 1] not in (b"", b"+", b";"):
        head.http_status = 415
        return
    head.is_grpc = True
    head.encoding = _encoding(by_name.get(b"grpc-encoding", b""))
    head.accept_encodings = _list(by_name.get(b"grpc-accept-encoding", b""))
    if head.method != b"POST":
        head.http_status = 405
        head.problem = (Status.INTERNAL, f"gRPC calls are POST requests, this is {head.method.decode('ascii'):.40}")
        return
    try:
        if (timeout := by_name.get(_TIMEOUT)) is not None:
            head.timeout_ns = parse_timeout(timeout)
        for name in by_name:
            if is_binary(name):
                # Checked now, so that `metadata` does not raise when a handler asks for it.
                _ = head.metadata
                break
    except ValueError as error:
        head.problem = (Status.INTERNAL, str(error))


def _encoding(value: bytes) -> bytes:
    return b"" if value == b"identity" else value


def _list(value: bytes) -> tuple[bytes, ...]:
    """The items of a comma-separated list."""
    return tuple([item.strip(b" \t") for item in value.split(b",")]) if value else ()


# Custom metadata of gRPC calls: header fields as handlers see them, and back.
#
# Keys that end in `-bin` have arbitrary bytes, in base64 on the wire; others have text.

_BINARY_SUFFIX = b"-bin"
# Fields of the protocol itself.
_RESERVED = frozenset({b"content-type", b"te"})
_RESERVED_PREFIXES = (b":", b"grpc-")


def is_custom(name: bytes) -> bool:
    """Whether the header field belongs to the metadata that handlers see."""
    return not name.startswith(_RESERVED_PREFIXES) and name not in _RESERVED


def is_binary(name: bytes) -> bool:
    """Whether the values of `name` are bytes."""
    return name.endswith(_BINARY_SUFFIX)


def decode_metadata(fields: Iterable[Field]) -> dict[str, str | bytes]:
    """The custom metadata among `fields`; of equal keys the last value counts.

    Raises ValueError when a binary value is not base64.
    """
    metadata: dict[str, str | bytes] = {}
    for name, value in fields:
        if is_custom(name):
            metadata[name.decode("ascii")] = decode_binary(value)[-1] if is_binary(name) else _text(value)
    return metadata


def decode_binary(value: bytes) -> list[bytes]:
    """The values of a `-bin` field: base64 with or without padding, several separated by commas.

    Raises ValueError when one of them is not base64.
    """
    return [_from_base64(item.strip(b" \t")) for item in value.split(b",")]


def encode_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> list[Field]:
    """Header fields for `metadata`.

    Raises ValueError for a key that is not lower case or is the protocol's, for text under a `-bin` key and the
    reverse, and for text that is not printable ASCII.
    """
    return [_field(key, value) for key, value in metadata]


def _field(key: str, value: str | bytes) -> Field:
    name = key.encode()
    if not name or name.translate(None, _KEY_CHARACTERS) or not is_custom(name):
        raise ValueError(f"{key!r} is not a valid metadata key: use digits, lower-case letters, '-', '_' and '.'")
    if is_binary(name) != isinstance(value, bytes):
        raise ValueError(f"the value of {key!r} must be {'bytes' if is_binary(name) else 'a string'}")
    if isinstance(value, bytes):
        return name, base64.b64encode(value).rstrip(b"=")
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"the value of {key!r} must be printable ASCII; other text needs a key that ends in '-bin'")
    return name, value.strip(" ").encode()


_KEY_CHARACTERS = b"0123456789abcdefghijklmnopqrstuvwxyz_-."


def _from_base64(item: bytes) -> bytes:
    bare = item.rstrip(b"=")
    try:
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"the binary value {item[:40]!r} is not base64: {error}") from None


def _text(value: bytes) -> str:
    # Text should be ASCII; most clients send other text as UTF-8, some in other encodings.
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


# The `grpc-timeout` header: how long the client waits (gRPC's PROTOCOL-HTTP2, "Requests").

_UNIT_NS: Final = {
    ord("n"): 1,
    ord("u"): 1_000,
    ord("m"): 1_000_000,
    ord("S"): 1_000_000_000,
    ord("M"): 60 * 1_000_000_000,
    ord("H"): 3600 * 1_000_000_000,
}
# Longer waits (146 years) are as good as none, and this still fits 64 bits when added to a clock.
MAX_TIMEOUT_NS: Final = 1 << 62
# The specification has 8 digits; some clients send nanoseconds with more.
_MAX_DIGITS: Final = 20


def parse_timeout(value: bytes) -> int:
    """Nanoseconds, at most MAX_TIMEOUT_NS; 0 means that the wait has already ended.

    Raises ValueError for anything but digits and one of the units H M S m u n.
    """
    digits = value[:-1]
    unit_ns = _UNIT_NS.get(value[-1]) if value else None
    if unit_ns is None or not digits.isdigit():
        raise ValueError(f"grpc-timeout {value[:40]!r} is not a number followed by one of H M S m u n")
    if len(digits) > _MAX_DIGITS:
        return MAX_TIMEOUT_NS
    return min(int(digits) * unit_ns, MAX_TIMEOUT_NS)
