"""Calls of libraries that cannot be told to stop: waited for as long as somebody wants to, and then left to end alone.

Their threads are not waited for when the server ends, and there are only so many: whatever hangs in a library costs no
more than these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class TooManyCallsError(Exception):
    """As many calls are under way as there may be: most of them hang."""


class _Call(Generic[Result]):
    """One call, of which there may be several who wait."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.result: Result | None = None
        self.error: BaseException | None = None


class UnstoppableCalls(Generic[Result]):
    """At most `max_calls` at once, one for each key. From any thread."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._lock = threading.Lock()  # guards the calls
        self._calls: dict[Hashable, _Call[Result]] = {}

    def run(self, key: Hashable, function: Callable[[], Result], timeout_s: float) -> Result:
        """What the function returns or raises; of a call of this key that is under way, what that one does.

        TimeoutError when it takes longer, TooManyCallsError when it is one too many.
        """
        with self._lock:
            call = self._calls.get(key)
            if call is None:
                if len(self._calls) >= self._max_calls:
                    raise TooManyCallsError
                call = self._calls[key] = _Call()
                arguments = (key, call, function)
                threading.Thread(target=self._run, args=arguments, name="llm-grammar-library", daemon=True).start()
        if not call.has_ended.wait(timeout_s):
            raise TimeoutError
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]  # it is there when there is no error

    def _run(self, key: Hashable, call: _Call[Result], function: Callable[[], Result]) -> None:
        try:
            call.result = function()
        except BaseException as error:  # raised where the result is waited for; panics of Rust are no Exceptions
            call.error = error
        with self._lock:
            del self._calls[key]
        call.has_ended.set()
