"""One placement of an engine: a stream, and an execution context for each of its profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelserver.backend import (
    Array,
    DeviceArray,
    InvalidArgumentError,
    Measurement,
    ModelConfig,
    Reservation,
    TensorInstance,
    UnavailableError,
    device_loss,
    device_memory,
)

from .engine import LoadedEngine
from .engine_info import IoTensor, Shape
from .execution import Execution, Streams, as_values, new_context
from .graphs import Graphs
from .instance_settings import InstanceSettings
from .profile_choice import choose_profile, smallest_batch
from .runtime_cache import RuntimeCache

# The device memory that the contexts of an instance take beside the engine's weights: scratch space for its layers.
# It is reserved from the device's budget before the contexts are made, so that a model that does not fit fails at load.


_PER_PROFILE = "ON_PROFILE_CHANGE"


def scratch_bytes(loaded: LoadedEngine, settings: InstanceSettings) -> int:
    """The memory of a context of each profile, and the memory that all CUDA graphs of the instance share."""
    engine: Any = loaded.engine
    largest = int(engine.device_memory_size_v2)
    if settings.allocation_strategy == _PER_PROFILE:
        contexts = sum(int(engine.get_device_memory_size_for_profile_v2(profile)) for profile in settings.profiles)
    else:
        contexts = largest * len(settings.profiles)
    has_graphs = bool(settings.graphs) and not loaded.captures_by_itself
    return contexts + (largest if has_graphs else 0)


def reserve_scratch(loaded: LoadedEngine, settings: InstanceSettings, *, name: str) -> Reservation:
    """Raises UnavailableError when the device has not that much left."""
    num_bytes = scratch_bytes(loaded, settings)
    return device_memory(loaded.device.name).reserve(
        num_bytes,
        available=loaded.device.free_bytes(),
        least=num_bytes,
        what=f"instance '{name}' on {loaded.device.name}",
        purpose=" for its execution contexts",
        advice="list fewer profiles, fewer instances or no CUDA graphs, build the engine with smaller profiles, or "
        "unload a model",
    )


class TensorRTInstance(TensorInstance):
    """Contexts on an engine that others share."""

    def __init__(
        self, loaded: LoadedEngine, config: ModelConfig, settings: InstanceSettings, cache: RuntimeCache, *, name: str
    ) -> None:
        self._loaded = loaded
        self.gpu = loaded.device.device_id
        self._batches = config.max_batch_size > 0
        self._settings = settings
        # Where requests of different shapes share a batch, the first dimensions are not its rows.
        is_ragged = bool(config.batch_input) or any(spec.allow_ragged_batch for spec in config.input)
        self._has_rows = self._batches and not is_ragged
        self._smallest_batch = smallest_batch(loaded.info, settings.profiles) if self._has_rows else 0
        self._graphs = Graphs()
        self._executions: dict[int, Execution] = {}
        self._scratch = reserve_scratch(loaded, settings, name=name)
        try:
            self._open(cache, name)
        except BaseException:
            self._scratch.release()
            raise
        self._scratch.settle()

    def _open(self, cache: RuntimeCache, name: str) -> None:
        """Make streams, contexts and graphs."""
        loaded, settings, device = self._loaded, self._settings, self._loaded.device
        with device.activate():
            compute = device.new_stream(is_urgent=settings.is_urgent)
            self._streams = Streams(
                compute,
                device.new_stream(is_urgent=settings.is_urgent) if settings.has_copy_stream else compute,
                device.new_event(busy_waits=settings.busy_waits),
                settings.is_input_pinned,
                settings.is_output_pinned,
            )
            runtime_cache = cache.open(loaded)
            self._executions = {
                profile: Execution(
                    loaded,
                    profile,
                    self._streams,
                    new_context(loaded, settings.allocation_strategy, settings.captures_graphs, runtime_cache),
                )
                for profile in settings.profiles
            }
            if not loaded.captures_by_itself:
                self._graphs.capture(loaded, settings.graphs, settings.profiles, self._streams, name)

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        found: Mapping[str, Any] = self.run_on_device(inputs, {})
        return found

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], targets: Mapping[str, DeviceArray]
    ) -> Mapping[str, Array | DeviceArray]:
        info = self._loaded.info
        tensors = info.inputs
        rows = self._rows(inputs)
        feeds = {tensor.name: self._feed(tensor, inputs, rows) for tensor in tensors}
        if rows < self._smallest_batch:
            feeds = {name: self._filled(name, array, self._smallest_batch) for name, array in feeds.items()}
            targets = {}  # they have no room for the rows that are filled in
        try:
            outputs = self._outputs(feeds, targets)
        except self._loaded.device.torch.cuda.OutOfMemoryError as error:
            raise UnavailableError(
                "the GPU has too little free memory for this batch: send fewer rows at once, or unload a model: "
                f"{error}"
            ) from error.with_traceback(None)  # whose frames keep memory
        return {tensor.name: self._shown(tensor, outputs[tensor.name], rows) for tensor in info.outputs}

    def _outputs(
        self, feeds: Mapping[str, Array | DeviceArray], targets: Mapping[str, DeviceArray]
    ) -> Mapping[str, Array | DeviceArray]:
        with self._loaded.device.activate():
            found = self._graphs.find(feeds, batches=self._has_rows)
            if found is not None:
                return found[1].replay(feeds, self._streams, self._loaded.device.torch)
            return self._execution(feeds).run(feeds, targets)

    def is_ready(self) -> bool:
        """Not on a GPU that this process has lost."""
        return not device_loss()

    def measure(self) -> Sequence[Measurement]:
        if not self._graphs.is_wanted:
            return ()
        return (
            Measurement(
                "modelserver_tensorrt_graph_replays",
                "counter",
                "Batches that were executed by replaying a CUDA graph",
                self._graphs.num_replays,
            ),
            Measurement(
                "modelserver_tensorrt_graph_misses",
                "counter",
                "Batches for whose shapes there was no CUDA graph",
                self._graphs.num_misses,
            ),
        )

    def close(self) -> None:
        with self._loaded.device.activate():
            self._streams.compute.synchronize()
            self._graphs.close()
            for execution in self._executions.values():
                execution.close()
            self._executions.clear()
        self._scratch.release()

    def _rows(self, inputs: Mapping[str, Array | DeviceArray]) -> int:
        if not self._batches:
            return 0
        return next(
            (
                len(inputs[tensor.name])
                for tensor in self._loaded.info.inputs
                if not tensor.is_shape_tensor and tensor.name in inputs
            ),
            1,
        )

    def _feed(self, tensor: IoTensor, inputs: Mapping[str, Array | DeviceArray], rows: int) -> Array | DeviceArray:
        """The array for an engine's input: of the engine's rank, and shape tensors with the batch in front."""
        array = inputs.get(tensor.name)
        if array is None:
            raise InvalidArgumentError(f"input '{tensor.name}' is missing: a TensorRT engine has no optional inputs")
        if tensor.is_shape_tensor:
            values = np.asarray(array).reshape(-1)
            if self._batches:
                values = np.concatenate([np.array([rows], dtype=values.dtype), values])
            return values.reshape(()) if not tensor.dims else values
        # A scalar has no dimension in the engine, and one element in the config.
        return array.reshape(()) if not tensor.dims and array.size == 1 else array

    def _filled(self, name: str, given: Array | DeviceArray, rows: int) -> Array:
        """`array` with rows of zeros up to `rows`; of a shape tensor, with that many rows as its first value."""
        array = np.asarray(given)
        if any(tensor.name == name and tensor.is_shape_tensor for tensor in self._loaded.info.inputs):
            changed = array.copy()
            changed[0] = rows
            return changed
        filled: Array = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)
        filled[: len(array)] = array
        return filled

    def _execution(self, feeds: Mapping[str, Array | DeviceArray]) -> Execution:
        shapes: dict[str, Shape] = {}
        values: dict[str, Shape] = {}
        for tensor in self._loaded.info.inputs:
            if tensor.is_shape_tensor:
                values[tensor.name] = as_values(np.asarray(feeds[tensor.name]))
            else:
                shapes[tensor.name] = feeds[tensor.name].shape
        return self._executions[choose_profile(self._loaded.info, self._settings.profiles, shapes, values)]

    def _shown(self, tensor: IoTensor, array: Array | DeviceArray, rows: int) -> Array | DeviceArray:
        """An output as the config describes it: without the rows that were filled up."""
        if not self._batches:
            return array.reshape(1) if not array.ndim else array
        if not self._has_rows:
            return array
        if tensor.is_shape_tensor:  # the same for every row, without the batch that stands in front
            return np.tile(np.asarray(array).reshape(-1)[1:], (rows, 1))
        if isinstance(array, DeviceArray):
            return array.beginning(array.dtype, (rows, *array.shape[1:]))
        return array[:rows] if len(array) > rows else array
