"""Progress of a long command: a spinner on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

# Frames of the spinner.
_REFRESHES_PER_S = 12.5


class Steps:
    """A context manager: `show` names the current step. Drawn on standard error, and erased at the end."""

    def __init__(self) -> None:
        self._live: Live | None = None

    def __enter__(self) -> Steps:
        if sys.stderr.isatty():
            console = Console(stderr=True)
            self._live = Live(console=console, refresh_per_second=_REFRESHES_PER_S, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, step: str) -> None:
        """Drawn at once, so that a short step is seen, too."""
        if self._live is not None:
            self._live.update(Spinner("dots", text=Text(f"{step} ..."), style="status.spinner"), refresh=True)
