"""A copy of a checkpoint whose linear layers are rounded, in compressed-tensors, which other servers read too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .calibration import measured_products
from .checkpoint import Checkpoint, text_config
from .models.families import find_family
from .models.linear import Linear
from .models.linear_tensors import ALONE, LinearTensors, Split
from .models.load import walk
from .quantization.bits import pack_words
from .quantization.checking import WalkingScheme
from .quantization.quantized_weight import QuantizedWeight
from .quantization.rounded import GROUP, round_by_products, round_float8, round_integers

_INDEX = "model.safetensors.index.json"
METHODS = ("int4", "int8", "fp8")
# Of inputs with each other, that are measured at once.
_PRODUCT_BYTES = 1 << 30
Packed = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class QuantizedCopy:
    """The result: how many modules were rounded, and the linear ones that stay in floats."""

    num_rounded: int
    kept: tuple[str, ...]
    num_bytes: int


def write_quantized_copy(
    checkpoint: Checkpoint, target: Path, method: str, calibration: str | None = None
) -> QuantizedCopy:
    """The same checkpoint in an empty directory, with weights rounded to the nearest of `METHODS`.

    With a calibration text, int4 is rounded by GPTQ: so that what layers make of their inputs on it changes least.
    The head, embeddings, norms and routers stay in floats. UnsupportedError for checkpoints that are quantized already,
    and for families that run on transformers' network.
    """
    if method not in METHODS:
        raise InvalidArgumentError(f"quantization {method!r} of a language model: expected {', '.join(METHODS)}")
    if checkpoint.config.get("quantization_config") is not None:
        raise UnsupportedError(f"the weights in {checkpoint.place} are quantized already")
    linear = linear_modules(checkpoint)
    source = checkpoint.transformers_directory
    rounded = {name for name, num_inputs in linear.items() if method != "int4" or num_inputs % GROUP == 0}
    calibrated: Mapping[str, Packed] = {}
    if calibration is not None:
        if method != "int4":
            raise InvalidArgumentError(f"{method} is rounded to the nearest: a calibration text is for int4")
        calibrated = _calibrated(checkpoint, calibration, {name: linear[name] for name in rounded})
    places = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors = _rounded_tensors(path, rounded, method, calibrated)
        save_file(tensors, target / path.name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, path.name))
    _copy_others(source, target)
    if (source / _INDEX).is_file():
        (target / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=2, sort_keys=True))
    kept = tuple(sorted(linear.keys() - rounded))
    config = json.loads((source / "config.json").read_bytes())
    config["quantization_config"] = _described(method, ("lm_head", *kept))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return QuantizedCopy(len(rounded), kept, sum(path.stat().st_size for path in target.glob("*.safetensors")))


def linear_modules(checkpoint: Checkpoint) -> Mapping[str, int]:
    """The linear layers of a network within its layers, by their names in the file, and how many inputs they have."""
    entries = text_config(checkpoint)
    family = find_family(entries["model_type"])
    if family is None or family.names.is_transposed:
        raise UnsupportedError(f"weights of {entries['model_type']} cannot be quantized: they are read as they are")
    recorder = _Recorder()
    walk(checkpoint, recorder, family, family.config_of(checkpoint), ALONE)
    return recorder.found


class _Recorder(WalkingScheme):
    """Notes the names of layers, and how many inputs they have."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def linear(self, tensors: LinearTensors) -> Linear:
        if tensors.split is not Split.WHOLE:
            self.found |= {name: part.num_inputs for name, part in zip(tensors.names, tensors.parts, strict=True)}
        return super().linear(tensors)


def _calibrated(checkpoint: Checkpoint, text: str, modules: Mapping[str, int]) -> dict[str, Packed]:
    """Modules in 4 bits, by their names in the file. The text is read once for as many as there is room for."""
    names = {checkpoint.module(name.removesuffix(".weight")): name for name in checkpoint.names()}
    inner = {name: names[name].removesuffix(".weight") for name in sorted(modules, key=_numbered)}
    found: dict[str, Packed] = {}
    batch: list[str] = []
    taken = 0
    for name in inner:
        batch.append(name)
        taken += 4 * modules[name] ** 2
        if taken < _PRODUCT_BYTES and len(found) + len(batch) < len(inner):
            continue
        products = measured_products(checkpoint, text, {inner[one] for one in batch})
        for one in batch:
            weight = checkpoint.tensor(f"{inner[one]}.weight")
            if (measured := products.get(inner[one])) is None:  # an expert that the text never asked
                found[one] = _packed(weight, "int4")
            else:
                found[one] = _packed_integers(round_by_products(weight, measured, 4, GROUP), weight.shape)
        batch, taken = [], 0
    return found


def _numbered(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _rounded_tensors(
    path: Path, modules: set[str], method: str, calibrated: Mapping[str, Packed]
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            tensor: torch.Tensor = file.get_tensor(name)
            module, _, suffix = name.rpartition(".")
            if suffix == "weight" and module in modules:
                packed = calibrated.get(module) or _packed(tensor, method)
                found |= {f"{module}.{part}": one for part, one in packed.items()}
            else:
                found[name] = tensor
    return found


def _packed(weight: torch.Tensor, method: str) -> Packed:
    if method == "fp8":
        floats = round_float8(weight)
        return {"weight": floats.codes, "weight_scale": floats.scales}
    bits, group = (4, GROUP) if method == "int4" else (8, weight.shape[1])
    return _packed_integers(round_integers(weight, bits, group), weight.shape)


def _packed_integers(integers: QuantizedWeight, shape: torch.Size) -> Packed:
    return {
        "weight_packed": pack_words(integers.codes, integers.bits),
        "weight_scale": integers.scales,
        "weight_shape": torch.tensor(shape),
    }


def _described(method: str, ignored: Sequence[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 4 if method == "int4" else 8, "symmetric": True, "dynamic": False}
    weights["type"] = "float" if method == "fp8" else "int"
    weights |= {"strategy": "group", "group_size": GROUP} if method == "int4" else {"strategy": "channel"}
    form = "float-quantized" if method == "fp8" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": form}},
        "ignore": list(ignored),
        "quantization_status": "compressed",
    }


def _copy_others(source: Path, target: Path) -> None:
    """Tokenizer, templates and whatever lies beside the weights."""
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors" or path.name in (_INDEX, "config.json") or path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)
