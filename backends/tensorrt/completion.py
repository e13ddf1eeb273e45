"""Completes a model's config from an engine, or the ONNX file that it is built from: Triton's rules of autofill.

Nothing here asks a GPU. An engine's first dimension is a batch if it is variable, or if the config says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from modelserver.backend import (
    BackendContext,
    ConfigError,
    FileSignature,
    FileTensor,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    UnsupportedError,
)

from .engine_info import EngineInfo, IoTensor
from .onnx_file import OnnxFile

log = logging.getLogger(__name__)

_Spec = ModelInput | ModelOutput


def complete_from_engine(context: BackendContext, info: EngineInfo, profiles: Sequence[int]) -> ModelConfig:
    """The config with what is missing filled in. Raises ConfigError with what the engine contradicts."""
    config = context.config
    batches = wants_batching(config, info)
    if batches is None:
        batches = info.can_batch and info.largest_batch(profiles) > 0
    signature = engine_signature(context, info, profiles, batches=batches)
    if not batches:
        config = _without_batching(config)
    completed = replace(context, config=config).complete_config(signature)
    completed = _with_batcher(_with_flags(completed, info))
    check_flags(context.model_name, completed, info)
    check_ranges(context.model_name, completed, info, profiles)
    return completed


def check_against_engine(context: BackendContext, info: EngineInfo, profiles: Sequence[int]) -> None:
    """Raise ConfigError if the engine contradicts a config that is complete."""
    check_flags(context.model_name, context.config, info)
    check_ranges(context.model_name, context.config, info, profiles)
    context.check_config(engine_signature(context, info, profiles, batches=context.config.max_batch_size > 0))


def complete_from_onnx(context: BackendContext, onnx: OnnxFile, largest_batch: int | None) -> ModelConfig:
    """As far as the ONNX file tells; shape tensors are not to be seen in it. Raises ConfigError, UnsupportedError."""
    tensors = {}
    for kind, listed in (("input", onnx.inputs), ("output", onnx.outputs)):
        for tensor in listed:
            if tensor.datatype is None:
                raise UnsupportedError(
                    f"model '{context.model_name}': {onnx.path}: {kind} '{tensor.name}' is of a type that no KServe "
                    "tensor can carry"
                )
            tensors[tensor.name] = FileTensor(tensor.name, tensor.datatype, tensor.shape)
    inputs = tuple(tensors[tensor.name] for tensor in onnx.inputs)
    outputs = tuple(tensors[tensor.name] for tensor in onnx.outputs)
    # A config that flags shape tensors is taken at its word, and compared with the built engine later.
    specs: tuple[_Spec, ...] = (*context.config.input, *context.config.output)
    if any(spec.is_shape_tensor for spec in specs):
        return context.config
    return context.complete_config(FileSignature(inputs, outputs, largest_batch))


def wants_batching(config: ModelConfig, info: EngineInfo) -> bool | None:
    """Whether the config has the engine's first dimension for a batch, by the rank of its dims; None if it is silent.

    Raises ConfigError when its tensors say both.
    """
    ranks = {tensor.name: tensor for tensor in info.tensors}
    hints = set()
    specs: tuple[_Spec, ...] = (*config.input, *config.output)
    for spec in specs:
        tensor = ranks.get(spec.name)
        if tensor is None:
            continue
        if isinstance(spec, ModelInput) and spec.allow_ragged_batch:
            hints.add(True)
            continue
        dims = spec.dims if spec.reshape is None else spec.reshape.shape
        if not dims and spec.reshape is None:
            continue
        num_sizes = sum(dims) if tensor.is_shape_tensor else len(dims)
        num_engine = (tensor.dims[0] if tensor.dims else 1) if tensor.is_shape_tensor else len(tensor.dims)
        if num_sizes in (num_engine, num_engine - 1):
            hints.add(num_sizes == num_engine - 1)
    if len(hints) > 1:
        raise ConfigError(
            f"unable to autofill for '{config.name}', model tensor configurations are contradicting each other in "
            "terms of whether batching is supported: dims leave the batch dimension out of every tensor, or of none"
        )
    if hints:
        return hints.pop()
    return True if config.max_batch_size else None


def engine_signature(
    context: BackendContext, info: EngineInfo, profiles: Sequence[int], *, batches: bool
) -> FileSignature:
    """The engine as a file's signature: with batching every tensor has a free first dimension.

    Raises ConfigError when the config wants a batch that the engine has no dimension for, UnsupportedError for
    formats that are not served.
    """
    for tensor in info.tensors:
        if not tensor.is_linear:
            raise UnsupportedError(
                f"model '{context.model_name}': '{tensor.name}' has a vectorised format, which this server does not "
                "lay out; build the engine with linear inputs and outputs (the default of every builder)"
            )
    largest = info.largest_batch(profiles)
    if batches and not largest:
        raise ConfigError(
            f"model '{context.model_name}': max_batch_size: expected 0, because an input of the engine has no "
            "dimension that could be a batch"
        )
    tensors = {tensor.name: _file_tensor(tensor, batches=batches) for tensor in info.tensors}
    return FileSignature(
        tuple(tensors[tensor.name] for tensor in info.inputs),
        tuple(tensors[tensor.name] for tensor in info.outputs),
        largest if batches else None,
    )


def _file_tensor(tensor: IoTensor, *, batches: bool) -> FileTensor:
    if not batches:
        return FileTensor(tensor.name, tensor.datatype, tensor.dims)
    if tensor.is_shape_tensor:  # its first value is the batch, which the server fills in
        num_values = tensor.dims[0] if tensor.dims else 1
        return FileTensor(tensor.name, tensor.datatype, (-1, num_values - 1 if num_values > 0 else -1))
    return FileTensor(tensor.name, tensor.datatype, (-1, *tensor.dims[1:]))


def _without_batching(config: ModelConfig) -> ModelConfig:
    """A config whose dims are whole has no batch, whatever else it says: as with Triton, that is a warning."""
    if config.max_batch_size:
        log.warning(
            "model '%s': max_batch_size %d has no effect: the dims of its tensors list the batch dimension",
            config.name,
            config.max_batch_size,
        )
    return replace(config, max_batch_size=0)


def _with_batcher(config: ModelConfig) -> ModelConfig:
    """Dynamic batching where there is something to batch, as Triton adds it to engines also if the size was written."""
    has_scheduler = config.dynamic_batching is not None or config.sequence_batching is not None
    if config.max_batch_size < 2 or has_scheduler:
        return config
    return replace(config, dynamic_batching=ModelDynamicBatching())


def _with_flags(config: ModelConfig, info: EngineInfo) -> ModelConfig:
    shapes = {tensor.name for tensor in info.tensors if tensor.is_shape_tensor}
    return replace(
        config,
        input=tuple(
            replace(spec, is_shape_tensor=spec.is_shape_tensor or spec.name in shapes) for spec in config.input
        ),
        output=tuple(
            replace(spec, is_shape_tensor=spec.is_shape_tensor or spec.name in shapes) for spec in config.output
        ),
    )


def check_flags(model_name: str, config: ModelConfig, info: EngineInfo) -> None:
    """Raise ConfigError where the config is wrong about what is a shape tensor."""
    tensors = {tensor.name: tensor for tensor in info.tensors}
    specs: tuple[_Spec, ...] = (*config.input, *config.output)
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is None:
            continue
        if spec.is_shape_tensor is not tensor.is_shape_tensor:
            said, truth = ("is_shape_tensor", "none") if spec.is_shape_tensor else ("no shape tensor", "one")
            raise ConfigError(
                f"model '{model_name}': '{spec.name}' is incorrectly specified as a shape tensor: the config says "
                f"{said}, in the engine it is {truth}"
            )
        if spec.is_non_linear_format_io and tensor.is_linear:
            raise ConfigError(
                f"model '{model_name}': '{spec.name}' uses a linear IO format, but 'is_non_linear_format_io' is "
                "incorrectly set to true in the model configuration."
            )


def check_ranges(model_name: str, config: ModelConfig, info: EngineInfo, profiles: Sequence[int]) -> None:
    """Raise ConfigError where the config promises a size that none of the profiles takes."""
    tensors = {tensor.name: tensor for tensor in info.inputs if not tensor.is_shape_tensor}
    first = 1 if config.max_batch_size else 0
    for spec in config.input:
        tensor = tensors.get(spec.name)
        dims = spec.dims if spec.reshape is None else spec.reshape.shape
        if tensor is None or spec.allow_ragged_batch or len(dims) + first != len(tensor.dims):
            continue  # a wrong rank is reported elsewhere
        for place, size in enumerate(dims, first):
            ranges = [info.profiles[index][spec.name] for index in profiles]
            if size == -1 or any(bounds.min[place] <= size <= bounds.max[place] for bounds in ranges):
                continue
            low, high = min(it.min[place] for it in ranges), max(it.max[place] for it in ranges)
            raise ConfigError(
                f"model configuration specified invalid shape for input '{spec.name}' for model {model_name}. Error "
                f"details: model expected the shape of dimension {place} to be between {low} and {high} but received "
                f"{size}"
            )
