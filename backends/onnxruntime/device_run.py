"""Runs of a session on a device by IOBinding: staged inputs, and captured CUDA graphs over fixed addresses.

The device is a parameter, so that the tests run this on a CPU; what a CPU cannot show is written against ONNX Runtime's
documentation of its CUDA provider ("Using CUDA Graphs") and is checked by `tests/gpu`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from modelserver.backend import Array, DeviceArray

from .pinned import Staging
from .signature import datatype_of

logger = logging.getLogger(__name__)

# Each captured graph keeps device memory, so at most this many shapes have one.
MAX_GRAPHS = 16
_GRAPH_ID = "gpu_graph_id"
_NO_GRAPH = "-1"


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
        binding, device, targets = self._binding, self._device, targets or {}
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
    if target is None or datatype is None or value.tensor_size_in_bytes() > target.nbytes:
        array: Array = value.numpy()
        return array
    placed = target.beginning(datatype.numpy, tuple(value.shape()))
    placed.fill(value.data_ptr())
    return placed


class _FixedRun:
    """Inputs and outputs of one set of shapes, at addresses that stay."""

    def __init__(self, session: Any, feeds: Mapping[str, Array], results: Mapping[str, Array], device: tuple[str, int]):
        self._session = session
        self._inputs = {
            name: onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, *device)
            for name, array in feeds.items()
        }
        self._outputs = {
            name: onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, *device)
            for name, array in results.items()
        }
        self.has_run = False
        self._binding = session.io_binding()
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(self, feeds: Mapping[str, Array], options: Any) -> list[Array]:
        for name, array in feeds.items():
            self._inputs[name].update_inplace(np.ascontiguousarray(array))
        self._session.run_with_iobinding(self._binding, options)
        self.has_run = True
        # On a device `numpy` copies; on a CPU it shows the buffer, which the next run overwrites.
        return [np.array(value.numpy()) for value in self._outputs.values()]


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
        new_options: Callable[[], Any] = onnxruntime.RunOptions,
    ) -> None:
        """`new_options` makes options of runs. Each graph has some of its own, as its number is in them and cannot be
        changed: ONNX Runtime prints a warning each time that it is."""
        self._session = session
        self._output_names = output_names
        self._device = device
        self._has_ids = has_ids  # only the CUDA provider knows the ids of graphs
        self._new_options = new_options
        self._options: dict[str, Any] = {}
        self._is_interrupted = False
        self._plain = BoundRun(session, output_names, None)
        self.gpu = None  # its inputs and outputs have addresses of their own
        self._fixed: dict[tuple[Any, ...], tuple[int, _FixedRun]] = {}
        self._can_capture = True

    def interrupt(self, is_wanted: bool) -> None:
        """End runs, or let them go on again; from any thread."""
        self._is_interrupted = is_wanted
        for options in list(self._options.values()):
            options.terminate = is_wanted

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs, in arrays of their own."""
        key = tuple((name, array.shape) for name, array in feeds.items())
        known = self._fixed.get(key)
        if known is not None:
            number, fixed = known
            try:
                return fixed.run(feeds, self._named(str(number)))
            except (native.Fail, native.RuntimeException, native.EPFail) as error:
                if self._is_interrupted or fixed.has_run:
                    raise
                logger.warning(
                    "batches of an ONNX model are run without CUDA graphs, as one cannot be captured: %s", error
                )
                self._can_capture = False
                self._fixed.clear()
        results: list[Any] = self._plain.run(feeds, self._named(_NO_GRAPH))
        if self._can_capture and len(self._fixed) < MAX_GRAPHS:
            named = dict(zip(self._output_names, results, strict=True))
            self._fixed[key] = (len(self._fixed) + 1, _FixedRun(self._session, feeds, named, self._device))
        return results

    def _named(self, number: str) -> Any:
        """The options of runs of a graph."""
        options = self._options.get(number)
        if options is None:
            options = self._new_options()
            if self._has_ids:
                options.add_run_config_entry(_GRAPH_ID, number)
            options.terminate = self._is_interrupted
            self._options[number] = options
        return options
