"""ONNX Runtime's CUDA provider without a GPU, over a session on the CPU.

A run is queued on the session's stream, and done when that is waited for: at the end of the run, unless its options say
otherwise. Memory that ONNX Runtime has allocated is lost when the last value over it is. A run with a graph's id
captures the graph, once in each thread; later runs read and write the addresses of the capture, whatever is bound.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

_LOST = 0xEE
_ONNX_NAMES = {"float32": "tensor(float)", "int64": "tensor(int64)"}
_GRAPH_ID, _NO_SYNC = "gpu_graph_id", "disable_synchronize_execution_providers"


class Value:
    """An OrtValue, in memory of the device, or of the host."""

    is_host = False

    def __init__(self, array: np.ndarray[Any, Any], *, is_owned: bool) -> None:
        self.array = array
        if is_owned:
            weakref.finalize(self, array.view(np.uint8).reshape(-1).fill, _LOST)

    @classmethod
    def ortvalue_from_shape_and_type(cls, shape: Sequence[int], dtype: Any, device: str, _number: int) -> Value:
        assert device == "cuda", "graphs need addresses on the device"
        return cls(np.zeros(shape, dtype), is_owned=True)

    @classmethod
    def ortvalue_from_numpy(cls, array: np.ndarray[Any, Any]) -> Value:
        found = cls(array, is_owned=False)
        found.is_host = True
        return found

    def update_inplace(self, data: np.ndarray[Any, Any]) -> None:
        assert data.flags.c_contiguous, "memory with gaps is copied"
        self.array[...] = data

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array.copy()

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def data_type(self) -> str:
        return _ONNX_NAMES[self.array.dtype.name]

    def shape(self) -> list[int]:
        return list(self.array.shape)

    def tensor_size_in_bytes(self) -> int:
        return self.array.nbytes


class Binding:
    def __init__(self) -> None:
        self.inputs: dict[str, np.ndarray[Any, Any]] = {}
        self.outputs: dict[str, Value | str | None] = {}

    def bind_input(self, name: str, device: str, number: int, dtype: Any, shape: Any, address: int) -> None:
        assert (device, number) == ("cuda", 0)
        size = int(np.prod(shape)) * dtype.itemsize
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self.inputs[name] = memory.view(dtype).reshape(shape)

    def bind_output(self, name: str, device: str = "cpu", _number: int = 0) -> None:
        self.outputs[name] = device

    def bind_ortvalue_input(self, name: str, value: Value) -> None:
        # Memory of the host is copied to the device, at once.
        self.inputs[name] = value.array.copy() if value.is_host else value.array

    def bind_ortvalue_output(self, name: str, value: Value) -> None:
        self.outputs[name] = value

    def get_outputs(self) -> list[Any]:
        return list(self.outputs.values())

    def clear_binding_inputs(self) -> None:
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        self.outputs.clear()


class Session:
    """`cannot_capture`: a node that no graph can hold."""

    def __init__(self, session: onnxruntime.InferenceSession, *, cannot_capture: bool = False) -> None:
        self._session = session
        self._cannot_capture = cannot_capture
        self._queue: list[Callable[[], None]] = []
        self._graphs: dict[tuple[int, str], Callable[[], None]] = {}
        self.num_captures = self.num_replays = 0
        self.options: list[Any] = []

    def io_binding(self) -> Binding:
        return Binding()

    def get_outputs(self) -> Any:
        return self._session.get_outputs()

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        graph = _entry(options, _GRAPH_ID) or "-1"
        known = [other for other in self.options if other[0] is options]
        # ONNX Runtime prints a warning for an entry that is written again.
        assert all(entry == graph for _, entry in known), "options get another graph's id"
        if not known:
            self.options.append((options, graph))
        key = threading.get_ident(), graph
        if graph == "-1":
            self._queue.append(self._computation(binding.inputs, binding.outputs))
        elif key in self._graphs:
            self.num_replays += 1
            self._queue.append(self._graphs[key])
        elif self._cannot_capture:
            raise native.EPFail("operation not permitted when stream is capturing")
        else:
            assert all(isinstance(value, Value) for value in binding.outputs.values()), "a graph needs addresses"
            self.num_captures += 1
            compute = self._graphs[key] = self._computation(dict(binding.inputs), dict(binding.outputs))
            self._queue.append(compute)
        if _entry(options, _NO_SYNC) != "1":
            self.synchronize()

    def synchronize(self) -> None:
        while self._queue:
            self._queue.pop(0)()

    def _computation(self, inputs: Mapping[str, Any], outputs: dict[str, Any]) -> Callable[[], None]:
        def compute() -> None:
            for name, array in zip(outputs, self._session.run(list(outputs), dict(inputs)), strict=True):
                place = outputs[name]
                if isinstance(place, Value):
                    place.array[...] = array
                else:
                    outputs[name] = Value(array, is_owned=place == "cuda")

        return compute


def _entry(options: Any, name: str) -> str | None:
    try:
        return str(options.get_run_config_entry(name))
    except RuntimeError:  # there is none
        return None
