"""The models of each ensemble, and the effects on ensembles when a model is loaded or unloaded.

An ensemble is loaded after the models of its steps; missing models are loaded with it. It serves as long as all
of them serve and fit. When one is replaced, the ensemble uses the new one. Event loop thread only, except for
`find_config`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from modelserver.config.config_limits import FLAG, ConfigLimits
from modelserver.config.ensemble_models import FindConfig, check_models
from modelserver.config.problem import Problem, error_of
from modelserver.config.schema import EnsembleStep, ModelConfig
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError, UnavailableError
from modelserver.execution.model import Model
from modelserver.repository.definition import ModelDefinition
from modelserver.repository.namespaces import key_of
from modelserver.repository.plan import LoadedVersion
from modelserver.repository.table import ModelTable
from modelserver.scheduling.ensemble_plan import StepModel

# Loads a model as in the repository, unless it serves or is being loaded. Raises NotFoundError if it does not exist.
EnsureLoaded = Callable[[str], Awaitable[None]]


class Ensembles:
    """The ensembles of a repository, by key, and the keys of their models.

    `table` has all models that were ever loaded; `known_keys` lists the others.
    """

    def __init__(
        self,
        table: ModelTable,
        ensure_loaded: EnsureLoaded,
        known_keys: Callable[[], Iterable[str]],
        *,
        max_steps: int = ConfigLimits().ensemble_steps,
    ) -> None:
        """`max_steps` limits the steps of one request, including the steps of nested ensembles."""
        self._max_steps = max_steps
        self._table = table
        self._ensure_loaded = ensure_loaded
        self._known_keys = known_keys
        # Of ensembles that are loaded, and of those that are being loaded.
        self._composing: dict[str, frozenset[str]] = {}
        self._coming: dict[str, frozenset[str]] = {}

    def find_config(self, key: str) -> FindConfig:
        """A lookup of the configs of serving models for the steps of ensemble `key`. From any thread."""

        def find(step: EnsembleStep) -> ModelConfig | None:
            lifecycle = self._table.lifecycles.get(self._key_of(key, step))
            if lifecycle is not None and lifecycle.pending_load is not None:
                return None  # it may be replaced soon
            model = self._find(key, step)
            return model.config if model is not None else None

        return find

    async def compose(self, key: str, definition: ModelDefinition) -> None:
        """Load the models of an ensemble's steps if they are not loaded.

        Raises InvalidArgumentError for models that do not exist or cannot be loaded, and for an ensemble that
        contains itself.
        """
        steps = _steps(definition.config)
        keys = {self._key_of(key, step, is_new=True): index for index, step in reversed(list(enumerate(steps)))}
        self._coming[key] = frozenset(keys)
        try:
            self._check_cycles(key, definition)
            results = await asyncio.gather(*map(self._ensure_loaded, keys), return_exceptions=True)
        finally:
            del self._coming[key]
        problems = []
        for index, result in zip(keys.values(), results, strict=True):
            if isinstance(result, ServerError):
                name, is_missing = steps[index].model_name, isinstance(result, NotFoundError)
                what = "there is no model" if is_missing else "cannot load model"
                summary = f"ensemble '{definition.name}' depends on '{name}' which has no loaded version"
                if is_missing:
                    summary = f"ensemble {definition.name} contains models that are not available or ambiguous: {name}"
                problems.append(_problem(definition, index, f"{what} '{name}': {result.message}", summary))
            elif isinstance(result, BaseException):
                raise result
        if problems:  # not a ConfigError: a retry may succeed
            raise InvalidArgumentError(error_of(problems, definition.config_source).message)

    def bind(self, key: str, loaded: LoadedVersion) -> ServerError | None:
        """Let an ensemble call the models that serve now. Returns the reason if it cannot serve."""
        definition, model = loaded.definition, loaded.model
        models: list[Model] = []
        for index, step in enumerate(_steps(definition.config)):
            found = self._find(key, step)
            if found is None:
                version = f" version {step.model_version}" if step.model_version > 0 else ""
                message = f"step[{index}] needs model '{step.model_name}'{version}, which is not ready"
                model.bind(None, message)
                lacks = f"whose required{version} is not loaded" if version else "which has no loaded version"
                return UnavailableError(
                    f"ensemble '{definition.name}' depends on '{step.model_name}' {lacks}: {message}"
                )
            models.append(found)
        problems = self._problems(definition, models)
        if problems:
            error = error_of(problems, definition.config_source)
            model.bind(None, error.message)
            return error
        num_steps = sum(1 + _num_steps(each) for each in models)
        if num_steps > self._max_steps:
            limit = (
                f"expected at most {self._max_steps} steps, including the steps of nested ensembles, got {num_steps}"
            )
            message = f"{limit}; {FLAG}=ensemble_steps={num_steps} allows it"
            error = error_of([_problem(definition, 0, message, "")], definition.config_source)
            model.bind(None, error.message)
            return error
        if list(model.composing) != models:
            model.bind(models, find_holder=self._find_holder)
        return None

    def published(self, key: str) -> None:
        """Update the ensembles that contain a model whose ready versions have changed."""
        if key in self._table.lifecycles:
            self._link(key)
        name = self._table.namespaces.name_of(key)
        for ensemble, composing in tuple(self._composing.items()):
            # Before or from now on, the step may mean a model of that name in another namespace.
            if key in composing or (self._table.namespaces.is_on and self._names_step(ensemble, name)):
                self._link(ensemble)
                self._table.lifecycles[ensemble].rebind()

    def _link(self, key: str) -> None:
        """Note which models the loaded versions of an ensemble call, if it is one."""
        steps = self._steps_of(key)
        if steps:
            self._composing[key] = frozenset(self._key_of(key, step) for step in steps)
        else:
            self._composing.pop(key, None)

    def _names_step(self, key: str, name: str) -> bool:
        return any(step.model_name == name for step in self._steps_of(key))

    def _steps_of(self, key: str) -> list[EnsembleStep]:
        ensembles = self._table.lifecycles[key].ensembles
        return [step for loaded in ensembles for step in _steps(loaded.definition.config)]

    def only_of(self, key: str) -> list[str]:
        """The models of an ensemble, also of nested ones, that no other loaded ensemble needs."""
        own: dict[str, None] = {}
        left = [key]
        while left:
            ensemble = left.pop()
            for composing in sorted(self._composing.get(ensemble, ())):
                if composing not in own:
                    own[composing] = None
                    left.append(composing)
        while shared := [composing for composing in own if self.users(composing) - {key, *own}]:
            for composing in shared:
                del own[composing]
        return list(own)

    def users(self, key: str) -> set[str]:
        """The ensembles that are loaded and call the model."""
        return {ensemble for ensemble, composing in self._composing.items() if key in composing}

    def _find(self, key: str, step: EnsembleStep) -> Model | None:
        versions: Mapping[int | None, Model] = self._table.ready.get(self._key_of(key, step), {})
        return versions.get(step.model_version if step.model_version > 0 else None)

    def _find_holder(self, model: StepModel, sequence_id: int | str) -> Model | None:
        return self._table.sequence_holder(model.name, None, sequence_id)

    def _key_of(self, ensemble: str, step: EnsembleStep, *, is_new: bool = False) -> str:
        """The key of a step's model: in the step's namespace, else the ensemble's, else the only model of that name.

        If the model in the ensemble's namespace was unloaded, a serving model of another one takes its place until
        an ensemble that `is_new` loads it again.
        """
        namespaces = self._table.namespaces
        if not namespaces.is_on:
            return step.model_name
        if step.model_namespace:
            return key_of(step.model_namespace, step.model_name)
        own = key_of(namespaces.split(ensemble)[0], step.model_name)
        lifecycles, stored = self._table.lifecycles, set(self._known_keys())
        if (own in stored and (is_new or own not in lifecycles)) or self._table.is_known(own):
            return own
        keys = namespaces.keys(step.model_name, lifecycles)
        keys = [key for key in keys if self._table.is_known(key)] or namespaces.keys(step.model_name, stored)
        return keys[0] if len(keys) == 1 else own

    def _check_cycles(self, key: str, definition: ModelDefinition) -> None:
        """Raise ConfigError when the ensemble contains itself, directly or through nested ensembles."""
        path = self._path(key, key, (key,))
        if path is not None:
            steps = _steps(definition.config)
            index = next(index for index, step in enumerate(steps) if self._key_of(key, step, is_new=True) == path[1])
            message = f"ensembles contain each other: {' -> '.join(path)}"
            summary = f"circular dependency between ensembles: {path[0]} -> ... -> {path[-2]} -> {path[-1]}"
            raise error_of([_problem(definition, index, message, summary)], definition.config_source)

    def _path(self, start: str, target: str, path: tuple[str, ...]) -> tuple[str, ...] | None:
        composing = self._coming.get(start) or self._composing.get(start, frozenset())
        if target in composing:
            return (*path, target)
        for key in sorted(composing):
            found = self._path(key, target, (*path, key)) if key not in path else None
            if found is not None:
                return found
        return None

    def _problems(self, definition: ModelDefinition, models: Iterable[Model]) -> tuple[Problem, ...]:
        configs = {id(step): model.config for step, model in zip(_steps(definition.config), models, strict=True)}
        return check_models(
            definition.config,
            lambda step: configs[id(step)],
            locations=definition.locations,
            source=definition.config_source,
        )


def _steps(config: ModelConfig) -> tuple[EnsembleStep, ...]:
    return config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()


def _problem(definition: ModelDefinition, index: int, message: str, summary: str) -> Problem:
    field = f"ensemble_scheduling.step[{index}].model_name"
    line, column = definition.locations.find(field) or (None, None)
    return Problem(definition.config_source, line, column, field, message, summary=summary)


def _num_steps(model: Model) -> int:
    """The number of models that one request to this model calls, including nested ones; 0 unless it is an ensemble."""
    return sum(1 + _num_steps(each) for each in model.composing)
