"""Shapes of tensors between an ensemble and the models of its steps.

An ensemble may have a `reshape` of its own, and models with and without a batch dimension may be its steps: as in
Triton a tensor that has the dimensions of a batching model is a batch of one there, and a batch of one loses that
dimension where a model has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from modelserver.config.schema import ModelConfig
from modelserver.config.signature import Array, ModelSignature, Reshape, Shape, TensorSpec, reshaper
from modelserver.core.tensor import Tensor


def is_mixed(config: ModelConfig, signatures: Sequence[ModelSignature]) -> bool:
    """Whether some have a batch dimension and others have none."""
    return len({config.max_batch_size > 0, *(signature.max_batch_size > 0 for signature in signatures)}) > 1


def step_adapters(signature: ModelSignature, names: Sequence[str]) -> dict[str, Reshape]:
    """For the inputs of a step of a mixed ensemble, by the model's names of them."""
    specs = (signature.inputs[name] for name in names)
    return {
        spec.name: _leading(spec.dims, is_batched=signature.max_batch_size > 0) for spec in specs if not spec.is_shape
    }


def input_adapters(config: ModelConfig) -> dict[str, Reshape]:
    """For the inputs of the ensemble that have a `reshape`."""
    specs = ModelSignature(config).inputs.values()
    is_batched = config.max_batch_size > 0
    return {
        spec.name: reshaper(spec.dims, spec.reshape, is_batched=is_batched)
        for spec in specs
        if spec.reshape is not None
    }


def output_adapters(config: ModelConfig, *, is_mixed: bool) -> dict[str, Reshape]:
    """For the outputs of the ensemble that may change on their way out."""
    is_batched = config.max_batch_size > 0
    found: dict[str, Reshape] = {}
    for spec in ModelSignature(config).outputs.values():
        adapters = [_leading(_inner(spec), is_batched=is_batched)] if is_mixed else []
        if spec.reshape is not None:
            adapters.append(reshaper(spec.reshape, spec.dims, is_batched=is_batched))
        if adapters:
            found[spec.name] = _in_turn(adapters)
    return found


def adapt(tensors: dict[str, Tensor], adapters: Mapping[str, Reshape]) -> None:
    """Let the tensors have the shapes that their reader expects, as far as that is possible."""
    for name, adapter in adapters.items():
        tensor = tensors.get(name)
        if tensor is not None:
            tensors[name] = Tensor(tensor.name, tensor.datatype, adapter(tensor.data))


def _inner(spec: TensorSpec) -> Shape:
    return spec.dims if spec.reshape is None else spec.reshape


def _leading(dims: Shape, *, is_batched: bool) -> Reshape:
    """Adds or removes a batch dimension of one. A shape that fits neither way stays, and its reader reports it."""

    def change(array: Array) -> Array:
        shape = array.shape
        if _matches(shape, dims) is is_batched:
            if is_batched:
                return array[np.newaxis]
            if shape[:1] == (1,) and _matches(shape[1:], dims):
                return array.reshape(shape[1:])
        return array

    return change


def _matches(shape: Shape, dims: Shape) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


def _in_turn(adapters: Sequence[Reshape]) -> Reshape:
    def change(array: Array) -> Array:
        for adapter in adapters:
            array = adapter(array)
        return array

    return change
