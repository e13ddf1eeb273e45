"""The options as a table, from which the command line, the environment and the documentation are made."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, fields
from functools import cache

from modelserver.options.flags import Flag, FlagState, Option, OptionValue
from modelserver.options.server_options import ServerOptions

# Older flags that still work.
_OLD_IN_EFFECT = (
    *("strict_model_config", "response_cache_byte_size"),
    *("trace_file", "trace_level", "trace_rate", "trace_count", "trace_log_frequency"),
)


@cache
def option_table() -> tuple[Option, ...]:
    """The table in the order of the fields."""
    return describe_options(ServerOptions)


def describe_options(kind: type) -> tuple[Option, ...]:
    """The options that are the fields of a dataclass with a flag each."""
    hints = typing.get_type_hints(kind)
    return tuple(_describe(each.name, hints[each.name], each.default, each.metadata) for each in fields(kind))


def ineffective(options: ServerOptions) -> list[Option]:
    """The given options that have no effect."""
    silent = (FlagState.ACCEPTED, FlagState.DEPRECATED)
    return [
        option
        for option in option_table()
        if option.flag.state in silent
        and option.name not in _OLD_IN_EFFECT
        and getattr(options, option.name) != option.default
    ]


def deprecated(options: ServerOptions) -> list[Option]:
    """The given options that act and have a successor, which their help names behind "As"."""
    return [
        option
        for option in option_table()
        if option.name in _OLD_IN_EFFECT and getattr(options, option.name) != option.default
    ]


def ineffective_metrics_settings(options: ServerOptions) -> list[str]:
    """The given keys of --metrics-config that have no effect: quantiles without summaries."""
    return [key for key in options.metrics_settings if key == "summary_quantiles" and not options.summary_quantiles]


def _describe(name: str, hint: object, default: object, metadata: typing.Mapping[str, Flag]) -> Option:
    assert default is not MISSING, f"option {name} has no default"
    is_repeated = typing.get_origin(hint) is tuple
    is_nullable = isinstance(hint, types.UnionType)
    kind = typing.get_args(hint)[0] if is_repeated or is_nullable else hint
    assert isinstance(kind, type), f"option {name} has no plain type"
    return Option(name, kind, is_repeated, is_nullable, typing.cast(OptionValue, default), metadata["flag"])


def markdown() -> str:
    """The reference of all flags for docs/configuration.md."""
    lines: list[str] = []
    group = ""
    for option in option_table():
        if option.flag.group != group:
            group = option.flag.group
            lines += ["", f"### {group}", "", "| flag | value | default | meaning | state |", "|---|---|---|---|---|"]
        names = " ".join(f"`--{name.replace('_', '-')}`" for name in (option.name, *option.flag.aliases))
        is_bool = option.kind is bool
        expected = "true or false" if is_bool else option.expectation.replace("|", "\\|")
        expected += ", repeatable" if option.is_repeated else ""
        value = str(option.default).lower() if is_bool else option.default
        default = "" if value in ((), "", None) else f"`{value}`"
        ours = " (ours)" if option.flag.is_ours else ""
        meaning = option.flag.help.replace("<", "&lt;")  # a tag, else
        lines.append(f"| {names} | {expected} | {default} | {meaning} | {option.flag.state.value}{ours} |")
    return "\n".join(lines).lstrip("\n") + "\n"


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201 - the command's answer
