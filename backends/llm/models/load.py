"""From a checkpoint's directory to a network on its device, in its precision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelserver.backend import InvalidArgumentError, UnavailableError

from ..options import EngineOptions
from .build import build_decoder
from .checkpoint import Checkpoint
from .config import DecoderConfig, read_config, read_config_json
from .decoder import Decoder
from .names import names_of
from .quantization import quantization_method
from .weights import Weights

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadedNetwork:
    network: Decoder
    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int


def load_network(directory: Path, options: EngineOptions) -> LoadedNetwork:
    """InvalidArgumentError or UnsupportedError says what of the checkpoint or the options does not fit."""
    entries = read_config_json(directory)
    config = read_config(directory)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, config.dtype, device)
    max_model_len = choose_max_model_len(options.max_model_len, config)
    method = quantization_method(options.quantization, entries)
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        weights = Weights(
            checkpoint, method, dtype=dtype, device=device, is_transposed=names_of(config.model_type).is_transposed
        )
        network = build_decoder(config, weights, max_len=max_model_len)
    return LoadedNetwork(network, config, device, dtype, max_model_len)


def choose_device(asked: str) -> torch.device:
    """ "auto" is the GPU if there is one. UnavailableError if the one asked for is not there."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise InvalidArgumentError(f"device {asked!r} is no device: expected cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(f"device {asked!r} was asked for, but torch finds no GPU")
    return device


def choose_dtype(asked: str, stored: str, device: torch.device) -> torch.dtype:
    """ "auto" is what the checkpoint says, but on a CPU float32 where that multiplies no slower than half precision."""
    name = (stored if asked == "auto" else asked).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidArgumentError(f"dtype {name!r} is not supported: expected auto, {', '.join(_DTYPES)}")
    dtype = _DTYPES[name]
    if asked != "auto" or device.type != "cpu" or dtype == torch.float32:
        return dtype
    is_faster = dtype == torch.bfloat16 and _multiplies_bfloat16()
    return dtype if is_faster else torch.float32


def _multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for it (AVX512-BF16, AMX); without them oneDNN converts and is slower."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def choose_max_model_len(asked: int | None, config: DecoderConfig) -> int:
    """As long as the network's positions go. InvalidArgumentError if more is asked for."""
    if asked is None:
        return config.max_position_embeddings
    if asked > config.longest:
        raise InvalidArgumentError(
            f"max_model_len {asked} is more than the {config.longest} positions that the checkpoint was made for"
        )
    return asked


def read_pooling(directory: Path) -> str:
    """ "last" or "mean": how sentence-transformers says that a checkpoint's hidden states become one vector."""
    path = directory / "1_Pooling" / "config.json"
    if not path.is_file():
        return "last"
    entries = json.loads(path.read_text())
    return "mean" if entries.get("pooling_mode_mean_tokens") else "last"
