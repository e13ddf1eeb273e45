"""`modelserver health`: whether a server answers and is ready, as an exit code; what a container's HEALTHCHECK runs."""

from __future__ import annotations

from typing import Annotated

import typer

from modelserver.cli.client import DEFAULT_URL, ServerClient
from modelserver.cli.output import print_line

# A probe that takes longer has its answer: kubelet and container engines give it a few seconds.
TIMEOUT_S = 3.0


def register(app: typer.Typer) -> None:
    app.command()(health)


def health(
    url: Annotated[str, typer.Option("--url", "-u", envvar="MODELSERVER_URL", help="HTTP address of the server.")] = (
        DEFAULT_URL
    ),
    live: Annotated[
        bool, typer.Option("--live", help="Ask only whether the server runs, whatever its models.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer.")] = TIMEOUT_S,
) -> None:
    """Tell by the exit code whether a server is ready: 0 it is, 1 it is not or does not answer.

    Of TLS, the variables MODELSERVER_CA_FILE, MODELSERVER_CLIENT_CERT and MODELSERVER_CLIENT_KEY name the files.
    """
    client = ServerClient(url, timeout_s=timeout_s)
    if live:
        client.check_live()
    else:
        client.check_ready()
    print_line("live" if live else "ready")
