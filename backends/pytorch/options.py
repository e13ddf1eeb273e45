"""A model's config -> how its program is prepared and called; Triton's parameter names where Triton has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelserver.backend import BackendContext, ConfigError, parse_json

_COMPILE = "TORCH_COMPILE"
_COMPILE_JSON = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
_COMPILE_KEYS = {
    "fullgraph": bool,
    "dynamic": bool,
    "backend": str,
    "mode": str,
    "options": dict,
    "disable": bool,
}
ALLOW_PICKLE = "allow-pickle"
ALLOW_NATIVE = "allow-native-code"


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """`num_threads` 0: as many as PyTorch takes by itself. `compile_arguments` None: the program is not compiled."""

    num_threads: int = 0
    num_interop_threads: int = 0
    is_inference_mode: bool = True
    is_optimized: bool = True
    is_channels_last: bool = False
    has_cudnn: bool = True
    cleans_cache: bool = False
    shares_weights: bool = True
    has_cuda_graphs: bool = False
    is_pinned: bool = True
    compile_arguments: Mapping[str, Any] | None = field(default=None)


def torch_options(context: BackendContext) -> TorchOptions:
    """The options of the config. Raises ConfigError for invalid values."""
    optimization = context.config.optimization
    cuda = optimization.cuda if optimization is not None else None
    pinned = optimization.input_pinned_memory if optimization is not None else None
    return TorchOptions(
        num_threads=_count(context, "INTRA_OP_THREAD_COUNT", "NUM_THREADS"),
        num_interop_threads=_count(context, "INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS"),
        is_inference_mode=context.bool_parameter("INFERENCE_MODE", True),
        is_optimized=not context.bool_parameter("DISABLE_OPTIMIZED_EXECUTION"),
        is_channels_last=context.bool_parameter("CHANNELS_LAST"),
        has_cudnn=not context.bool_parameter("DISABLE_CUDNN"),
        cleans_cache=context.bool_parameter("ENABLE_CACHE_CLEANING"),
        shares_weights=context.bool_parameter("ENABLE_WEIGHT_SHARING", True),
        has_cuda_graphs=cuda is not None and cuda.graphs,
        is_pinned=pinned is None or pinned.enable,
        compile_arguments=_compile_arguments(context),
    )


def is_allowed(context: BackendContext, option: str) -> bool:
    """Whether the operator vouches, with `--backend-config=pytorch,<option>=true`, for files that run code."""
    return context.options.get(option, "false").lower() in ("true", "1")


def _count(context: BackendContext, *keys: str) -> int:
    """The first of the parameters that is there; 0 without any."""
    for key in keys:
        if context.parameter(key):
            count = context.int_parameter(key)
            if count < 0:
                raise ConfigError(f"model '{context.model_name}': parameter {key}: expected 0 or more, got {count}")
            return count
    return 0


def _compile_arguments(context: BackendContext) -> Mapping[str, Any] | None:
    """Arguments of torch.compile; None without. Raises ConfigError for what torch.compile does not take."""
    text = context.parameter(_COMPILE_JSON).strip()
    if not context.bool_parameter(_COMPILE, bool(text)):
        return None
    what = f"model '{context.model_name}': parameter {_COMPILE_JSON}"
    try:
        arguments = parse_json(text, what) if text else {}
    except ValueError as error:
        raise ConfigError(f"{what}: expected JSON, got '{text:.80}': {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"{what}: expected a JSON object, got '{text:.80}'")
    for key, value in arguments.items():
        kind = _COMPILE_KEYS.get(key)
        if kind is None:
            raise ConfigError(f"{what}: expected one of {', '.join(_COMPILE_KEYS)}, got '{key}'")
        if not isinstance(value, kind):
            raise ConfigError(f"{what}: {key}: expected a {kind.__name__}, got {value!r:.80}")
    return arguments
