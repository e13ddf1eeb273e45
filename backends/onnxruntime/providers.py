"""A model's config -> execution providers: the ones that it asks for, and whether the session has them.

ONNX Runtime takes a provider that it cannot load as a hint, and computes on the CPU without a word. Here that fails the
load, unless the config allows it (parameter `allow_cpu_fallback`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from modelserver.backend import (
    BackendContext,
    ConfigError,
    DeviceKind,
    InstanceGroupKind,
    ModelInstanceGroup,
    Placement,
    UnavailableError,
)

from .options import ENABLE_CUDA_GRAPH, wants_graphs

Provider = tuple[str, dict[str, str]]

ALLOW_CPU_FALLBACK = "allow_cpu_fallback"
CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
TENSORRT_RTX = "NvTensorRTRTXExecutionProvider"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An execution provider by its name in `execution_accelerators`, and its package. `on_gpu`: it needs a GPU."""

    provider: str
    distribution: str
    on_gpu: bool = False


ACCELERATORS = {
    "cuda": Accelerator(CUDA, "onnxruntime-gpu", on_gpu=True),
    "tensorrt": Accelerator(TENSORRT, "onnxruntime-gpu with 'tensorrt-cu13<11'", on_gpu=True),
    "tensorrt_rtx": Accelerator(TENSORRT_RTX, "onnxruntime-ep-nv-tensorrt-rtx", on_gpu=True),
    "openvino": Accelerator("OpenVINOExecutionProvider", "onnxruntime-openvino"),
    "migraphx": Accelerator("MIGraphXExecutionProvider", "onnxruntime-migraphx"),
    "dnnl": Accelerator("DnnlExecutionProvider", "a build of ONNX Runtime with it"),
    "xnnpack": Accelerator("XnnpackExecutionProvider", "a build of ONNX Runtime with it"),
}
_DISTRIBUTIONS = {accelerator.provider: accelerator.distribution for accelerator in ACCELERATORS.values()}

_CUDA_PARAMETERS = (
    "cudnn_conv_algo_search",
    "gpu_mem_limit",
    "arena_extend_strategy",
    "do_copy_in_default_stream",
)
_CUDNN_SEARCHES = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
_ARENA_STRATEGIES = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
# Triton's names of what the TensorRT provider calls otherwise.
_TENSORRT_OPTIONS = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_TENSORRT_GRAPHS = "trt_cuda_graph_enable"
_PRECISIONS = ("FP32", "FP16", "BF16", "INT8")
_PROFILE_KEYS = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")


def wanted_providers(context: BackendContext, placement: Placement) -> list[Provider]:
    """The providers that the config asks for on a placement, the best first, without the CPU's at the end.

    Raises ConfigError for an accelerator that is unknown, not for this kind of device, or has bad parameters.
    """
    on_gpu = placement.kind is DeviceKind.GPU
    wanted = _accelerated(context, placement)
    # TensorRT for RTX is a plugin of ONNX Runtime's build without CUDA: the CPU computes nodes that it refuses.
    if len(wanted) > 1 and any(name == TENSORRT_RTX for name, _ in wanted):
        raise ConfigError(
            f"model '{context.model_name}': expected the accelerator 'tensorrt_rtx' alone, as the CPU computes what it "
            f"leaves; got {len(wanted)} accelerators"
        )
    if on_gpu and not any(name in (CUDA, TENSORRT_RTX) for name, _ in wanted):
        wanted.append((CUDA, _cuda_options(context, context.config.parameters, placement)))
    return wanted


# Its ONNX Runtime has no GPU of its own, so that instances go to the CPU unless they are told.
_RTX_HINT = ", and name it with instance_group [ { kind: KIND_GPU } ]"


def check_gpu_wish(context: BackendContext, *, has_gpu: bool) -> None:
    """Raise UnavailableError if the config names accelerators of GPUs, leaves the device to us, and there is no GPU.

    The config is as it was written; `has_gpu`: this machine and this build of ONNX Runtime have one. Unless the config
    allows the CPU, by a parameter or because it chose it: then the accelerators wait for a machine that has one.
    """
    names = _gpu_accelerators(context)
    groups = context.config.instance_group or (ModelInstanceGroup(),)
    is_left_to_us = any(group.kind is InstanceGroupKind.KIND_AUTO and not group.gpus for group in groups)
    if names and is_left_to_us and not has_gpu and not may_fall_back(context):
        raise UnavailableError(
            f"model '{context.model_name}': its config asks for the GPU accelerator '{names[0]}', and ONNX "
            "Runtime here has no GPU ('modelserver doctor' says what is missing): serve it where there is one"
            f"{_RTX_HINT if 'tensorrt_rtx' in names else ''}, or "
            "allow the CPU in its place with instance_group [ { kind: KIND_CPU } ] or the parameter "
            f"{ALLOW_CPU_FALLBACK}: true"
        )


def unused_accelerators(context: BackendContext) -> tuple[str, ...]:
    """The accelerators of GPUs that a config names without an instance on a GPU, as it turned out."""
    if any(group.kind is InstanceGroupKind.KIND_GPU for group in context.config.instance_group):
        return ()
    return _gpu_accelerators(context)


def _gpu_accelerators(context: BackendContext) -> tuple[str, ...]:
    optimization = context.config.optimization
    if optimization is None or optimization.execution_accelerators is None:
        return ()
    return tuple(accelerator.name for accelerator in optimization.execution_accelerators.gpu_execution_accelerator)


def available_providers(
    context: BackendContext, wanted: Sequence[Provider], available: Collection[str], version: str
) -> list[Provider]:
    """Those of `wanted` that are in this build of ONNX Runtime, and the CPU's.

    Raises UnavailableError when one is missing, unless the config allows the CPU in its place.
    """
    missing = [name for name, _ in wanted if name not in available]
    if missing and not may_fall_back(context):
        raise UnavailableError(
            f"model '{context.model_name}': its config asks for {missing[0]}, which ONNX Runtime {version} here does "
            f"not have (it has {', '.join(sorted(available))}): pip install {_DISTRIBUTIONS[missing[0]]}, or allow the "
            f"CPU in its place with the parameter {ALLOW_CPU_FALLBACK}: true"
        )
    return [*(provider for provider in wanted if provider[0] not in missing), (CPU, {})]


def check_session(
    context: BackendContext, asked: Sequence[Provider], got: Collection[str], missing: str = ""
) -> str | None:
    """The requested providers that a session lacks, in words; None if it has all.

    `missing` is what `preload_libraries` has said. Raises UnavailableError, unless the config allows the CPU in its
    place.
    """
    lost = [name for name, _ in asked if name not in got]
    if not lost:
        return None
    error = no_provider(context, ", ".join(lost), missing or f"it made a session of {', '.join(got)}")
    if not may_fall_back(context):
        raise error
    return error.message


def no_provider(context: BackendContext, name: str, reason: str) -> UnavailableError:
    """The error for a provider that this build of ONNX Runtime has, and cannot load."""
    return UnavailableError(
        f"model '{context.model_name}': ONNX Runtime could not load {name}: {reason}; install the libraries that it "
        f"needs (pip install 'onnxruntime-gpu[cuda,cudnn]' for CUDA), or allow the CPU in its place with the parameter "
        f"{ALLOW_CPU_FALLBACK}: true"
    )


def may_fall_back(context: BackendContext) -> bool:
    """Whether the config allows the CPU in place of a requested provider."""
    return context.bool_parameter(ALLOW_CPU_FALLBACK)


def _accelerated(context: BackendContext, placement: Placement) -> list[Provider]:
    optimization = context.config.optimization
    if optimization is None or optimization.execution_accelerators is None:
        return []
    listed = optimization.execution_accelerators
    for kind in ("gpu", "cpu"):
        for accelerator in getattr(listed, f"{kind}_execution_accelerator"):
            _check_name(context, kind, accelerator.name)
    on_gpu = placement.kind is DeviceKind.GPU
    chosen = listed.gpu_execution_accelerator if on_gpu else listed.cpu_execution_accelerator
    return [
        (
            ACCELERATORS[accelerator.name].provider,
            _options(context, accelerator.name, accelerator.parameters, placement),
        )
        for accelerator in chosen
    ]


def _check_name(context: BackendContext, kind: str, name: str) -> None:
    where = f"model '{context.model_name}': optimization.execution_accelerators.{kind}_execution_accelerator"
    if name not in ACCELERATORS:
        raise ConfigError(f"{where}: expected one of {', '.join(ACCELERATORS)}, got '{name}'")
    if kind == "cpu" and ACCELERATORS[name].on_gpu:
        raise ConfigError(f"{where}: '{name}' needs a GPU; name it under gpu_execution_accelerator")


def _options(context: BackendContext, name: str, parameters: Mapping[str, str], placement: Placement) -> dict[str, str]:
    match name:
        case "cuda":
            return _cuda_options(context, parameters, placement, passes_all=True)
        case "tensorrt":
            return _tensorrt_options(context, parameters, placement)
        case "tensorrt_rtx":
            return dict(parameters) | {"device_id": str(placement.device_id)}
        case _:
            return dict(parameters)


def _cuda_options(
    context: BackendContext, parameters: Mapping[str, str], placement: Placement, *, passes_all: bool = False
) -> dict[str, str]:
    """Of the model's own parameters those that are CUDA's by name; of an accelerator's all."""
    options = {key: value for key, value in parameters.items() if passes_all or key in _CUDA_PARAMETERS}
    for key, words in (("cudnn_conv_algo_search", _CUDNN_SEARCHES), ("arena_extend_strategy", _ARENA_STRATEGIES)):
        if key in options:
            options[key] = words.get(options[key], options[key])
    if wants_graphs(context):
        options[ENABLE_CUDA_GRAPH] = "1"
    return options | {"device_id": str(placement.device_id)}


def _tensorrt_options(context: BackendContext, parameters: Mapping[str, str], placement: Placement) -> dict[str, str]:
    options = {_TENSORRT_OPTIONS.get(key, key): value for key, value in parameters.items()}
    what = f"model '{context.model_name}': accelerator tensorrt"
    if options.get(_TENSORRT_GRAPHS, "0").lower() in ("1", "true"):
        # The provider keeps one graph for all shapes and addresses, and would give the first batch's outputs for ever.
        raise ConfigError(
            f"{what}: {_TENSORRT_GRAPHS}: batches have other addresses and shapes each time, and this provider's graph "
            "only one; leave it out, or serve the model by the backend 'tensorrt', whose graphs follow the shapes"
        )
    precision = options.pop("precision_mode", "FP32").upper()
    if precision not in _PRECISIONS:
        raise ConfigError(f"{what}: precision_mode: expected one of {', '.join(_PRECISIONS)}, got '{precision}'")
    if precision != "FP32":
        options[f"trt_{precision.lower()}_enable"] = "1"
    given = [key for key in _PROFILE_KEYS if key in options]
    if given and len(given) < len(_PROFILE_KEYS):
        # The provider would ignore them, and build engines within requests.
        missing = ", ".join(key for key in _PROFILE_KEYS if key not in given)
        raise ConfigError(f"{what}: expected all of {', '.join(_PROFILE_KEYS)}, or none; {missing} missing")
    return options | {"device_id": str(placement.device_id)}


def nodes_by_provider(assignment: Sequence[Any]) -> dict[str, int]:
    """By provider: how many nodes it executes, of `InferenceSession.get_provider_graph_assignment_info()`."""
    counts: dict[str, int] = {}
    for part in assignment:
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(part.get_nodes())
    return counts


# Execution providers in distributions of their own, which ONNX Runtime loads when it is told where they are. One is
# known: TensorRT for RTX, `pip install onnxruntime-ep-nv-tensorrt-rtx` (ONNX Runtime 1.24 and later). It has not
# been run with this server, since it needs one of the GPUs on its list.

# Module with `get_ep_name` and `get_library_path`, by provider.
_MODULES = {TENSORRT_RTX: "onnxruntime_ep_nv_tensorrt_rtx"}

_lock = threading.Lock()
_registered: set[str] = set()


def plugin_providers(wanted: Iterable[Provider]) -> list[str]:
    """Those of the wanted providers that an installed plugin brings."""
    return [name for name, _ in wanted if name in _MODULES and importlib.util.find_spec(_MODULES[name]) is not None]


def add_plugin(options: Any, asked: Sequence[Provider]) -> bool:
    """Give a session's options the device of the plugin among `asked`; whether there is one.

    The session must then be made without a list of providers, which would take the place of this one, and with options
    of its own: they take a provider once. Raises UnavailableError without the device.
    """
    for name, settings in asked:
        if name not in _MODULES:
            continue
        with _lock:
            if name not in _registered:
                module = importlib.import_module(_MODULES[name])
                try:
                    onnxruntime.register_execution_provider_library(module.get_ep_name(), module.get_library_path())
                except native.Fail as error:
                    raise UnavailableError(f"{name} is installed, and cannot be loaded: {error}") from error
                _registered.add(name)
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]
        number = int(settings["device_id"])
        if number >= len(devices):
            raise UnavailableError(
                f"{name} is installed, and finds {len(devices)} devices that it supports on this machine: there is no "
                f"GPU {number} for it"
            )
        options.add_provider_for_devices([devices[number]], settings)
        return True
    return False


@functools.cache
def preload_libraries() -> str:
    """Load the libraries of CUDA and cuDNN that NVIDIA's packages for Python bring, in which no loader looks.

    Gives back what is missing, in words.
    ONNX Runtime's CUDA provider is linked to them ("Preload DLLs" in the documentation of its CUDA provider; 1.21 and
    later can do it).
    """
    said = io.StringIO()
    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(said):
            onnxruntime.preload_dlls()
    return "; ".join(line for line in said.getvalue().splitlines() if line.startswith("Failed to load"))
