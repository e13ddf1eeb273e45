"""Sources of option values: command line, environment, file. The first source with a value wins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from modelserver.core import accelerator
from modelserver.core.documents import parse_yaml
from modelserver.core.spelling import FALSE_WORDS, TRUE_WORDS, nearest_hint, suggest
from modelserver.errors import InvalidArgumentError
from modelserver.options.flags import Option, OptionValue
from modelserver.options.server_options import ServerOptions
from modelserver.options.table import option_table
from modelserver.telemetry.trace_settings import settings_of_environment

PREFIX = "MODELSERVER_"
# Between the values of a repeated option in one environment variable.
SEPARATOR = ";"
# Kubernetes puts such variables into the environment for each service; they are not ours.
_SERVICE_LINK = re.compile(r"^(tcp|udp|sctp)://")
_SERVICE_LINK_NAME = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
# Variables read by the client commands, and variables needed before the options are parsed.
_OTHER_VARIABLES = frozenset(
    {
        f"MODELSERVER_{name}"
        for name in ("URL", "API_KEY", "CA_FILE", "CLIENT_CERT", "CLIENT_KEY", "GROUP_KEY", "REGISTRY")
    }
    | {accelerator.VARIABLE}
)

Values = dict[str, OptionValue]


@dataclass(frozen=True, slots=True)
class ResolvedOptions:
    """The options, and for each the source of its value: a flag, a variable, a file, a program or `default`."""

    options: ServerOptions
    origins: Mapping[str, str]


def resolve_options(
    arguments: Sequence[str], environment: Mapping[str, str], program: Mapping[str, OptionValue] | None = None
) -> ResolvedOptions:
    """The server's options from its command line and environment; those of a Python `program` come last.

    Raises InvalidArgumentError for an unknown flag or key (with the nearest known one) and for a bad value.
    """
    given = parse_arguments(arguments)
    from_environment = parse_environment(environment)
    path = given.get("config") or from_environment.get("config")
    from_file = read_file(Path(str(path))) if path else {}
    from_vertex_ai = _vertex_ai_values(environment)
    from_leader_worker_set = _leader_worker_set_values(environment)
    values: Values = {}
    origins: dict[str, str] = {}
    for option in option_table():
        sources = (
            (given, "flag"),
            (from_environment, f"environment {option.variable}"),
            (from_file, f"file {path}"),
            (from_vertex_ai, "environment of Vertex AI"),
            (from_leader_worker_set, "environment of LeaderWorkerSet"),
            (program or {}, "program"),
        )
        origins[option.name] = "default"
        for source, origin in sources:
            if option.name in source:
                values[option.name], origins[option.name] = source[option.name], origin
                break
    traces = values.get("trace_config", ())
    if isinstance(traces, tuple) and (of_environment := settings_of_environment(traces, environment)):
        values["trace_config"] = (*of_environment, *traces)
    options = ServerOptions(**values)  # type: ignore[arg-type] # each was parsed as its option's type
    if not (options.allow_http or options.allow_grpc or options.allow_sagemaker or options.allow_vertex_ai):
        raise InvalidArgumentError("--allow-http=false with --allow-grpc=false leaves nothing to serve; allow one")
    return ResolvedOptions(options, origins)


def _vertex_ai_values(environment: Mapping[str, str]) -> Values:
    """The options set by Vertex AI's variables, as in Triton: only its endpoints, for the models that it names."""
    values: Values = {}
    if environment.get("AIP_MODE") == "PREDICTION":
        values |= {"allow_vertex_ai": True, "allow_http": False, "allow_grpc": False}
    if environment.get("AIP_STORAGE_URI"):
        values["model_repository"] = (environment["AIP_STORAGE_URI"],)
    return values


def _leader_worker_set_values(environment: Mapping[str, str]) -> Values:
    """The options set by the variables that Kubernetes' LeaderWorkerSet gives to the pods of a group."""
    names = {
        "nnodes": "LWS_GROUP_SIZE",
        "node_rank": "LWS_WORKER_INDEX",
        "master_addr": "LWS_LEADER_ADDRESS",
    }
    if not all(environment.get(variable) for variable in names.values()):
        return {}
    return {
        option.name: option.parse(environment[names[option.name]], source=names[option.name])
        for option in option_table()
        if option.name in names
    }


def parse_arguments(
    arguments: Sequence[str], table: Sequence[Option] | None = None, *, bare: str = "model_repository"
) -> Values:
    """Options of the table, the server's by default, given as `--name=value`, `--name value` or, if boolean, `--name`.

    Bare words are values of the option `bare`.
    """
    known = _names(option_table() if table is None else table)
    values: Values = {}
    rest = list(reversed(arguments))
    while rest:
        word = rest.pop()
        if not word.startswith("-"):
            _put(values, known[bare], word)
            continue
        name, equals, text = word.partition("=")
        option = known.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
        if option is None:
            flags = ["--" + key.replace("_", "-") for key in known]
            raise InvalidArgumentError(f"unknown flag '{name}'{nearest_hint(name, flags)}")
        if not equals:
            text = _following_value(option, name, rest)
        _put(values, option, option.parse(text, source=name))
    return values


def parse_environment(environment: Mapping[str, str], table: Sequence[Option] | None = None) -> Values:
    """Options from `MODELSERVER_*`; `unknown_variables` names the others of that prefix."""
    values: Values = {}
    for option in option_table() if table is None else table:
        text = environment.get(option.variable)
        if text is None or (option.kind is int and _SERVICE_LINK.match(text)):
            continue
        for part in text.split(SEPARATOR) if option.is_repeated else [text]:
            if part or not option.is_repeated:
                _put(values, option, option.parse(part, source=f"environment variable {option.variable}"))
    return values


def unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each unknown variable with our prefix; variables set by Kubernetes are ignored."""
    known = {option.variable for option in option_table()} | _OTHER_VARIABLES
    return tuple(
        f"environment variable {name} is not a server option{_nearest_variable(name)}"
        for name, text in sorted(environment.items())
        if name.startswith(PREFIX)
        and name not in known
        and not _SERVICE_LINK.match(text)
        and not _SERVICE_LINK_NAME.search(name)
    )


def _nearest_variable(name: str) -> str:
    nearest = suggest(name.removeprefix(PREFIX), [option.name for option in option_table()])
    return f"; did you mean '{PREFIX}{nearest.upper()}'?" if nearest else ""


def read_file(path: Path, table: Sequence[Option] | None = None) -> Values:
    """Options from a YAML mapping of flag names (with or without the dashes) to values or lists of values."""
    try:
        content: Any = parse_yaml(path.read_text(), f"--config: '{path}'")
    except OSError as error:
        raise InvalidArgumentError(f"--config: cannot read '{path}': {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"--config: '{path}' is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"--config: '{path}' must be a mapping from flag names to values")
    known = _names(option_table() if table is None else table)
    values: Values = {}
    for key, value in content.items():
        option = known.get(str(key).removeprefix("--").replace("-", "_"))
        if option is None or option.name == "config":
            names = [name.replace("_", "-") for name in known]
            raise InvalidArgumentError(f"{path}: unknown option '{key}'{nearest_hint(str(key), names)}")
        if value is None or isinstance(value, dict) or (isinstance(value, list) and not option.is_repeated):
            raise InvalidArgumentError(f"{path}: {key} expects {option.expectation}, got {value!r}")
        for part in value if isinstance(value, list) else [value]:
            _put(values, option, option.parse(_written(part), source=f"{path}: {key}"))
    return values


def _names(options: Iterable[Option]) -> dict[str, Option]:
    return {name: option for option in options for name in (option.name, *option.flag.aliases)}


def _following_value(option: Option, name: str, rest: list[str]) -> str:
    """The value of a flag without `=`: the next word; a boolean needs none."""
    has_next = bool(rest) and not rest[-1].startswith("--")
    if option.kind is bool:
        return rest.pop() if has_next and rest[-1].lower() in TRUE_WORDS | FALSE_WORDS else "true"
    if not has_next:
        raise InvalidArgumentError(f"{name} expects {option.expectation}, got nothing")
    return rest.pop()


def _put(values: Values, option: Option, value: bool | int | float | str) -> None:
    if option.is_repeated:
        before = values.get(option.name, ())
        assert isinstance(before, tuple), "a repeated option is a tuple"
        values[option.name] = (*before, str(value))
    else:
        values[option.name] = value


def _written(value: object) -> str:
    """A YAML scalar in the form of a flag's value."""
    return str(value).lower() if isinstance(value, bool) else str(value)
