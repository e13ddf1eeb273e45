"""A model's engine from its ONNX file: out of the cache, or built for the device at hand."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserver.backend import BackendContext, UnavailableError

from .build_options import BuildRequest
from .builder import BuildResult, build_engine
from .device import Device
from .driver import driver_version
from .engine import library_for
from .engine_cache import EngineCache, cache_key
from .plan import Flavour
from .runtime import library_version
from .source import BuildSource

log = logging.getLogger(__name__)

_TIMEOUT_S = 3600
# Progress is logged whenever this fraction more is done.
_LOG_STEP = 0.1


def _nothing() -> None:
    """There is no cache to forget it from."""


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """A plan that can be loaded; `kernels` is where those that are compiled at run time are kept, if anywhere.

    `forget` drops it from the cache.
    """

    plan: Path
    kernels: Path | None = None
    forget: Callable[[], None] = _nothing


def prepare_engine(context: BackendContext, source: BuildSource, device: Device) -> PreparedEngine:
    """The plan for `source` on `device`. Blocking, for minutes if it has to be built.

    Raises ServerError; UnavailableError once `context.is_wanted` says that the model is to be unloaded.
    """
    flavour, library = library_for(source.options.runtime)
    version = library_version(library)
    cache = open_cache(context)
    request = BuildRequest(str(source.onnx.path), "", flavour, source.profiles, source.options)
    target = build_target(source, flavour, device)
    key = cache_key(request, external=source.onnx.external_files, library_version=version, target=target)

    def build(plan: Path) -> BuildResult:
        log.info("model '%s': building engine: %s with %s", context.model_name, source.onnx.path, flavour.title)
        wanted = BuildRequest(request.onnx, str(plan), flavour, request.profiles, request.options)
        timeout_s = context.int_option("build-timeout-s", _TIMEOUT_S)
        tell = _ProgressLog(context.model_name)
        return build_engine(wanted, timeout_s=timeout_s or None, is_wanted=context.is_wanted, tell=tell)

    facts = {"onnx": source.onnx.path.name, "target": dict(target)}
    found = cache.obtain(key, build, facts=facts, is_wanted=context.is_wanted)
    log.info(
        "model '%s': engine %s %s",
        context.model_name,
        found.plan.name,
        "is in the cache" if found.is_hit else "is built",
    )
    return PreparedEngine(found.plan, cache.kernels_path(key), lambda: cache.forget(key))


def build_target(source: BuildSource, flavour: Flavour, device: Device) -> Mapping[str, Any]:
    """The key of an engine besides its inputs. One for TensorRT for RTX runs on all GPUs that it was built for."""
    options = source.options
    if flavour is Flavour.RTX:
        return {"targets": [device.compute_capability if it == "current" else it for it in sorted(options.targets)]}
    if options.hardware_compatibility == "ampere+":
        return {"hardware": "ampere+"}
    if options.hardware_compatibility == "same-cc":
        return {"compute_capability": device.compute_capability}
    return {**device.describe(), "driver": driver_version() // 1000}


def open_cache(context: BackendContext) -> EngineCache:
    """Where `engine-cache-dir` says; else beside the model, or if that cannot be written, in the user's cache."""
    max_bytes = context.int_option("engine-cache-bytes")
    named = context.options.get("engine-cache-dir", "")
    if named:
        return EngineCache(Path(named), max_bytes)
    try:
        return EngineCache(context.version_directory / ".cache" / "trt", max_bytes)
    except UnavailableError:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return EngineCache(home / "modelserver" / "trt", max_bytes)


class _ProgressLog:
    """A line in the log for each tenth of a build."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._next = _LOG_STEP

    def __call__(self, phase: str, fraction: float) -> None:
        if fraction >= self._next:
            log.info("model '%s': building engine: %.0f %%, %s", self._model_name, fraction * 100, phase)
            self._next = fraction + _LOG_STEP
