"""A progress bar on a terminal; nothing elsewhere."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TextIO

WIDTH = 30
TICK_S = 0.2
_ERASE = "\r\x1b[K"
_FULL, _EMPTY = "━", "─"


class ProgressBar:
    """One line at the bottom, drawn by a task of its own while a window is measured."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_shown = out.isatty()
        self._name = ""
        self._trial = 0
        self._seconds = 0.0
        self._began_s = 0.0
        self._has_line = False
        self._task: asyncio.Task[None] | None = None

    def level_began(self, name: str) -> None:
        self._name = name

    def window_began(self, trial: int, seconds: float) -> None:
        """`seconds` is how long the window will be; 0 if unknown."""
        if not self._is_shown:
            return
        self._trial, self._seconds, self._began_s = trial, seconds, monotonic()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def count(self, name: str, num_done: int, num_all: int) -> None:
        """Draw how many of a known number are done; called again and again."""
        if self._is_shown:
            self._out.write(_ERASE + count_text(name, num_done, num_all))
            self._out.flush()
            self._has_line = True

    def window_ended(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Erase the line, so that another can be written."""
        if self._has_line:
            self._out.write(_ERASE)
            self._out.flush()
            self._has_line = False

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.clear()

    async def _run(self) -> None:
        while True:
            self._out.write(_ERASE + bar_text(self._name, self._trial, monotonic() - self._began_s, self._seconds))
            self._out.flush()
            self._has_line = True
            await asyncio.sleep(TICK_S)


def bar_text(name: str, trial: int, passed_s: float, seconds: float) -> str:
    """The line: what is measured, and how far it is."""
    if seconds <= 0:
        return f"  {name}, {passed_s:.0f} s"
    return f"  {name}, window {trial}  {_drawn(passed_s / seconds)}"


def count_text(name: str, num_done: int, num_all: int) -> str:
    """The line of a run whose requests are counted."""
    return f"  {name}, {num_done} of {num_all}  {_drawn(num_done / max(num_all, 1))}"


def _drawn(share: float) -> str:
    share = min(1.0, share)
    full = round(share * WIDTH)
    return f"{_FULL * full}{_EMPTY * (WIDTH - full)} {share:4.0%}"
