"""Reads model repositories without serving them, for `check`, and for `list` and `show` without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelserver.backend.model_files import backend_for_model_files
from modelserver.config.ensemble_models import FindConfig, check_models, is_decoupled
from modelserver.config.problem import Problem
from modelserver.config.schema import EnsembleStep, ModelConfig, ModelTransactionPolicy
from modelserver.core.spelling import nearest_hint
from modelserver.errors import ConfigError, NotFoundError, ServerError
from modelserver.repository.definition import ModelDefinition, read_definition
from modelserver.repository.layout import IgnoredPath, ModelLayout, RemoteModel, scan_model
from modelserver.repository.options import DefinitionOptions, RepositoryOptions, gpu_ids
from modelserver.repository.roots import RepositoryScan, open_roots, scan_roots
from modelserver.store.cloud_uri import is_cloud_uri, parse_cloud_uri


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One model as its files define it, or the problems in them: one of `definition` and `problems` is empty."""

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


def read_repositories(
    repositories: Sequence[str], options: DefinitionOptions, *, model_name: str = ""
) -> tuple[list[StoredModel], tuple[IgnoredPath, ...]]:
    """Every model of the repositories, and the other entries that are not models.

    A repository is a directory, or an address in an object store. Raises NotFoundError if a path is not a directory,
    and UnavailableError if a store cannot be reached.
    """
    scan = _scan(repositories, options, model_name)
    reader = _Reader(scan, options)
    found = [reader.read(layout) for layout in scan.models.values()]
    for name, directories in scan.duplicates.items():
        listed = ", ".join(str(directory) for directory in directories)
        problem = Problem(
            str(directories[0]), None, None, "", f"model '{name}' is in several repositories: {listed}", "keep one"
        )
        found.append(StoredModel(name, directories[0], problems=(problem,)))
    return sorted(found, key=lambda model: model.name), scan.ignored


def read_model(repositories: Sequence[str], name: str, options: DefinitionOptions) -> StoredModel:
    """One model of the repositories. Raises NotFoundError, with the nearest name, if it is in none."""
    scan = _scan(repositories, options, "")
    if name not in scan.models:
        places = ", ".join(repositories)
        raise NotFoundError(f"no model '{name}' in {places}{nearest_hint(name, scan.names)}")
    return _Reader(scan, options).read(scan.models[name])


def _scan(repositories: Sequence[str], options: DefinitionOptions, model_name: str) -> RepositoryScan:
    places = tuple(parse_cloud_uri(text) if is_cloud_uri(text) else Path(text) for text in repositories)
    roots = open_roots(RepositoryOptions(places, model_name=model_name))
    for root in roots:
        if root.cloud is not None:
            root.cloud.refresh()
    return scan_roots(roots, config_name=options.config_name, find_backend=backend_for_model_files)


class _Reader:
    """Reads each model once; the models of an ensemble before the ensemble."""

    def __init__(self, scan: RepositoryScan, options: DefinitionOptions) -> None:
        self._layouts = {layout.name: layout for layout in scan.models.values()}
        self._options = replace(options, gpu_ids=gpu_ids())  # as the server does
        self._found: dict[str, StoredModel] = {}
        self._path: list[str] = []

    def read(self, layout: ModelLayout) -> StoredModel:
        if layout.name not in self._found:
            self._path.append(layout.name)
            self._found[layout.name] = _read(layout, self._options, self._find_config)
            self._path.pop()
        return self._found[layout.name]

    def _find_config(self, step: EnsembleStep) -> ModelConfig | str | None:
        """The config of a step's model, or its problem."""
        name = step.model_name
        if name not in self._layouts:
            return f"there is no model '{name}'{nearest_hint(name, sorted(self._layouts))}"
        if name in self._path:
            return f"ensembles contain each other: {' -> '.join((*self._path[self._path.index(name) :], name))}"
        definition = self.read(self._layouts[name]).definition
        if definition is None:
            return f"model '{name}' has problems of its own"
        if step.model_version > 0 and step.model_version not in definition.versions:
            served = ", ".join(map(str, definition.versions))
            return f"model '{name}' does not serve version {step.model_version}, only {served}"
        models = [self._find_config(inner) for inner in _steps(definition.config)]
        if is_decoupled(definition.config, [model for model in models if isinstance(model, ModelConfig)]):
            return replace(definition.config, model_transaction_policy=ModelTransactionPolicy(decoupled=True))
        return definition.config


def _steps(config: ModelConfig) -> tuple[EnsembleStep, ...]:
    return config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()


def _read(layout: ModelLayout, options: DefinitionOptions, find_config: FindConfig) -> StoredModel:
    try:
        if layout.remote is not None:
            return _read_remote(layout, layout.remote, options, find_config)
        definition = read_definition(layout, options, find_config=find_config)
        source, locations = definition.config_source, definition.locations
        misfits = check_models(definition.config, find_config, locations=locations, source=source)
        if misfits:
            return StoredModel(layout.name, layout.directory, problems=misfits)
        return StoredModel(layout.name, layout.directory, definition)
    except ConfigError as error:
        problems = tuple(problem for problem in error.problems if isinstance(problem, Problem))
        return StoredModel(layout.name, layout.directory, problems=problems or (_problem(layout, error.message),))
    except ServerError as error:
        return StoredModel(layout.name, layout.directory, problems=(_problem(layout, error.message),))
    except OSError as error:
        where = error.filename or layout.directory
        reason = f"the model's files cannot be read: {where}: {error.strerror}"
        return StoredModel(layout.name, layout.directory, problems=(_problem(layout, reason),))


def _read_remote(
    layout: ModelLayout, remote: RemoteModel, options: DefinitionOptions, find_config: FindConfig
) -> StoredModel:
    """Read a remote model as the server does: from a copy in the cache."""
    tree = remote.root.materialise(layout.name, remote.listing)
    try:
        copy = scan_model(tree.path, layout.name, config_name=options.config_name)
        return replace(_read(copy, options, find_config), directory=layout.directory)
    finally:
        tree.release()


def _problem(layout: ModelLayout, message: str) -> Problem:
    return Problem(str(layout.directory), None, None, "", message)
