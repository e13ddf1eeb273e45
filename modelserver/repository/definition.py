"""Makes a loadable definition of a model's directory: parse, complete, normalise, validate.

All problems are reported at once. Nothing is loaded here; `modelserver check` uses the same code.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from modelserver.backend import Backend, BackendContext
from modelserver.backend.discovery import find_backend
from modelserver.backend.model_files import (
    backend_for_model_file,
    backend_for_model_files,
    foreign_model_file,
    model_filenames,
)
from modelserver.config.config_limits import FLAG
from modelserver.config.defaults import BACKENDS, normalise
from modelserver.config.ensemble_models import FindConfig, check_models
from modelserver.config.message import config_from_json
from modelserver.config.on_demand import OnDemandConfig, on_demand_config
from modelserver.config.pbtxt import ParsedConfig, read_pbtxt
from modelserver.config.problem import Locations, Problem, error_of, is_doubtful, key_path
from modelserver.config.schema import ModelConfig, RepositoryAgent
from modelserver.config.validate import validate
from modelserver.errors import ConfigError, InvalidArgumentError, NotFoundError, ServerError, UnsupportedError
from modelserver.execution.engine import EnsembleBackend
from modelserver.execution.process.hosted_backend import complete_config
from modelserver.repository.fingerprint import ModelFingerprint
from modelserver.repository.layout import (
    CONFIG_FILENAME,
    ModelLayout,
    fingerprint_model,
    missing_versions,
    served_versions,
)
from modelserver.repository.options import DefinitionOptions
from modelserver.repository.state import CompletionError
from modelserver.repository.unsupported import ignored_warnings, setting_warnings, unsupported_problems
from modelserver.scheduling.strategy import STRATEGY_PARAMETER, find_strategy


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """A model that is ready to be loaded. `versions` are those that its policy serves, with their directories.

    `origin` is the source of the files, if the directory is a copy. `fingerprint` was taken before anything
    was read. `missing_versions` are named by the policy but absent. `config_source` and `locations` say where the
    config is written. `is_uploaded`: the files came with a request. `read_ns` is the Unix time before reading began.
    """

    name: str
    config: ModelConfig
    backend_class: type[Backend]
    model_directory: Path
    versions: Mapping[int, Path]
    fingerprint: ModelFingerprint = field(default_factory=ModelFingerprint)
    backend_options: Mapping[str, str] = field(default_factory=dict)
    strategies: Mapping[int, Path] = field(default_factory=dict)
    missing_versions: tuple[int, ...] = ()
    namespace: str = ""
    origin: str = ""
    warnings: tuple[Problem, ...] = ()
    config_source: str = ""
    locations: Locations = field(default_factory=lambda: Locations({}), compare=False)
    is_uploaded: bool = False
    read_ns: int = field(default=0, compare=False)

    @property
    def is_of_files_alone(self) -> bool:
        """Whether the definition depends only on the files below `model_directory` and the backend of that name."""
        is_elsewhere = self.is_uploaded or self.origin or self.strategies or self.config.is_ensemble
        return not is_elsewhere and self.config.model_repository_agents is None

    def context(self, version: int) -> BackendContext:
        """The context of one version for its backend."""
        return BackendContext(
            model_name=self.name,
            version=version,
            config=self.config,
            model_directory=self.model_directory,
            version_directory=self.versions[version],
            options=self.backend_options,
            namespace=self.namespace,
            batch_strategy=self.strategies.get(version),
            is_uploaded=self.is_uploaded,
        )


def read_definition(
    layout: ModelLayout,
    options: DefinitionOptions,
    *,
    config_json: str | None = None,
    only_version: int | None = None,
    find_config: FindConfig | None = None,
    is_uploaded: bool = False,
) -> ModelDefinition:
    """The definition of `layout`; `config_json` replaces its config file. Blocking.

    `find_config` finds the configs of an ensemble's models, as far as they are known. A mismatch is reported along with
    other problems. Without other problems it is left to the binding of the ensemble, because its models may change.
    `only_version` is served instead of the versions of the policy. Raises NotFoundError if it does not exist,
    ConfigError with every problem, UnsupportedError when the only problems are fields that this
    version does not execute, CompletionError when the backend cannot read its files, and what it raises when it cannot
    be imported.
    """
    if only_version is not None:
        check_has_version(layout, only_version)
    read_ns = time.time_ns()
    fingerprint = fingerprint_model(layout)
    source, parsed = _parse(layout, config_json)
    reading = _Reading(layout, options, source, parsed, only_version, find_config, is_uploaded=is_uploaded)
    return replace(reading.finish(), fingerprint=fingerprint, read_ns=read_ns)


def read_agents(layout: ModelLayout, *, config_json: str | None = None) -> tuple[RepositoryAgent, ...]:
    """The repository agents that the config names; none if the config has errors, which `read_definition` reports.

    Raises ConfigError for a config that cannot be read at all.
    """
    _, parsed = _parse(layout, config_json)
    agents = parsed.config.model_repository_agents
    return agents.agents if agents is not None and not parsed.problems else ()


def read_on_demand_configs(layouts: Iterable[ModelLayout]) -> dict[str, OnDemandConfig]:
    """How long models stay in memory, by key, according to their configs; unreadable configs are left out.

    Blocking.
    """
    found: dict[str, OnDemandConfig] = {}
    for layout in layouts:
        try:
            _, parsed = _parse(layout, None)
        except ConfigError:
            found[layout.key] = OnDemandConfig()
        else:
            found[layout.key] = on_demand_config(parsed.config)
    return found


def read_unloaded(layouts: Iterable[ModelLayout], options: DefinitionOptions) -> list[ModelConfig]:
    """The configs of models whose inputs and outputs are known without loading them: the config states them, or
    the backend completes them quickly. Unreadable configs are left to a load, which reports why. Blocking.
    """
    found = []
    for layout in layouts:
        if layout.remote is not None:
            continue
        with suppress(ServerError):  # a ConfigError is one
            _, parsed = _parse(layout, None)
            config = replace(parsed.config, name=layout.name)
            if not (config.input and config.output):
                if not _completes_quickly(layout, config, options):
                    continue
                config = read_definition(layout, options).config
            found.append(config)
    return found


def _completes_quickly(layout: ModelLayout, config: ModelConfig, options: DefinitionOptions) -> bool:
    """Whether the model's backend says so. Code in a model's directory is not run to find out."""
    files = (backend_for_model_files(directory) for _, directory in sorted(layout.versions.items(), reverse=True))
    of_files = backend_for_model_file(layout.directory / layout.file) if layout.file else next(filter(None, files), "")
    name = config.backend or BACKENDS.get(config.platform, "") or of_files
    return bool(name) and find_backend(name, backend_directories=options.backend_directories).completes_quickly


def size_on_disk(layout: ModelLayout) -> int:
    """The size of a model's newest version in bytes; 0 if it cannot be determined. Blocking."""
    if not layout.versions or layout.remote is not None:
        return 0
    try:
        tree = fingerprint_model(layout).versions[max(layout.versions)]
    except OSError:
        return 0
    return sum(max(0, file.size_bytes) for file in tree.files)


def check_has_version(layout: ModelLayout, version: int) -> None:
    """Raise NotFoundError unless the model's directory holds this version."""
    if version not in layout.versions:
        there = ", ".join(map(str, layout.versions)) or "none"
        raise NotFoundError(f"model '{layout.name}' has no version {version} in {layout.directory}; there are: {there}")


def _parse(layout: ModelLayout, config_json: str | None) -> tuple[str, ParsedConfig]:
    """A description of the config's source, and the config."""
    if config_json is not None:
        source = f"config override of model '{layout.name}'"
        return source, ParsedConfig(config_from_json(config_json, source=source), Locations({}))
    if layout.config_file is None:
        # Without a file the backend completes everything.
        return str(layout.directory / CONFIG_FILENAME), ParsedConfig(ModelConfig(), Locations({}))
    source = str(layout.config_file)
    try:
        text = layout.config_file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = Problem(source, None, None, "", f"expected UTF-8 text, got other bytes at offset {error.start}")
        raise error_of((problem,), source) from error
    except OSError as error:
        problem = Problem(source, None, None, "", f"the file cannot be read: {error.strerror}")
        raise error_of((problem,), source) from error
    return source, read_pbtxt(text, source)


class _Reading:
    """One run of `read_definition`: collects problems instead of stopping at the first."""

    def __init__(
        self,
        layout: ModelLayout,
        options: DefinitionOptions,
        source: str,
        parsed: ParsedConfig,
        only_version: int | None,
        find_config: FindConfig | None,
        *,
        is_uploaded: bool,
    ) -> None:
        self._is_uploaded = is_uploaded
        self._only_version = only_version
        self._find_config = find_config
        self._layout = layout
        self._options = options
        self._source = source
        self._locations = parsed.locations
        self._config = parsed.config
        self._problems: list[Problem] = list(parsed.problems)
        self._parsed = parsed
        self._strategies: dict[int, Path] = {}

    def finish(self) -> ModelDefinition:
        if self._layout.file:
            self._config = replace(self._config, default_model_filename=self._layout.file)
        if self._layout.is_single or not self._config.name:  # a single model gets its name from outside
            self._config = replace(self._config, name=self._layout.name)
        is_ensemble = self._config.is_ensemble
        backend_class = EnsembleBackend if is_ensemble else self._settle_backend()
        acts_on = backend_class.acts_on if backend_class is not None else ()
        unsupported = unsupported_problems(self._config, self._source, acts_on)
        served = self._settle_versions()
        completed = backend_class is not None and bool(served) and not self._problems
        if completed and not unsupported and not is_ensemble:
            assert backend_class is not None, "completed says so"
            self._complete(backend_class, served)
            unsupported = unsupported_problems(self._config, self._source, acts_on)
        written = self._config
        if backend_class is not None:
            self._normalise(backend_class)
            self._settle_strategies(served)
        self._validate(is_complete=completed or is_ensemble)
        if self._problems and is_ensemble and self._find_config is not None:
            found = check_models(self._config, self._find_config, locations=self._locations, source=self._source)
            self._problems += found
        self._raise(unsupported)
        assert backend_class is not None, "a config without a backend has a problem"
        return ModelDefinition(
            name=self._layout.name,
            config=self._config,
            backend_class=backend_class,
            model_directory=self._layout.directory,
            versions=served,
            namespace=self._layout.namespace,
            origin=self._layout.origin,
            backend_options=self._options.backend_options(self._config.backend),
            strategies=self._strategies,
            missing_versions=self._missing_versions(),
            warnings=self._warnings(written, backend_class),
            config_source=self._source,
            locations=self._locations,
            is_uploaded=self._is_uploaded,
        )

    def _add(self, field_path: str, message: str, hint: str | None = None, summary: str = "") -> None:
        line, column = self._locations.find(field_path) or (None, None)
        self._problems.append(Problem(self._source, line, column, field_path, message, hint, summary))

    def _settle_backend(self) -> type[Backend] | None:
        config = self._config
        name = config.backend or BACKENDS.get(config.platform, "")
        if not name and config.platform:
            return None  # `validate` reports the problem with the platform
        if not name:
            name = self._backend_of_files()
        if not name:
            return None
        self._config = replace(config, backend=name)
        directory = self._layout.directory if self._options.allow_model_backends else None
        try:
            return find_backend(name, backend_directories=self._options.backend_directories, model_directory=directory)
        except (NotFoundError, InvalidArgumentError) as error:
            unknown = f"unable to find backend library for backend '{name}'"
            is_missing = isinstance(error, NotFoundError)
            summary = f"{unknown}, try specifying runtime on the model configuration." if is_missing else ""
            hint = None
            if not config.backend and not config.platform:
                hint = (
                    f"the backend is taken from the model's name, since no version has one of the files {_filenames()}"
                )
            self._add("backend", error.message, hint, summary)
            return None

    def _backend_of_files(self) -> str:
        """The backend by which a model without `backend:` is recognised; "" with a problem if there is none."""
        if self._options.is_auto_complete_disabled:
            has_file = self._source != str(self._layout.directory / CONFIG_FILENAME) or self._layout.config_file
            summary = "" if has_file else f"failed to open text file for read {self._source}: No such file or directory"
            message = "expected the name of a backend, because auto-completion is disabled; got none"
            self._add("backend", message, summary=summary)
            return ""
        if self._layout.file:
            return backend_for_model_file(self._layout.directory / self._layout.file)
        for _, directory in sorted(self._layout.versions.items(), reverse=True):
            name = backend_for_model_files(directory)
            if name is not None:
                return name
        _, _, named = self._layout.name.partition(".")
        if named:  # as in Triton, where a directory may be called `model.<backend>`
            return named
        unknown = f"Invalid model name: Could not determine backend for model '{self._layout.name}'"
        form = "with no backend in model configuration. Expected model name of the form 'model.<backend_name>'."
        message = f"expected the name of a backend, or one of the files {_filenames()} in a version directory"
        foreign = (foreign_model_file(directory) for directory in self._layout.versions.values())
        hint = next((each for each in foreign if each is not None), "")
        self._add("backend", message, hint, summary=f"{unknown} {form}")
        return ""

    def _settle_versions(self) -> dict[int, Path]:
        available = self._layout.versions
        if not available:
            where = self._layout.directory
            hint = "put the model's files into a directory named by its version, such as '1'"
            if self._layout.ignored:
                hint = "; ".join(path.reason for path in self._layout.ignored)
            policy = f"at least one version must be available under the version policy of model '{self._layout.name}'"
            self._add("", f"no version directories in '{where}'", hint, policy)
            return {}
        if self._only_version is not None:
            return {self._only_version: available[self._only_version]}
        served = served_versions(self._config.version_policy, tuple(available))
        if not served:
            message = f"no version to serve: the directory holds only {sorted(available)}"
            policy = f"at least one version must be available under the version policy of model '{self._layout.name}'"
            self._add("version_policy", message, summary=policy)
        if len(served) > (limit := self._options.limits.versions):
            hint = f"{FLAG}=versions={len(served)} allows it"
            self._add("version_policy", f"expected at most {limit} versions to serve, got {len(served)}", hint)
        return {version: available[version] for version in sorted(served)}

    def _settle_strategies(self, served: Mapping[int, Path]) -> None:
        """The custom batching code of each version, if it exists and is allowed to run."""
        config, options = self._config, self._options
        trusted = [directory / config.backend for directory in options.backend_directories]
        field_path = key_path("parameters", STRATEGY_PARAMETER)
        for version, directory in served.items():
            try:
                path = find_strategy(config, [directory, self._layout.directory, *trusted])
            except ConfigError as error:
                self._add(field_path, error.message)
                return
            if path is None:
                continue
            is_trusted = any(path.is_relative_to(place.resolve()) for place in options.backend_directories)
            if not is_trusted and not options.allow_model_backends:
                self._add(
                    field_path,
                    f"{path} decides how requests are batched, and is not allowed to run in the server",
                    "vouch for all models of this server with --allow-model-backends, or put it in a backend directory",
                )
                return
            self._strategies[version] = path

    def _missing_versions(self) -> tuple[int, ...]:
        if self._only_version is not None:
            return ()
        return missing_versions(self._config.version_policy, tuple(self._layout.versions))

    def _complete(self, backend_class: type[Backend], served: Mapping[int, Path]) -> None:
        """Let the backend read the config as written, and complete it from the model's files."""
        version = max(served)
        context = BackendContext(
            model_name=self._layout.name,
            version=version,
            config=self._config,
            model_directory=self._layout.directory,
            version_directory=served[version],
            options=self._options.backend_options(self._config.backend),
            is_uploaded=self._is_uploaded,
            gpu_ids=self._options.gpu_ids,
        )
        try:
            backend_class.check_written(context)
            if not self._options.is_auto_complete_disabled:
                self._config = complete_config(backend_class, context)
        except ConfigError as error:
            found = [problem for problem in error.problems if isinstance(problem, Problem)]
            for problem in found:
                position = self._locations.find(problem.field) if problem.line is None else None
                line, column = position or (problem.line, problem.column)
                self._problems.append(replace(problem, source=self._source, line=line, column=column))
            if not found:
                raise CompletionError(error, served) from error
        except ServerError as error:
            raise CompletionError(error, served) from error

    def _normalise(self, backend_class: type[Backend]) -> None:
        self._config = normalise(
            self._config,
            model_name=self._layout.name,
            default_model_filename=names[0] if len(names := backend_class.model_filenames) == 1 else "",
            default_cpu_instances=backend_class.default_cpu_instances,
            supports_gpu=backend_class.supports_gpu,
            gpu_ids=self._options.gpu_ids,
        )

    def _validate(self, *, is_complete: bool) -> None:
        found = validate(
            self._config,
            locations=self._locations,
            source=self._source,
            model_name=self._layout.name,
            gpu_ids=self._options.gpu_ids,
            limits=self._options.limits,
        )
        # Completion may still fill in missing fields, so only errors in the written fields count here.
        self._problems += [problem for problem in found if is_complete or problem.field not in _COMPLETED_FIELDS]

    def _raise(self, unsupported: tuple[Problem, ...]) -> None:
        located = [self._located(problem) for problem in unsupported]
        if self._problems:
            known = {(problem.field, problem.message) for problem in self._problems}
            extra = [problem for problem in located if (problem.field, problem.message) not in known]
            raise error_of(self._sure((*self._problems, *extra)), self._source)
        if located:
            raise UnsupportedError("\n".join(str(problem) for problem in located))

    def _sure(self, problems: Iterable[Problem]) -> list[Problem]:
        """Without the problems that may be consequences of a reported error in the text."""
        written, doubtful = self._parsed.problems, self._parsed.doubtful
        return [problem for problem in problems if problem in written or not is_doubtful(problem, doubtful)]

    def _warnings(self, written: ModelConfig, backend_class: type[Backend]) -> tuple[Problem, ...]:
        found = ignored_warnings(written, self._source, backend_class.acts_on)
        settings = setting_warnings(self._options, written.backend, backend_class)
        return (*(self._located(problem) for problem in found), *settings)

    def _located(self, problem: Problem) -> Problem:
        line, column = self._locations.find(problem.field) or (None, None)
        return replace(problem, line=line, column=column)


def _filenames() -> str:
    """The files by which backends are recognised."""
    return ", ".join(sorted(name for names in model_filenames().values() for name in names))


# Fields that auto-completion may fill, and the file as a whole.
_COMPLETED_FIELDS = frozenset({"", "backend", "input", "output"})
