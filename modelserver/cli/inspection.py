"""Reads model repositories without serving them: what `check`, and `list` and `show` without a server, look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelserver.config.problem import Problem
from modelserver.discovery import backend_for_model_files
from modelserver.errors import ConfigError, NotFoundError, ServerError
from modelserver.flags import nearest_hint
from modelserver.repository.definition import ModelDefinition, read_definition
from modelserver.repository.devices import gpu_ids
from modelserver.repository.layout import IgnoredPath, ModelLayout
from modelserver.repository.options import DefinitionOptions
from modelserver.repository.roots import RepositoryScan, resolve_roots, scan_roots


@dataclass(frozen=True, slots=True)
class Inspection:
    """One model as its files define it, or what is wrong with them: one of `definition` and `problems` is empty."""

    name: str
    directory: Path
    definition: ModelDefinition | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def is_valid(self) -> bool:
        return not self.problems

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return self.definition.warnings if self.definition is not None else ()


def inspect_repositories(
    paths: Sequence[Path], options: DefinitionOptions, *, model_name: str = ""
) -> tuple[list[Inspection], tuple[IgnoredPath, ...]]:
    """Every model of the repositories, and what lies there and is no model.

    Raises NotFoundError for a path that is no directory.
    """
    scan = _scan(paths, options, model_name)
    found = [_inspect(layout, options) for layout in scan.models.values()]
    for name, directories in scan.duplicates.items():
        listed = ", ".join(str(directory) for directory in directories)
        problem = Problem(
            str(directories[0]), None, None, "", f"model '{name}' is in several repositories: {listed}", "keep one"
        )
        found.append(Inspection(name, directories[0], problems=(problem,)))
    return sorted(found, key=lambda inspection: inspection.name), scan.ignored


def inspect_model(paths: Sequence[Path], name: str, options: DefinitionOptions) -> Inspection:
    """One model of the repositories. Raises NotFoundError, with the nearest name, if it is in none."""
    scan = _scan(paths, options, "")
    if name not in scan.models:
        places = ", ".join(str(path) for path in paths)
        raise NotFoundError(f"no model '{name}' in {places}{nearest_hint(name, scan.names)}")
    return _inspect(scan.models[name], options)


def _scan(paths: Sequence[Path], options: DefinitionOptions, model_name: str) -> RepositoryScan:
    roots = resolve_roots(paths, model_name=model_name, find_backend=backend_for_model_files)
    return scan_roots(roots, config_name=options.config_name, find_backend=backend_for_model_files)


def _inspect(layout: ModelLayout, options: DefinitionOptions) -> Inspection:
    options = replace(options, gpu_ids=gpu_ids())  # as the server does
    try:
        return Inspection(layout.name, layout.directory, read_definition(layout, options))
    except ConfigError as error:
        problems = tuple(problem for problem in error.problems if isinstance(problem, Problem))
        return Inspection(layout.name, layout.directory, problems=problems or (_problem(layout, error.message),))
    except ServerError as error:
        return Inspection(layout.name, layout.directory, problems=(_problem(layout, error.message),))
    except OSError as error:
        where = error.filename or layout.directory
        reason = f"the model's files cannot be read: {where}: {error.strerror}"
        return Inspection(layout.name, layout.directory, problems=(_problem(layout, reason),))


def _problem(layout: ModelLayout, message: str) -> Problem:
    return Problem(str(layout.directory), None, None, "", message)
