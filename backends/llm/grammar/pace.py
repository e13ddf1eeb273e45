"""How long a grammar may take to compile, and how: compilers take turns, so that all of them together disturb no more
than one does, and let go of the interpreter between slices, which other threads would have to wrest from them."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from modelserver.backend import CancelledError, InvalidArgumentError

# The length of a turn: as long as threads wait for the interpreter anyway.
_SLICE_S = 0.005
# Long enough for a thread that waits to be woken.
_REST_S = 0.0005
# Held by the compiler whose turn it is.
_TURN = threading.Lock()


class Pace:
    """Used by one thread: `with pace:` around the work, and `pace.look()` within it, at least every few milliseconds.

    Not to be entered within itself.
    """

    __slots__ = ("_deadline", "_is_cancelled", "_turn_end")

    def __init__(self, deadline: float = float("inf"), is_cancelled: threading.Event | None = None) -> None:
        """`deadline` is a time of `time.monotonic()`; `is_cancelled` is set once the grammar is no longer wanted."""
        self._deadline = deadline
        self._is_cancelled = is_cancelled
        self._turn_end = float("inf")

    def __enter__(self) -> Pace:
        self._take_turn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._turn_end = float("inf")
        _TURN.release()

    def look(self) -> None:
        """InvalidArgumentError after the deadline, CancelledError when the grammar is no longer wanted.

        Within `with`, lets others have their turn at the end of this one.
        """
        now = time.monotonic()
        if self._is_cancelled is not None and self._is_cancelled.is_set():
            raise CancelledError("structured output: the request was cancelled")
        if now > self._deadline:
            raise InvalidArgumentError("structured output: compiling the constraint takes too long; simplify it")
        if now > self._turn_end:
            _TURN.release()
            try:
                time.sleep(_REST_S)
            finally:
                self._take_turn()

    def _take_turn(self) -> None:
        _TURN.acquire()
        self._turn_end = time.monotonic() + _SLICE_S
