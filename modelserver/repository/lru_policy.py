"""Loaded models on demand: the memory of each, how long it is kept, and which models are evicted for others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelserver.config.on_demand import OnDemandConfig
from modelserver.repository.options import DemandOptions

if TYPE_CHECKING:
    from modelserver.execution.model import Model
    from modelserver.repository.roots import RepositoryScan
    from modelserver.repository.table import ModelTable


logger = logging.getLogger(__name__)

_UNSAID = OnDemandConfig()


class LruPolicy:
    """Data about models by key, loaded or not. Event loop thread only.

    `users` are the loaded ensembles that call a model, `is_awaited` says whether requests wait for one.
    """

    def __init__(
        self,
        options: DemandOptions,
        table: ModelTable,
        *,
        scan: Callable[[], RepositoryScan],
        users: Callable[[str], set[str]],
        is_awaited: Callable[[str], bool],
    ) -> None:
        self.policies: dict[str, OnDemandConfig] = {}
        self.keep_alive_s: dict[str, float] = {}  # set by load requests
        self.num_bytes: dict[str, int] = {}
        self.evictions: Counter[tuple[str, str]] = Counter()  # by key and reason
        self.evicted: dict[str, str] = {}  # reasons of evicted models that are not loaded again
        self._options = options
        self._table = table
        self._scan = scan
        self._users = users
        self._is_awaited = is_awaited

    def policy(self, key: str) -> OnDemandConfig:
        return self.policies.get(key, _UNSAID)

    def is_on_demand(self, key: str) -> bool:
        """Whether requests load the model, and it may be evicted."""
        wish = self.policy(key).is_on_demand
        return self._options.is_on if wish is None else wish

    def models(self, key: str) -> list[Model]:
        """Its ready versions."""
        lifecycle = self._table.lifecycles.get(key)
        return lifecycle.models if lifecycle is not None else []

    def all(self, but: str = "") -> list[LoadedModel]:
        """The models on demand that are in memory, without one of them."""
        return [self._loaded_model(key) for key in self._table.lifecycles if key != but and self._is_loaded(key)]

    def in_children_bytes(self, key: str) -> int:
        """The memory of the processes of its versions."""
        return sum(usage.byte_size for model in self.models(key) for usage in model.memory_usage())

    def unmeasured(self) -> list[str]:
        """Models that were not loaded on demand: at start, by a load request, or as steps of an ensemble."""
        return [key for key in self._table.lifecycles if key not in self.num_bytes and self._is_loaded(key)]

    def assume(self, key: str, file_bytes: int) -> None:
        """An estimate without a measurement: the config's number or the memory of its processes, at least its files."""
        assumed = self.policy(key).memory_bytes or max(file_bytes, self.in_children_bytes(key))
        self.num_bytes.setdefault(key, assumed)

    def stays(self, key: str) -> bool:
        """Whether the model is pinned, called by a loaded ensemble, or could not be reloaded in the same form."""
        comes_back = self._table.lifecycles[key].is_as_stored and key in self._scan().models
        return self.policy(key).is_pinned or bool(self._users(key)) or not comes_back

    def evict(self, key: str, reason: str) -> bool:
        """Unload the model if it is idle; returns whether it was. `reason` is "idle" or "memory"."""
        if not self._table.lifecycles[key].evict():
            return False
        self.evictions[key, reason] += 1
        self.evicted[key] = "idle" if reason == "idle" else "to make room"
        logger.info("model '%s' is evicted (%s); it is loaded again on demand", key, self.evicted[key])
        return True

    async def wait_closed(self, key: str) -> None:
        """Return when evicted models are closed."""
        await self._table.lifecycles[key].wait_retired()

    def _is_loaded(self, key: str) -> bool:
        return bool(self.models(key)) and self.is_on_demand(key)

    def _loaded_model(self, key: str) -> LoadedModel:
        models = self.models(key)
        kept_s = self.keep_alive_s.get(key, self.policy(key).keep_alive_s)
        lifecycle = self._table.lifecycles[key]
        is_busy = lifecycle.is_busy or self._is_awaited(key) or not all(model.is_idle for model in models)
        return LoadedModel(
            key=key,
            num_bytes=self.num_bytes.get(key, 0),
            last_use_s=max(model.last_use_ns for model in models) / 1e9,
            keep_alive_s=self._options.keep_alive_s if kept_s is None else kept_s,
            can_leave=not (is_busy or self.stays(key)),
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory that was loaded on demand, or may be. Times are seconds of one clock.

    `can_leave` unless it is pinned, busy, or called by an ensemble that is loaded. `keep_alive_s` inf is for ever.
    """

    key: str
    num_bytes: int
    last_use_s: float
    keep_alive_s: float
    can_leave: bool

    @property
    def expires_s(self) -> float:
        return self.last_use_s + self.keep_alive_s


def idle_models(models: Iterable[LoadedModel], now_s: float) -> list[str]:
    """Models without requests for as long as they are kept."""
    return [model.key for model in models if model.can_leave and model.expires_s <= now_s]


def plan_room(models: Iterable[LoadedModel], needed_bytes: int, budget_bytes: int) -> tuple[str, ...] | None:
    """The least recently used ones that must leave for `needed_bytes` to fit; None: not enough may leave now."""
    everyone = list(models)
    excess = sum(model.num_bytes for model in everyone) + needed_bytes - budget_bytes
    leaving: list[str] = []
    for model in sorted(everyone, key=lambda model: model.last_use_s):
        if excess <= 0:
            break
        if model.can_leave and model.num_bytes:
            leaving.append(model.key)
            excess -= model.num_bytes
    return tuple(leaving) if excess <= 0 else None
