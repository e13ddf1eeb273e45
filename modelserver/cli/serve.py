"""`modelserver serve`: the options of the process, and the server that they describe."""

from __future__ import annotations

import importlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from modelserver.app.logs import start_logs
from modelserver.cli.completion import FlagCommand
from modelserver.cli.foreground import run
from modelserver.cli.output import print_error, print_line, print_table
from modelserver.errors import InvalidArgumentError
from modelserver.options.flags import Option
from modelserver.options.server_options import ServerOptions
from modelserver.options.sources import ResolvedOptions, Values, resolve_options
from modelserver.options.table import markdown, option_table
from modelserver.store.store import Store, default_directory

if TYPE_CHECKING:
    from modelserver.embed.server import Server as ProgramServer

USAGE = "Usage: modelserver serve [PATH ...] [--FLAG=VALUE ...]"
# The first word that `tritonserver` adds, and the defaults in which Triton differs from us.
_AS_TRITON = "--defaults=triton"
_TRITONS_DEFAULTS: Values = {"host": "0.0.0.0", "exit_on_error": True, "allow_client_shm": True}  # noqa: S104  # as Triton
# Options whose values have a secret after the first =.
_SECRET = frozenset({"http_restricted_api", "grpc_restricted_protocol"})
# A server that a Python program makes, as FILE.py:NAME.
_PROGRAM = re.compile(r"[^-].*\.py:[A-Za-z_]\w*")
# Ranks of language models on several machines.
_NODES = "modelserver_backends.llm.nodes"
# Models that were written for MLServer lie beside it.
_MLSERVER = "model-settings.json"
# The parser is ours: Triton's forms of booleans and repeated flags are not those of other command lines.
SETTINGS = {
    "cls": FlagCommand,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}


def serve(context: typer.Context) -> None:
    """Serve model repositories over HTTP and gRPC. Takes Triton's flags; --help lists them."""
    words = list(context.args)
    defaults: Values | None = _TRITONS_DEFAULTS if _AS_TRITON in words else None
    words = [word for word in words if word != _AS_TRITON]
    if "--help" in words or "-h" in words:
        _print_help()
        return
    if "--markdown" in words:
        print_line(markdown().rstrip())
        return
    only_print = "--print-config" in words
    places = [word for word in words if _PROGRAM.fullmatch(word)]
    try:
        if not only_print and _run_foreign(words):
            return
        program = _import_program(places)
        given = [word for word in words if word not in ("--print-config", "--", *places)]
        resolved = resolve_options(given, os.environ, program.options if program is not None else defaults)
        is_follower = resolved.options.node_rank > 0
        if not only_print and program is None and not is_follower:
            resolved = _with_models(resolved)
    except InvalidArgumentError as error:
        print_error(error.message)
        raise typer.Exit(2) from None
    if only_print:
        _print_config(resolved)
    elif is_follower:
        _follow(resolved.options)
    elif program is None:
        raise typer.Exit(run(resolved.options))
    else:
        program.run(resolved.options)


def tritonserver() -> None:
    """The program `tritonserver`: `modelserver serve` with Triton's defaults, for scripts that start Triton."""
    from modelserver.cli.main import main

    main(["serve", _AS_TRITON, *sys.argv[1:]])


def _run_foreign(words: Sequence[str]) -> bool:
    """Run the program, or serve the directory, that was written for another server, if the only path is one.

    Raises InvalidArgumentError.
    """
    places = [Path(word) for word in words if not word.startswith("-") and Path(word).exists()]
    if len(places) == 1 and (any(places[0].glob("*/" + _MLSERVER)) or (places[0] / _MLSERVER).is_file()):
        from modelserver.embed.foreign.mlserver import serve_directory

        serve_directory(places[0], [word for word in words if Path(word) != places[0]])
        return True
    files = [Path(word) for word in words if not word.startswith("-") and word.endswith(".py") and Path(word).is_file()]
    if len(files) != 1:
        return False
    from modelserver.embed.foreign.program import packages_of, run_file

    packages = packages_of(files[0])
    if packages:
        run_file(files[0], packages, [word for word in words if Path(word) != files[0]])
    return bool(packages)


def _follow(options: ServerOptions) -> None:
    """Compute for the leader of several machines, until this program or the leader is to end."""
    nodes = importlib.import_module(_NODES)
    logs = start_logs(options)
    try:
        nodes.FollowerNode(nodes.Nodes(options.nnodes, *options.leader), options.node_rank).run()
    finally:
        logs.close()


def _import_program(places: Sequence[str]) -> ProgramServer | None:
    """The server of the Python program that the command line names as FILE.py:NAME. Raises InvalidArgumentError."""
    if not places:
        return None
    if len(places) > 1:
        raise InvalidArgumentError(f"expected one program, got {', '.join(places)}")
    from modelserver.embed.server import import_server

    return import_server(places[0])


def _with_models(resolved: ResolvedOptions) -> ResolvedOptions:
    """Without any place of models, those of the store. Raises InvalidArgumentError if there are none."""
    options = resolved.options
    if options.model_repository or options.store:
        return resolved
    directory = default_directory()
    if not Store(directory).names():
        raise InvalidArgumentError(
            "--model-repository is missing: say which directory of models to serve, or get a model by "
            f"'modelserver pull NAME', since the model store {directory} is empty"
        )
    return replace(resolved, options=replace(options, store=str(directory)))


def _print_config(resolved: ResolvedOptions) -> None:
    rows = []
    for option in option_table():
        value = getattr(resolved.options, option.name)
        if option.name in _SECRET:
            value = tuple(f"{text.partition('=')[0]}=***" for text in value)
        text = ", ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
        rows.append(
            (option.flag_name, text.lower() if isinstance(value, bool) else text, resolved.origins[option.name])
        )
    print_table(("flag", "value", "from"), rows)


def _print_help() -> None:
    print_line(USAGE)
    print_line("")
    print_line("Each flag is also a variable (MODELSERVER_HTTP_PORT) and a key of the file given by --config;")
    print_line("a flag wins over a variable, a variable over the file. --print-config shows the result.")
    print_line(f"{_AS_TRITON}, which the program tritonserver gives, takes Triton's: every address, exit on error, and")
    print_line("shared memory of clients.")
    print_options(option_table())


def print_options(options: Iterable[Option]) -> None:
    """The options in the help of their command, by group."""
    group = ""
    for option in options:
        if option.flag.group != group:
            group = option.flag.group
            print_line("")
            print_line(f"{group}:")
        for line in _help_lines(option):
            print_line(line)


def _help_lines(option: Option) -> Sequence[str]:
    kind = {bool: "true|false", int: "INTEGER", float: "NUMBER"}.get(option.kind, "TEXT")
    value = option.flag.metavar or "|".join(option.flag.choices) or kind
    aliases = "".join(f", --{alias.replace('_', '-')}" for alias in option.flag.aliases)
    default = "" if option.default in ((), "", None) else f" (default {str(option.default).lower()})"
    state = "" if option.flag.state.name == "ACTIVE" else f" [{option.flag.state.value}]"
    text = f"{option.flag.help}{default}{state}"
    return [
        f"  {option.flag_name}{aliases}={value}",
        *textwrap.wrap(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 8),
    ]
