"""Options that commands share, and their output: tables for people, JSON for programs, text without a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from modelserver.client.address import OLLAMA_VARIABLE, URL_VARIABLE, usual_url

# rich is imported where something is drawn on a terminal, so that programs do not wait for it.
if TYPE_CHECKING:
    from rich.live import Live

Url = Annotated[
    str,
    typer.Option(
        "--url", "-u", envvar=[URL_VARIABLE, OLLAMA_VARIABLE], callback=usual_url, help="HTTP address of the server."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

STATE_STYLES = {"READY": "green", "LOADING": "yellow", "UNLOADING": "yellow", "UNAVAILABLE": "red"}


def print_json(document: object) -> None:
    """Print `document` on standard output, indented."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on standard output: with borders on a terminal, else columns separated by blanks.

    Without a terminal lines are not wrapped: they are for grep and for logs.
    """
    lines = [tuple(row) for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in lines:
            table.add_row(*(Text(cell, style=STATE_STYLES.get(cell, "")) for cell in row))
        Console().print(table)
        return
    lines = [tuple(" ".join(cell.split("\n")) for cell in line) for line in lines]
    widths = [max(len(line[index]) for line in [tuple(columns), *lines]) for index in range(len(columns))]
    for line in [tuple(column.upper() for column in columns), *lines]:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(text.rstrip() + "\n")


def print_line(text: str, *, flush: bool = False) -> None:
    """Print one line on standard output; with `flush` the reader of a pipe gets it at once."""
    sys.stdout.write(text + "\n")
    if flush:
        sys.stdout.flush()


def print_error(message: str) -> None:
    """Print `error: message` on standard error."""
    if not sys.stderr.isatty():
        sys.stderr.write(f"error: {message}\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    console.print(Text.assemble(("error: ", "bold red"), message))


# Frames of the spinner.
_REFRESHES_PER_S = 12.5


class Steps:
    """A context manager: `show` names the current step. Drawn on standard error, and erased at the end."""

    def __init__(self) -> None:
        self._live: Live | None = None

    def __enter__(self) -> Steps:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

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
            from rich.spinner import Spinner
            from rich.text import Text

            self._live.update(Spinner("dots", text=Text(f"{step} ..."), style="status.spinner"), refresh=True)
