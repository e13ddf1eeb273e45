"""`modelserver bench`: measure a running server. The flags are perf_analyzer's."""

from __future__ import annotations

import typer

from modelserver.cli.output import print_error
from modelserver.errors import InvalidArgumentError

# The parser is the bench's own: perf_analyzer's flags are single letters and long names with their own forms.
SETTINGS = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}


def bench(context: typer.Context) -> None:
    """Measure a running server: throughput and latency. Takes perf_analyzer's flags; --help lists them."""
    # Here, because the other commands need none of it and should answer at once.
    from modelserver.bench.program import run

    try:
        status = run(context.args)
    except InvalidArgumentError as error:
        print_error(error.message)
        raise typer.Exit(2) from None
    raise typer.Exit(status)
