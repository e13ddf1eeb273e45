"""The models of the server by name: lookup by requests, and the errors for unknown models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from modelserver.core.spelling import suggest
from modelserver.errors import NotFoundError, ServerError, UnavailableError, UnloadedError
from modelserver.execution.model import Model
from modelserver.repository.lifecycle import ModelLifecycle
from modelserver.repository.namespaces import Namespaces
from modelserver.repository.roots import RepositoryScan, duplicate_reason
from modelserver.repository.serving import ReadyTable
from modelserver.repository.state import IndexEntry, ModelState, Standing

_MOST_NAMES_COMPARED = 256


class ModelTable:
    """Every model with a load so far, and the ready models. Event loop thread only.

    `ready` is the hot path of every request: name, or key -> version (None: the highest) -> model. `lifecycles`
    are by key; both are the same without namespaces.
    """

    def __init__(self, namespaces: Namespaces) -> None:
        self.namespaces = namespaces
        self.ready: dict[str, ReadyTable] = {}
        self.lifecycles: dict[str, ModelLifecycle] = {}
        # Both follow `publish`, so that readiness and metrics cost nothing for models that have not changed.
        self._models: tuple[Model, ...] | None = None
        self._missing: set[str] = set()

    def publish(self, key: str, table: ReadyTable) -> None:
        """Publish the ready versions of this model to requests; an empty table removes the model.

        Called whenever its versions, or whether it should serve, have changed.
        """
        self._models = None
        lifecycle = self.lifecycles.get(key)
        if lifecycle is not None and lifecycle.standing is Standing.MISSING:
            self._missing.add(key)
        else:
            self._missing.discard(key)
        self._set_ready(key, table)
        if self.namespaces.is_on:
            name = self.namespaces.name_of(key)
            known = self.known_keys(name)
            self._set_ready(name, self.ready.get(known[0], {}) if len(known) == 1 else {})

    @property
    def models(self) -> tuple[Model, ...]:
        """Every ready version of every model, by key and version: the same tuple until one of them changes."""
        if self._models is None:
            lifecycles = sorted(self.lifecycles.items())
            self._models = tuple(model for _, lifecycle in lifecycles for model in lifecycle.models)
        return self._models

    @property
    def missing_models(self) -> Mapping[str, ModelLifecycle]:
        """The models by key that should serve and do not."""
        return {key: self.lifecycles[key] for key in sorted(self._missing) if key in self.lifecycles}

    def known_keys(self, name: str) -> list[str]:
        """The keys of the models that `name` may mean: models that serve or should, else models that did."""
        keys = self.namespaces.keys(name, self.lifecycles)
        return [key for key in keys if self.is_known(key)] or keys

    def is_known(self, key: str) -> bool:
        """Whether a model of this key serves, or should."""
        lifecycle = self.lifecycles.get(key)
        return lifecycle is not None and lifecycle.standing is not Standing.ABSENT

    def sequence_holder(self, name: str, version: int | None, sequence_id: int | str) -> Model | None:
        """The model on which a sequence is under way; it may be one that was replaced or unloaded meanwhile."""
        for key in self.known_keys(name):
            lifecycle = self.lifecycles[key]
            for model in (*reversed(lifecycle.models), *lifecycle.retiring_models):
                if version in (None, model.version) and model.has_sequence(sequence_id):
                    return model
        return None

    def ready_versions(self, name: str) -> tuple[int, ...]:
        """The ready versions, ascending; empty for a model that is not ready, not known, or not the only one."""
        keys = self.known_keys(name)
        return self.lifecycles[keys[0]].versions if len(keys) == 1 else ()

    def index_rows(self, scan: RepositoryScan, repository: str = "") -> list[IndexEntry]:
        """A row for every version of every model here or in `scan`, or in one repository if it is named."""
        rows: list[IndexEntry] = []
        for key in sorted({*self.lifecycles, *scan.names}):
            if not repository or repository in scan.repositories.get(key, ()):
                rows += self._rows_of(key, scan)
        if not self.namespaces.is_on:
            return rows
        split = [self.namespaces.split(row.name) for row in rows]
        return [replace(row, name=name, repository=found) for row, (found, name) in zip(rows, split, strict=True)]

    def _rows_of(self, key: str, scan: RepositoryScan) -> Sequence[IndexEntry]:
        lifecycle = self.lifecycles.get(key)
        directories = scan.duplicates.get(key)
        if directories is None:
            return lifecycle.index() if lifecycle is not None else [IndexEntry(key, None, ModelState.UNKNOWN)]
        reason = duplicate_reason(key, directories)
        if lifecycle is None or not lifecycle.versions:
            return [IndexEntry(key, None, ModelState.UNAVAILABLE, reason)]
        return [IndexEntry(row.name, row.version, row.state, row.reason or reason) for row in lifecycle.index()]

    def missing(self, name: str, version: int | None, scan: RepositoryScan) -> ServerError:
        """Why the model is not ready: UNAVAILABLE only if it may become ready without an operator."""
        keys = self.known_keys(name)
        prefix = f"Request for unknown model: '{name}'"
        if len(keys) > 1:
            return self.namespaces.ambiguous(name, keys)
        if not keys:
            if name in scan.duplicates:
                return UnavailableError(duplicate_reason(name, scan.duplicates[name]))
            return NotFoundError(f"{prefix} is not found{self._hint(name, scan)}")
        lifecycle = self.lifecycles[keys[0]]
        rows = {row.version: row for row in lifecycle.index()}
        if version is None:
            states = "; ".join(str(row) for row in rows.values())
            is_absent = all(row.is_absent for row in rows.values())
            return _refusal(f"{prefix} has no available versions: {states}", is_absent=is_absent)
        if version not in rows:
            ready = ", ".join(map(str, lifecycle.versions)) or "none"
            return NotFoundError(f"{prefix} version {version} is not found; ready versions: {ready}")
        row = rows[version]
        return _refusal(f"{prefix} version {version} is not at ready state: {row}", is_absent=row.is_absent)

    def _hint(self, name: str, scan: RepositoryScan) -> str:
        """A hint on `name`: a model that is not loaded yet, or a misspelt name of another model.

        Names are not compared if that would take long, with a large number of models.
        """
        if self.namespaces.keys(name, scan.models):
            return "; it is in the repository, but has not been loaded"
        near = suggest(name, self.ready) if len(self.ready) <= _MOST_NAMES_COMPARED else None
        return f"; did you mean '{near}'?" if near else ""

    def _set_ready(self, name: str, table: ReadyTable) -> None:
        if table:
            self.ready[name] = table
        else:
            self.ready.pop(name, None)


def _refusal(message: str, *, is_absent: bool) -> ServerError:
    return UnloadedError(message) if is_absent else UnavailableError(message)
