"""Heads of requests and answers: those of HTTP/1.1 as bytes, with the bodies that they frame, and gRPC's as fields."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from modelserver.client.address import Address
from modelserver.client.grpc_messages import SERVICE
from modelserver.core.recognition import Memory

MAX_SHOWN = 300
END_OF_HEAD: Final = b"\r\n\r\n"
# Remembered: heads of other lengths are rarely the same twice.
_MAX_HEADS: Final = 512
_MAX_KNOWN_BYTES: Final = 1024
# Of a chunk's size with its extensions, and of all trailers.
_MAX_LINE_BYTES: Final = 16 * 1024
_HEX_DIGITS: Final = b"0123456789abcdefABCDEF"
_MAX_DIGITS: Final = 16
# Fields that say where an answer ends.
_FRAMING: Final = frozenset({"content-length", "transfer-encoding"})
# Fields of one connection (RFC 9110, 7.6.1), and the length, which the wire writes.
HOP_FIELDS: Final = frozenset(
    {
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class MalformedAnswerError(Exception):
    """The bytes are not an HTTP/1.1 answer; the message says why."""


class AnswerHead:
    """The head of an answer. Equal heads share one: never change it.

    `fields` have names in lower case; `headers` are those of them that concern more than this connection, as they were
    sent. `length` is None where the body is chunked or ends with the connection, and `json_len`, the length of the JSON
    in front of binary tensors, where KServe's header does not say it.
    """

    __slots__ = ("fields", "headers", "is_chunked", "is_last", "json_len", "length", "media_type", "status")

    def __init__(self, raw: bytes) -> None:
        """`raw` ends with the empty line. Raises MalformedAnswerError."""
        lines = raw[: -len(END_OF_HEAD)].decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not _is_number(words[1], 3):
            raise MalformedAnswerError(f"expected an HTTP/1.1 answer, got {lines[0][:60]!r}")
        self.status = status = int(words[1])
        if not 100 <= status < 600:
            raise MalformedAnswerError(f"the status is {status}")
        self.fields = fields = dict[str, str]()
        headers = []
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or name.split() != [name]:
                raise MalformedAnswerError(f"expected a header, got {line[:60]!r}")
            value = value.strip(" \t")
            lower = name.lower()
            if lower in _FRAMING and fields.get(lower, value) != value:
                raise MalformedAnswerError(f"{name} is both {fields[lower][:40]!r} and {value[:40]!r}")
            fields[lower] = value
            if lower not in HOP_FIELDS:
                headers.append((name, value))
        options = fields.get("connection", "").lower()
        if options not in ("", "close", "keep-alive"):
            dropped = {option.strip() for option in options.split(",")}
            headers = [each for each in headers if each[0].lower() not in dropped]
        self.headers = tuple(headers)
        coding = fields.get("transfer-encoding", "").lower()
        if coding not in ("", "chunked"):
            raise MalformedAnswerError(f"Transfer-Encoding is {coding[:40]!r}")
        text = fields.get("content-length")
        if text is not None and not _is_number(text, _MAX_DIGITS):
            raise MalformedAnswerError(f"Content-Length is {text[:40]!r}")
        is_bodyless = status < 200 or status in (204, 304)
        self.is_chunked = coding == "chunked" and not is_bodyless
        self.length = 0 if is_bodyless else int(text) if text is not None and not self.is_chunked else None
        is_1_0 = words[0] == "HTTP/1.0"
        has_end = self.length is not None or self.is_chunked
        self.is_last = "close" in options or (is_1_0 and "keep-alive" not in options) or not has_end
        self.media_type = fields.get("content-type", "").partition(";")[0].strip().lower()
        json_len = fields.get("inference-header-content-length", "")
        self.json_len = int(json_len) if _is_number(json_len, _MAX_DIGITS) else None


class AnswerHeads:
    """Heads that were read, by their bytes: those of equal requests are equal."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = Memory[bytes, AnswerHead](_MAX_HEADS, is_on=True)

    def read(self, raw: bytes) -> AnswerHead:
        """Raises MalformedAnswerError."""
        head = self._memory.known.get(raw)
        if head is None:
            head = AnswerHead(raw)
            if len(raw) <= _MAX_KNOWN_BYTES:
                self._memory.remember(raw, head)
        return head


def failure_text(status: int, body: bytes) -> str:
    """The message of an answer that is not 200: `HTTP 400: ...`."""
    message = body[:MAX_SHOWN].decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        message = error_text(json.loads(body)["error"])
    return f"HTTP {status}: {message[:MAX_SHOWN]}"


def error_text(error: object) -> str:
    """The message of an error: text, or in OpenAI's API an object with a message."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class ChunkedBody:
    """Undoes chunked transfer coding (RFC 9112, section 7.1), piece by piece."""

    def __init__(self) -> None:
        self._pending = b""
        # Of a chunk: its bytes to come, and the line end behind them.
        self._left = 0
        self._num_trailer_bytes = 0
        self._is_in_trailer = False
        self.is_done = False

    def feed(self, data: bytes) -> bytes:
        """The body's bytes that `data` completes. Raises MalformedAnswerError, also for bytes behind the end."""
        data = self._pending + data if self._pending else data
        offset, pieces = 0, []
        while not self.is_done:
            if self._left > 2:
                piece = data[offset : offset + self._left - 2]
                if not piece:
                    break
                pieces.append(piece)
                offset += len(piece)
                self._left -= len(piece)
                continue
            end = data.find(b"\r\n", offset)
            if end < 0:
                if len(data) - offset > (1 if self._left else _MAX_LINE_BYTES):
                    raise MalformedAnswerError(f"a chunk has the line {data[offset : offset + 40]!r}")
                break
            self._read_line(data[offset:end])
            offset = end + 2
        self._pending = data[offset:]
        if self.is_done and self._pending:
            raise MalformedAnswerError(f"{len(self._pending)} bytes follow the last chunk")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_line(self, line: bytes) -> None:
        if self._left:
            if line:
                raise MalformedAnswerError(f"{line[:40]!r} follows a chunk")
            self._left = 0
            return
        if self._is_in_trailer:
            self._num_trailer_bytes += len(line)
            if self._num_trailer_bytes > _MAX_LINE_BYTES:
                raise MalformedAnswerError(f"trailers of over {_MAX_LINE_BYTES} bytes")
            self.is_done = not line
            return
        digits = line.split(b";", 1)[0].strip(b" \t")
        if not digits or len(digits) > _MAX_DIGITS or digits.strip(_HEX_DIGITS):
            raise MalformedAnswerError(f"the size of a chunk is {line[:40]!r}")
        size = int(digits, 16)
        if size:
            self._left = size + 2
        else:
            self._is_in_trailer = True


def _is_number(text: str, most: int) -> bool:
    """Whether it has digits, `most` of them at the most, and nothing else."""
    return len(text) <= most and text.isascii() and text.isdigit()


USER_AGENT = "modelserver-bench"


@dataclass(frozen=True, slots=True)
class HttpRequestHead:
    """The head of an HTTP/1.1 request to send, but for the length of its body."""

    address: Address
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, content_length: int, json_len: int | None = None) -> bytes:
        """The head of a request whose body has `content_length` bytes, of which `json_len` are JSON."""
        lines = [f"{self.method} {self.path} HTTP/1.1", f"Host: {self.address}", f"User-Agent: {USER_AGENT}"]
        if self.method != "GET":
            lines.append(f"Content-Length: {content_length}")
            kind = "application/json" if json_len is None else "application/octet-stream"
            if not any(name.lower() == "content-type" for name in self.headers):
                lines.append(f"Content-Type: {kind}")
        if json_len is not None:
            lines.append(f"Inference-Header-Content-Length: {json_len}")
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass(frozen=True, slots=True)
class GrpcRequestHead:
    """The head of a gRPC call to send; `method` is a method of the inference service."""

    address: Address
    method: str
    headers: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = "none"
    user_agent: str = USER_AGENT

    @property
    def fields(self) -> tuple[tuple[bytes, bytes], ...]:
        """The fields of every request's head, in the order in which gRPC sends them."""
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"https" if self.address.tls is not None else b"http"),
            (b":path", f"/{SERVICE}/{self.method}".encode()),
            (b":authority", self.address.authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", self.user_agent.encode()),
        ]
        if self.algorithm != "none":
            fields.append((b"grpc-encoding", self.algorithm.encode()))
            fields.append((b"grpc-accept-encoding", f"identity,{self.algorithm}".encode()))
        return (*fields, *((name.lower().encode(), value.encode()) for name, value in self.headers.items()))


def model_path(model: str, version: str) -> str:
    """The path of a model, or of one version."""
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
