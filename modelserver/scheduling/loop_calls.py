"""What schedulers need of an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """What `call_later` returns."""

    def cancel(self) -> None: ...


class LoopCalls(Protocol):
    """The services of an event loop that a batcher needs."""

    def call_soon(self, callback: Callable[[], None], /) -> object: ...

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: object) -> object: ...
