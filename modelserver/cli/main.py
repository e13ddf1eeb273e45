"""The command line: one entry point, a command per task. Exit codes: 0 done, 1 failed, 2 misused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from modelserver.cli import (
    bench,
    build_engine,
    chat,
    check,
    completion,
    convert,
    doctor,
    health,
    infer,
    inspect,
    keys,
    logs,
    manifest,
    models,
    ps,
    quantize,
    serve,
    top,
    traffic,
    tune,
)
from modelserver.cli.output import print_error
from modelserver.errors import ServerError

DEBUG = "--debug"

app = typer.Typer(
    name="modelserver",
    help="One server for every kind of model. Start with: modelserver serve --model-repository=DIRECTORY",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `main` has taken --debug out, wherever it stood."""
    del debug


serve.register(app)
check.register(app)
models.register(app)
traffic.register(app)
ps.register(app)
top.register(app)
logs.register(app)
health.register(app)
doctor.register(app)
infer.register(app)
chat.register(app)
bench.register(app)
tune.register(app)
convert.register(app)
quantize.register(app)
build_engine.register(app)
inspect.register(app)
keys.register(app)
manifest.register(app)
completion.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. A `ServerError` is printed as one sentence; without --debug other errors are, too."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    wants_traceback = DEBUG in words
    words = [word for word in words if word != DEBUG]
    try:
        app(words, prog_name="modelserver")
    except ServerError as error:
        if wants_traceback:
            raise
        print_error(error.message)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of our output has closed the pipe (`| head`), so an error message would not be read.
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if wants_traceback:
            raise
        print_error(f"{type(error).__name__}: {error} (run with {DEBUG} for the traceback; this may be a bug)")
        sys.exit(1)


if __name__ == "__main__":
    main()
