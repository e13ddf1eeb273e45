"""`modelserver completion bash | zsh | fish`: shell completion of commands, options and the flags of `serve`."""

from __future__ import annotations

import enum
import importlib
from typing import Annotated, Any

import typer
from typer._completion_shared import get_completion_script
from typer.core import TyperCommand

from modelserver.cli.output import print_line
from modelserver.options.table import option_table

_PROGRAM = "modelserver"
_VARIABLE = "_MODELSERVER_COMPLETE"


class Shell(enum.StrEnum):
    """Supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the script that completes this program: source <(modelserver completion bash)"""
    print_line(get_completion_script(prog_name=_PROGRAM, complete_var=_VARIABLE, shell=shell.value))


class FlagCommand(TyperCommand):
    """A command that takes the server's flags, which typer's parser does not know. The word `--` is one of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        behind = args[end:]
        rest: list[str] = super().parse_args(ctx, args[:end])
        ctx.args = [*ctx.args, *behind]
        return rest

    def shell_complete(self, ctx: object, incomplete: str) -> list[Any]:
        """Flags with this prefix; after the `=` of a flag, its choices."""
        del ctx
        item = _item_type()
        name, equals, value = incomplete.partition("=")
        if equals:
            return [
                item(f"{name}={choice}")
                for option in option_table()
                if option.flag_name == name
                for choice in (("true", "false") if option.kind is bool else option.flag.choices)
                if choice.startswith(value)
            ]
        return [
            item(f"{option.flag_name}=", help=option.flag.help)
            for option in option_table()
            if option.flag_name.startswith(incomplete)
        ]


def _item_type() -> Any:
    """click's class of completions: newer versions of typer bundle click, older ones use the package."""
    command = next(base for base in TyperCommand.__mro__ if base.__name__ == "Command")
    package = command.__module__.removesuffix(".core")
    return importlib.import_module(f"{package}.shell_completion").CompletionItem
