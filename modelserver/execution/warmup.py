"""Requests that every instance executes before its version is ready: `model_warmup`, parameter `auto_warmup`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from modelserver.backend import Array
from modelserver.config.auto_warmup import auto_warmup, warmup_rows
from modelserver.config.hidden_tensors import hidden_inputs
from modelserver.config.schema import ModelConfig, ModelWarmup, WarmupInput
from modelserver.config.signature import ModelSignature
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.sender import ResponseSender, ResponseTarget
from modelserver.core.tensor import Tensor, tensor_from_bytes
from modelserver.errors import InternalError, InvalidArgumentError, ServerError
from modelserver.execution.executor import Executor

# A model that takes longer than this with the responses of one probe has forgotten it.
_PATIENCE_S = 300.0


def execute_probe(executor: Executor, request: InFlightRequest) -> int:
    """Execute a request to its end; the duration in ns. Blocking. Raises the ServerError of a response."""
    began_ns = executor.now_ns()
    if executor.answers_later:
        _execute_to_end(executor, request)
    else:
        response: InferResponse = executor.run([request]).entries[0]
        if response.error is not None:
            raise response.error
    return executor.now_ns() - began_ns


def _execute_to_end(executor: Executor, request: InFlightRequest) -> None:
    target = _ProbeTarget(executor, request)
    request.own_sender = ResponseSender(target)
    entry = executor.run([request]).entries[0]
    # Kept until the answer has come: a sender that dies without one drops the request.
    sender, request.own_sender = request.own_sender, None
    if entry is not None:
        target.send(entry, is_final=True, wait=False)
    del sender
    target.wait()


class _ProbeTarget(ResponseTarget):
    """Takes the responses of a probe and keeps the first error."""

    is_cancelled = False
    has_room = True

    def __init__(self, executor: Executor, request: InFlightRequest) -> None:
        self._check = executor.assembler.check_sent
        self._request = request
        self._ended = SimpleQueue[ServerError | None]()  # `put` may be called by the garbage collector
        self._error: ServerError | None = None

    def send(self, response: InferResponse | ServerError | None, *, is_final: bool, wait: bool) -> None:  # noqa: ARG002  # there is room
        if isinstance(response, ServerError):
            self._error = self._error or response
        elif response is not None:
            self._error = self._error or response.error
            self._check(self._request, response)
        if is_final:
            self._ended.put(self._error)

    def watch(self, *, on_cancel: Callable[[], None] | None, on_room: Callable[[], None] | None) -> None:
        """A probe is never cancelled, and always has room."""

    def note(self, event: str, time_ns: int) -> None:
        """A probe has no trace."""

    def drop(self) -> None:
        self._ended.put(self._error or InternalError("a response sender was dropped without finishing its request"))

    def wait(self) -> None:
        """Wait for the final response; raises the first error."""
        try:
            error = self._ended.get(timeout=_PATIENCE_S)
        except Empty:
            raise InternalError(f"a request was not finished within {_PATIENCE_S:.0f} s") from None
        if error is not None:
            raise error


logger = logging.getLogger(__name__)

_AUTO_HINT = " auto_warmup sends zeros, and no optional inputs: if these do not fit, write samples with model_warmup"


def warm_up(
    executor: Executor, config: ModelConfig, signature: ModelSignature, model_directory: Path, *, instance_name: str
) -> None:
    """Execute every sample of the config on one instance. Blocking.

    Raises ServerError, naming the sample, when one does not fit the model, cannot be read, or fails.
    """
    needs_inputs = any(not spec.is_optional for spec in signature.inputs.values())
    for sample in config.model_warmup:
        if needs_inputs and not sample.inputs:
            continue
        read = partial(_sample_inputs, sample, model_directory, config)
        _run(executor, signature, sample.name, read, count=max(1, sample.count), instance_name=instance_name)
    for name, make in _automatic_samples(config, signature):
        _run(executor, signature, name, make, count=1, instance_name=instance_name, hint=_AUTO_HINT)


def _run(
    executor: Executor,
    signature: ModelSignature,
    name: str,
    make_inputs: Callable[[], list[Tensor]],
    *,
    count: int,
    instance_name: str,
    hint: str = "",
) -> None:
    started_s = time.monotonic()
    try:
        inputs = make_inputs()
        for iteration in range(1, count + 1):
            logger.debug("instance '%s' is running warmup sample '%s' for iteration %d", instance_name, name, iteration)
            for request in _requests(signature, inputs):
                execute_probe(executor, request)
    except ServerError as error:
        message = f"model '{signature.model_name}': failed to run warmup sample '{name}': {error.message};{hint}"
        raise ServerError(message, code=error.code) from error
    duration_s = time.monotonic() - started_s
    logger.info("instance '%s': warmup sample '%s' took %.3f s", instance_name, name, duration_s)


def _requests(signature: ModelSignature, inputs: Sequence[Tensor]) -> list[InFlightRequest]:
    """One request with all rows; for a model with sequences, one with each row, which is a whole sequence."""
    if not signature.has_sequences or not signature.max_batch_size or not inputs:
        return [probe_request(signature, inputs)]
    return [
        probe_request(
            signature, [Tensor(tensor.name, tensor.datatype, tensor.data[row : row + 1]) for tensor in inputs]
        )
        for row in range(len(inputs[0].data))
    ]


def probe_request(signature: ModelSignature, inputs: Sequence[Tensor]) -> InFlightRequest:
    """A checked request that no client sent. Raises InvalidArgumentError when the model cannot take it."""
    request = InFlightRequest(
        model_name=signature.model_name, version=None, inputs={tensor.name: tensor for tensor in inputs}
    )
    request.is_decoupled = signature.is_decoupled
    if signature.has_sequences:
        # A whole sequence of its own.
        request.sequence_id, request.sequence_start, request.sequence_end = 1, True, True
    signature.check(request)
    return request


def probe_inputs(config: ModelConfig, signature: ModelSignature, model_directory: Path) -> list[list[Tensor]]:
    """Inputs to try the model with: its warmup samples, or else the smallest request of zeros that it accepts.

    Raises InvalidArgumentError for a sample that cannot be read.
    """
    is_batched = config.max_batch_size > 0
    samples = [sample for sample in config.model_warmup if sample.inputs]
    if samples:
        return [_sample_inputs(sample, model_directory, config) for sample in samples]
    return [_zero_inputs(signature, {}, 1 if is_batched else None)]


def _automatic_samples(
    config: ModelConfig, signature: ModelSignature
) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """What `auto_warmup` asks for: zeros, in each batch size that matters, with small and with large dimensions."""
    asked = auto_warmup(config)
    if asked is None:
        return
    ranges = {spec.name: asked.ranges(spec) for spec in config.input if not spec.optional}
    ends = ("min", "max") if any(low != high for pairs in ranges.values() for low, high in pairs) else ("min",)
    for rows in warmup_rows(config):
        for end, label in enumerate(ends):
            sizes = {name: [pair[end] for pair in pairs] for name, pairs in ranges.items()}
            batch = "" if rows is None else f" rows={rows}"
            dims = f" dims={label}" if len(ends) > 1 else ""
            yield f"auto{batch}{dims}", partial(_zero_inputs, signature, sizes, rows)


def _zero_inputs(signature: ModelSignature, sizes: Mapping[str, Sequence[int]], rows: int | None) -> list[Tensor]:
    """Every input that is not optional; `sizes` are those of variable dimensions, 1 if there are none."""
    inputs = []
    for spec in signature.inputs.values():
        if spec.is_optional:
            continue
        left = iter(sizes.get(spec.name, ()))
        item = _least_item(spec.datatype, tuple([next(left, 1) if dim == -1 else dim for dim in spec.dims]))
        data = item if rows is None or spec.is_shape else np.repeat(item[np.newaxis], rows, axis=0)
        inputs.append(Tensor(spec.name, spec.datatype, data))
    return inputs


def _sample_inputs(sample: ModelWarmup, model_directory: Path, config: ModelConfig) -> list[Tensor]:
    """The inputs that a client would send. Controls and states, which a sample may name too, come from the server."""
    rows = max(1, sample.batch_size) if config.max_batch_size > 0 else None
    shapes = {spec.name for spec in config.input if spec.is_shape_tensor}  # these have no batch dimension
    hidden = {spec.name for spec in hidden_inputs(config)}
    return [
        _tensor(name, spec, None if name in shapes else rows, model_directory)
        for name, spec in sample.inputs.items()
        if name not in hidden
    ]


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


def _least_item(datatype: Datatype, dims: tuple[int, ...]) -> Array:
    """Zeros that any model accepts. Texts are "0", because language models refuse an empty prompt."""
    return np.full(dims, b"0", dtype=object) if datatype is Datatype.BYTES else _zero_item(datatype, dims)


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
