"""How busy the server is, in a few totals without labels: for endpoint pickers, which ask 20 times a second and more.

A picker takes one series of each family, never their sum, so that the families of the metrics page tell it of one model
alone. The names of language models' gauges are vLLM's, which pickers know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from modelserver.errors import NotFoundError
from modelserver.telemetry.measurement import Measurement

WAITING, RUNNING, CACHE_USE = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
CACHE_INFO = "vllm:cache_config_info"
PENDING, EXECUTING, INFLIGHT = (
    "nv_inference_pending_request_count",
    "modelserver_running_requests",
    "modelserver_inflight_requests",
)
# Measurements of a language model are made anew after this time: there are dozens, of which three are needed.
_MEASURED_FOR_S = 0.1


class BusyModel(Protocol):
    """A loaded version, as far as the page needs it. Event loop thread."""

    @property
    def name(self) -> str: ...

    @property
    def is_ensemble(self) -> bool:
        """Its requests are those of its steps, too."""

    @property
    def inflight(self) -> int: ...

    @property
    def queue_depth(self) -> int: ...

    @property
    def measures(self) -> bool:
        """Whether its instances may have measurements."""

    def measure(self) -> Sequence[Sequence[Measurement]]:
        """The measurements of each of its instances."""


class _Engine:
    """What a language model's instances measured last: `num_waiting` of them wait within the model."""

    __slots__ = ("at_s", "cache", "num_waiting", "use")

    def __init__(self, model: BusyModel, now_s: float) -> None:
        self.at_s = now_s
        self.num_waiting, self.use, self.cache = 0, 0.0, ""
        for measurement in (each for instance in model.measure() for each in instance):
            if measurement.name == WAITING:
                self.num_waiting += int(measurement.value)
            elif measurement.name == CACHE_USE:
                self.use = max(self.use, measurement.value)
            elif measurement.name == CACHE_INFO:
                labels = measurement.labels
                sizes = f'block_size="{labels["block_size"]}",num_gpu_blocks="{labels["num_gpu_blocks"]}"'
                self.cache = f"{CACHE_INFO}{{{sizes}}} 1\n"


class LoadPage:
    """`models` are the loaded versions. Event loop thread only."""

    def __init__(self, models: Callable[[], Sequence[BusyModel]], now_s: Callable[[], float] = time.monotonic) -> None:
        self._models = models
        self._now_s = now_s
        self._engines: dict[int, tuple[BusyModel, _Engine]] = {}
        # Whether a model is an ensemble, and whether it measures itself: both stay while it is loaded.
        self._kinds: dict[BusyModel, tuple[bool, bool]] = {}

    def text(self, name: str = "") -> bytes:
        """The page, of all models or of the one of that name. Raises NotFoundError if none of that name is loaded."""
        num_inflight = num_queued = num_in_engines = 0
        use, cache, is_known = 0.0, "", not name
        models, kinds = self._models(), self._kinds
        for model in models:
            if name and model.name != name:
                continue
            is_known = True
            kind = kinds.get(model)
            if kind is None:
                kind = kinds[model] = model.is_ensemble, model.measures
            is_ensemble, measures = kind
            if is_ensemble:
                if not name:
                    continue
                num_inflight += model.inflight
                continue
            inflight = model.inflight
            if inflight:
                num_inflight += inflight
                num_queued += model.queue_depth
            if measures:
                engine = self._engine(model)
                # It is a little older than the numbers above.
                num_in_engines += min(engine.num_waiting, inflight)
                use = max(use, engine.use)
                cache = cache or engine.cache
        if len(kinds) > len(models):
            self._kinds = {model: kinds[model] for model in models if model in kinds}
        if not is_known:
            raise NotFoundError(f"no version of model '{name:.100}' is loaded")
        num_waiting = min(num_queued + num_in_engines, num_inflight)
        num_running = num_inflight - num_waiting
        info = f"# TYPE {CACHE_INFO} gauge\n{cache}" if cache else ""
        return (
            f"# TYPE {WAITING} gauge\n{WAITING} {num_waiting}\n"
            f"# TYPE {RUNNING} gauge\n{RUNNING} {num_running}\n"
            f"# TYPE {CACHE_USE} gauge\n{CACHE_USE} {use:.4g}\n{info}"
            f"# TYPE {PENDING} gauge\n{PENDING} {num_queued}\n"
            f"# TYPE {EXECUTING} gauge\n{EXECUTING} {num_inflight - num_queued}\n"
            f"# TYPE {INFLIGHT} gauge\n{INFLIGHT} {num_inflight}\n"
        ).encode()

    def _engine(self, model: BusyModel) -> _Engine:
        now_s = self._now_s()
        kept = self._engines.get(id(model))
        if kept is not None and kept[0] is model and now_s - kept[1].at_s < _MEASURED_FOR_S:
            return kept[1]
        if kept is None:
            loaded = {id(each) for each in self._models()}
            self._engines = {key: each for key, each in self._engines.items() if key in loaded}
        engine = _Engine(model, now_s)
        self._engines[id(model)] = (model, engine)
        return engine
