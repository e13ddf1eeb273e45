"""Runs of a session on a device by IOBinding: staged inputs, and captured CUDA graphs over fixed addresses.

The device is a parameter, so that the tests run this on a CPU; what a CPU cannot show is written against ONNX Runtime's
documentation of its CUDA provider ("Using CUDA Graphs") and is checked by `tests/gpu`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from modelserver.backend import Array, DeviceArray, capture_turn

from .options import GRAPH_ID, NO_GRAPH
from .pinned import Staging
from .signature import datatype_of

logger = logging.getLogger(__name__)

# Each captured graph keeps device memory, so at most this many shapes have one.
MAX_GRAPHS = 16
# Names of an OrtMemoryInfo, of memory that kernels of the host read.
_HOST_MEMORY = ("Cpu", "CudaPinned")


class _Captures:
    """Lets a capture run alone among the sessions of the process.

    ONNX Runtime captures in CUDA's global mode: meanwhile an allocation or a blocking copy by any other thread fails,
    and so does the capture (CUDA Runtime API, `cudaStreamBeginCapture`). What other backends run is not kept from that.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_runs = 0
        self._is_capturing = False

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Work on a device during which nothing is captured."""
        with self._changed:
            while self._is_capturing:
                self._changed.wait()
            self._num_runs += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_runs -= 1
                self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """A run that captures: it waits for others, and later ones wait for it."""
        with self._changed:
            while self._is_capturing:
                self._changed.wait()
            self._is_capturing = True
            while self._num_runs:
                self._changed.wait()
        try:
            with capture_turn():
                yield
        finally:
            with self._changed:
                self._is_capturing = False
                self._changed.notify_all()


captures = _Captures()


def host_inputs(session: Any) -> frozenset[str] | None:
    """The inputs that the session's kernels read in memory of the host, such as shapes; None before ONNX Runtime 1.23,
    which cannot say."""
    if not hasattr(session, "get_input_memory_infos"):
        return None
    infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return frozenset(spec.name for spec, info in infos if info.name in _HOST_MEMORY)


class BoundRun:
    """Binds what lies in host memory; ONNX Runtime copies to the device and back. One instance's, one at a time."""

    def __init__(
        self, session: Any, output_names: Sequence[str], staging: Staging | None, device: tuple[str, int] | None = None
    ) -> None:
        """`device` is the one whose memory inputs and outputs may lie in, besides the host's."""
        self._session = session
        self._output_names = output_names
        self._staging = staging
        self._device = device
        self.gpu = device[1] if device is not None else None
        self._binding = session.io_binding()

    def run(
        self, feeds: Mapping[str, Array | DeviceArray], options: Any, targets: Mapping[str, DeviceArray] | None = None
    ) -> list[Array | DeviceArray]:
        """The outputs, in arrays of their own, or where their targets say if these are large enough.

        A run waits for the device at its end, so the outputs are there when they are copied to their targets.
        """
        with captures.excluded():
            return self._run(feeds, options, targets or {})

    def _run(
        self, feeds: Mapping[str, Array | DeviceArray], options: Any, targets: Mapping[str, DeviceArray]
    ) -> list[Array | DeviceArray]:
        binding, device = self._binding, self._device
        try:
            for name, array in feeds.items():
                if isinstance(array, DeviceArray):
                    assert device is not None, "the server gives them only to an instance with a GPU"
                    binding.bind_input(name, *device, array.dtype, array.shape, array.address)
                    continue
                staged = array if self._staging is None else self._staging.stage(name, array)
                # Not `bind_cpu_input`: the binding would keep the array until another one has its name.
                value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(staged))
                binding.bind_ortvalue_input(name, value)
            for name in self._output_names:
                binding.bind_output(name, *(device if device is not None and name in targets else ()))
            self._session.run_with_iobinding(binding, options)
            values = zip(self._output_names, binding.get_outputs(), strict=True)
            return [_taken(value, targets.get(name)) for name, value in values]
        finally:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()


def _taken(value: Any, target: DeviceArray | None) -> Array | DeviceArray:
    datatype = None if target is None else datatype_of(value.data_type())
    if target is not None and datatype is not None:
        placed = target.beginning(datatype.numpy, tuple(value.shape()))
        if placed.nbytes <= target.nbytes:
            placed.fill(value.data_ptr())
            return placed
    array: Array = value.numpy()
    return array


class _FixedRun:
    """Inputs and outputs of one set of shapes, at addresses that stay.

    A graph holds what its kernels have read in memory of the host, so those inputs stay as they are.
    """

    def __init__(
        self,
        session: Any,
        feeds: Mapping[str, Array | DeviceArray],
        results: Mapping[str, Array | DeviceArray],
        device: tuple[str, int],
        on_host: Collection[str],
    ) -> None:
        self._session = session
        new_value = onnxruntime.OrtValue.ortvalue_from_shape_and_type
        self._inputs = {
            name: new_value(array.shape, array.dtype, *device) for name, array in feeds.items() if name not in on_host
        }
        self._outputs = {name: new_value(array.shape, array.dtype, *device) for name, array in results.items()}
        # A value of the host is a view of its array, and an array of the client's would change.
        self._kept = {name: np.array(feeds[name]) for name in on_host if name in feeds}
        self.has_run = False
        self._binding = session.io_binding()
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, array in self._kept.items():
            self._binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        for name, value in self._outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(
        self, feeds: Mapping[str, Array | DeviceArray], options: Any, targets: Mapping[str, DeviceArray]
    ) -> list[Array | DeviceArray]:
        with captures.excluded() if self.has_run else captures.capturing():
            for name, value in self._inputs.items():
                array = feeds[name]
                if isinstance(array, DeviceArray):
                    array.copy_to(value.data_ptr())
                else:
                    value.update_inplace(np.ascontiguousarray(array))
            self._session.run_with_iobinding(self._binding, options)
            self.has_run = True
            return [_copied(value, targets.get(name)) for name, value in self._outputs.items()]


def _copied(value: Any, target: DeviceArray | None) -> Array | DeviceArray:
    taken = _taken(value, target)
    # On a device `numpy` copies; on a CPU it shows the buffer, which the next run overwrites.
    return taken if isinstance(taken, DeviceArray) else np.array(taken)


class GraphRun:
    """As `BoundRun`, with a CUDA graph for each of the first `MAX_GRAPHS` sets of input shapes.

    The first run of new shapes tells those of the outputs, the second one captures, later ones replay. A session with
    captured graphs belongs to one instance; it keeps them by threads, and those that run an instance are few. After a
    capture that failed, there are no graphs.
    """

    def __init__(
        self,
        session: Any,
        output_names: Sequence[str],
        device: tuple[str, int],
        *,
        has_ids: bool,
        on_host: Collection[str] = (),
        new_options: Callable[[], Any] = onnxruntime.RunOptions,
    ) -> None:
        """`on_host` are the inputs of `host_inputs`: their values belong to a graph, as the shapes of all do.

        `new_options` makes options of runs. Each graph has some of its own, as its number is in them and cannot be
        changed: ONNX Runtime prints a warning each time that it is.
        """
        self._session = session
        self._output_names = output_names
        self._device = device
        self._has_ids = has_ids  # only the CUDA provider knows the ids of graphs
        self._on_host = on_host
        self._new_options = new_options
        self._options: dict[str, Any] = {}
        self._is_interrupted = False
        self._plain = BoundRun(session, output_names, None, device)
        self.gpu = device[1]
        self._fixed: dict[tuple[Any, ...], tuple[int, _FixedRun]] = {}
        self._can_capture = True

    def interrupt(self, is_wanted: bool) -> None:
        """End runs, or let them go on again; from any thread."""
        self._is_interrupted = is_wanted
        for options in list(self._options.values()):
            options.terminate = is_wanted

    def run(
        self, feeds: Mapping[str, Array | DeviceArray], targets: Mapping[str, DeviceArray] | None = None
    ) -> list[Array | DeviceArray]:
        """The outputs, in arrays of their own, or where their targets say if these are large enough."""
        targets = targets or {}
        key = tuple(
            (name, array.shape, np.asarray(array).tobytes() if name in self._on_host else b"")
            for name, array in feeds.items()
        )
        known = self._fixed.get(key)
        if known is not None:
            number, fixed = known
            try:
                return fixed.run(feeds, self._named(str(number)), targets)
            except (native.Fail, native.RuntimeException, native.EPFail) as error:
                if self._is_interrupted or fixed.has_run:
                    raise
                logger.warning(
                    "batches of an ONNX model are run without CUDA graphs, as one cannot be captured: %s", error
                )
                self._can_capture = False
                self._fixed.clear()
        results = self._plain.run(feeds, self._named(NO_GRAPH), targets)
        if self._can_capture and len(self._fixed) < MAX_GRAPHS:
            named = dict(zip(self._output_names, results, strict=True))
            with captures.excluded():
                fixed = _FixedRun(self._session, feeds, named, self._device, self._on_host)
            self._fixed[key] = len(self._fixed) + 1, fixed
        return results

    def _named(self, number: str) -> Any:
        """The options of runs of a graph."""
        options = self._options.get(number)
        if options is None:
            options = self._new_options()
            if self._has_ids:
                options.add_run_config_entry(GRAPH_ID, number)
            options.terminate = self._is_interrupted
            self._options[number] = options
        return options
