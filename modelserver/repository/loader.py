"""The blocking half of loading: reads definitions, makes and closes models, on threads of the load pool.

It does not know states and swaps (see `lifecycle`), but keeps track of every open model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson

from modelserver.backend import Backend, BackendContext, always
from modelserver.backend.discovery import find_backend
from modelserver.backend.model_files import backend_for_model_files
from modelserver.config.ensemble_models import FindConfig
from modelserver.config.message import config_to_json
from modelserver.config.schema import ModelConfig
from modelserver.errors import SHUTTING_DOWN, InternalError, NotFoundError, ServerError, UnavailableError
from modelserver.execution.model import Model
from modelserver.repository.agents import AgentRun
from modelserver.repository.cloud_cache import CloudTree
from modelserver.repository.definition import ModelDefinition, check_has_version, read_agents, read_definition
from modelserver.repository.held_resource import HeldResource
from modelserver.repository.layout import INCOMPLETE_MARKER, ModelLayout, fingerprint_model, scan_model
from modelserver.repository.load_request import LoadRequest, ReplacementDirectory
from modelserver.repository.options import DefinitionOptions
from modelserver.repository.override_store import OverrideStore
from modelserver.repository.plan import LoadedVersion
from modelserver.repository.roots import RepositoryRoot, find_model

# Of the differences between two configs, as text for people.
_LONGEST_VALUE = 80
_ABSENT = "(none)"


def config_changes(old: ModelConfig, new: ModelConfig) -> tuple[str, ...]:
    """One `path: old -> new` for each field that differs, sorted by path; paths are those of the config as JSON."""
    before, after = dict(_leaves("", config_to_json(old))), dict(_leaves("", config_to_json(new)))
    paths = sorted(before.keys() | after.keys())
    return tuple(
        f"{path}: {before.get(path, _ABSENT)} -> {after.get(path, _ABSENT)}"
        for path in paths
        if before.get(path) != after.get(path) and not _is_filled(path, paths)
    )


def _is_filled(path: str, paths: Sequence[str]) -> bool:
    """Whether one of the configs has fields below `path` and the other has none."""
    return any(other.startswith((f"{path}.", f"{path}[")) for other in paths)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every value that is not an object, and every list without objects, by its path."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(f"{path}[{index}]", inner)
    else:
        text = orjson.dumps(value).decode()
        yield path, text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# File systems distinguish times that are this far apart.
_CLOCK_STEP_NS = 2_000_000_000

# Makes a model that is ready, warmed up included. Blocking; raises ServerError.
LoadModel = Callable[[type[Backend], BackendContext], "Model"]


@dataclass(frozen=True, slots=True)
class LoadSource:
    """A definition and its resources on disk until the caller releases them: the directory for files that
    came with the request, and the directories that its agents made.

    `request` is its load request; for a load by the stored override, that override. `changes` describe the effect of
    an override. `is_wanted` says, in any thread, whether the load still makes sense.
    """

    definition: ModelDefinition
    held: tuple[HeldResource, ...] = ()
    request: LoadRequest = field(default_factory=LoadRequest)
    changes: tuple[str, ...] = ()
    is_wanted: Callable[[], bool] = always

    def release(self) -> None:
        """Release everything that the source holds, in reverse order. Blocking."""
        _release(self.held)


class ModelLoader:
    """Reads, loads, updates and closes. Its methods block and may be called from any thread at once."""

    def __init__(
        self,
        roots: Sequence[RepositoryRoot],
        options: DefinitionOptions,
        load_model: LoadModel,
        *,
        num_retries: int = 0,
        overrides: OverrideStore | None = None,
        find_config: Callable[[str], FindConfig] | None = None,
    ) -> None:
        self._find_config = find_config
        self._overrides = overrides
        self.roots = tuple(roots)
        self._options = options
        self._load_model = load_model
        self._num_retries = num_retries
        self._lock = threading.Lock()  # guards _open and _is_abandoned
        self._open: set[LoadedVersion] = set()
        self._is_abandoned = False

    @property
    def num_open(self) -> int:
        """Models that were loaded and are not closed yet."""
        with self._lock:
            return len(self._open)

    def read(self, name: str, request: LoadRequest) -> LoadSource:
        """The definition of a model as on disk now, or as overridden by `request`. Raises ServerError."""
        # The first words are Triton's; its public example of model control matches them.
        what = f"failed to poll from model repository: reading model '{name}'"
        source = _at_edge(what, lambda: self._read(name, request))
        for warning in source.definition.warnings:
            logger.warning("model '%s': %s", name, warning)
        return source

    def is_current(self, key: str, definition: ModelDefinition) -> bool:
        """Whether reading the model again would give this definition, because no file has changed. Never raises.

        Files that were written shortly before they were read are not trusted: the file system's clock may be too coarse
        to distinguish later writes.
        """
        try:
            return (
                definition.is_of_files_alone
                and self.has_same_files(key, definition)
                and definition.fingerprint.latest_mtime_ns + _CLOCK_STEP_NS < definition.read_ns
                and self._backend_of(definition) is definition.backend_class
            )
        except (OSError, ServerError):
            return False

    def has_same_files(self, key: str, definition: ModelDefinition) -> bool:
        """Whether the model's directory holds the files that the definition was made beside. Never raises."""
        try:
            layout = self._find(key)
            is_there = layout.directory == definition.model_directory and not layout.is_incomplete
            return is_there and fingerprint_model(layout) == definition.fingerprint
        except (OSError, ServerError):
            return False

    def _backend_of(self, definition: ModelDefinition) -> type[Backend]:
        """The backend that a load of the definition would find now."""
        options = self._options
        directory = definition.model_directory if options.allow_model_backends else None
        name = definition.config.backend
        return find_backend(name, backend_directories=options.backend_directories, model_directory=directory)

    def check_exists(self, key: str, version: int | None) -> None:
        """Raise NotFoundError for a model, or a version of it, that no root holds."""
        layout = self._find(key)
        if version is not None:
            check_has_version(layout, version)

    def versions(self, key: str) -> frozenset[int]:
        """The versions in a root now; empty for a model that no root holds."""
        try:
            return frozenset(self._find(key).versions)
        except NotFoundError:
            return frozenset()

    def load(self, source: LoadSource, version: int) -> LoadedVersion:
        """One version, ready to serve. A failure raises ServerError and leaves nothing behind."""
        name = source.definition.name
        return _at_edge(f"loading model '{name}' version {version}", lambda: self._load(source, version))

    def update(self, loaded: LoadedVersion, definition: ModelDefinition) -> None:
        """Change the instances of a model that serves to those of `definition`. Raises ServerError."""
        what = f"updating the instances of model '{definition.name}' version {loaded.version}"
        _at_edge(what, lambda: loaded.model.update_instances(definition.config))

    def close(self, loaded: LoadedVersion) -> None:
        """Close a model for good. Never raises, because no caller could handle it. A second call does nothing."""
        with self._lock:
            if loaded not in self._open:
                return
            self._open.discard(loaded)
        what = f"closing model '{loaded.definition.name}' version {loaded.version}"
        try:
            _at_edge(what, loaded.model.close)
        except ServerError as error:
            logger.error("%s failed: %s", what, error.message)
        finally:
            _release(loaded.held)

    def abandon(self) -> tuple[LoadedVersion, ...]:
        """From now on close every model as soon as it is loaded; returns the models that are still open."""
        with self._lock:
            self._is_abandoned = True
            return tuple(self._open)

    def _read(self, name: str, request: LoadRequest) -> LoadSource:
        if request.is_stored and self._overrides is not None:
            request = self._overrides.read(name) or LoadRequest()
        source = self._read_replacement(name, request) if request.files else self._read_repository(name, request)
        if request.is_plain:
            return source
        try:
            changes = self._changes(name, source.definition, request)
        except BaseException:
            source.release()
            raise
        logger.info("model '%s': the override changes %s", name, "; ".join(changes) or "nothing")
        return replace(source, request=request, changes=changes)

    def _own_definition(self, key: str, version: int | None) -> ModelDefinition:
        """A model without its override and without its agents."""
        layout = self._find(key)
        if layout.remote is None:
            return read_definition(layout, self._options, only_version=version)
        tree = layout.remote.root.materialise(layout.name, layout.remote.listing)
        try:
            return read_definition(self._copied(layout, tree), self._options, only_version=version)
        finally:
            tree.release()

    def _changes(self, key: str, definition: ModelDefinition, request: LoadRequest) -> tuple[str, ...]:
        """The differences between an override and the model in the repository, if that can be read."""
        files = (f"all files: {len(request.files)} in place of the directory",) if request.files else ()
        try:
            own = self._own_definition(key, request.version)
        except ServerError as error:
            return (*files, f"a model whose own files cannot be read ({error.code.value})")
        return (*files, *config_changes(own.config, definition.config))

    def _find(self, name: str) -> ModelLayout:
        config_name = self._options.config_name
        return find_model(self.roots, name, config_name=config_name, find_backend=backend_for_model_files)

    def _read_repository(self, name: str, request: LoadRequest) -> LoadSource:
        layout = self._find(name)
        if layout.is_incomplete:
            raise UnavailableError(
                f"model '{name}' is marked as incomplete by {layout.directory / INCOMPLETE_MARKER}: "
                "it can be loaded when that file is removed"
            )
        if layout.remote is None:
            return self._define(layout, request, ())
        tree = layout.remote.root.materialise(layout.name, layout.remote.listing)
        return self._define(self._copied(layout, tree), request, (tree,))

    def _copied(self, layout: ModelLayout, tree: CloudTree) -> ModelLayout:
        """The layout of a model's local copy."""
        copy = scan_model(tree.path, layout.name, config_name=self._options.config_name)
        return replace(copy, repository=layout.repository, namespace=layout.namespace, origin=str(layout.directory))

    def _read_replacement(self, name: str, request: LoadRequest) -> LoadSource:
        assert request.files is not None, "the caller has looked"
        replacement = ReplacementDirectory(name, request.files)
        try:
            layout = scan_model(replacement.path, name)
        except BaseException:
            replacement.release()
            raise
        return self._define(layout, request, (replacement,))

    def _define(self, layout: ModelLayout, request: LoadRequest, held: tuple[HeldResource, ...]) -> LoadSource:
        """Run the model's agents, and read the directory that they produce. On failure nothing is held."""
        options, config_json = self._options, request.config_json
        try:
            agents = read_agents(layout, config_json=config_json)
            if agents:
                run = AgentRun(layout.name, layout.directory, agents, options.agent_directory)
                held = (*held, run)
                layout = self._left_by(run, layout)
            definition = read_definition(
                layout,
                options,
                config_json=config_json,
                only_version=request.version,
                find_config=self._find_config(layout.key) if self._find_config is not None else None,
                is_uploaded=bool(request.files),
            )
        except BaseException:
            _release(held)
            raise
        return LoadSource(definition, held)

    def _left_by(self, run: AgentRun, layout: ModelLayout) -> ModelLayout:
        if run.directory == layout.directory:
            return layout
        left = scan_model(run.directory, layout.name, config_name=self._options.config_name)
        return replace(left, is_single=layout.is_single)

    def _load(self, source: LoadSource, version: int) -> LoadedVersion:
        definition = source.definition
        if definition.missing_versions:
            logger.warning(
                "model '%s': versions %s of its version policy do not exist",
                definition.name,
                list(definition.missing_versions),
            )
        loaded = LoadedVersion(self._load_with_retries(source, version), definition, source.held)
        with self._lock:
            self._open.add(loaded)
            is_abandoned = self._is_abandoned
        for resource in source.held:
            resource.acquire()
        try:
            if is_abandoned:
                raise UnavailableError(SHUTTING_DOWN)
            _check_unchanged(definition, version)
        except ServerError:
            self.close(loaded)
            raise
        return loaded

    def _load_with_retries(self, source: LoadSource, version: int) -> Model:
        definition = source.definition
        context = replace(definition.context(version), is_wanted=source.is_wanted)
        for attempt in range(self._num_retries):
            try:
                return self._load_model(definition.backend_class, context)
            except ServerError as error:
                if not source.is_wanted():
                    raise
                logger.warning(
                    "loading model '%s' version %d failed, attempt %d of %d: %s",
                    definition.name,
                    version,
                    attempt + 1,
                    self._num_retries + 1,
                    error.message,
                )
        return self._load_model(definition.backend_class, context)


def _release(held: Sequence[HeldResource]) -> None:
    for resource in reversed(held):
        resource.release()


def _check_unchanged(definition: ModelDefinition, version: int) -> None:
    """Reject a version whose files changed during its load: it may be half old, half new.

    New files are fine: backends write caches beside their models.
    """
    before = definition.fingerprint.versions[version]
    if not before.is_still_in(definition.versions[version]):
        raise UnavailableError(
            f"the files in {definition.versions[version]} changed while they were being loaded; "
            "load again when the copy is complete"
        )


def _at_edge(what: str, action: Callable[[], Result]) -> Result:
    """Run a job of the pool: an error of a backend or the file system becomes a ServerError."""
    try:
        return action()
    except ServerError:
        raise
    except OSError as error:
        raise InternalError(f"{what}: {error}") from error
    except Exception as error:
        logger.exception("%s failed", what)
        raise InternalError(f"{what}: {type(error).__name__}: {error}") from error
