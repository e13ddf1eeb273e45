"""Adapters of language models that are loaded while these serve, by the name of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from modelserver.core.request import LoadedAdapter
from modelserver.errors import InvalidArgumentError, NotFoundError


class AdapterLoads:
    """What requests of a model may name beside the adapters of its files; they bring it to their instance.

    It outlives a reload of the model, and ends with the server. Event loop thread only.
    """

    def __init__(self) -> None:
        self.by_model: dict[str, dict[str, LoadedAdapter]] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._numbers = itertools.count(1)

    def of(self, model: str) -> tuple[LoadedAdapter, ...]:
        return tuple(self.by_model.get(model, {}).values())

    def make(self, model: str, name: str, place: str, *, replaces: bool = False) -> LoadedAdapter:
        """An adapter to be tried, and then to `add`. Raises InvalidArgumentError for a name that is taken, and for a
        path that is not absolute.
        """
        if name in self.by_model.get(model, {}) and not replaces:
            raise InvalidArgumentError(
                f"The lora adapter '{name:.200}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True."
            )
        if not Path(place).is_absolute():
            raise InvalidArgumentError(
                f"'lora_path' must be an absolute path of the server's machine, got '{place:.200}'"
            )
        return LoadedAdapter(name, place, next(self._numbers))

    def add(self, model: str, adapter: LoadedAdapter) -> None:
        """Requests may name it from now on."""
        self.by_model.setdefault(model, {})[adapter.name] = adapter
        self.on_change()

    def remove(self, model: str, name: str) -> None:
        """Later requests may not name it any more; those that run end with it. Raises NotFoundError."""
        loaded: Mapping[str, LoadedAdapter] = self.by_model.get(model, {})
        if name not in loaded:
            raise NotFoundError(f"The lora adapter '{name:.200}' cannot be found.")
        del self.by_model[model][name]
        if not self.by_model[model]:
            del self.by_model[model]
        self.on_change()
