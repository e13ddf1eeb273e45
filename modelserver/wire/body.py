"""Collects an HTTP body into one buffer, with a limit that holds while it arrives."""

from __future__ import annotations

import numpy as np

from modelserver.core.tensor import Buffer
from modelserver.errors import PayloadTooLargeError

_ALIGNMENT = 64


class BodyCollector:
    """One body that comes in pieces: `add` until `finish`.

    A body of announced length that does not come in one piece is copied once, into a buffer of that size.
    `header_length` is the size of the JSON part of an infer request: the buffer is placed so that the
    tensors behind it are aligned. As soon as the body is known to be over `max_bytes` there is an `error`,
    and what still comes is dropped.
    """

    def __init__(self, content_length: int | None, header_length: int, max_bytes: int) -> None:
        self.is_complete = False
        self.error: PayloadTooLargeError | None = None
        self._content_length = content_length
        self._header_length = header_length
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._chunks: list[bytes] = []
        self._buffer: memoryview | None = None
        self._check(content_length or 0)

    def add(self, chunk: bytes) -> None:
        """Take the next piece, which the caller gives away."""
        start, self._num_bytes = self._num_bytes, self._num_bytes + len(chunk)
        self._check(self._num_bytes)
        if self.error is not None:
            return
        if self._content_length is None or len(chunk) == self._content_length:
            self._chunks.append(chunk)
            return
        if self._buffer is None:
            self._buffer = _aligned_buffer(self._content_length, self._header_length)
        self._buffer[start : self._num_bytes] = chunk

    def finish(self) -> None:
        """The body has ended."""
        self.is_complete = True

    def body(self) -> Buffer:
        """The whole body, once it is complete and there is no error."""
        if self._buffer is not None:
            return self._buffer
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes and self.error is None:
            self._chunks.clear()
            self._buffer = None
            self.error = PayloadTooLargeError(
                f"the request body is over the limit of {self._max_bytes} bytes; raise it with --http-max-input-size"
            )


def _aligned_buffer(num_bytes: int, header_length: int) -> memoryview:
    """`num_bytes` of memory, not yet touched, whose byte at `header_length` is aligned."""
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    padding = -(memory.ctypes.data + header_length) % _ALIGNMENT
    return memory.data[padding : padding + num_bytes]
