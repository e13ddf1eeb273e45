"""Calls of libraries that cannot be interrupted: waited for up to a limit, and then left to end alone.

Their threads are not waited for when the server ends, and their number is bounded: whatever hangs in a library costs no
more than these.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from modelserver.backend import CancelledError

Result = TypeVar("Result")

# How often a caller looks whether the result is still wanted.
_LOOK_S = 0.05


class TooManyCallsError(Exception):
    """As many calls are under way as there may be: most of them hang."""


class _Call(Generic[Result]):
    """One call, for which several may wait."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.is_abandoned = threading.Event()
        self.num_waiting = 0
        self.result: Result | None = None
        self.error: BaseException | None = None


class UnstoppableCalls(Generic[Result]):
    """At most `max_calls` at once, one for each key. From any thread."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._lock = threading.Lock()  # guards the calls and how many wait for each
        self._calls: dict[Hashable, _Call[Result]] = {}

    def run(
        self,
        key: Hashable,
        function: Callable[[threading.Event], Result],
        timeout_s: float,
        is_cancelled: threading.Event | None = None,
    ) -> Result:
        """Call the function, or join a call with this key that is under way, and return or raise its result.

        The function gets an event that is set when its last waiter has left. TimeoutError when it takes longer,
        TooManyCallsError when it is one too many, CancelledError when `is_cancelled` is set meanwhile.
        """
        while True:
            call = self._join(key, function)
            try:
                self._wait(call, time.monotonic() + timeout_s, is_cancelled)
            finally:
                self._leave(call)
            if isinstance(call.error, CancelledError):
                continue  # it had been given up before this caller came
            if call.error is not None:
                raise call.error
            return call.result  # type: ignore[return-value]  # it is there when there is no error

    def _join(self, key: Hashable, function: Callable[[threading.Event], Result]) -> _Call[Result]:
        """The call of a key, begun if it is not under way."""
        with self._lock:
            call = self._calls.get(key)
            if call is None:
                if len(self._calls) >= self._max_calls:
                    raise TooManyCallsError
                call = self._calls[key] = _Call()
                arguments = (key, call, function)
                threading.Thread(target=self._run, args=arguments, name="llm-grammar-library", daemon=True).start()
            call.num_waiting += 1
            call.is_abandoned.clear()
            return call

    @staticmethod
    def _wait(call: _Call[Result], deadline: float, is_cancelled: threading.Event | None) -> None:
        while not call.has_ended.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
            if is_cancelled is not None and is_cancelled.is_set():
                raise CancelledError("structured output: the request was cancelled")
            if time.monotonic() >= deadline:
                raise TimeoutError

    def _leave(self, call: _Call[Result]) -> None:
        with self._lock:
            call.num_waiting -= 1
            if not call.num_waiting:
                call.is_abandoned.set()

    def _run(self, key: Hashable, call: _Call[Result], function: Callable[[threading.Event], Result]) -> None:
        try:
            call.result = function(call.is_abandoned)
        except BaseException as error:  # raised where the result is waited for; panics of Rust are no Exceptions
            call.error = error
        with self._lock:
            del self._calls[key]
        call.has_ended.set()
