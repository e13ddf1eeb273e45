"""The inputs that sequences add to a request before the model sees it: control tensors, and the sequence's state.

The model returns states as outputs, which are kept for the sequence's next request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from modelserver.backend import Array
from modelserver.config.hidden_tensors import control_datatype, control_tensors
from modelserver.config.schema import ModelConfig, SequenceControl, SequenceControlKind, SequenceState
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor, tensor_from_bytes
from modelserver.errors import ConfigError, InternalError, InvalidArgumentError

_DIRECTORY = "initial_state"

# The tensor of one control for one request.
Control = Callable[[InFlightRequest], Tensor]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state: the model's input and output, and its initial value, with the batch dimension if there is one."""

    input_name: str
    output_name: str
    datatype: Datatype
    dims: tuple[int, ...]
    initial: Array


class SequenceInputs:
    """Controls and states of one model. All workers share it; the requests hold the states of their sequences."""

    def __init__(self, config: ModelConfig, model_directory: Path) -> None:
        """Raises ConfigError for an initial state that cannot be read."""
        batching = config.sequence_batching
        assert batching is not None, "only models with sequence_batching have controls and states"
        self._model_name = config.name
        self._is_batched = config.max_batch_size > 0
        lead = (1,) if self._is_batched else ()
        self._controls = [_control(tensor.name, control, (*lead, 1)) for tensor, control in control_tensors(config)]
        self._states = [_state(config.name, state, lead, model_directory) for state in batching.state]
        self._shown = {output.name for output in config.output}

    def inject(self, requests: Sequence[InFlightRequest]) -> None:
        """Add controls and states to the inputs of each request; padding gets zero states of the same shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for request in requests:
            for control in self._controls:
                tensor = control(request)
                request.inputs[tensor.name] = tensor
            if self._states and not request.is_padding:
                self._add_states(request, shapes)
        for request in requests:
            if request.is_padding:
                for spec in self._states:
                    zeros = _zeros(shapes[spec.input_name], spec.datatype)
                    request.inputs[spec.input_name] = Tensor(spec.input_name, spec.datatype, zeros)

    def _add_states(self, request: InFlightRequest, shapes: dict[str, tuple[int, ...]]) -> None:
        state = request.state
        if state is not None and request.sequence_start:
            state.arrays = {}
        kept = state.arrays if state is not None else {}
        for spec in self._states:
            array = kept.get(spec.input_name, spec.initial)
            shapes[spec.input_name] = array.shape
            request.inputs[spec.input_name] = Tensor(spec.input_name, spec.datatype, array)

    def keep_rows(self, requests: Sequence[InFlightRequest], outputs: Mapping[str, Array]) -> None:
        """Keep each request's row of the states among the outputs of a whole batch.

        Raises InternalError if one is missing or does not match the config.
        """
        for spec in self._states:
            array = outputs.get(spec.output_name)
            if not isinstance(array, np.ndarray):
                raise self._error(spec, f"is missing, the model gave {sorted(outputs)}")
            self._check(spec, array, len(requests) if self._is_batched else None)
            for row, request in enumerate(requests):
                if request.state is not None:
                    # A copy, so that one sequence does not keep the states of all others alive.
                    mine = array if len(requests) == 1 else array[row : row + 1].copy()
                    request.state.arrays[spec.input_name] = mine

    def keep_outputs(self, request: InFlightRequest, response: InferResponse) -> None:
        """Keep the states among a response's outputs, and remove those that are hidden from clients.

        A state that the response does not contain is kept. Raises InternalError for one that does not match the config.
        """
        if not self._states:
            return
        tensors = {tensor.name: tensor for tensor in response.outputs}
        for spec in self._states:
            tensor = tensors.get(spec.output_name)
            if tensor is None:
                continue
            self._check(spec, tensor.data, 1 if self._is_batched else None)
            if request.state is not None:
                request.state.arrays[spec.input_name] = tensor.data
            if spec.output_name not in self._shown:
                response.outputs.remove(tensor)

    def _check(self, spec: StateSpec, array: Array, rows: int | None) -> None:
        if array.dtype != spec.datatype.numpy:
            raise self._error(spec, f"has dtype {array.dtype}, expected {spec.datatype.numpy}")
        if rows is not None and array.shape[:1] != (rows,):
            raise self._error(spec, f"has shape {list(array.shape)}, expected {rows} rows in dimension 0")
        shape = array.shape if rows is None else array.shape[1:]
        fits = len(shape) == len(spec.dims) and all(
            dim in (-1, size) for size, dim in zip(shape, spec.dims, strict=True)
        )
        if not fits:
            raise self._error(spec, f"has items of shape {list(shape)}, expected {list(spec.dims)}")

    def _error(self, spec: StateSpec, problem: str) -> InternalError:
        return InternalError(f"model '{self._model_name}': state output '{spec.output_name}' {problem}")


def _control(name: str, control: SequenceControl, shape: tuple[int, ...]) -> Control:
    datatype = control_datatype(control)
    assert datatype is not None, "a validated control has a datatype"
    if control.kind is SequenceControlKind.CONTROL_SEQUENCE_CORRID:
        return lambda request: Tensor(name, datatype, _correlation_id(request.sequence_id, datatype, shape))
    values = control.int32_false_true or control.fp32_false_true or control.bool_false_true
    no, yes = (Tensor(name, datatype, np.full(shape, value, datatype.numpy)) for value in values)
    for tensor in (no, yes):
        tensor.data.flags.writeable = False  # all requests share them
    match control.kind:
        case SequenceControlKind.CONTROL_SEQUENCE_START:
            return lambda request: yes if request.sequence_start else no
        case SequenceControlKind.CONTROL_SEQUENCE_END:
            return lambda request: yes if request.sequence_end else no
        case _:
            return lambda request: no if request.is_padding else yes


def _correlation_id(sequence_id: int | str, datatype: Datatype, shape: tuple[int, ...]) -> Array:
    """The id in the model's datatype: a number as text for BYTES, a hash of a text for integers."""
    if datatype is Datatype.BYTES:
        text = "" if sequence_id == 0 else str(sequence_id)
        return np.full(shape, text.encode(), dtype=object)
    assert datatype.itemsize is not None, "correlation ids are integers or BYTES"
    if isinstance(sequence_id, str):
        raw = blake2b(sequence_id.encode(), digest_size=datatype.itemsize).digest() if sequence_id else b"\0" * 8
    else:
        raw = (sequence_id & ((1 << 64) - 1)).to_bytes(8, "little")
    return np.full(shape, np.frombuffer(raw[: datatype.itemsize], datatype.numpy)[0], datatype.numpy)


def _state(model_name: str, state: SequenceState, lead: tuple[int, ...], model_directory: Path) -> StateSpec:
    assert state.data_type is not None, "a validated state has a datatype"
    # Variable sizes begin with 1, unless the initial state gives others.
    shape = tuple(1 if dim == -1 else dim for dim in state.dims)
    initial = state.initial_state[0] if state.initial_state else None
    if initial is not None:
        shape = tuple(initial.dims) or shape
    if initial is None or initial.data_file is None:
        array = _zeros((*lead, *shape), state.data_type)
    else:
        path = model_directory / _DIRECTORY / initial.data_file
        try:
            data = tensor_from_bytes(state.input_name, state.data_type, shape, path.read_bytes()).data
        except OSError as error:
            raise ConfigError(
                f"model '{model_name}': initial_state '{initial.name}' of '{state.input_name}': cannot read {path}: "
                f"{error.strerror}"
            ) from None
        except InvalidArgumentError as error:
            raise ConfigError(f"model '{model_name}': initial_state '{initial.name}' in {path}: {error}") from None
        array = data.reshape((*lead, *shape))
    array.flags.writeable = False  # all sequences begin with it
    return StateSpec(state.input_name, state.output_name, state.data_type, tuple(state.dims), array)


def _zeros(shape: tuple[int, ...], datatype: Datatype) -> Array:
    return np.full(shape, b"", dtype=object) if datatype is Datatype.BYTES else np.zeros(shape, datatype.numpy)
