"""`modelserver route`: one address in front of identical servers."""

from __future__ import annotations

import asyncio
import os
import textwrap

import typer

from modelserver.app.logs import start_logs
from modelserver.cli.foreground import loop_factory
from modelserver.cli.output import print_error, print_line
from modelserver.cli.serve import SETTINGS as SETTINGS
from modelserver.cli.serve import print_options
from modelserver.errors import InvalidArgumentError
from modelserver.options.router_options import RouterOptions, resolve_router_options, router_table

USAGE = "Usage: modelserver route --to=ADDRESS[,ADDRESS...] [--FLAG=VALUE ...]"


def route(context: typer.Context) -> None:
    """Put one address in front of several identical servers. --help lists the flags."""
    words = list(context.args)
    if "--help" in words or "-h" in words:
        _print_help()
        return
    try:
        options = resolve_router_options(words, os.environ)
    except InvalidArgumentError as error:
        print_error(error.message)
        raise typer.Exit(2) from None
    raise typer.Exit(run(options))


def run(options: RouterOptions) -> int:
    """Route until stopped; the exit status."""
    logs = start_logs(options.server)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_serve(options))
    finally:
        logs.close()


async def _serve(options: RouterOptions) -> int:
    # Here, because the other commands need no frontends and should answer at once.
    from modelserver.router.server import Router

    return await Router(options).serve(_announce)


def _announce(router: object) -> None:
    from modelserver.router.server import Router

    assert isinstance(router, Router), "it announces itself"
    if router.options.server.log_format == "json":
        return
    for each in router.endpoints.endpoints:
        print_line(f"replica  {each.address}")
    for name, address in router.addresses.items():
        print_line(f"{name:<8} {address}")


def _print_help() -> None:
    print_line(USAGE)
    print_line("")
    for line in textwrap.wrap(
        "Each flag is also a variable (MODELSERVER_TO) and a key of the file given by --config. The flags of ports, "
        "TLS and logs are those of `modelserver serve`. See docs/scale.md.",
        100,
    ):
        print_line(line)
    print_options(router_table())
