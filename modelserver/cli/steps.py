"""What a long command is doing: a spinner on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.status import Status


class Steps:
    """A context manager: `show` says the step that begins. Drawn on standard error."""

    def __init__(self) -> None:
        self._status: Status | None = None

    def __enter__(self) -> Steps:
        if sys.stderr.isatty():
            self._status = Console(stderr=True).status("")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def show(self, step: str) -> None:
        if self._status is not None:
            self._status.update(f"{step} ...")
