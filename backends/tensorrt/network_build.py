"""From an ONNX file to a plan, by the calls that TensorRT 10, TensorRT 11 and TensorRT for RTX share.

Runs in a process of its own (`build_child`): a build takes gigabytes and minutes, and a parser may crash.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .build_options import HARDWARE, BuildRequest
from .driver import find_problem
from .engine_info import DATATYPES, EngineInfo, IoTensor, Range
from .onnx_file import read_onnx
from .plan import Flavour
from .precision import in_precision
from .progress import PhaseTree, progress_monitor
from .runtime import find_library, initialise_plugins, library_lock, library_version, logger_of

# The parser's errors about whole files, by the names of their codes; all other codes are about nodes.
_FILE_CODES = {"MODEL_DESERIALIZE_FAILED", "INVALID_VALUE", "MEM_ALLOC_FAILED"}


@dataclass(frozen=True, slots=True)
class FailedNode:
    """A node of the ONNX file that TensorRT cannot run."""

    name: str
    op: str
    reason: str


class UnsupportedNodesError(UnsupportedError):
    """The file has nodes that this library does not know; all of them."""

    def __init__(self, path: str, nodes: tuple[FailedNode, ...]) -> None:
        self.nodes = nodes
        listed = "; ".join(f"{node.op} '{node.name}': {node.reason}" for node in nodes[:8])
        more = f"; and {len(nodes) - 8} more" if len(nodes) > 8 else ""
        super().__init__(f"{path}: TensorRT does not support {len(nodes)} of its nodes: {listed}{more}")


class BuildFailedError(InvalidArgumentError):
    """The library built nothing; the message has its reason."""


def _gpu_hint(request: BuildRequest) -> str:
    """The likely cause: TensorRT for RTX needs a GPU only for weights that can be put into the engine."""
    problem = find_problem() if request.options.weights != "keep" else ""
    return f"; weights are stripped or made replaceable on a machine with a GPU, and here {problem}" if problem else ""


@dataclass(frozen=True, slots=True)
class Built:
    """The result of a build, except the plan itself, which is in the request's file."""

    info: EngineInfo
    library_version: str
    num_bytes: int


def build(request: BuildRequest, tell: Callable[[str, float], None]) -> Built:
    """Write the plan that `request` wants. Raises ServerError. `tell` is called with phases and the fraction done."""
    try:
        return _build(request, tell)
    except UnicodeDecodeError as error:  # by the bindings, which take every name for UTF-8
        raise InvalidArgumentError(
            f"{request.onnx}: the ONNX file has names that are not valid UTF-8: {error}"
        ) from error


def _build(request: BuildRequest, tell: Callable[[str, float], None]) -> Built:
    trt: Any = find_library(request.flavour)
    logger = logger_of(trt)
    with library_lock:
        initialise_plugins(trt, request.options.plugins)
    mark = logger.mark()
    with tempfile.TemporaryDirectory(prefix="modelserver-onnx-") as scratch:
        # TensorRT 11 and RTX take precision from nowhere else.
        onnx = in_precision(Path(request.onnx), Path(scratch), request.options.precision)
        try:
            builder = trt.Builder(logger)
        except TypeError as error:  # the binding's way to say that there is no object
            raise BuildFailedError(f"TensorRT could not create a builder: {logger.errors_since(mark)}") from error
        network = _parse(trt, builder, request, onnx)
        _check_network(request, network)
        config = _configure(trt, builder, network, request)
        monitor = progress_monitor(trt, PhaseTree(tell))
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            reason = f"TensorRT builds no engine: {logger.errors_since(mark)}"
            raise BuildFailedError(f"{request.onnx}: {reason}{_gpu_hint(request)}")
        num_bytes = Path(request.plan).write_bytes(memoryview(plan))
        _write_timing_cache(config, request)
        info = _describe(network, request)
    return Built(info, library_version(trt), num_bytes)


def _parse(trt: Any, builder: Any, request: BuildRequest, onnx: Path) -> Any:
    # Needed by TensorRT 10, ignored by the others: precision is the file's.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger_of(trt))
    # By path and not by bytes, so that weights in other files are found.
    if not parser.parse_from_file(str(onnx)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        if not errors or any(error.code().name in _FILE_CODES and not error.node_operator() for error in errors):
            reasons = "; ".join(dict.fromkeys(error.desc() for error in errors)) or "no reason given"
            raise InvalidArgumentError(f"{request.onnx}: TensorRT cannot read the ONNX file: {reasons}")
        raise UnsupportedNodesError(
            request.onnx, tuple(FailedNode(error.node_name(), error.node_operator(), error.desc()) for error in errors)
        )
    return network


def _check_network(request: BuildRequest, network: Any) -> None:
    """TensorRT's parser takes some rubbish for an empty network, and 64-bit floats for 32-bit ones."""
    if not network.num_inputs or not network.num_outputs:
        raise InvalidArgumentError(
            f"{request.onnx}: expected an ONNX model with inputs and outputs, TensorRT found {network.num_inputs} and "
            f"{network.num_outputs}"
        )
    onnx = read_onnx(Path(request.onnx))
    written = {tensor.name: tensor.datatype for tensor in (*onnx.inputs, *onnx.outputs)}
    for tensor in _io(network):
        datatype = DATATYPES.get(tensor.dtype.name)
        wanted = written.get(tensor.name)
        if wanted is None or datatype is not wanted:
            got = tensor.dtype.name if datatype is None else datatype.value
            raise UnsupportedError(
                f"{request.onnx}: '{tensor.name}' is {wanted.value if wanted else 'of no tensor type'} in the file, "
                f"and TensorRT would make it {got}; export the model with one of {', '.join(DATATYPES)} there"
            )


def _io(network: Any) -> list[Any]:
    return [
        *(network.get_input(index) for index in range(network.num_inputs)),
        *(network.get_output(index) for index in range(network.num_outputs)),
    ]


def _configure(trt: Any, builder: Any, network: Any, request: BuildRequest) -> Any:
    options = request.options
    config = builder.create_builder_config()
    config.builder_optimization_level = options.opt_level
    # So that an inspector can name the layers.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.workspace_bytes:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.hardware_compatibility != "none":
        if request.flavour is Flavour.RTX:
            raise InvalidArgumentError(
                "hardware_compatibility: TensorRT for RTX has none and would ignore it: its engines run on every "
                "architecture that they are built for (target)"
            )
        level = getattr(trt.HardwareCompatibilityLevel, HARDWARE[options.hardware_compatibility])
        config.hardware_compatibility_level = level
    for name in _flags(request):
        config.set_flag(getattr(trt.BuilderFlag, name))
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.plugins:
        config.plugins_to_serialize = list(options.plugins)
    _set_targets(trt, config, request)
    _read_timing_cache(config, request)
    for profile in request.profiles:
        _add_profile(builder, config, network, profile, request.onnx)
    return config


def _flags(request: BuildRequest) -> list[str]:
    options = request.options
    wanted = {
        "VERSION_COMPATIBLE": options.version_compatible,
        "SPARSE_WEIGHTS": options.sparse,
        "STRIP_PLAN": options.weights == "strip",
        "REFIT": options.weights == "refit",
        "WEIGHT_STREAMING": options.weight_streaming,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _set_targets(trt: Any, config: Any, request: BuildRequest) -> None:
    targets = [target for target in request.options.targets if target != "any"]
    if not targets:
        return
    if not hasattr(trt, "ComputeCapability"):
        raise InvalidArgumentError(
            "target: TensorRT builds for the GPU that it runs on; only TensorRT for RTX builds for others "
            "(--runtime tensorrt_rtx), or --hardware-compat for families"
        )
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        name = target.upper()
        if not hasattr(trt.ComputeCapability, name):
            raise InvalidArgumentError(f"target: {library_version(trt)} does not know {target}")
        if not config.set_compute_capability(getattr(trt.ComputeCapability, name), index):
            raise InvalidArgumentError(f"target: TensorRT for RTX refuses {target}")


def _read_timing_cache(config: Any, request: BuildRequest) -> None:
    """Measurements of earlier builds; TensorRT for RTX makes none."""
    path = request.options.timing_cache
    if path and request.flavour is Flavour.TENSORRT:
        kept = Path(path).read_bytes() if Path(path).is_file() else b""
        # Of a damaged file it makes none.
        cache = config.create_timing_cache(kept) or config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)


def _write_timing_cache(config: Any, request: BuildRequest) -> None:
    path = request.options.timing_cache
    if path and request.flavour is Flavour.TENSORRT:
        Path(path).write_bytes(memoryview(config.get_timing_cache().serialize()))


def _add_profile(builder: Any, config: Any, network: Any, ranges: Any, source: str) -> None:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        bounds: Range | None = ranges.get(tensor.name)
        if tensor.is_shape_tensor:
            _set_values(profile, tensor, bounds, source)
        elif bounds is not None and -1 in tuple(tensor.shape):
            profile.set_shape(tensor.name, bounds.min, bounds.opt, bounds.max)
    if config.add_optimization_profile(profile) < 0:
        raise BuildFailedError(f"{source}: TensorRT refuses an optimization profile; its log has the reason")


def _set_values(profile: Any, tensor: Any, bounds: Range | None, source: str) -> None:
    num_values = tensor.shape[0] if len(tensor.shape) else 1
    if bounds is None or len(bounds.min) != num_values:
        example = "/".join("x".join([size] * num_values) for size in ("1", "8", "32"))
        got = "none" if bounds is None else f"{len(bounds.min)}"
        raise InvalidArgumentError(
            f"{source}: input '{tensor.name}' is a shape tensor: its profile gives the {num_values} values that it may "
            f"have, as in {tensor.name}:{example}; got {got}"
        )
    profile.set_shape_input(tensor.name, bounds.min, bounds.opt, bounds.max)


def _describe(network: Any, request: BuildRequest) -> EngineInfo:
    """The engine's description, without the GPU that reading it from the engine needs."""
    tensors = tuple(
        IoTensor(
            tensor.name,
            bool(tensor.is_network_input),
            DATATYPES[tensor.dtype.name],
            tuple(int(size) for size in tensor.shape),
            bool(tensor.is_shape_tensor),
        )
        for tensor in _io(network)
    )
    static = {tensor.name: Range(tensor.dims, tensor.dims, tensor.dims) for tensor in tensors if -1 not in tensor.dims}
    inputs = [tensor.name for tensor in tensors if tensor.is_input]
    profiles = tuple(
        {name: ranges.get(name) or static[name] for name in inputs} for ranges in request.profiles or ({},)
    )
    return EngineInfo(tensors, profiles)
