"""`modelserver top`: how busy a server's models are, live in the terminal until q is pressed."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from modelserver.cli.output import STATE_STYLES, Url, print_line, print_table
from modelserver.cli.usage import COLUMNS, ModelUsage, bytes_text, duration_text, model_usages, usage_cells
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.errors import ServerError

_NUMERIC_FROM = COLUMNS.index("instances")


def top(
    url: Url = DEFAULT_URL,
    interval_s: Annotated[float, typer.Option("--interval", "-d", min=0.1, help="Seconds between updates.")] = 1.0,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="Exit after this many updates; 0: run until q.")
    ] = 0,
) -> None:
    """Watch a server's models. Without a terminal it prints one table after --interval seconds, or --count of them."""
    watch = Watch(ServerClient(url))
    watch.look()
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        for _ in range(count or 1):
            time.sleep(interval_s)
            watch.look()
            print_table(COLUMNS, [usage_cells(row, time.time()) for row in watch.usages])
            print_line(watch.headline)
        return
    with _keys_at_once(), Live(watch.screen(), console=Console(), screen=True, auto_refresh=False) as live:
        num_looks = 0
        while not _wait_for_quit(interval_s) and (num_looks < count or not count):
            num_looks += 1
            try:
                watch.look()
            except ServerError as error:
                watch.trouble = error.message
            live.update(watch.screen(), refresh=True)


@dataclass(slots=True)
class _Look:
    document: dict[str, Any]
    at_s: float


class Watch:
    """The last two overviews of a server, and the screen made from them."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._last: _Look | None = None
        self.usages: list[ModelUsage] = []
        # Why the last request failed; empty if it succeeded.
        self.trouble = ""

    def look(self) -> None:
        """Ask the server once more. Raises ServerError as `ServerClient` does, and then keeps the last overview."""
        look = _Look(self._client.overview(), time.monotonic())
        before, self._last, self.trouble = self._last, look, ""
        if before is None:
            self.usages = model_usages(look.document)
        else:
            self.usages = model_usages(look.document, before.document, look.at_s - before.at_s)

    @property
    def headline(self) -> str:
        """One line about server and host."""
        if self._last is None:
            return f"{self._client.url}: no answer"
        server, host = self._last.document["server"], self._last.document["host"]
        rates = [row.rate for row in self.usages if row.rate is not None]
        return (
            f"{self._client.url}  {'ready' if server['ready'] else 'NOT READY'}  up {duration_text(server['uptime_s'])}"
            f"  cpu {host['cpu_utilization']:.0%}  memory {bytes_text(host['memory_used_bytes'])} of "
            f"{bytes_text(host['memory_total_bytes'])}  server {bytes_text(server['memory_bytes'])}"
            f"  {sum(rates):.0f} req/s  queued {sum(row.queue_depth for row in self.usages)}"
        )

    def screen(self) -> RenderableType:
        """The whole screen: the busiest models first."""
        table = Table(header_style="bold", expand=False, box=None, padding=(0, 1))
        for index, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if index >= _NUMERIC_FROM else "left", no_wrap=True)
        for row in sorted(self.usages, key=lambda row: (-(row.rate or 0.0), row.name, row.version)):
            cells = usage_cells(row, time.time())
            table.add_row(*(Text(cell, style=STATE_STYLES.get(cell, "")) for cell in cells))
        lines: list[RenderableType] = [Text(self.headline, style="bold"), Text(), table, Text()]
        if self.trouble:
            lines.append(Text(self.trouble, style="red"))
        elif self._last is not None:
            lines += [Text(reason, style="yellow") for reason in self._last.document["server"]["reasons"]]
        lines.append(Text("q: quit", style="dim"))
        return Group(*lines)


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Reads keys as they are pressed, without echo."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait_for_quit(seconds: float) -> bool:
    """Wait; return whether q or Ctrl-C was pressed."""
    deadline = time.monotonic() + seconds
    try:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
                return True
    except KeyboardInterrupt:
        return True
    return False
