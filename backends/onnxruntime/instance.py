"""One placement of an ONNX model: arrays in, arrays out, as few steps between as possible."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from modelserver.backend import (
    Array,
    Datatype,
    InternalError,
    InvalidArgumentError,
    ModelConfig,
    TensorInstance,
    model_inputs,
    model_outputs,
)

_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16


class OnnxInstance(TensorInstance):
    """Runs the session that all instances on a device share.

    `scalars` are the inputs and outputs that the graph has without the one dimension of their config;
    `run_options` are onnxruntime.RunOptions for every run.
    """

    def __init__(
        self, session: Any, config: ModelConfig, scalars: Collection[str] = (), *, run_options: Any = None
    ) -> None:
        self._session = session
        self._run_options = run_options
        inputs, outputs = model_inputs(config), model_outputs(config)
        self._scalar_inputs = [spec.name for spec in inputs if spec.name in scalars]
        self._scalar_outputs = [spec.name for spec in outputs if spec.name in scalars]
        self._output_names = [spec.name for spec in outputs]
        self._string_inputs = [spec.name for spec in inputs if spec.data_type is Datatype.BYTES]
        self._string_outputs = [spec.name for spec in outputs if spec.data_type is Datatype.BYTES]
        self._bfloat16_inputs = {spec.name for spec in inputs if spec.data_type is Datatype.BF16}
        self._has_bfloat16 = bool(self._bfloat16_inputs) or any(spec.data_type is Datatype.BF16 for spec in outputs)

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        feeds = dict(inputs)
        for name in self._scalar_inputs:
            if name in feeds:
                feeds[name] = feeds[name].reshape(())
        for name in self._string_inputs:
            if name in feeds:
                feeds[name] = _decoded(feeds[name])
        try:
            if self._has_bfloat16:
                arrays = self._run_values(feeds)
            else:
                arrays = self._session.run(self._output_names, feeds, self._run_options)
        except (native.InvalidArgument, ValueError) as error:
            raise InvalidArgumentError(f"ONNX Runtime refuses the inputs: {error}") from error
        except (native.Fail, native.RuntimeException, native.EPFail, native.NotImplemented) as error:
            raise InternalError(f"ONNX Runtime failed: {error}") from error
        outputs = dict(zip(self._output_names, arrays, strict=True))
        for name in self._string_outputs:
            outputs[name] = _encoded(outputs[name])
        for name in self._scalar_outputs:
            outputs[name] = np.reshape(outputs[name], 1)
        return outputs

    def _run_values(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The long road for BF16, which NumPy lacks: ONNX Runtime's own values on both sides."""
        values = {name: self._value(name, array) for name, array in feeds.items()}
        results = self._session.run_with_ort_values(self._output_names, values, self._run_options)
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
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(raw, np.uint16).reshape(value.shape())


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
