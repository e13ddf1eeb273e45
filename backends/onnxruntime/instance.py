"""One placement of an ONNX model: arrays in, arrays out, as few steps between as possible."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from modelserver.backend import (
    Array,
    CancelledError,
    Datatype,
    DeviceArray,
    InternalError,
    InvalidArgumentError,
    ModelConfig,
    TensorInstance,
    UnavailableError,
    model_inputs,
    model_outputs,
    note_device_error,
)

from .device_run import BoundRun, GraphRun
from .signature import is_rows_of_maps, rows_of_maps

_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16
# What arenas, and CUDA itself, say when they cannot allocate.
_NO_MEMORY = ("Failed to allocate memory", "is smaller than requested bytes", "out of memory")


class OnnxInstance(TensorInstance):
    """Runs a session, which the instances on a device share.

    `scalars` are the inputs and outputs that have no dimensions in the graph, and some of one element in their config.
    `run_options` is what `options.run_options` gives. `bound` executes runs of plain tensors in place of the session:
    on a GPU.
    """

    can_be_interrupted = True

    def __init__(
        self,
        session: Any,
        config: ModelConfig,
        scalars: Collection[str] = (),
        *,
        run_options: tuple[Any, Any | None, int],
        bound: BoundRun | GraphRun | None = None,
    ) -> None:
        self._session = session
        # Options of this instance alone: they carry the interruption.
        self._run_options, self._shrinking, self._interval = run_options
        self._num_runs = 0
        self._is_interrupted = False
        inputs, outputs = model_inputs(config), model_outputs(config)
        self._scalar_inputs = [spec.name for spec in inputs if spec.name in scalars]
        self._scalar_outputs = [
            (spec.name, spec.dims if spec.reshape is None else spec.reshape.shape)
            for spec in outputs
            if spec.name in scalars
        ]
        self._output_names = [spec.name for spec in outputs]
        self._string_inputs = [spec.name for spec in inputs if spec.data_type is Datatype.BYTES]
        self._string_outputs = [spec.name for spec in outputs if spec.data_type is Datatype.BYTES]
        maps = {each.name for each in session.get_outputs() if is_rows_of_maps(each.type)}
        self._map_outputs = {spec.name: spec.data_type for spec in outputs if spec.name in maps}
        self._bfloat16_inputs = {spec.name for spec in inputs if spec.data_type is Datatype.BF16}
        self._has_bfloat16 = bool(self._bfloat16_inputs) or any(spec.data_type is Datatype.BF16 for spec in outputs)
        is_plain = not (self._string_inputs or self._string_outputs or self._map_outputs or self._has_bfloat16)
        self._bound = bound if is_plain else None
        self.gpu = self._bound.gpu if self._bound is not None else None

    def interrupt(self, is_wanted: bool) -> None:
        self._is_interrupted = is_wanted
        self._run_options.terminate = is_wanted
        if self._shrinking is not None:
            self._shrinking.terminate = is_wanted
        if isinstance(self._bound, GraphRun):
            self._bound.interrupt(is_wanted)

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        found: Mapping[str, Any] = self.run_on_device(inputs, {})
        return found

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], targets: Mapping[str, DeviceArray]
    ) -> Mapping[str, Array | DeviceArray]:
        feeds: dict[str, Any] = dict(inputs)
        for name in self._scalar_inputs:
            if name in feeds:
                feeds[name] = feeds[name].reshape(())
        for name in self._string_inputs:
            if name in feeds:
                feeds[name] = _decoded(feeds[name])
        try:
            arrays = self._execute(feeds, targets)
        except (native.InvalidArgument, ValueError) as error:
            raise InvalidArgumentError(f"ONNX Runtime refuses the inputs: {error}") from error
        except (native.Fail, native.RuntimeException, native.EPFail, native.NotImplemented, RuntimeError) as error:
            # Bindings raise RuntimeError, as for a device without memory.
            note_device_error(error)
            if self._is_interrupted:
                raise CancelledError("the requests of the batch were cancelled while it was executed") from error
            if any(reason in str(error) for reason in _NO_MEMORY):
                raise UnavailableError(
                    "there is too little free memory for this batch: send fewer rows at once, set a smaller "
                    f"max_batch_size, or unload a model: {error}"
                ) from error
            raise InternalError(f"ONNX Runtime failed: {error}") from error
        outputs: dict[str, Any] = dict(zip(self._output_names, arrays, strict=True))
        for name, datatype in self._map_outputs.items():
            assert datatype is not None, "a checked output has a datatype"
            outputs[name] = rows_of_maps(name, outputs[name], datatype)
        for name in self._string_outputs:
            outputs[name] = _encoded(outputs[name])
        for name, dims in self._scalar_outputs:
            outputs[name] = outputs[name].reshape(dims)
        return outputs

    def _execute(self, feeds: Mapping[str, Array], targets: Mapping[str, DeviceArray]) -> Sequence[Array | DeviceArray]:
        options = self._run_options
        if self._shrinking is not None:
            self._num_runs += 1
            if self._num_runs % self._interval == 0:
                options = self._shrinking
        if isinstance(self._bound, BoundRun):
            return self._bound.run(feeds, options, targets)
        if self._bound is not None:
            return self._bound.run(feeds, targets)
        if self._has_bfloat16:
            return self._run_values(feeds, options)
        arrays: list[Array] = self._session.run(self._output_names, feeds, options)
        return arrays

    def _run_values(self, feeds: Mapping[str, Array], options: Any) -> list[Array]:
        """The long road for BF16, which NumPy lacks: ONNX Runtime's own values on both sides."""
        values = {name: self._value(name, array) for name, array in feeds.items()}
        results = self._session.run_with_ort_values(self._output_names, values, options)
        return [_array(value) for value in results]

    def _value(self, name: str, array: Array) -> Any:
        array = np.ascontiguousarray(array)
        if name in self._bfloat16_inputs:
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BFLOAT16)
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _array(value: Any) -> Array:
    if value.element_type() != _ONNX_BFLOAT16:
        array: Array = value.numpy()
        return array
    shape = value.shape()
    return np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * prod(shape)), np.uint16).reshape(shape)


def _decoded(array: Array) -> Array:
    """BYTES elements as the str that ONNX Runtime takes.

    A byte that is not UTF-8 becomes U+FFFD: an error would fail every request of the batch for one of them.
    """
    decoded = np.empty(array.shape, dtype=object)
    decoded.reshape(-1)[:] = [
        element.decode("utf-8", "replace") if isinstance(element, bytes) else element for element in array.reshape(-1)
    ]
    return decoded


def _encoded(array: Array) -> Array:
    encoded = np.empty(array.shape, dtype=object)
    encoded.reshape(-1)[:] = [element.encode() for element in array.reshape(-1)]
    return encoded
