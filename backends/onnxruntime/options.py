"""A model's config -> session options and execution providers."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import onnxruntime

from modelserver.backend import BackendContext, ConfigError, DeviceKind, Placement

log = logging.getLogger(__name__)

Provider = tuple[str, dict[str, str]]

_OPTIMIZATION_LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    2: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
}
# Keys in these name spaces are ONNX Runtime's own session entries, passed on as they are.
_SESSION_ENTRY_PREFIXES = ("session.", "optimization.", "ep.", "memory.")
# But this one it reads at each run.
_ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_ARENAS = re.compile(r"(cpu|gpu):\d+(;(cpu|gpu):\d+)*")

_ACCELERATORS = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "dnnl": "DnnlExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
}
_CUDA_PARAMETERS = (
    "cudnn_conv_algo_search",
    "gpu_mem_limit",
    "arena_extend_strategy",
    "do_copy_in_default_stream",
)
_CUDNN_SEARCHES = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
_ARENA_STRATEGIES = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
_TENSORRT_OPTIONS = {"max_workspace_size_bytes": "trt_max_workspace_size"}


def session_options(context: BackendContext) -> Any:
    """Options of the model's session. Raises ConfigError for a parameter that is no number where one is due."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised: printing them as well is noise
    _set_threads(options, context)
    options.enable_cpu_mem_arena = context.bool_parameter("enable_mem_arena", True)
    options.enable_mem_pattern = context.bool_parameter("enable_mem_pattern", True)
    options.graph_optimization_level = _optimization_level(context)
    for key, value in context.config.parameters.items():
        if key.startswith(_SESSION_ENTRY_PREFIXES) and key != _ARENA_SHRINKAGE:
            options.add_session_config_entry(key, value)
    return options


def run_options(context: BackendContext) -> Any:
    """Options of every run, or None. Raises ConfigError for what each run would refuse."""
    devices = context.config.parameters.get(_ARENA_SHRINKAGE)
    if devices is None:
        return None
    if not _ARENAS.fullmatch(devices):
        raise _refused(context, f"parameter {_ARENA_SHRINKAGE}", "devices such as cpu:0;gpu:0", f"'{devices}'")
    if "cpu" in devices and not context.bool_parameter("enable_mem_arena", True):
        raise _refused(context, f"parameter {_ARENA_SHRINKAGE}", f"enable_mem_arena to be on for {devices}", "off")
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # as in `session_options`
    options.add_run_config_entry(_ARENA_SHRINKAGE, devices)
    return options


def _set_threads(options: Any, context: BackendContext) -> None:
    options.intra_op_num_threads = _thread_count(context, "intra_op_thread_count")
    options.inter_op_num_threads = _thread_count(context, "inter_op_thread_count")
    modes = {0: onnxruntime.ExecutionMode.ORT_SEQUENTIAL, 1: onnxruntime.ExecutionMode.ORT_PARALLEL}
    mode = context.int_parameter("execution_mode", 0)
    if mode not in modes:
        raise _refused(context, "parameter execution_mode", "0 (sequential) or 1 (parallel)", mode)
    options.execution_mode = modes[mode]


def _thread_count(context: BackendContext, key: str) -> int:
    """The model's parameter, else the backend's option; 0 leaves the default, a thread per physical core."""
    count = context.int_parameter(key, context.int_option(key))
    if count < 0:
        raise _refused(context, f"parameter {key}", "0 or more", count)
    return count


def _refused(context: BackendContext, what: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"model '{context.model_name}': {what}: expected {expected}, got {got}")


def _optimization_level(context: BackendContext) -> Any:
    """Triton's reading of `optimization.graph.level`: -1 none, 1 basic, 2 extended, otherwise all."""
    optimization = context.config.optimization
    level = optimization.graph.level if optimization is not None and optimization.graph is not None else 0
    return _OPTIMIZATION_LEVELS.get(level, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)


def providers(context: BackendContext, placement: Placement) -> list[Provider]:
    """Execution providers in order of preference, those that this build of ONNX Runtime lacks left out.

    Raises ConfigError for an accelerator name that nobody knows.
    """
    on_gpu = placement.kind is DeviceKind.GPU
    wanted = _accelerators(context, placement)
    if on_gpu and not any(name == "CUDAExecutionProvider" for name, _ in wanted):
        wanted.append(("CUDAExecutionProvider", _cuda_options(context.config.parameters, placement)))
    available = set(onnxruntime.get_available_providers())
    chosen = []
    for name, options in wanted:
        if name in available:
            chosen.append((name, options))
        else:
            log.warning(
                "model '%s': %s is not in this build of ONNX Runtime (it has %s); going on without it",
                context.model_name,
                name,
                ", ".join(sorted(available)),
            )
    return [*chosen, ("CPUExecutionProvider", {})]


def _accelerators(context: BackendContext, placement: Placement) -> list[Provider]:
    optimization = context.config.optimization
    if optimization is None or optimization.execution_accelerators is None:
        return []
    accelerators = optimization.execution_accelerators
    on_gpu = placement.kind is DeviceKind.GPU
    chosen = accelerators.gpu_execution_accelerator if on_gpu else accelerators.cpu_execution_accelerator
    result = []
    for accelerator in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        if accelerator.name not in _ACCELERATORS:
            what = "optimization.execution_accelerators"
            raise _refused(context, what, f"one of {', '.join(_ACCELERATORS)}", repr(accelerator.name))
    for accelerator in chosen:
        options = dict(accelerator.parameters)
        if accelerator.name == "cuda":
            options = _cuda_options(options, placement)
        elif accelerator.name == "tensorrt":
            options = _tensorrt_options(options, placement)
        result.append((_ACCELERATORS[accelerator.name], options))
    return result


def _cuda_options(parameters: Mapping[str, str], placement: Placement) -> dict[str, str]:
    options = {key: parameters[key] for key in _CUDA_PARAMETERS if key in parameters}
    for key, words in (("cudnn_conv_algo_search", _CUDNN_SEARCHES), ("arena_extend_strategy", _ARENA_STRATEGIES)):
        if key in options:
            options[key] = words.get(options[key], options[key])
    return options | {"device_id": str(placement.device_id)}


def _tensorrt_options(parameters: Mapping[str, str], placement: Placement) -> dict[str, str]:
    options = {_TENSORRT_OPTIONS.get(key, key): value for key, value in parameters.items()}
    precision = options.pop("precision_mode", "FP32").upper()
    if precision in ("FP16", "INT8"):
        options[f"trt_{precision.lower()}_enable"] = "1"
    return options | {"device_id": str(placement.device_id)}
