"""A copy of a checkpoint whose linear layers are rounded, in compressed-tensors, which other servers read too;
and how often the copy predicts the same token as the original."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .activation_aware import scale_layer
from .calibration import MeanProducts, MeanSquares, measured
from .checkpoint import Checkpoint, HfCheckpoint, open_checkpoint, text_config
from .checkpoint.safetensors_files import SAFETENSORS_INDEX, SafetensorsWriter
from .layerwise import ChangedCheckpoint, LayerwiseNetwork
from .models.families import find_family
from .models.linear import Linear
from .models.linear_tensors import ALONE, LinearTensors, Split
from .models.load import walk
from .quantization import find_scheme
from .quantization.bits import pack_words
from .quantization.checking import WalkingScheme
from .quantization.quantized_weight import QuantizedWeight
from .quantization.rounded import GROUP, round_by_products, round_float8, round_integers

METHODS = ("int4", "int8", "fp8", "awq")
# Of the products of inputs with each other, which are measured at once.
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
    """The same checkpoint in an empty directory, with weights rounded by one of `METHODS`.

    int4, int8 and fp8 are rounded to the nearest. With a calibration text, int4 is rounded by GPTQ: so that what layers
    make of their inputs on it changes least. awq needs that text; then inputs are scaled before weights are rounded.
    The head, embeddings, norms and routers stay in floats. UnsupportedError for checkpoints that are quantized already,
    and for families that run on transformers' network.
    """
    if method not in METHODS:
        raise InvalidArgumentError(f"quantization {method!r} of a language model: expected {', '.join(METHODS)}")
    if checkpoint.config.get("quantization_config") is not None:
        raise UnsupportedError(f"the weights in {checkpoint.place} are quantized already")
    if calibration is None and method == "awq":
        raise InvalidArgumentError("awq needs a text that shows which inputs count: give --calibration")
    if calibration is not None and method not in ("int4", "awq"):
        raise InvalidArgumentError(f"{method} is rounded to the nearest: a calibration text is for int4 and awq")
    linear = linear_modules(checkpoint)
    source = checkpoint.transformers_directory
    rounded = {name: module for name, module in linear.items() if _can_round(method, module)}
    writer, written = SafetensorsWriter(target), set[str]()
    if calibration is not None:
        with ChangedCheckpoint(HfCheckpoint(source)) as changed:
            for name, tensor in _calibrated(changed, calibration, rounded, by_scales=method == "awq"):
                writer.add(name, tensor)
                written.add(name)
    stored = {module.stored_name for module in rounded.values()}
    for name, tensor in _others(source, stored, written, method):
        writer.add(name, tensor)
    writer.finish()
    _copy_others(source, target)
    kept = tuple(sorted(module.stored_name for name, module in linear.items() if name not in rounded))
    config = json.loads((source / "config.json").read_bytes())
    config["quantization_config"] = _described(method, ("lm_head", *kept))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return QuantizedCopy(len(rounded), kept, sum(path.stat().st_size for path in target.glob("*.safetensors")))


def _can_round(method: str, module: LinearModule) -> bool:
    return method in ("int8", "fp8") or module.num_inputs % GROUP == 0


@dataclass(frozen=True, slots=True)
class LinearModule:
    """`stored_name` is what the file calls it."""

    stored_name: str
    num_inputs: int


def linear_modules(checkpoint: Checkpoint) -> Mapping[str, LinearModule]:
    """The linear layers of a network within its layers, by their names in the decoder."""
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
        self.found: dict[str, LinearModule] = {}

    def linear(self, tensors: LinearTensors) -> Linear:
        if tensors.split is not Split.WHOLE:
            self.found |= {
                part.name: LinearModule(stored_name, part.num_inputs)
                for stored_name, part in zip(tensors.names, tensors.parts, strict=True)
            }
        return super().linear(tensors)


def _calibrated(
    checkpoint: ChangedCheckpoint, text: str, modules: Mapping[str, LinearModule], *, by_scales: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that the text changes, by their names in the file.

    Layer by layer: each gets what those before make of the text with their weights rounded.
    """
    network = LayerwiseNetwork(checkpoint, text)
    for index in range(network.config.num_layers):
        inner = [name for name in modules if name.startswith(network.layer_prefix(index))]
        scaled = scale_layer(network, checkpoint, index, inner) if by_scales else set()
        matrices = {f"{name}.weight" for name in inner}
        for name in sorted(scaled - matrices):
            yield f"{checkpoint.module(name.rpartition('.')[0])}.{name.rpartition('.')[2]}", checkpoint.tensor(name)
        for batch in _batches(inner, modules):
            found = measured(network, index, MeanSquares if by_scales else MeanProducts, batch)
            for name in batch:
                weight, counts = checkpoint.tensor(f"{name}.weight"), found.get(name)
                if counts is None or by_scales:  # of an expert that the text never asked, nothing is known
                    integers = round_integers(weight, 4, GROUP, counts)
                else:
                    integers = round_by_products(weight, counts, 4, GROUP)
                checkpoint.changed[f"{name}.weight"] = integers.dequantized()
                for part, tensor in _packed_integers(integers, weight.shape).items():
                    yield f"{modules[name].stored_name}.{part}", tensor
        network.advance(index)
        checkpoint.changed.clear()


def _batches(names: Sequence[str], modules: Mapping[str, LinearModule]) -> Iterator[list[str]]:
    """As many as there is room for what is measured of them."""
    batch: list[str] = []
    taken = 0
    for name in names:
        num_bytes = 4 * modules[name].num_inputs ** 2
        if batch and taken + num_bytes > _PRODUCT_BYTES:
            yield batch
            batch, taken = [], 0
        batch.append(name)
        taken += num_bytes
    if batch:
        yield batch


def _others(
    source: Path, modules: Collection[str], written: Collection[str], method: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is not written yet, with the matrices of `modules` rounded to the nearest."""
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                module, _, suffix = name.rpartition(".")
                is_rounded = suffix == "weight" and module in modules
                if name in written or (is_rounded and f"{module}.weight_packed" in written):
                    continue
                if not is_rounded:
                    yield name, file.get_tensor(name)
                    continue
                for part, tensor in _packed(file.get_tensor(name), method).items():
                    yield f"{module}.{part}", tensor


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
    weights: dict[str, Any] = {"num_bits": 8 if method in ("int8", "fp8") else 4, "symmetric": True, "dynamic": False}
    weights["type"] = "float" if method == "fp8" else "int"
    weights |= {"strategy": "group", "group_size": GROUP} if weights["num_bits"] == 4 else {"strategy": "channel"}
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
        if (
            path.suffix == ".safetensors"
            or path.name in (SAFETENSORS_INDEX, "config.json")
            or path.name.startswith(".")
        ):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)


@dataclass(frozen=True, slots=True)
class QuantizationQuality:
    """Of a text's tokens, each but the first. `agreement`: the share at which the likeliest token is the same.

    `divergence`: the mean KL divergence in nats of the predictions before from those after, over the whole vocabulary;
    `divergence_p99`: what 99 of 100 positions do not exceed.
    """

    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    agreement: float
    divergence: float
    divergence_p99: float


def compare_on_text(source: Path, target: Path, text: str) -> QuantizationQuality:
    """Both models read at most the first 4096 tokens of a text, a layer of each at a time in memory.

    Raises as `LayerwiseNetwork` does.
    """
    before, after = _finished(source, text), _finished(target, text)
    divergences, agreements, losses = [], [], []
    for (logits, targets), (others, _) in zip(before.predictions(), after.predictions(), strict=True):
        own, other = logits.log_softmax(dim=1), others.log_softmax(dim=1)
        divergences.append((own.exp() * (own - other)).sum(dim=1))
        agreements.append(own.argmax(dim=1) == other.argmax(dim=1))
        losses.append(torch.stack([-each.gather(1, targets[:, None])[:, 0] for each in (own, other)]))
    divergence = torch.cat(divergences).double().clamp(min=0.0)
    loss = torch.cat(losses, dim=1).double().mean(dim=1)
    return QuantizationQuality(
        num_tokens=len(divergence),
        perplexity_before=math.exp(loss[0]),
        perplexity_after=math.exp(loss[1]),
        agreement=float(torch.cat(agreements).double().mean()),
        divergence=float(divergence.mean()),
        divergence_p99=float(divergence.quantile(0.99)),
    )


def _finished(place: Path, text: str) -> LayerwiseNetwork:
    with open_checkpoint(place) as checkpoint:
        scheme = find_scheme(None, {**checkpoint.config, **text_config(checkpoint)})
        return LayerwiseNetwork(checkpoint, text, scheme).finish()
