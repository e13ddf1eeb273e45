"""`modelserver check`: validates a repository before a roll-out, for people and for CI."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from modelserver.cli.output import print_json, print_line
from modelserver.cli.stored_models import StoredModel, read_repositories
from modelserver.config.config_limits import parse_config_limits
from modelserver.config.problem import Problem
from modelserver.options.server_options import ServerOptions
from modelserver.repository.definition import ModelDefinition
from modelserver.repository.layout import IgnoredPath
from modelserver.repository.options import DefinitionOptions


def check(
    repository: Annotated[
        list[str], typer.Argument(help="Model repositories (also s3://...), or a single model's directory.")
    ],
    model_name: Annotated[str, typer.Option(help="Name of the model, if the directory is a single one.")] = "",
    model_config_name: Annotated[str, typer.Option(help="Use <model>/configs/<name>.pbtxt where it exists.")] = "",
    backend_directory: Annotated[list[Path] | None, typer.Option(help="Directory of backend packages.")] = None,
    backend_config: Annotated[
        list[str] | None, typer.Option(metavar="[BACKEND],KEY=VALUE", help="Setting of a backend, or of all.")
    ] = None,
    allow_pickle_models: Annotated[bool, typer.Option(help="As the server's flag: allow pickled models.")] = False,
    allow_model_backends: Annotated[
        bool, typer.Option(help="As the server's flag: allow models' own backends.")
    ] = False,
    config_limits: Annotated[
        str, typer.Option(metavar="NAME=NUMBER[,...]", help="Limits of a config, as the server's flag.")
    ] = "",
    disable_auto_complete_config: Annotated[bool, typer.Option(help="Use config.pbtxt as it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Validate every model of a repository without serving it. Exit code 1 if one of them is wrong."""
    options = DefinitionOptions(
        config_name=model_config_name,
        backend_directories=tuple(backend_directory or ()),
        backend_config=ServerOptions(
            backend_config=tuple(backend_config or ()), allow_pickle_models=allow_pickle_models
        ).backend_options,
        allow_model_backends=allow_model_backends,
        is_auto_complete_disabled=disable_auto_complete_config,
        limits=parse_config_limits(config_limits),
    )
    found, ignored = read_repositories(repository, options, model_name=model_name)
    is_valid = all(stored.is_valid for stored in found)
    if as_json:
        print_json(_document(found, ignored, is_valid=is_valid))
    else:
        _print(found, ignored)
    raise typer.Exit(0 if is_valid else 1)


def _print(found: list[StoredModel], ignored: tuple[IgnoredPath, ...]) -> None:
    for stored in found:
        if stored.definition is not None:
            versions = ", ".join(str(version) for version in stored.definition.versions)
            print_line(f"ok    {stored.name}: {_kind(stored.definition)}, versions {versions}")
        else:
            print_line(f"WRONG {stored.name}: {_count(len(stored.problems), 'problem')}")
        for problem in stored.problems:
            print_line(f"      {problem}")
        for warning in stored.warnings:
            print_line(f"      warning: {warning}")
    for path in ignored:
        print_line(f"left out: {path.path}: {path.reason}")
    num_wrong = sum(not stored.is_valid for stored in found)
    print_line(f"{_count(len(found), 'model')}, {num_wrong} wrong")


def _document(found: list[StoredModel], ignored: tuple[IgnoredPath, ...], *, is_valid: bool) -> dict[str, object]:
    return {
        "valid": is_valid,
        "models": [
            {
                "name": stored.name,
                "directory": str(stored.directory),
                "valid": stored.is_valid,
                "backend": stored.definition.config.backend if stored.definition else None,
                "versions": list(stored.definition.versions) if stored.definition else [],
                "problems": [_as_dict(problem) for problem in stored.problems],
                "warnings": [_as_dict(warning) for warning in stored.warnings],
            }
            for stored in found
        ],
        "ignored": [{"path": str(path.path), "reason": path.reason} for path in ignored],
    }


def _as_dict(problem: Problem) -> dict[str, object]:
    return dataclasses.asdict(problem)


def _kind(definition: ModelDefinition) -> str:
    return definition.config.backend or definition.config.platform


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
