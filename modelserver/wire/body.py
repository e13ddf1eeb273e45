"""Collects a request's body into one buffer, with limits that hold while it arrives."""

from __future__ import annotations

from collections.abc import Callable

from modelserver.core.body_pipe import BodyPipe, PipedBody
from modelserver.core.large_buffers import aligned_buffer, reserved_bytes
from modelserver.core.tensor import Buffer
from modelserver.errors import PayloadTooLargeError, ServerError, UnavailableError
from modelserver.wire.assembly import FREE_BYTES, AssemblyBudget, Holder

# From this size on it pays to receive straight into the body's own buffer.
MIN_DIRECT_BYTES = 32 * 1024
# Received at a time: the kernel may hold many MB of a body, and the copy of all of them would hold the event loop.
MAX_RECEIVED_BYTES = 256 * 1024
# A body of unknown length lies in pieces up to this size; then it gets memory for as much as it may have, of which
# pages count once they are written to, but for no more than this.
_MAX_IN_PIECES_BYTES = 1024 * 1024
_MAX_UNKNOWN_BYTES = 4 * 1024 * 1024 * 1024


_SHORT = "the server is receiving too many large requests at once, and others came faster than this; try again later"


class BodyCollector(Holder):
    """One body in pieces: `add`, or `room` and `filled`, until `finish`; `drop` if it never ends.

    A body that does not come in one piece is collected in a buffer, but for short ones of unknown length. It is placed
    so that the tensors behind the `header_length` bytes of JSON of an infer request are aligned. As soon as the body is
    known to be over `max_bytes`, or must give way where the `budget` of all bodies is short, there is an `error`, and
    further bytes are dropped.

    With a `pipe` nothing is collected: the pieces go there, and the limits are those of what it leads to.
    """

    __slots__ = (
        "_budget",
        "_buffer",
        "_chunks",
        "_content_length",
        "_header_length",
        "_max_bytes",
        "_owner",
        "_pipe",
        "error",
        "is_complete",
        "num_bytes",
        "on_given_up",
        "on_room",
    )

    def __init__(
        self,
        content_length: int | None,
        header_length: int,
        max_bytes: int,
        budget: AssemblyBudget | None = None,
        owner: str = "",
        pipe: BodyPipe | None = None,
    ) -> None:
        """`owner` is the client whose share of the budget the body counts towards."""
        self.is_complete = False
        self.error: ServerError | None = None
        self.num_bytes = 0
        self._content_length = content_length
        self._header_length = header_length
        self._max_bytes = max_bytes
        self._budget = budget
        self._owner = owner
        # Called when another body needs this one's memory, and this one has an `error`; never within a call of ours.
        self.on_given_up: Callable[[], None] | None = None
        # Called when the pipe has room again.
        self.on_room: Callable[[], None] | None = None
        self._chunks: list[bytes] = []
        self._buffer: memoryview | None = None
        self._pipe = pipe
        if pipe is not None:
            self.error = pipe.error
            pipe.on_change = self._follow_pipe
        self.expect(content_length or 0)

    def expect(self, num_bytes: int) -> None:
        """This many more bytes are announced: refuse them before they arrive, if necessary."""
        if self._pipe is None and self.num_bytes + num_bytes > self._max_bytes:
            self._fail(
                PayloadTooLargeError(
                    f"request JSON size of more than {self._max_bytes} bytes exceeds the maximum allowed input size of "
                    f"{self._max_bytes} bytes; raise it with --http-max-input-size"
                )
            )

    def add(self, chunk: bytes | memoryview) -> None:
        """Take the next piece. `bytes` are kept; a view is copied, because its memory may be shared."""
        self.expect(len(chunk))
        if self.error is not None:
            self.num_bytes += len(chunk)
            return
        if self._pipe is not None:
            self.num_bytes += len(chunk)
            self._pipe.put(bytes(chunk))
            return
        length, end = self._content_length, self.num_bytes + len(chunk)
        is_whole = end <= _MAX_IN_PIECES_BYTES if length is None else len(chunk) == length
        if isinstance(chunk, bytes) and is_whole:
            self._chunks.append(chunk)
        else:
            room = self._room(len(chunk))
            room[: len(chunk)] = chunk
        self._count(len(chunk))

    def room(self) -> memoryview | None:
        """Memory for the next bytes, all of which belong to this body; None if they should be given to `add`.

        It is as large as the event loop should receive at once.
        """
        length = self._content_length
        if length is None or self._pipe is not None or self.error is not None:
            return None
        if self._buffer is None and length < MIN_DIRECT_BYTES:
            return None
        return self._room(1)[:MAX_RECEIVED_BYTES]

    def filled(self, num_bytes: int) -> None:
        """This many bytes of `room` were received."""
        if self.error is None:
            self._count(num_bytes)
        else:
            self.num_bytes += num_bytes

    @property
    def is_piped(self) -> bool:
        """Whether the body is not kept in memory."""
        return self._pipe is not None

    @property
    def has_room(self) -> bool:
        """Whether the client should send more now."""
        return self._pipe is None or self._pipe.has_room

    @property
    def is_full(self) -> bool:
        """Whether a body of announced length has arrived."""
        return self.num_bytes == self._content_length

    def finish(self) -> None:
        """The body has ended."""
        self.is_complete = True
        self._release()

    def drop(self) -> None:
        """The body will not end; forget the received part."""
        self._chunks.clear()
        self._buffer = None
        if self._pipe is not None:
            self._pipe.drop()
        self._release()

    def body(self) -> Buffer:
        """The whole body, once it is complete and there is no error."""
        if self._pipe is not None:
            return PipedBody.of(self._pipe)
        if self._buffer is not None:
            return self._buffer[: self.num_bytes]
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def _room(self, num_bytes: int) -> memoryview:
        """The rest of the buffer, with space for `num_bytes` at least."""
        buffer, end = self._buffer, self.num_bytes + num_bytes
        if buffer is None or len(buffer) < end:
            length = self._content_length
            if length is None:
                length = min(self._max_bytes, max(_MAX_UNKNOWN_BYTES, 2 * end))
            grown = aligned_buffer(reserved_bytes(length, end), self._header_length)
            start = 0
            for part in self._chunks if buffer is None else [buffer[: self.num_bytes]]:
                grown[start : start + len(part)] = part
                start += len(part)
            self._chunks.clear()
            self._buffer = buffer = grown
        return buffer[self.num_bytes :]

    def give_up(self) -> None:
        """Called by the budget."""
        on_given_up = self.on_given_up
        self._fail(UnavailableError(_SHORT))
        if on_given_up is not None:
            on_given_up()

    def _follow_pipe(self) -> None:
        assert self._pipe is not None, "it called this"
        changed = self.on_room
        if self._pipe.error is not None:
            changed = self.on_given_up
            self._fail(self._pipe.error)
        if changed is not None:
            changed()

    def _count(self, num_bytes: int) -> None:
        before = max(self.num_bytes, FREE_BYTES)
        self.num_bytes += num_bytes
        if self._budget is None or self.num_bytes <= before:
            return
        if not self._budget.charge(self.num_bytes - before, self, self._owner):
            self._fail(UnavailableError(_SHORT))

    def _fail(self, error: ServerError) -> None:
        if self.error is None:
            self.error = error
            self.drop()

    def _release(self) -> None:
        self.on_given_up = self.on_room = None
        if self._pipe is not None:
            self._pipe.on_change = None
        if self._budget is not None:
            self._budget.release(self)
