"""The longest turn of an event loop, in CPU time of its thread: what a busy machine does not change."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LoopTurns:
    """The longest callback so far, in seconds of CPU, and what it was."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest = ""

    def note(self, seconds: float, handle: events.Handle) -> None:
        if seconds > self.longest_s:
            self.longest_s, self.longest = seconds, repr(handle)


@contextmanager
def measured_turns(loop: asyncio.AbstractEventLoop) -> Iterator[LoopTurns]:
    """Measure each callback that asyncio's own event loop runs until the block ends."""
    turns = LoopTurns()
    run = events.Handle._run  # asyncio has no public place for this

    def measured(handle: Any) -> None:
        if getattr(loop, "_thread_id", None) != threading.get_ident():
            run(handle)
            return
        began_s = time.thread_time()
        run(handle)
        turns.note(time.thread_time() - began_s, handle)

    events.Handle._run = measured  # type: ignore[method-assign]
    gc.freeze()  # a collection within a turn is of what the block has made, and not of all that the tests hold
    try:
        yield turns
    finally:
        gc.unfreeze()
        events.Handle._run = run  # type: ignore[method-assign]
