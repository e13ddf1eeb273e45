"""Requests that every instance executes before its version is ready (`model_warmup`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from modelserver.backend import Array
from modelserver.config.schema import ModelConfig, ModelWarmup, WarmupInput
from modelserver.config.signature import ModelSignature
from modelserver.core.datatype import Datatype
from modelserver.core.request import InferRequest
from modelserver.core.tensor import Tensor, tensor_from_bytes
from modelserver.errors import InvalidArgumentError, ServerError
from modelserver.execution.executor import Executor
from modelserver.execution.probe import execute_probe

logger = logging.getLogger(__name__)


def warm_up(
    executor: Executor, config: ModelConfig, signature: ModelSignature, model_directory: Path, *, instance_name: str
) -> None:
    """Execute every sample of the config on one instance. Blocking.

    Raises ServerError, naming the sample, when one does not fit the model, cannot be read, or fails.
    """
    for sample in config.model_warmup:
        started_s = time.monotonic()
        try:
            inputs = _sample_inputs(sample, model_directory, is_batched=config.max_batch_size > 0)
            for _ in range(max(1, sample.count)):
                _execute(executor, signature, inputs)
        except ServerError as error:
            message = f"model '{config.name}': warmup sample '{sample.name}' failed: {error.message}"
            raise ServerError(message, code=error.code) from error
        duration_s = time.monotonic() - started_s
        logger.info("instance '%s': warmup sample '%s' took %.3f s", instance_name, sample.name, duration_s)


def _execute(executor: Executor, signature: ModelSignature, inputs: Sequence[Tensor]) -> None:
    execute_probe(executor, probe_request(signature, inputs))


def probe_request(signature: ModelSignature, inputs: Sequence[Tensor]) -> InferRequest:
    """A checked request that no client sent. Raises InvalidArgumentError when the model cannot take it."""
    request = InferRequest(signature.model_name, None, {tensor.name: tensor for tensor in inputs})
    if signature.has_sequences:
        # A whole sequence of its own.
        request.sequence_id, request.sequence_start, request.sequence_end = 1, True, True
    signature.check(request)
    return request


def probe_inputs(config: ModelConfig, signature: ModelSignature, model_directory: Path) -> list[list[Tensor]]:
    """Inputs to try the model with: its warmup samples, or else the smallest request that it takes, of zeros.

    Raises InvalidArgumentError for a sample that cannot be read.
    """
    is_batched = config.max_batch_size > 0
    if config.model_warmup:
        return [_sample_inputs(sample, model_directory, is_batched=is_batched) for sample in config.model_warmup]
    inputs = []
    for spec in signature.inputs.values():
        if spec.is_optional:
            continue
        item = _zero_item(spec.datatype, tuple(1 if dim == -1 else dim for dim in spec.dims))
        inputs.append(Tensor(spec.name, spec.datatype, item[np.newaxis] if is_batched else item))
    return [inputs]


def _sample_inputs(sample: ModelWarmup, model_directory: Path, *, is_batched: bool) -> list[Tensor]:
    rows = max(1, sample.batch_size)
    return [_tensor(name, spec, rows if is_batched else None, model_directory) for name, spec in sample.inputs.items()]


def _tensor(name: str, spec: WarmupInput, rows: int | None, model_directory: Path) -> Tensor:
    """One input of a sample: the same item in each of `rows` rows, or the item alone without batching."""
    if spec.data_type is None:
        raise InvalidArgumentError(f"input '{name}' has no data_type")
    if any(dim < 0 for dim in spec.dims):
        raise InvalidArgumentError(f"input '{name}' has dims {list(spec.dims)}; a sample needs fixed sizes")
    if spec.input_data_file is not None:
        return _tensor_from_file(name, spec.data_type, spec, rows, model_directory)
    make = _random_item if spec.random_data else _zero_item
    item = make(spec.data_type, tuple(spec.dims))
    return Tensor(name, spec.data_type, item if rows is None else np.repeat(item[np.newaxis], rows, axis=0))


def _zero_item(datatype: Datatype, dims: tuple[int, ...]) -> Array:
    return np.full(dims, b"", dtype=object) if datatype is Datatype.BYTES else np.zeros(dims, datatype.numpy)


def _random_item(datatype: Datatype, dims: tuple[int, ...]) -> Array:
    """Reproducible random values: floats in [0, 1), integers over the whole range, short BYTES."""
    generator = np.random.default_rng(0)
    if datatype is Datatype.BYTES:
        item = np.empty(dims, dtype=object)
        item.reshape(-1)[:] = [generator.bytes(8).hex().encode() for _ in range(item.size)]
        return item
    if datatype is Datatype.BF16:
        # A bfloat16 is the upper half of a float32.
        return (generator.random(dims, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if datatype.numpy.kind == "f":
        return generator.random(dims).astype(datatype.numpy)
    if datatype is Datatype.BOOL:
        return generator.integers(0, 2, dims).astype(bool)
    limits = np.iinfo(datatype.numpy)
    return generator.integers(limits.min, limits.max, dims, datatype.numpy, endpoint=True)


def _tensor_from_file(
    name: str, datatype: Datatype, spec: WarmupInput, rows: int | None, model_directory: Path
) -> Tensor:
    """The file holds raw bytes of one item, which is repeated, or of all rows."""
    directory = (model_directory / "warmup").resolve()
    path = (directory / (spec.input_data_file or "")).resolve()
    if not path.is_relative_to(directory):
        raise InvalidArgumentError(f"input '{name}': input_data_file '{spec.input_data_file}' leaves {directory}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"input '{name}': cannot read {path}: {error.strerror}") from None
    dims = tuple(spec.dims)
    if rows is None:
        return tensor_from_bytes(name, datatype, dims, raw)
    try:
        item = tensor_from_bytes(name, datatype, dims, raw)
    except InvalidArgumentError:
        return tensor_from_bytes(name, datatype, (rows, *dims), raw)
    return Tensor(name, datatype, np.repeat(item.data[np.newaxis], rows, axis=0))
