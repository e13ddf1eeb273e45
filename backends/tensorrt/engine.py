"""An engine on a device: made from a plan once, shared by the instances there."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from modelserver.backend import InternalError, InvalidArgumentError, UnavailableError

from .device import Device
from .engine_info import EngineInfo, from_engine
from .plan import HEAD_BYTES, Flavour, PlanHeader, read_header
from .precision import in_precision
from .runtime import find_library, initialise_plugins, library_lock, library_version, logger_of

log = logging.getLogger(__name__)

# Bits of what `Runtime.get_engine_validity` finds wrong.
_DIAGNOSTICS = {
    1: "it was built with another version",
    2: "it does not support this GPU's architecture",
    4: "the NVIDIA driver is too old",
    8: "the CUDA runtime is too old",
    16: "the GPU has too little memory",
    32: "the file is damaged",
    64: "CUDA fails",
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a plan is loaded. `allows_host_code`: version-compatible plans carry a library, which is then executed.

    `weight_streaming_bytes`: the part of the weights that may be on the device (None: all). `refit_onnx` is the file
    from which a plan without weights gets them, in the precision that the plan was built in.
    """

    plugins: tuple[str, ...] = ()
    allows_host_code: bool = False
    weight_streaming_bytes: int | None = None
    refit_onnx: Path | None = None
    precision: str = "keep"


class LoadedEngine:
    """`engine` is the library's, `info` its inputs and outputs. Instances make contexts from it."""

    def __init__(self, trt: ModuleType, runtime: Any, engine: Any, info: EngineInfo, device: Device) -> None:
        self.trt: Any = trt
        self.engine = engine
        self.info = info
        self.device = device
        self._runtime = runtime  # an engine must not outlive the runtime that made it

    @property
    def captures_by_itself(self) -> bool:
        """Whether the library makes CUDA graphs of its executions: TensorRT for RTX does."""
        return hasattr(self.trt, "CudaGraphStrategy")

    def close(self) -> None:
        """Free the engine's memory. Contexts must be gone before."""
        with self.device.activate():  # else CUDA would make a context on the thread's device, and keep it
            self.engine = None
            self._runtime = None


def load_engine(path: Path, device: Device, settings: EngineSettings, *, name: str) -> LoadedEngine:
    """The engine in the file `path`. A GPU that works is taken for granted: see `driver`.

    Raises InvalidArgumentError for a plan that cannot be used, saying why, UnavailableError without the library.
    """
    header = read_header(path)
    trt: Any = find_library(header.flavour, allow_lean=settings.allows_host_code)
    with library_lock, device.activate():
        logger = logger_of(trt)
        initialise_plugins(trt, settings.plugins)
        mark = logger.mark()
        try:
            runtime = trt.Runtime(logger)
        except TypeError as error:  # the binding's way to say that there is no object
            raise UnavailableError(f"TensorRT could not make a runtime: {logger.errors_since(mark)}") from error
        if settings.allows_host_code:
            runtime.engine_host_code_allowed = True
        plan = path.read_bytes()
        _check_validity(trt, runtime, plan, path)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = logger.errors_since(mark)
            raise InvalidArgumentError(f"unable to create TensorRT engine: {reason} ({path}{_versions(header, trt)})")
        if settings.refit_onnx is not None:
            _refit(trt, engine, settings.refit_onnx, settings.precision)
        if settings.weight_streaming_bytes is not None:
            _stream_weights(engine, settings.weight_streaming_bytes, name, logger)
        info = from_engine(trt, engine, name=name)
    return LoadedEngine(trt, runtime, engine, info, device)


def _versions(header: PlanHeader, trt: ModuleType) -> str:
    built = f"; built with {header.flavour.title} {header.version_text}"
    installed = library_version(trt)
    if installed.split(".")[:2] == header.version_text.split(".")[:2]:
        return f"{built}, as is installed: an engine runs on the kind of GPU that it was built for"
    return f"{built}, installed is {installed}: build it again on this machine with modelserver build-engine"


def _check_validity(trt: Any, runtime: Any, plan: bytes, path: Path) -> None:
    """Ask what only TensorRT for RTX can tell before it loads. Raises InvalidArgumentError."""
    if not hasattr(runtime, "get_engine_validity"):
        return
    validity, found = runtime.get_engine_validity(plan[: max(HEAD_BYTES, runtime.engine_header_size)])
    reasons = [text for bit, text in _DIAGNOSTICS.items() if int(found) & bit]
    if validity == trt.EngineValidity.INVALID and reasons:
        raise InvalidArgumentError(
            f"unable to create TensorRT engine: {path}: {', '.join(reasons)} (TensorRT for RTX "
            f"{library_version(trt)}); build it again on this machine with modelserver build-engine, or with TensorRT "
            "(--runtime tensorrt) where the GPU is none of those that TensorRT for RTX supports"
        )
    if reasons:
        log.warning("%s will run, but not as well as it could: %s", path, ", ".join(reasons))


def _refit(trt: Any, engine: Any, onnx: Path, precision: str) -> None:
    logger = logger_of(trt)
    mark = logger.mark()
    with tempfile.TemporaryDirectory(prefix="modelserver-onnx-") as scratch:
        source = in_precision(onnx, Path(scratch), precision)
        refitter = trt.Refitter(engine, logger)
        refit_parser = trt.OnnxParserRefitter(refitter, logger)
        if not refit_parser.refit_from_file(str(source)) or not refitter.refit_cuda_engine():
            raise InvalidArgumentError(
                f"the weights of {onnx} do not fit the engine: {logger.errors_since(mark)}; build it again"
            )


def _stream_weights(engine: Any, budget_bytes: int, name: str, logger: Any) -> None:
    """Before there is any context; not more than there is to stream."""
    streamable = engine.streamable_weights_size
    if not streamable:
        raise InvalidArgumentError(
            f"model '{name}': weight_streaming_budget: the engine streams no weights; build it with --weight-streaming"
        )
    mark = logger.mark()
    engine.weight_streaming_budget_v2 = wanted = min(budget_bytes, streamable)
    # The binding drops what TensorRT answers: a refusal leaves the budget as it was.
    if engine.weight_streaming_budget_v2 > wanted:
        raise InvalidArgumentError(
            f"model '{name}': weight_streaming_budget: TensorRT refuses {wanted} bytes: {logger.errors_since(mark)}"
        )


def require_context(context: Any, logger: Any, mark: int, what: str) -> Any:
    """`context`, or InternalError with TensorRT's reason where it is None."""
    if context is None:
        raise InternalError(f"{what}: TensorRT makes no execution context: {logger.errors_since(mark)}")
    return context


def library_for(runtime: str) -> tuple[Flavour, ModuleType]:
    """The library that builds: the one that is named, or with "auto" TensorRT if it is there, else that for RTX.

    Raises UnavailableError when there is none.
    """
    if runtime != "auto":
        flavour = Flavour(runtime)
        return flavour, find_library(flavour)
    problems = []
    for flavour in Flavour:
        try:
            return flavour, find_library(flavour)
        except UnavailableError as error:
            problems.append(error.message)
    raise UnavailableError("; ".join(problems))
