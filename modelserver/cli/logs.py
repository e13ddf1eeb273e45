"""`modelserver logs`: the log of a running server, regardless of where it is written."""

from __future__ import annotations

from typing import Annotated

import typer

from modelserver.cli.output import Url, print_line
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.telemetry.log_tail import NUM_KEPT

# A server may log nothing for a long time.
_FOLLOW_TIMEOUT_S = 24 * 3600.0


def logs(
    url: Url = DEFAULT_URL,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=NUM_KEPT, help="Number of newest lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines, until Ctrl-C.")] = False,
) -> None:
    """Print the newest lines of a server's log."""
    if not follow:
        for line in ServerClient(url).log_lines(num_lines):
            print_line(line)
        return
    try:
        for line in ServerClient(url, timeout_s=_FOLLOW_TIMEOUT_S).log_lines(num_lines, follows=True):
            print_line(line, flush=True)
    except KeyboardInterrupt:
        return
