"""Between requests and instances: gather inputs, scatter outputs, and check outputs.

A lone request passes its arrays as they are; several are copied once, into one array per input. Outputs
are scattered as views of the batch's arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import accumulate

import numpy as np

from modelserver.backend import Array
from modelserver.config.signature import ModelSignature, Reshape, Shape, TensorSpec, reshaper
from modelserver.core.datatype import Datatype
from modelserver.core.element_arrays import concatenate
from modelserver.core.request import InFlightRequest
from modelserver.core.response import RESCHEDULE, InferResponse, RowResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import InternalError, ServerError
from modelserver.execution.batch_tensors import BatchTensors
from modelserver.execution.sequence_inputs import SequenceInputs
from modelserver.platform.cuda import DeviceArray

logger = logging.getLogger(__name__)


class Assembler:
    """Gather and scatter for one model. All workers share it."""

    def __init__(
        self,
        signature: ModelSignature,
        *,
        sequence: SequenceInputs | None = None,
        batch_tensors: BatchTensors | None = None,
    ) -> None:
        """`sequence` adds controls and states to the inputs of a model with sequences, and keeps its states.

        `batch_tensors` gathers and scatters tensors that are not simply joined by rows.
        """
        self._sequence = sequence
        self._batch_tensors = batch_tensors if batch_tensors is not None and batch_tensors.is_needed else None
        self._model_name = signature.model_name
        self._is_batched = signature.max_batch_size > 0
        self._outputs = signature.outputs
        # The datatypes of the last row, and the outputs of which they are the model's.
        self._known_datatypes: Mapping[str, Datatype] | None = None
        self._known_names: AbstractSet[str] = frozenset()
        self._is_open = signature.is_open
        # Outputs that differ from the config: served unchanged, as in Triton, and logged once.
        self._misdescribed: set[str] = set()
        self._input_reshapes = {
            name: reshaper(spec.dims, spec.reshape, is_batched=self._is_batched)
            for name, spec in signature.inputs.items()
            if spec.reshape is not None
        }
        self._output_reshapes = {
            name: reshaper(spec.reshape, spec.dims, is_batched=self._is_batched)
            for name, spec in signature.outputs.items()
            if spec.reshape is not None
        }

    def gather(self, requests: Sequence[InFlightRequest]) -> dict[str, Array]:
        """The inputs of a batch of requests with the same inputs and item shapes, as one array each."""
        if self._sequence is not None:
            self._sequence.inject(requests)
        if self._batch_tensors is not None:
            return self._gather_ragged(requests, self._batch_tensors)
        first = requests[0].inputs
        if len(requests) == 1:
            inputs = {name: tensor.data for name, tensor in first.items()}
        else:
            inputs = {name: concatenate([request.inputs[name].data for request in requests]) for name in first}
        for name, reshape in self._input_reshapes.items():
            if name in inputs:
                inputs[name] = reshape(inputs[name])
        return inputs

    def _gather_ragged(self, requests: Sequence[InFlightRequest], batch_tensors: BatchTensors) -> dict[str, Array]:
        inputs: dict[str, Array] = {}
        for name in requests[0].inputs:
            if name in batch_tensors.ragged:
                inputs[name] = batch_tensors.flatten(requests, name)
                continue
            if name in batch_tensors.shared:
                inputs[name] = requests[0].inputs[name].data
                continue
            arrays = [request.inputs[name].data for request in requests]
            array = arrays[0] if len(arrays) == 1 else concatenate(arrays)
            reshape = self._input_reshapes.get(name)
            inputs[name] = array if reshape is None else reshape(array)
        batch_tensors.add_inputs(requests, inputs)
        return inputs

    def scatter(self, requests: Sequence[InFlightRequest], outputs: Mapping[str, Array]) -> list[InferResponse]:
        """Each request's rows of the outputs that it asked for; an error if one of these is missing or wrong.

        Raises InternalError when `outputs` is not a mapping.
        """
        if not isinstance(outputs, Mapping):
            raise InternalError(
                f"model '{self._model_name}': run() returned {type(outputs).__name__}, "
                "expected a mapping of output names to arrays"
            )
        if self._sequence is not None:
            self._sequence.keep_rows(requests, outputs)
        total = requests[0].rows if len(requests) == 1 else sum(request.rows for request in requests)
        arrays: dict[str, Array] = {}
        problems: dict[str, InternalError] = {}
        for name, spec in self._outputs.items():
            try:
                arrays[name] = self._checked_array(spec, outputs, total)
            except InternalError as error:
                problems[name] = error
        if self._batch_tensors is not None:
            return self._scatter_ragged(requests, arrays, problems, self._batch_tensors)
        if len(requests) == 1:
            return [self._respond(requests[0], arrays, problems, None)]
        everything = [] if problems else [(name, spec.datatype, arrays[name]) for name, spec in self._outputs.items()]
        responses = []
        start = 0
        for request in requests:
            end = start + request.rows
            if request.outputs is None and everything:
                tensors = [Tensor(name, datatype, array[start:end]) for name, datatype, array in everything]
                responses.append(InferResponse(tensors))
            else:
                responses.append(self._respond(request, arrays, problems, slice(start, end)))
            start = end
        return responses

    def _scatter_ragged(
        self,
        requests: Sequence[InFlightRequest],
        arrays: Mapping[str, Array],
        problems: dict[str, InternalError],
        batch_tensors: BatchTensors,
    ) -> list[InferResponse]:
        ends = list(accumulate(request.rows for request in requests))
        parts: dict[str, list[Array]] = {}
        for name, array in arrays.items():
            try:
                if batch_tensors.is_scattered(name):
                    parts[name] = batch_tensors.scatter(name, array, requests)
                else:
                    parts[name] = [array[end - request.rows : end] for end, request in zip(ends, requests, strict=True)]
            except InternalError as error:
                problems[name] = error
        return [
            self._respond(request, {name: part[place] for name, part in parts.items()}, problems, None)
            for place, request in enumerate(requests)
        ]

    @property
    def shapes_inputs(self) -> bool:
        """Whether `shape_inputs` changes anything for this model."""
        return self._sequence is not None or bool(self._input_reshapes)

    def shape_inputs(self, requests: Sequence[InFlightRequest]) -> Sequence[InFlightRequest]:
        """The requests as a BatchInstance sees them: inputs with a `reshape` in the model's shape."""
        if self._sequence is not None:
            self._sequence.inject(requests)
        for name, reshape in self._input_reshapes.items():
            for request in requests:
                tensor = request.inputs.get(name)
                if tensor is not None:
                    request.inputs[name] = Tensor(name, tensor.datatype, reshape(tensor.data))
        return requests

    def collect(self, requests: Sequence[InFlightRequest], entries: object) -> list[InferResponse]:
        """The responses of a BatchInstance, each checked and cut down to the outputs that its request asked for.

        A wrong entry fails only its request. An output that no request named may be left out, and its shape is not
        checked, because no other request depends on it. Raises InternalError unless there is one entry per request.
        """
        # Most instances return a list, and testing for it costs a tenth of testing for a Sequence.
        if not isinstance(entries, list | tuple) and not isinstance(entries, Sequence):
            raise self._entries_error(type(entries).__name__, len(requests))
        if len(entries) != len(requests):
            raise self._entries_error(f"{len(entries)} responses", len(requests))
        if len(requests) == 1:
            try:
                return [self._checked_response(requests[0], entries[0])]
            except ServerError as error:
                return [InferResponse(error=error)]
        return [self._collect_one(request, entry) for request, entry in zip(requests, entries, strict=True)]

    def _collect_one(self, request: InFlightRequest, entry: object) -> InferResponse:
        try:
            return self._checked_response(request, entry)
        except ServerError as error:
            return InferResponse(error=error)

    def collect_later(self, requests: Sequence[InFlightRequest], entries: object) -> Sequence[object]:
        """The entries of an instance that answers later, one for each request. They are checked when they are sent.

        Raises InternalError unless there is one entry for each request.
        """
        if entries is None:
            return [None] * len(requests)
        if not isinstance(entries, Sequence):
            raise self._entries_error(type(entries).__name__, len(requests))
        if len(entries) != len(requests):
            raise self._entries_error(f"{len(entries)} responses", len(requests))
        return entries

    def check_sent(self, request: InFlightRequest, response: InferResponse) -> InferResponse:
        """The response that a sender was given, cut down to the outputs that its request asked for.

        A requested output may be missing, because another response may bring it. Raises InternalError for outputs that
        the model does not have.
        """
        if not isinstance(response, InferResponse):
            raise InternalError(
                f"model '{self._model_name}': a response sender was given {type(response).__name__}, "
                "expected an InferResponse or a ServerError"
            )
        specs, has_reshapes = self._outputs, bool(self._output_reshapes)
        if type(response) is RowResponse:
            if self._sequence is None and not has_reshapes and self._checks_row(response):
                if request.outputs is not None:
                    values = response.values
                    response.values = {name: values[name] for name in request.outputs if name in values}
                return response
            response = InferResponse(response.outputs, response.error, response.parameters)
        if self._sequence is not None:
            self._sequence.keep_outputs(request, response)
        for tensor in response.outputs:
            spec = specs.get(tensor.name)
            # Correct outputs cost no call: this runs for every streamed token.
            if spec is None or tensor.datatype is not spec.datatype or tensor.data.dtype is not tensor.datatype.numpy:
                self._check_tensor(tensor)
            elif has_reshapes:
                self._reshape_output(spec, tensor)
        if request.outputs is not None:
            by_name = {tensor.name: tensor for tensor in response.outputs}
            response.outputs = [by_name[name] for name in request.outputs if name in by_name]
        return response

    def _entries_error(self, got: str, num_requests: int) -> InternalError:
        return InternalError(
            f"model '{self._model_name}': execute() returned {got}, expected a list of {num_requests} responses, "
            "one for each request"
        )

    def _respond(
        self,
        request: InFlightRequest,
        arrays: Mapping[str, Array],
        problems: Mapping[str, InternalError],
        rows: slice | None,
    ) -> InferResponse:
        tensors = []
        for name in self._outputs if request.outputs is None else request.outputs:
            if name in problems:
                return InferResponse(error=problems[name])
            array = arrays[name]
            tensors.append(Tensor(name, self._outputs[name].datatype, array if rows is None else array[rows]))
        return InferResponse(tensors)

    def _checked_array(self, spec: TensorSpec, outputs: Mapping[str, Array], rows: int) -> Array:
        array = outputs.get(spec.name)
        if array is None:
            raise self._output_error(spec, f"is missing, run() returned {sorted(outputs)}")
        if not isinstance(array, np.ndarray | DeviceArray):
            raise self._output_error(spec, f"is a {type(array).__name__}, expected a NumPy array")
        if array.dtype != spec.datatype.numpy:
            array = self._converted(spec, array)
        if self._batch_tensors is not None and self._batch_tensors.is_scattered(spec.name):
            return array
        if self._is_batched and (array.ndim == 0 or array.shape[0] != rows):
            raise self._output_error(spec, f"has shape {list(array.shape)}, expected {rows} rows in dimension 0")
        reshape = self._output_reshapes.get(spec.name)
        if reshape is not None:
            return self._reshaped(spec, array, reshape)
        item_shape = array.shape[1:] if self._is_batched else array.shape
        if item_shape != spec.dims and spec.name not in self._misdescribed and not _fits(item_shape, spec.dims):
            self._misdescribed.add(spec.name)
            logger.warning(
                "model '%s': output '%s' has items of shape %s and dims %s in its config; clients are told the latter",
                self._model_name,
                spec.name,
                list(item_shape),
                list(spec.dims),
            )
        return array

    def _checked_response(self, request: InFlightRequest, entry: object) -> InferResponse:
        """Raises the entry's error, or InternalError if it is not a valid response."""
        if not isinstance(entry, InferResponse):
            if isinstance(entry, ServerError):
                raise entry
            raise InternalError(
                f"model '{self._model_name}': execute() returned an entry of type {type(entry).__name__}, "
                "expected an InferResponse or a ServerError"
            )
        if entry.error is not None:
            raise entry.error
        if self._sequence is not None:
            if entry is RESCHEDULE:
                return entry
            self._sequence.keep_outputs(request, entry)
        if not entry.is_final:
            raise InternalError(f"model '{self._model_name}': execute() returned a response that is not final")
        for tensor in entry.outputs:
            spec = self._outputs.get(tensor.name)
            datatype = tensor.datatype
            # Correct outputs cost no call.
            if spec is None or datatype is not spec.datatype or tensor.data.dtype is not datatype.numpy:
                self._check_tensor(tensor)
            elif self._output_reshapes:
                self._reshape_output(spec, tensor)
        names = request.outputs
        if names is not None and (
            len(names) != len(entry.outputs) or names[0] != entry.outputs[0].name or len(names) > 1
        ):
            entry.outputs = self._select(names, entry.outputs)
        return entry

    def _checks_row(self, response: RowResponse) -> bool:
        """Whether all values are outputs of the model, of its datatypes."""
        specs, datatypes = self._outputs, response.datatypes
        if datatypes is not self._known_datatypes:
            self._known_names = {name for name, spec in specs.items() if datatypes.get(name) is spec.datatype}
            self._known_datatypes = datatypes
        return response.values.keys() <= self._known_names

    def _check_tensor(self, tensor: Tensor) -> None:
        """Raise InternalError for an output that is not in the config, or whose array is not of its datatype.

        A datatype that differs from the config's is sent unchanged, as in Triton, and models rely on that.
        """
        spec = self._outputs.get(tensor.name)
        if spec is None and self._is_open:
            spec = TensorSpec(tensor.name, tensor.datatype, tensor.data.shape)
        if spec is None:
            raise InternalError(
                f"model '{self._model_name}': unexpected output '{tensor.name}', the config has {sorted(self._outputs)}"
            )
        if tensor.datatype is not spec.datatype and spec.name not in self._misdescribed:
            self._misdescribed.add(spec.name)
            logger.warning(
                "model '%s': output '%s' is %s and its config says %s; it is sent as it is",
                self._model_name,
                spec.name,
                tensor.datatype.config_name,
                spec.datatype.config_name,
            )
        if tensor.data.dtype != tensor.datatype.numpy:
            tensor.data = self._converted(replace(spec, datatype=tensor.datatype), tensor.data)
        self._reshape_output(spec, tensor)

    def _reshape_output(self, spec: TensorSpec, tensor: Tensor) -> None:
        reshape = self._output_reshapes.get(tensor.name)
        if reshape is not None:
            tensor.data = self._reshaped(spec, tensor.data, reshape)

    def _select(self, names: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
        by_name = {tensor.name: tensor for tensor in tensors}
        missing = [name for name in names if name not in by_name]
        if missing:
            raise InternalError(
                f"model '{self._model_name}': output '{missing[0]}' was asked for and is missing, "
                f"execute() returned {sorted(by_name)}"
            )
        return [by_name[name] for name in names]

    def _converted(self, spec: TensorSpec, array: Array) -> Array:
        """Fixed-width strings become BYTES elements; any other wrong dtype raises InternalError."""
        if spec.datatype is Datatype.BYTES and array.dtype.kind in "SU":
            return array.astype(object)
        raise self._output_error(
            spec, f"has dtype {array.dtype}, expected {spec.datatype.numpy} for {spec.datatype.value}"
        )

    def _reshaped(self, spec: TensorSpec, array: Array, reshape: Reshape) -> Array:
        try:
            return reshape(array)
        except (ValueError, StopIteration):
            raise self._output_error(
                spec, f"has shape {list(array.shape)}, which cannot be reshaped to dims {list(spec.dims)}"
            ) from None

    def _output_error(self, spec: TensorSpec, problem: str) -> InternalError:
        return InternalError(f"model '{self._model_name}': output '{spec.name}' {problem}")


def _fits(shape: Shape, dims: Shape) -> bool:
    # A plain loop, because this runs for every output of every batch.
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):  # noqa: SIM110
        if dim not in (size, -1):
            return False
    return True
