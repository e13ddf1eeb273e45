"""ONNX Runtime's CUDA provider without a GPU, over a session on the CPU.

A run is queued on the session's stream, and done when that is waited for: at the end of the run, unless its options say
otherwise. Memory that ONNX Runtime has allocated is lost when the last value over it is. A run of a session with graphs
captures the graph of its id, once in each thread; later runs read and write the addresses of the capture, whatever is
bound. During a capture a call by another thread fails, and so does the capture.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from modelserver_backends.onnxruntime.providers import preload_libraries
from onnxruntime.capi import onnxruntime_pybind11_state as native

from modelserver.backend.discovery import find_backend

_LOST = 0xEE
_CPU, _CUDA, _TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
# Options of the CUDA provider of ONNX Runtime 1.31; it refuses any other.
_OPTIONS = {
    "arena_extend_strategy",
    "cudnn_conv1d_pad_to_nc1d",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "device_id",
    "do_copy_in_default_stream",
    "enable_cuda_graph",
    "enable_skip_layer_norm_strict_mode",
    "fuse_conv_bias",
    "gpu_mem_limit",
    "prefer_nhwc",
    "sdpa_kernel",
    "tunable_op_enable",
    "tunable_op_max_tuning_duration_ms",
    "tunable_op_tuning_enable",
    "use_ep_level_unified_stream",
    "use_tf32",
}
_ONNX_NAMES = {"float32": "tensor(float)", "int64": "tensor(int64)"}
_GRAPH_ID, _NO_SYNC = "gpu_graph_id", "disable_synchronize_execution_providers"


class _Capture:
    """The one of the process, in CUDA's global mode."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.is_broken = False

    def check(self) -> None:
        """A call of the library, which may allocate or copy."""
        if self.thread not in (None, threading.get_ident()):
            self.is_broken = True
            raise native.EPFail("operation not permitted when stream is capturing")


_CAPTURE = _Capture()


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
        _CAPTURE.check()
        return cls(np.zeros(shape, dtype), is_owned=True)

    @classmethod
    def ortvalue_from_numpy(cls, array: np.ndarray[Any, Any]) -> Value:
        found = cls(array, is_owned=False)
        found.is_host = True
        return found

    def update_inplace(self, data: np.ndarray[Any, Any]) -> None:
        assert data.flags.c_contiguous, "memory with gaps is copied"
        _CAPTURE.check()
        self.array[...] = data

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array.copy()

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def data_type(self) -> str:
        return _ONNX_NAMES[self.array.dtype.name]

    def shape(self) -> list[int]:
        return list(self.array.shape)


class Binding:
    def __init__(self, on_host: Collection[str] = ()) -> None:
        self._on_host = on_host
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
        # Memory is copied at once to where kernels read it, if it lies elsewhere.
        _CAPTURE.check()
        self.inputs[name] = value.array if value.is_host == (name in self._on_host) else value.array.copy()

    def bind_ortvalue_output(self, name: str, value: Value) -> None:
        self.outputs[name] = value

    def get_outputs(self) -> list[Any]:
        return list(self.outputs.values())

    def clear_binding_inputs(self) -> None:
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        self.outputs.clear()


class Session:
    """`has_graphs`: the provider's `enable_cuda_graph`. `cannot_capture`: a node that no graph can hold. `on_host`:
    inputs that kernels read in memory of the host. `in_capture` is called during each capture.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        *,
        has_graphs: bool = False,
        cannot_capture: bool = False,
        on_host: Collection[str] = (),
        in_capture: Callable[[], object] = lambda: None,
    ) -> None:
        self._session = session
        self._has_graphs = has_graphs
        self._cannot_capture = cannot_capture
        self._on_host = on_host
        self._in_capture = in_capture
        self._queue: list[Callable[[], None]] = []
        self._graphs: dict[tuple[int, str], Callable[[], None]] = {}
        self.num_captures = self.num_replays = 0
        self.options: list[Any] = []

    def io_binding(self) -> Binding:
        return Binding(self._on_host)

    def get_providers(self) -> list[str]:
        return [_CUDA, _CPU]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [SimpleNamespace(ep_name=_CUDA, get_nodes=lambda: ["all"])]

    def run(self, *_arguments: object) -> Any:
        raise AssertionError("a session on a GPU is run by a binding")

    def run_with_ort_values(self, names: Any, values: Any, options: Any) -> Any:
        assert self._graph(options) == "-1", "a graph would be captured over memory that is another's in the next run"
        return self._session.run_with_ort_values(names, values, options)

    def _graph(self, options: Any) -> str:
        return _entry(options, _GRAPH_ID) or "0" if self._has_graphs else "-1"

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name="Cpu" if each.name in self._on_host else "Cuda") for each in self.get_inputs()]

    def get_outputs(self) -> Any:
        return self._session.get_outputs()

    def get_overridable_initializers(self) -> Any:
        return self._session.get_overridable_initializers()

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        _CAPTURE.check()
        graph = self._graph(options)
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
            _CAPTURE.thread, _CAPTURE.is_broken = threading.get_ident(), False
            try:
                self._in_capture()
            finally:
                _CAPTURE.thread = None
            if _CAPTURE.is_broken:
                raise native.EPFail("operation failed due to a previous error during capture")
            self.num_captures += 1
            # What kernels have read of the host is in the graph.
            inputs = {name: each.copy() if name in self._on_host else each for name, each in binding.inputs.items()}
            compute = self._graphs[key] = self._computation(inputs, dict(binding.outputs))
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


def install(patch: Callable[[Any, str, Any], object], **described: Any) -> list[Session]:
    """Put a library with CUDA, and without TensorRT, in the place of ONNX Runtime's; `patch` is like `setattr`.

    Sessions on a GPU are as `described`, and come to the list. A request to capture graphs of a model that it has
    described with `has_foreign_nodes` is refused.
    """
    real, made = onnxruntime.InferenceSession, list[Session]()
    has_foreign_nodes = described.pop("has_foreign_nodes", False)

    def new_session(path: Any, options: Any, providers: Any = None, enable_fallback: int = 1) -> Any:
        assert not enable_fallback, "the library would try other providers by itself"
        settings = dict(providers or ())
        on_cpu = real(path, options, providers=[_CPU], enable_fallback=0)
        if _CUDA not in settings:
            assert set(settings) == {_CPU}, settings
            return on_cpu
        assert preloaded, "its libraries would not be found"
        if _TENSORRT in settings:
            raise RuntimeError(
                "void onnxruntime::python::RegisterTensorRTPluginsAsCustomOps(PySessionOptions&, const "
                "onnxruntime::ProviderOptions&) Please install TensorRT libraries as mentioned in the GPU requirements"
            )
        unknown = set(settings[_CUDA]) - _OPTIONS
        if unknown:
            raise RuntimeError(f"Unknown provider option: '{min(unknown)}'.")
        has_graphs = settings[_CUDA].get("enable_cuda_graph", "0") == "1"
        if has_graphs and has_foreign_nodes:
            raise native.Fail(
                "This session cannot use the graph capture feature as requested by the user as all compute graph nodes "
                f"have not been partitioned to the {_CUDA}"
            )
        made.append(Session(on_cpu, has_graphs=has_graphs, **described))
        return made[-1]

    preloaded: list[bool] = []
    patch(onnxruntime, "InferenceSession", new_session)
    patch(onnxruntime, "OrtValue", Value)
    patch(onnxruntime, "get_available_providers", lambda: [_TENSORRT, _CUDA, _CPU])
    patch(onnxruntime, "preload_dlls", lambda: preloaded.append(True))
    preload_libraries.cache_clear()
    patch(find_backend("onnxruntime"), "supports_gpu", True)
    return made
