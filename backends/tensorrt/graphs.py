"""CUDA graphs of TensorRT: each captured once, with buffers of its own, and replayed for batches of its shape.

TensorRT for RTX captures by itself and has none of these.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelserver.backend import Array, DeviceArray, InternalError, InvalidArgumentError, capture_turn

from .engine import LoadedEngine, require_context
from .execution import Execution, Output, Streams, itemsize
from .graph_rules import GraphShape, find_graph
from .profile_choice import choose_profile
from .runtime import logger_of

log = logging.getLogger(__name__)


class CapturedGraph:
    """One graph, its context, and the memory that it reads and writes."""

    def __init__(self, execution: Execution, graph: Any, buffers: Mapping[str, Any], outputs: list[Output]) -> None:
        self._execution = execution
        self._graph = graph
        self._buffers = buffers
        self._outputs = outputs

    def replay(
        self, inputs: Mapping[str, Array | DeviceArray], streams: Streams, torch: Any
    ) -> dict[str, Array | DeviceArray]:
        """The outputs of a batch; of one that is smaller, those of all rows of the graph."""
        with torch.cuda.stream(streams.compute), streams.drained_on_error():
            staged = [self._execution.copy_in(array, self._buffers[name]) for name, array in inputs.items()]
            self._graph.replay()
            arrays = self._execution.fetch(self._outputs)
        del staged
        return arrays

    def close(self) -> None:
        self._graph = None
        self._execution.close()


class Graphs:
    """All graphs of one instance, which share the memory that TensorRT works in: one runs at a time."""

    def __init__(self) -> None:
        self._captured: dict[tuple[object, ...], CapturedGraph] = {}
        self._shapes: list[GraphShape] = []
        self._scratch: Any = None
        self.num_replays = 0
        self.num_misses = 0

    def capture(
        self, loaded: LoadedEngine, wanted: Sequence[GraphShape], profiles: Sequence[int], streams: Streams, name: str
    ) -> None:
        """Capture what can be; the rest is a warning, and its batches are executed without a graph."""
        for shape in wanted:
            try:
                self._captured[shape.key] = self._capture(loaded, shape, profiles, streams)
                self._shapes.append(shape)
            except (InternalError, InvalidArgumentError, RuntimeError) as error:
                log.warning("instance '%s': no CUDA graph for the shapes %s: %s", name, dict(shape.shapes), error)

    def find(
        self, inputs: Mapping[str, Array | DeviceArray], *, batches: bool
    ) -> tuple[GraphShape, CapturedGraph] | None:
        """The graph for a batch, if there is one; counts either way."""
        if not self._shapes:
            return None
        shape = find_graph(self._shapes, {name: array.shape for name, array in inputs.items()}, batches=batches)
        if shape is None:
            self.num_misses += 1
            return None
        self.num_replays += 1
        return shape, self._captured[shape.key]

    @property
    def is_wanted(self) -> bool:
        return bool(self._shapes)

    def close(self) -> None:
        for captured in self._captured.values():
            captured.close()
        self._captured.clear()
        self._shapes.clear()
        self._scratch = None

    def _capture(
        self, loaded: LoadedEngine, shape: GraphShape, profiles: Sequence[int], streams: Streams
    ) -> CapturedGraph:
        trt, device = loaded.trt, loaded.device
        logger = logger_of(trt)
        mark = logger.mark()
        profile = choose_profile(loaded.info, profiles, shape.shapes, {})
        context = loaded.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        require_context(context, logger, mark, "no context for a CUDA graph")
        with device.torch.cuda.stream(streams.compute):
            size = int(loaded.engine.device_memory_size_v2)
            if self._scratch is None:
                self._scratch = device.empty(size)
            context.set_device_memory(self._scratch.data_ptr(), size)
            execution = Execution(loaded, profile, streams, context)
            buffers = {
                tensor.name: device.empty(int(np.prod(shape.shapes[tensor.name])) * itemsize(tensor.datatype)).zero_()
                for tensor in loaded.info.inputs
            }
            outputs = execution.bind(shape.shapes, buffers)
            # TensorRT sets itself up in the first run after a change of shapes, which must not be captured.
            execution.enqueue()
            streams.compute.synchronize()
        graph = device.torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which waits for the whole device: for all other models.
        with capture_turn(), device.torch.cuda.stream(streams.compute):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                execution.enqueue()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the error on its way says why
                    graph.capture_end()
                raise
            graph.capture_end()
        return CapturedGraph(execution, graph, buffers, outputs)
