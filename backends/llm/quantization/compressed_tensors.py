"""compressed-tensors, which llm-compressor writes: several forms in one checkpoint, by groups of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..models.linear_tensors import FLOATS, LinearTensors, Part
from .bits import unpack_words
from .config_fields import checkpoints_only, fits, integer, names, one_of
from .quantized_weight import QuantizedWeight
from .small_floats import MX_GROUP, NVFP4_GROUP, by_output, read_float8, read_mxfp4, read_mxfp8, read_nvfp4
from .stored import StoredScheme, group_length, sorted_by_group

_METHOD = "compressed-tensors"
# What layers are called by the classes that targets name.
_LINEAR_CLASSES = frozenset({"Linear", "LinearBase"})
_FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How the weights of a group's modules are stored. `group_size` is -1 where all inputs share a scale."""

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    is_symmetric: bool
    group_size: int
    block: tuple[int, int] | None
    activations: torch.dtype | None


class CompressedTensors(StoredScheme):
    """Scales for activations are not read: where rows are rounded, each has a scale of its own."""

    def __init__(self, forms: tuple[_Form, ...], ignored: tuple[str, ...]) -> None:
        self._forms = forms
        self._ignored = ignored

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Self:
        config = checkpoints_only(_METHOD, config)
        one_of(config, "format", _FORMATS, default="dense", method=_METHOD)
        sparsity = config.get("sparsity_config") or {}
        one_of(sparsity, "format", ("dense",), default="dense", method=f"{_METHOD}' sparsity_config")
        if config.get("transform_config"):
            raise UnsupportedError(f"quantization_config.transform_config of {_METHOD} is not supported")
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise InvalidArgumentError("quantization_config.config_groups must be an object of groups")
        forms = [_form(name, group) for name, group in groups.items()]
        return cls(tuple(form for form in forms if form is not None), names(config, "ignore"))

    def is_quantized(self, tensors: LinearTensors, part: Part) -> bool:
        has_tensors = tensors.has(part, "weight_packed") or tensors.has(part, "weight_scale")
        name = tensors.checkpoint.module(part.name) or part.name
        return has_tensors and not any(_names(target, name) for target in self._ignored)

    def read(self, tensors: LinearTensors, part: Part) -> QuantizedWeight:
        form = self._form_of(tensors.checkpoint.module(part.name) or part.name)
        read = _read_integers
        if form.is_float:
            read = _read_floats
        elif tensors.has(part, "weight_packed"):
            read = _read_packed
        return replace(read(tensors, part, form), activations=form.activations)

    def _form_of(self, name: str) -> _Form:
        """That of the group which names the module itself; else by a pattern; else by its class."""
        for matches in (_is_name, _is_pattern, _is_class):
            for form in self._forms:
                if any(matches(target, name) for target in form.targets):
                    return form
        raise InvalidArgumentError(f"{name} has scales, but no group of quantization_config.config_groups names it")


def _form(name: str, group: Any) -> _Form | None:
    """None for a group that quantizes activations alone. UnsupportedError for weights in a form that is not read."""
    where = f"{_METHOD}' {name}"
    if not isinstance(group, Mapping):
        raise InvalidArgumentError(f"quantization_config.config_groups.{name} must be an object")
    one_of(group, "format", _FORMATS, default="dense", method=where)
    weights = group.get("weights")
    if weights is None:
        return None
    is_float = one_of(weights, "type", ("int", "float"), default="int", method=where) == "float"
    bits = integer(weights, "num_bits", (4, 8) if is_float else tuple(range(2, 9)), method=where, default=8)
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = one_of(weights, "strategy", strategies, default=_default_strategy(weights), method=where)
    is_grouped = strategy in ("group", "tensor_group")
    group_size = integer(weights, "group_size", method=where) if is_grouped else -1
    if is_float and is_grouped and (bits, group_size) not in ((4, NVFP4_GROUP), (4, MX_GROUP), (8, MX_GROUP)):
        raise UnsupportedError(f"floats of {bits} bits in groups of {group_size} of {where} are not supported")
    if is_float and bits == 4 and not is_grouped:
        raise UnsupportedError(f"strategy {strategy!r} of {where} is not supported for floats of 4 bits")
    return _Form(
        targets=names(group, "targets"),
        bits=bits,
        is_float=is_float,
        is_symmetric=bool(weights.get("symmetric", True)),
        group_size=group_size,
        block=_block(weights, where) if strategy == "block" else None,
        activations=_activations(group.get("input_activations")),
    )


def _activations(described: Any) -> torch.dtype | None:
    """The datatype that the rows of a group's modules may be rounded to."""
    if not isinstance(described, Mapping) or described.get("num_bits") != 8 or not described.get("symmetric", True):
        return None
    return torch.float8_e4m3fn if described.get("type") == "float" else torch.int8


def _default_strategy(weights: Mapping[str, Any]) -> str:
    size = weights.get("group_size")
    if size is None:
        return "tensor"
    return "channel" if size == -1 else "group"


def _block(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    value = weights.get("block_structure")
    parts = value.lower().split("x") if isinstance(value, str) else value
    try:
        outputs, inputs = (int(part) for part in parts)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"block_structure of {where} must be two lengths, got {value!r:.80}") from None
    if outputs < 1 or inputs < 1:
        raise InvalidArgumentError(f"block_structure of {where} must be two lengths, got {value!r:.80}")
    return outputs, inputs


def _read_floats(tensors: LinearTensors, part: Part, form: _Form) -> QuantizedWeight:
    if form.bits == 8:
        return (
            read_mxfp8(tensors, part)
            if form.group_size > 0
            else read_float8(tensors, part, "weight_scale", block=form.block)
        )
    if form.group_size == MX_GROUP:
        return read_mxfp4(tensors, part)
    return read_nvfp4(tensors, part, "weight_packed", "weight_global_scale", is_divisor=True)


def _read_packed(tensors: LinearTensors, part: Part, form: _Form) -> QuantizedWeight:
    """A stream of bits along the inputs; codes are above the middle of their range by the integers they stand for."""
    bits, outputs, inputs = form.bits, part.num_outputs, part.num_inputs
    _check_shape(tensors, part)
    packed = tensors.stored(part, "weight_packed", (outputs, _words(inputs, bits)), (torch.int32,))
    scales, group = _scales(tensors, part, form)
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    if not form.is_symmetric:
        shape = (_words(outputs, bits), scales.shape[1])
        zeros = unpack_words(tensors.stored(part, "weight_zero_point", shape, (torch.int32,)).t(), bits, outputs)
        zeros = zeros.t().contiguous()
    codes = unpack_words(packed, bits, inputs)
    return _ordered(tensors, part, QuantizedWeight(codes=codes, scales=scales, zeros=zeros, group=group, bits=bits))


def _read_integers(tensors: LinearTensors, part: Part, form: _Form) -> QuantizedWeight:
    """Each in a byte."""
    codes = tensors.stored(part, "weight", (part.num_outputs, part.num_inputs), (torch.int8,))
    if form.block is not None:
        raise UnsupportedError(f"{part.name} has integers with scales for blocks, which are not supported")
    scales, group = _scales(tensors, part, form)
    zeros = None
    if not form.is_symmetric:
        stored = tensors.stored(part, "weight_zero_point", None, (torch.int8, torch.int32))
        zeros = stored.to(torch.int16) if form.group_size > 0 else by_output(part, "weight_zero_point", stored)
        zeros = zeros.to(torch.int16)
    return _ordered(tensors, part, QuantizedWeight(codes=codes, scales=scales, zeros=zeros, group=group, bits=8))


def _scales(tensors: LinearTensors, part: Part, form: _Form) -> tuple[torch.Tensor, int]:
    """[outputs, groups], and the length of a group."""
    if form.block is not None:
        raise UnsupportedError(f"{part.name} has integers with scales for blocks, which are not supported")
    group = group_length(part, form.group_size)
    if form.group_size > 0:
        return tensors.stored(part, "weight_scale", (part.num_outputs, part.num_inputs // group), FLOATS), group
    return by_output(part, "weight_scale", tensors.stored(part, "weight_scale", None, FLOATS)), group


def _ordered(tensors: LinearTensors, part: Part, weight: QuantizedWeight) -> QuantizedWeight:
    if not tensors.has(part, "weight_g_idx"):
        return weight
    group_of = tensors.stored(part, "weight_g_idx", (part.num_inputs,), (torch.int32, torch.int64))
    if bool((group_of == -1).all()):
        return weight
    return sorted_by_group(weight, group_of, f"{part.name}.weight_g_idx")


def _check_shape(tensors: LinearTensors, part: Part) -> None:
    if not tensors.has(part, "weight_shape"):
        return
    stored = tensors.stored(part, "weight_shape", (2,), (torch.int32, torch.int64)).tolist()
    if stored != [part.num_outputs, part.num_inputs]:
        raise InvalidArgumentError(
            f"{part.name}.weight_shape says {stored}, expected {[part.num_outputs, part.num_inputs]}"
        )


def _names(target: str, name: str) -> bool:
    return _is_name(target, name) or _is_pattern(target, name) or _is_class(target, name)


def _is_name(target: str, name: str) -> bool:
    return target == name


def _is_pattern(target: str, name: str) -> bool:
    return target.startswith("re:") and fits(target.removeprefix("re:"), name)


def _is_class(target: str, _name: str) -> bool:
    return target in _LINEAR_CLASSES


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)
