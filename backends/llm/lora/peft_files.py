"""Adapters as the library PEFT writes them: adapter_config.json and adapter_model.safetensors in one directory."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from modelserver.backend import InvalidArgumentError, NotFoundError, UnsupportedError, parse_json

from ..checkpoint.safetensors_files import inner_name
from .adapter import Adapter, LowRank, Target, check_floats, check_modules, scaled

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DOWN, _UP, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
# Fields that change more than low-rank matrices of linear layers: the values that do not, and why others are refused.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "bias": ((None, "none"), "biases that were trained are not applied: train with bias='none'"),
    "lora_bias": ((None, False), "biases of adapters are not applied: train with lora_bias=False"),
    "modules_to_save": ((None, [], ()), "whole modules cannot be replaced for some requests: merge the adapter"),
    "alora_invocation_tokens": ((None, [], ()), "adapters are applied to all tokens: train without it"),
    "layer_replication": ((None, [], ()), "it makes a network of other layers: merge the adapter"),
    "target_parameters": ((None, [], ()), "experts are not adapted: merge the adapter"),
    "trainable_token_indices": ((None, [], {}), "embeddings are not adapted: merge the adapter"),
    "use_qalora": ((None, False), "its matrices see pooled groups of inputs: merge the adapter"),
    "use_bdlora": ((None, False), "its matrices are block-diagonal: merge the adapter"),
}
# Beginnings of `init_lora_weights` that take a part out of the base weights, which the files do not tell.
_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_peft(name: str, directory: Path, target: Target) -> Adapter:
    """Raises NotFoundError, InvalidArgumentError or UnsupportedError, which name the adapter and the file."""
    what = f"the adapter '{name}' in {directory}"
    written, config = _config(what, directory)
    path = directory / WEIGHTS
    if not path.is_file():
        others = "adapter_model.bin, which may run code when it is read" if (directory / _BIN).is_file() else "others"
        raise NotFoundError(f"{what}: there is no {WEIGHTS}, only {others}: save it with safe_serialization=True")
    data = path.read_bytes()
    try:
        tensors = load_safetensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidArgumentError(f"{path} is not a whole safetensors file: {error}") from None
    modules = _modules(what, tensors, config)
    check_modules(what, modules, target)
    if config.get("use_dora"):
        modules = {each: _with_gain(what, each, module, tensors, target) for each, module in modules.items()}
    digest = hashlib.blake2b(written, digest_size=32, person=b"peft adapter")
    digest.update(data)
    return Adapter(name, digest.digest(), modules)


_BIN = "adapter_model.bin"


def rank_of(directory: Path) -> int:
    """The greatest rank that a config names, before the tensors are read. Raises as `read_peft`."""
    what = f"the adapter in {directory}"
    _, config = _config(what, directory)
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r", 8), *(patterns.values() if isinstance(patterns, dict) else ())]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise InvalidArgumentError(f"{what}: {CONFIG}: 'r' and 'rank_pattern' must be positive integers")
    return max(map(int, ranks))


def _config(what: str, directory: Path) -> tuple[bytes, dict[str, Any]]:
    path = directory / CONFIG
    try:
        written = path.read_bytes()
        config = parse_json(written, str(path))
    except OSError:
        raise NotFoundError(
            f"{what}: there is no file {path}; an adapter is a directory as PEFT saves it, or a GGUF file"
        ) from None
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"{path}: expected a JSON object, got {type(config).__name__}")
    if config.get("peft_type", "LORA") != "LORA":
        raise UnsupportedError(f"{what} has peft_type {config['peft_type']!r:.40}: only LORA is served")
    for field, (neutral, why) in _REFUSED.items():
        if config.get(field) not in neutral:
            raise UnsupportedError(f"{what} has {field} {config[field]!r:.80}: {why}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGING_INITS):
        raise UnsupportedError(
            f"{what} has init_lora_weights {init!r:.40}, which changes the base's own weights: save it converted to "
            "plain LoRA (path_initial_model_for_weight_conversion)"
        )
    return written, config


def _modules(what: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, LowRank]:
    found = {}
    for stored in sorted(tensors):
        if stored.endswith(_UP):
            if stored.removesuffix(_UP) + _DOWN not in tensors:
                raise InvalidArgumentError(f"{what} has {stored} and no matrix {_DOWN} beside it")
        elif stored.endswith(_MAGNITUDE) and config.get("use_dora"):
            continue
        elif not stored.endswith(_DOWN):
            raise UnsupportedError(
                f"{what} has the tensor {stored}: only {_DOWN} and {_UP} of linear layers are served; merge the adapter"
            )
        else:
            module = stored.removesuffix(_DOWN)
            if (up := tensors.get(module + _UP)) is None:
                raise InvalidArgumentError(f"{what} has {stored} and no matrix {_UP} beside it")
            down = check_floats(what, stored, tensors[stored])
            plain = module.removeprefix(_PREFIX)
            scale = _scale(what, plain, down.shape[0], config)
            found[inner_name(plain)] = LowRank(down, scaled(check_floats(what, module + _UP, up), scale))
    return found


def _scale(what: str, module: str, rank: int, config: Mapping[str, Any]) -> float:
    """alpha / rank, or of rank-stabilized adapters alpha / sqrt(rank)."""
    alpha: Any = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        try:
            is_meant = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise InvalidArgumentError(f"{what}: alpha_pattern {pattern!r:.80}: {error}") from None
        if is_meant:
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise InvalidArgumentError(f"{what}: lora_alpha of {module} must be a number, got {alpha!r:.40}")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _with_gain(what: str, name: str, module: LowRank, tensors: Mapping[str, torch.Tensor], target: Target) -> LowRank:
    """DoRA: each output of W + BA is brought to a length that was trained, however long it is."""
    stored = next((each for each in tensors if _magnitude_of(each) == name), None)
    if stored is None:
        raise InvalidArgumentError(f"{what} has use_dora and no {_MAGNITUDE} of the module {name}")
    weight = target.weight(target.modules[name]).float()
    magnitude = tensors[stored].float().flatten()
    if magnitude.shape[0] != weight.shape[0]:
        raise InvalidArgumentError(f"{what} has {stored} of {magnitude.shape[0]} values, expected {weight.shape[0]}")
    up = module.up.float()
    gain = magnitude / torch.linalg.vector_norm(weight + up @ module.down.float(), dim=1)
    return LowRank(module.down, up * gain[:, None], gain)


def _magnitude_of(stored: str) -> str | None:
    module, found, _ = stored.partition(_MAGNITUDE)
    return inner_name(module.removeprefix(_PREFIX)) if found else None
