"""A model's config -> session options, run options and thread pools."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import onnxruntime

from modelserver.backend import BackendContext, ConfigError, UnavailableError

_OPTIMIZATION_LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    2: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
}
# Keys in these name spaces are ONNX Runtime's own session entries, passed on as they are.
_SESSION_ENTRY_PREFIXES = ("session.", "optimization.", "ep.", "memory.")
# But this one it reads at each run.
_ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_SHRINKAGE_INTERVAL = "arena_shrinkage_interval"
_ARENAS = re.compile(r"(cpu|gpu):\d+(;(cpu|gpu):\d+)*")
# Of the CUDA provider.
ENABLE_CUDA_GRAPH = "enable_cuda_graph"
# Of runs: the number of the CUDA graph that they capture or replay; without it ONNX Runtime takes one for all runs.
GRAPH_ID = "gpu_graph_id"
NO_GRAPH = "-1"
_RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"

_GLOBAL_POOL = "enable-global-threadpool"
# The thread pools that all sessions of the process share, once there are some: they can be made once only.
_pool_lock = threading.Lock()
_pool_sizes: tuple[int, int] | None = None


# A model of this size computes a row in microseconds, unless it has one of the operators, whose work its weights do not
# tell: it gets no threads beside the one that asks.
_SMALL_BYTES = 64 << 10
_LABORIOUS = re.compile(
    rb"Conv|Attention|LSTM|GRU|RNN|Scan|Loop|Einsum|Resize|TreeEnsemble|NonMaxSuppression|TopK|DFT|com\.microsoft"
)


def session_options(context: BackendContext, path: Path) -> Any:
    """Options of the model's session. Raises ConfigError for a parameter that must be a number and is not."""
    options = bare_options(context)
    _set_threads(options, context)
    if has_own_threads(options) and not options.intra_op_num_threads and _is_small(path):
        options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = context.bool_parameter("enable_mem_arena", True)
    options.enable_mem_pattern = context.bool_parameter("enable_mem_pattern", True)
    options.graph_optimization_level = _optimization_level(context)
    options.add_session_config_entry(_RECORD_ASSIGNMENT, "1")  # which provider executes which nodes
    for key, value in context.config.parameters.items():
        if key.startswith(_SESSION_ENTRY_PREFIXES) and key != _ARENA_SHRINKAGE:
            options.add_session_config_entry(key, value)
    return options


def _is_small(path: Path) -> bool:
    return path.stat().st_size <= _SMALL_BYTES and _LABORIOUS.search(path.read_bytes()) is None


def bare_options(context: BackendContext) -> Any:
    """Options without anything of the model's: of a session whose signature only is wanted.

    Raises UnavailableError when the process's thread pools cannot be what --backend-config wants.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised: printing them as well is noise
    if _has_global_pool(context):
        options.use_per_session_threads = False
    return options


def has_own_threads(options: Any) -> bool:
    """Whether a session with these options makes threads; before it could be asked, every session did."""
    return bool(getattr(options, "use_per_session_threads", True))


def run_options(context: BackendContext) -> tuple[Any, Any | None, int]:
    """Options of a run, those of one that gives memory back, and of how many runs one does that.

    The second is None if the config does not ask for it. Raises ConfigError for values that each run would refuse.
    """
    plain = _run_without_graph(context)
    devices = context.config.parameters.get(_ARENA_SHRINKAGE)
    interval = context.int_parameter(_SHRINKAGE_INTERVAL, 1)
    if interval < 1:
        raise _refused(context, f"parameter {_SHRINKAGE_INTERVAL}", "1 or more", interval)
    if devices is None:
        return plain, None, interval
    if not _ARENAS.fullmatch(devices):
        raise _refused(context, f"parameter {_ARENA_SHRINKAGE}", "devices such as cpu:0;gpu:0", f"'{devices}'")
    if "cpu" in devices and not context.bool_parameter("enable_mem_arena", True):
        raise _refused(context, f"parameter {_ARENA_SHRINKAGE}", f"enable_mem_arena to be on for {devices}", "off")
    if "gpu" in devices and wants_graphs(context):
        # Graphs write to memory that the arena takes for free.
        raise _refused(
            context, f"parameter {_ARENA_SHRINKAGE}", "no gpu beside optimization.cuda.graphs", f"'{devices}'"
        )
    shrinking = _run_without_graph(context)
    shrinking.add_run_config_entry(_ARENA_SHRINKAGE, devices)
    return plain, shrinking, interval


def wants_graphs(context: BackendContext) -> bool:
    """Whether the config asks for CUDA graphs on GPUs, by its optimization or as an option of the CUDA provider."""
    optimization = context.config.optimization
    if optimization is None:
        return False
    listed = optimization.execution_accelerators
    return (optimization.cuda is not None and optimization.cuda.graphs) or any(
        accelerator.name == "cuda" and accelerator.parameters.get(ENABLE_CUDA_GRAPH, "0").lower() in ("1", "true")
        for accelerator in (listed.gpu_execution_accelerator if listed is not None else ())
    )


def _run_without_graph(context: BackendContext) -> Any:
    options = quiet_run()
    if wants_graphs(context):
        options.add_run_config_entry(GRAPH_ID, NO_GRAPH)
    return options


def quiet_run() -> Any:
    """Options of a run whose errors are raised and not printed as well."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # as in `bare_options`
    return options


def _has_global_pool(context: BackendContext) -> bool:
    """Whether sessions share the process's thread pools; they are made when the first model wants them."""
    global _pool_sizes
    asked = context.options.get(_GLOBAL_POOL, "0").lower() in ("1", "true")
    sizes = (_thread_count(context, "intra_op_thread_count"), _thread_count(context, "inter_op_thread_count"))
    with _pool_lock:
        if asked and _pool_sizes is None:
            try:
                onnxruntime.set_global_thread_pool_sizes(*sizes)
            except (AttributeError, RuntimeError) as error:  # older versions have none
                raise UnavailableError(
                    f"--backend-config=onnxruntime,{_GLOBAL_POOL}: ONNX Runtime cannot make the thread pools: {error}"
                ) from error
            _pool_sizes = sizes
        # Once they exist, a session with threads of its own is refused.
        return _pool_sizes is not None


def _set_threads(options: Any, context: BackendContext) -> None:
    if has_own_threads(options):
        options.intra_op_num_threads = _thread_count(context, "intra_op_thread_count", context.config.parameters)
        options.inter_op_num_threads = _thread_count(context, "inter_op_thread_count", context.config.parameters)
    modes = {0: onnxruntime.ExecutionMode.ORT_SEQUENTIAL, 1: onnxruntime.ExecutionMode.ORT_PARALLEL}
    mode = context.int_parameter("execution_mode", 0)
    if mode not in modes:
        raise _refused(context, "parameter execution_mode", "0 (sequential) or 1 (parallel)", mode)
    options.execution_mode = modes[mode]


def _thread_count(context: BackendContext, key: str, parameters: Any = ()) -> int:
    """The model's parameter, else the backend's option; 0 leaves the default: one in a small model, else one a core."""
    count = context.int_option(key)
    if key in parameters:
        count = context.int_parameter(key, count)
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
