"""A request whose head was read and whose body is being received, by its length or in chunks (RFC 9112, 7.1)."""

from __future__ import annotations

import enum
import re

from modelserver.core.body_pipe import BodyPipe
from modelserver.core.tensor import Buffer
from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.assembly import AssemblyBudget
from modelserver.wire.body import BodyCollector
from modelserver.wire.http1.head import RefusedError, RequestHead

# Bodies in chunks (RFC 9112, 7.1), read as strictly as llhttp reads heads.
#
# llhttp could read them, but it does not report where in the received bytes a body ended, nor which bytes were framing;
# with pipelined requests both must be known.

# Sizes of up to 15 digits: more than any body has bytes. Blanks around the size are a means of request smuggling.
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(;[\t\x20-\x7e]*)?")
# The beginning of nearly all chunks.
_USUAL_SIZE = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n")
_TRAILER_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t\x20-\x7e\x80-\xff]*")
# Fields that frame or route a request must not follow its body (RFC 9110, 6.5.1).
_FORBIDDEN_TRAILERS = frozenset({b"content-length", b"transfer-encoding", b"host"})

MAX_EXTENSION_BYTES = 16 * 1024
MAX_TRAILER_BYTES = 16 * 1024
MAX_TRAILERS = 100
_MAX_SIZE_DIGITS = 15
# Even small chunks cost time: a body of more than this many, Triton's limit, needs this size on average.
MAX_TINY_CHUNKS = 65_536
_MIN_AVERAGE_BYTES = 64
# Chunks read before other connections have their turn.
MAX_CHUNKS_PER_TURN = 1000
# Chunks up to this size are joined before the body takes them.
_MAX_JOINED_BYTES = 4096


class _Part(enum.Enum):
    """The element that comes next."""

    SIZE = enum.auto()
    DATA = enum.auto()
    END_OF_DATA = enum.auto()
    TRAILER = enum.auto()
    NOTHING = enum.auto()


class ChunkedBody:
    """Hands the data of one chunked body to `body`: `feed` until `is_complete`."""

    __slots__ = (
        "_line",
        "_num_chunks",
        "_num_extension_bytes",
        "_num_missing",
        "_num_trailer_bytes",
        "_num_trailers",
        "_part",
        "body",
    )

    def __init__(self, body: BodyCollector) -> None:
        self.body = body
        self._part = _Part.SIZE
        self._line = b""  # the beginning of a line that is not complete
        self._num_missing = 0  # of the chunk that is being received
        self._num_chunks = 0
        self._num_extension_bytes = 0
        self._num_trailers = self._num_trailer_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether the end of the body was read."""
        return self._part is _Part.NOTHING

    def feed(self, data: bytes, at: int) -> int:
        """Read `data` from `at` on; returns where it stopped.

        It stops before the end when the body is complete or has an error, or after a number of chunks, so that other
        connections have their turn. Raises RefusedError.
        """
        size = len(data)
        last_chunk = self._num_chunks + MAX_CHUNKS_PER_TURN
        while at < size and self._part is not _Part.NOTHING and self.body.error is None:
            if self._part is _Part.DATA:
                taken = min(self._num_missing, size - at)
                self.body.add(data[at : at + taken])
                at += taken
                self._num_missing -= taken
                if self._num_missing == 0:
                    self._part = _Part.END_OF_DATA
                continue
            if self._part is _Part.SIZE and not self._line:
                if self._num_chunks >= last_chunk:
                    break
                start, at = at, self._read_small(data, at, last_chunk)
                if at > start:
                    continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                self._check_line_length(len(self._line) - 1)  # a carriage return may be among them
                return size
            line = self._line + data[at:end]
            self._line = b""
            at = end + 1
            if not line.endswith(b"\r"):
                raise _invalid("a line ends without a carriage return")
            self._check_line_length(len(line) - 1)
            self._read_line(line[:-1])
        return at

    def _read_small(self, data: bytes, at: int, last_chunk: int) -> int:
        """Read the small chunks at `at`, as long as they are complete and usual; returns where they end.

        A client may send thousands at once; reading one here takes a third of the time of reading it in parts.
        """
        pieces: list[bytes] = []
        # This many would be accepted if they were empty.
        num_left = min(last_chunk, self._max_chunks) - self._num_chunks
        read_size = _USUAL_SIZE.match
        while len(pieces) < num_left and (match := read_size(data, at)):
            start = match.end()
            end = start + int(match[1], 16)
            if end == start or end - start > _MAX_JOINED_BYTES or data[end : end + 2] != b"\r\n":
                break
            pieces.append(data[start:end])
            at = end + 2
        if pieces:
            self._num_chunks += len(pieces)
            self.body.add(b"".join(pieces))
        return at

    @property
    def _max_chunks(self) -> int:
        """The number of chunks allowed, by the bytes received so far."""
        return max(MAX_TINY_CHUNKS, self.body.num_bytes // _MIN_AVERAGE_BYTES + 1)

    def _check_line_length(self, num_bytes: int) -> None:
        if self._part is _Part.TRAILER:
            if self._num_trailer_bytes + num_bytes > MAX_TRAILER_BYTES:
                raise RefusedError(
                    431, f"the trailers are over the limit of {MAX_TRAILER_BYTES} bytes", Violation.HEAD_TOO_LARGE
                )
        elif num_bytes > _MAX_SIZE_DIGITS + MAX_EXTENSION_BYTES - self._num_extension_bytes:
            raise _too_many_extensions()

    def _read_line(self, line: bytes) -> None:
        if self._part is _Part.SIZE:
            self._read_size(line)
        elif self._part is _Part.TRAILER:
            self._read_trailer(line)
        elif line:
            raise _invalid("a chunk is longer than its size says")
        else:
            self._part = _Part.SIZE

    def _read_size(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise _invalid("a chunk has no valid size")
        self._num_extension_bytes += len(match[2] or b"")
        if self._num_extension_bytes > MAX_EXTENSION_BYTES:
            raise _too_many_extensions()
        self._num_missing = int(match[1], 16)
        if self._num_missing == 0:
            self._part = _Part.TRAILER
            return
        self._part = _Part.DATA
        self.body.expect(self._num_missing)
        self._num_chunks += 1
        if self._num_chunks > self._max_chunks:
            raise RefusedError(
                400,
                f"Chunked request body exceeds maximum of {MAX_TINY_CHUNKS} non-empty chunks. Send fewer or larger "
                f"HTTP chunks. More of them need {_MIN_AVERAGE_BYTES} bytes on average",
                Violation.SMUGGLING,
            )

    def _read_trailer(self, line: bytes) -> None:
        if not line:
            self._part = _Part.NOTHING
            return
        self._num_trailer_bytes += len(line)
        self._num_trailers += 1
        if self._num_trailers > MAX_TRAILERS:
            raise RefusedError(431, f"the request has more than {MAX_TRAILERS} trailers", Violation.HEAD_TOO_LARGE)
        match = _TRAILER_LINE.fullmatch(line)
        if match is None or match[1].lower() in _FORBIDDEN_TRAILERS:
            raise _invalid(f"'{line[:40].decode('latin-1')}' is not a trailer")


def _too_many_extensions() -> RefusedError:
    return _invalid(f"chunk extensions are over the limit of {MAX_EXTENSION_BYTES} bytes")


def _invalid(message: str) -> RefusedError:
    return RefusedError(400, f"this is not a valid chunked body: {message}", Violation.SMUGGLING)


class Incoming:
    """`feed`, or `room` and `filled`, until `is_complete` or `collector.error`; `collector.drop` if it never ends."""

    __slots__ = ("_chunks", "_num_chunk_bytes", "collector", "is_invited", "request")

    def __init__(
        self,
        request: RequestHead,
        max_bytes: int,
        budget: AssemblyBudget,
        owner: str = "",
        pipe: BodyPipe | None = None,
    ) -> None:
        length = None if request.is_chunked else request.content_length
        self.request = request
        self.collector = BodyCollector(length, request.json_length, max_bytes, budget, owner, pipe)
        self._chunks = ChunkedBody(self.collector) if request.is_chunked else None
        self._num_chunk_bytes = 0
        # A client that expects 100-continue sends its body after that.
        self.is_invited = not request.expects_continue

    def feed(self, data: bytes, at: int) -> int:
        """Take the body's part of `data`, from `at` on; returns where it ended. Raises RefusedError."""
        if at == len(data):
            return at
        self.is_invited = True
        if self._chunks is not None:
            self._num_chunk_bytes += len(data) - at
            return self._chunks.feed(data, at)
        piece = data[at : at + self.request.content_length - self.collector.num_bytes]
        self.collector.add(piece)
        return at + len(piece)

    @property
    def num_bytes(self) -> int:
        """The bytes received, of the body and its framing."""
        return self.collector.num_bytes if self._chunks is None else self._num_chunk_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the body is complete."""
        return self.collector.is_full if self._chunks is None else self._chunks.is_complete

    def finish(self) -> Buffer:
        """The body, once it is complete and has no error."""
        self.collector.finish()
        return self.collector.body()
