"""Serves in this process until it is stopped, and prints what is served: `modelserver serve`, and programs' servers."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelserver.app.logs import LogWriter, start_logs
from modelserver.cli.output import print_line, print_table
from modelserver.core import accelerator
from modelserver.core.interpreter import collect_rarely
from modelserver.options.server_options import ServerOptions
from modelserver.options.sources import unknown_variables

if TYPE_CHECKING:
    from modelserver.api import ApiFactory
    from modelserver.app.server import Server

logger = logging.getLogger(__name__)


def run(options: ServerOptions, apis: Mapping[str, ApiFactory] | None = None) -> int:
    """Serve until stopped, with the HTTP APIs of a program besides.

    A forced stop ends the process as it is: a thread may hang in a backend.
    """
    collect_rarely()
    logs = start_logs(options)
    for sentence in unknown_variables(os.environ):
        logger.warning("%s", sentence)
    logger.info("numbers in JSON are read and written by %s", accelerator.description())
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            status, is_abandoned = runner.run(_serve(options, apis or {}, logs))
            if is_abandoned:
                logs.close()
                sys.stdout.flush()
                os._exit(status)
        return status
    finally:
        logs.close()


async def _serve(options: ServerOptions, apis: Mapping[str, ApiFactory], logs: LogWriter) -> tuple[int, bool]:
    # Here, because the other commands need neither gRPC nor backends and should answer at once.
    from modelserver.app.server import Server

    server = Server(options, apis)
    server.controlplane.logs.follow(logs.apply)
    server.controlplane.logs.tail = logs.tail
    status = await server.serve(_announce)
    return status, server.is_abandoned


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's loop, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop


def _announce(server: Server) -> None:
    """Print what is served and where, unless the log is JSON: log lines then say it already."""
    if server.options.log_format == "json":
        return
    backends = {(model.name, model.version): model.backend_name for model in server.repository.models()}
    rows = [
        (
            row.name,
            "" if row.version is None else str(row.version),
            backends.get((row.name, row.version or 0), ""),
            row.state.value,
            row.reason,
        )
        for row in server.repository.index()
    ]
    try:
        print_table(("model", "version", "backend", "state", "reason"), rows)
        addresses = dict(server.addresses)
        if server.console_address is not None:
            addresses["console"] = server.console_address
        width = max(8, *map(len, addresses))
        for name, address in addresses.items():
            print_line(f"{name:<{width}} {address}")
        sys.stdout.flush()
    except OSError as error:
        logger.warning("cannot print what is served: %s; the server runs anyway", error.strerror)
        # Flushing the rest of the buffer would fail again when the process ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
