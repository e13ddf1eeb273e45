"""`modelserver health`: reports readiness as an exit code, for a container's HEALTHCHECK."""

from __future__ import annotations

from typing import Annotated

import typer

from modelserver.cli.output import Url, print_line
from modelserver.client.server_client import DEFAULT_URL, ServerClient

# A slower probe counts as failed: kubelet and container engines wait a few seconds only.
TIMEOUT_S = 3.0


def register(app: typer.Typer) -> None:
    app.command()(health)


def health(
    url: Url = DEFAULT_URL,
    live: Annotated[bool, typer.Option("--live", help="Check only that the server runs, not its models.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer.")] = TIMEOUT_S,
) -> None:
    """Check whether a server is ready. Exit code 0: it is ready; 1: it is not, or does not answer.

    The variables MODELSERVER_CA_FILE, MODELSERVER_CLIENT_CERT and MODELSERVER_CLIENT_KEY name the files for TLS.
    """
    client = ServerClient(url, timeout_s=timeout_s)
    if live:
        client.check_live()
    else:
        client.check_ready()
    print_line("live" if live else "ready")
