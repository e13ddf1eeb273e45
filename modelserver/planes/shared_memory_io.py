"""Requests with tensors outside their messages: regions become inputs, and outputs are written to regions, or become
classes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any, Final, TypeGuard

import numpy as np
from msgspec.structs import replace

from modelserver.core.datatype import Datatype
from modelserver.core.large_buffers import scratch
from modelserver.core.long_work import Result, Slices, finish, long_work
from modelserver.core.request import InFlightRequest, RegionInput, RegionSlice, Transfer
from modelserver.core.response import InferResponse, RelayStream
from modelserver.core.tensor import Buffer, Tensor, bytes_element_slices, tensor_from_bytes, tensor_to_bytes
from modelserver.errors import InternalError, InvalidArgumentError, ServerError
from modelserver.execution.model import Model
from modelserver.planes.shared_memory import AnyRegion, CudaRegion, SharedMemory, too_small
from modelserver.platform.cuda import DeviceArray

# Of one row: more would block the event loop.
_MAX_ELEMENTS = 1_000_000
_UNORDERED = (Datatype.BOOL, Datatype.BYTES)


def classify(tensor: Tensor, count: int, labels: Sequence[str], *, is_batched: bool) -> Tensor:
    """The `count` highest elements of each row (of all, without batching), the highest first.

    Of equal elements the lower index comes first; NaN ranks lowest. `labels` are by index, and may be fewer than the
    elements. Raises InvalidArgumentError for a datatype without an order, or too many elements.
    """
    if tensor.datatype in _UNORDERED:
        raise InvalidArgumentError(
            f"class result not available for output due to unsupported type '{tensor.datatype.value}', which output "
            f"'{tensor.name}' has"
        )
    data = _as_numbers(tensor)
    rows = data.reshape(data.shape[0], -1) if is_batched and data.shape[0] else data.reshape(1, -1)
    num_elements = rows.shape[1]
    if num_elements > _MAX_ELEMENTS:
        raise InvalidArgumentError(
            f"classification output tensor too large: output '{tensor.name}' has {num_elements} elements, at most "
            f"{_MAX_ELEMENTS} are possible"
        )
    count = min(count, num_elements)
    is_float = data.dtype.kind == "f"
    texts = np.empty((rows.shape[0], count), dtype=object)
    for row, values in enumerate(rows):
        for place, index in enumerate(_highest(values, count)):
            texts[row, place] = _text(values[index], index, labels, is_float=is_float)
    return Tensor(tensor.name, Datatype.BYTES, texts if is_batched else texts.reshape(count))


def _as_numbers(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.datatype is Datatype.BF16:
        return (tensor.data.astype(np.uint32) << 16).view(np.float32)
    return tensor.data


def _highest(values: np.ndarray[Any, Any], count: int) -> list[int]:
    """Indices of the highest values, in order."""
    if count == 0:
        return []
    ordered = np.where(np.isnan(values), -np.inf, values) if values.dtype.kind == "f" else values
    if count < len(ordered):
        # Sorting all of a large output to find a few would take many times longer.
        limit = np.partition(ordered, len(ordered) - count)[len(ordered) - count]
        candidates = np.flatnonzero(ordered >= limit)
    else:
        candidates = np.arange(len(ordered))
    # A stable sort of the reversed candidates, read backwards, leaves equal ones in their order.
    backwards = candidates[::-1]
    best = backwards[np.argsort(ordered[backwards], kind="stable")][::-1]
    return best[:count].tolist()  # type: ignore[no-any-return]


def _text(value: Any, index: int, labels: Sequence[str], *, is_float: bool) -> bytes:
    number = f"{value:f}" if is_float else str(value)
    label = labels[index] if index < len(labels) else ""
    return (f"{number}:{index}:{label}" if label else f"{number}:{index}").encode()


logger = logging.getLogger(__name__)

# Bytes that are split, copied or written on the event loop.
_MAX_BYTES_ON_LOOP: Final = 128 * 1024
# Classes of an output that are found on the event loop.
_MAX_CLASSES_ON_LOOP: Final = 1024
# Bytes that are copied before other threads get a turn.
_COPIED_BYTES: Final = 256 * 1024
# Every datatype's elements may begin there.
_BOUNDARY: Final = 8


def resolve(request: InFlightRequest, transfer: Transfer, memory: SharedMemory, gpu: int | None) -> Sequence[AnyRegion]:
    """Add the request's inputs from regions; returns all regions that it uses.

    Those of `gpu`, on which the model computes, are used in place.

    Raises NotFoundError for an unknown region, InvalidArgumentError for a slice that is outside its region or not of
    its tensor's size.
    """
    regions = []
    for item in transfer.inputs:
        region = memory.find(item.place.region)
        request.inputs[item.name] = _input(request.model_name, item, region)
        regions.append(region)
    targets: dict[str, DeviceArray] = {}
    for name, place in transfer.placed.items():
        region = memory.find(place.region)
        region.check(place.offset, place.num_bytes)
        regions.append(region)
        if gpu is not None and _is_used_there(region, place, gpu) and name not in transfer.class_counts:
            targets[name] = region.array(place.offset, np.dtype(np.uint8), (place.num_bytes,))
    request.targets = targets or None
    return regions


def _is_used_there(region: AnyRegion, place: RegionSlice, gpu: int) -> TypeGuard[CudaRegion]:
    """Whether a model on `gpu` can use the bytes where they lie."""
    if not isinstance(region, CudaRegion) or region.status.device_id != gpu:
        return False
    return place.num_bytes > 0 and region.is_usable(place.offset)


def long_inputs(model: Model, transfer: Transfer, memory: SharedMemory, gpu: int | None) -> tuple[RegionInput, ...]:
    """The inputs in regions that would block the event loop: BYTES to split, numbers to copy to a boundary, and those
    on a GPU that a model on `gpu` cannot use where they lie."""
    return tuple(
        item
        for item in transfer.inputs
        if (memory.num_cuda_regions and memory.is_on_device(item.place.region) and _is_moved(model, item, memory, gpu))
        or (item.place.num_bytes > _MAX_BYTES_ON_LOOP and _is_copied(item))
    )


def _is_moved(model: Model, item: RegionInput, memory: SharedMemory, gpu: int | None) -> bool:
    """Whether an input on a GPU goes by the host."""
    if gpu is None or not _is_numbers(model, item):
        return True
    return not _is_used_there(memory.find(item.place.region), item.place, gpu)


def _is_numbers(model: Model, item: RegionInput) -> bool:
    """Whether only the model's library looks at the elements: those of BYTES and of shape tensors are read here."""
    spec = model.signature.inputs.get(item.name)
    return item.datatype.itemsize is not None and spec is not None and not spec.is_shape


def _is_copied(item: RegionInput) -> bool:
    """Whether the tensor is certainly or perhaps a copy of the region's memory, and not a view."""
    itemsize = item.datatype.itemsize
    return itemsize is None or item.place.offset % _BOUNDARY != 0


def region_slices(
    model_name: str, items: Sequence[RegionInput], regions: Sequence[AnyRegion]
) -> Slices[dict[str, Tensor]]:
    """The tensors of inputs in regions, in slices. Raises InvalidArgumentError as `resolve` does."""
    inputs: dict[str, Tensor] = {}
    for item, region in zip(items, regions, strict=True):
        data = _read(model_name, item, region)
        if item.datatype.itemsize is None:
            elements = yield from bytes_element_slices(item.name, item.shape, data)
            inputs[item.name] = Tensor(item.name, item.datatype, elements)
        elif region.is_on_device:  # a copy already
            yield
            inputs[item.name] = tensor_from_bytes(item.name, item.datatype, item.shape, data)
        else:
            copy = scratch(len(data))
            yield from _copy(copy, data)
            inputs[item.name] = tensor_from_bytes(item.name, item.datatype, item.shape, copy)
        if not region.is_whole:
            region.check_whole()
    return inputs


def _copy(target: memoryview, data: Buffer) -> Slices[None]:
    """Copy in slices. No thread stops the others while the kernel finds memory for a page."""
    source = memoryview(data).cast("B")
    for start in range(0, len(source), _COPIED_BYTES):
        target[start : start + _COPIED_BYTES] = source[start : start + _COPIED_BYTES]
        yield


def _read(model_name: str, item: RegionInput, region: AnyRegion) -> memoryview:
    data = region.read(item.place.offset, item.place.num_bytes)
    _check_size(model_name, item)
    return data


def _check_size(model_name: str, item: RegionInput) -> None:
    place, itemsize = item.place, item.datatype.itemsize
    if itemsize is not None and place.num_bytes != prod(item.shape) * itemsize:
        raise InvalidArgumentError(
            f"input byte size mismatch for input '{item.name}' for model '{model_name}'. "
            f"Expected {prod(item.shape) * itemsize}, got {place.num_bytes}"
        )


def _input(model_name: str, item: RegionInput, region: AnyRegion) -> Tensor:
    if isinstance(region, CudaRegion):  # used where it lies, or it would have been read before
        _check_size(model_name, item)
        data: Any = region.array(item.place.offset, item.datatype.numpy, item.shape)
        return Tensor(item.name, item.datatype, data)
    tensor = tensor_from_bytes(item.name, item.datatype, item.shape, _read(model_name, item, region))
    if not tensor.data.flags.aligned:
        tensor.data = tensor.data.copy()
    return tensor


class TransferStream(RelayStream):
    """Writes outputs into their regions and ranks classes, before a response goes to its reader.

    Uses the regions from construction to the last response, or `release`.
    """

    __slots__ = ("_memory", "_model", "_regions", "_transfer", "_waiting")

    def __init__(
        self,
        request: InFlightRequest,
        transfer: Transfer,
        model: Model,
        regions: Sequence[AnyRegion],
        memory: SharedMemory,
    ) -> None:
        super().__init__(request.stream)
        self._transfer = transfer
        self._model = model
        self._regions = regions
        self._memory = memory
        # While a response is written beside the event loop: the later ones.
        self._waiting: deque[InferResponse] | None = None
        memory.acquire(regions)

    def deliver(self, response: InferResponse) -> None:
        """A response whose outputs take long is written beside the event loop; those behind it wait for it."""
        if self.is_finished:
            return
        if self._waiting is None and not self._is_long(response):
            super().deliver(response)
            return
        self.is_finished = response.is_final
        if self._waiting is not None:
            self._waiting.append(response)
        else:
            self._waiting = deque()
            self._start(response)

    def _start(self, response: InferResponse) -> None:
        long_work().start(self._passing(response), self._take)

    def _take(self, passed: Result[InferResponse]) -> None:
        assert self._waiting is not None, "it is set while a response is written"
        self._reader.deliver(self._ended(passed()))
        if self._waiting:
            self._start(self._waiting.popleft())
        else:
            self._waiting = None

    def _is_long(self, response: InferResponse) -> bool:
        transfer = self._transfer
        for tensor in response.outputs or ():
            if _is_in_place(tensor):
                continue
            place = transfer.placed.get(tensor.name)
            if place is not None and self._region(place.region).is_on_device:
                return True
            is_moved = place is not None or tensor.name in transfer.class_counts
            size = tensor.data.nbytes if tensor.datatype.itemsize is not None else _num_bytes(tensor)
            if size > _MAX_BYTES_ON_LOOP and (is_moved or self._is_in_region(tensor)):
                return True
            if transfer.class_counts.get(tensor.name, 0) > _MAX_CLASSES_ON_LOOP:
                return True
        return False

    def pass_on(self, response: InferResponse) -> InferResponse:
        return self._ended(finish(self._passing(response)))

    def _passing(self, response: InferResponse) -> Slices[InferResponse]:
        """As `pass_on`, in slices."""
        try:
            if response.error is None and response.outputs:
                outputs = list(response.outputs)
                for place, tensor in enumerate(response.outputs):
                    outputs[place] = yield from self._delivered(tensor)
                # A new response: others may share this one (a cache, requests that wait for the same answer).
                response = replace(response, outputs=outputs)
            for region in self._regions:
                region.check_whole()  # else the model may have read zeros
        except ServerError as error:
            response = InferResponse(error=error, is_final=response.is_final)
        except Exception as error:
            logger.exception("outputs could not be delivered to a client")
            text = f"outputs could not be delivered: {type(error).__name__}; the server's log has the details"
            response = InferResponse(error=InternalError(text), is_final=response.is_final)
        yield
        return response

    def _ended(self, response: InferResponse) -> InferResponse:
        if response.is_final:
            self.release()
        return response

    def release(self) -> None:
        """The request has ended, or was not accepted. Safe to repeat."""
        regions, self._regions = self._regions, ()
        self._memory.release(regions)

    def _delivered(self, tensor: Tensor) -> Slices[Tensor]:
        """The output as the message has it: itself, its placeholder, or its classes."""
        transfer, model = self._transfer, self._model
        if _is_in_place(tensor):
            return placeholder(tensor)
        place = transfer.placed.get(tensor.name)
        if place is not None:
            data = memoryview(tensor_to_bytes(tensor)).cast("B")
            if len(data) > place.num_bytes:
                raise too_small(tensor.name, place.num_bytes, len(data))
            region = self._region(place.region)
            step = max(1, len(data)) if region.is_on_device else _COPIED_BYTES
            for start in range(0, len(data), step):
                region.write(place.offset + start, data[start : start + _COPIED_BYTES])
                yield
            return placeholder(tensor)
        count = transfer.class_counts.get(tensor.name)
        if count is None:
            if not self._is_in_region(tensor):
                return tensor
            # The input itself: after this check its client must not be able to remove it.
            source = np.ascontiguousarray(tensor.data)
            copy = scratch(source.nbytes)
            yield from _copy(copy, source.reshape(-1).view(np.uint8).data)
            return Tensor(tensor.name, tensor.datatype, np.frombuffer(copy, source.dtype).reshape(source.shape))
        is_batched = model.config.max_batch_size > 0
        return classify(tensor, count, model.labels.get(tensor.name, ()), is_batched=is_batched)

    def _is_in_region(self, tensor: Tensor) -> bool:
        return any(region.holds(tensor.data) for region in self._regions)

    def _region(self, name: str) -> AnyRegion:
        return next(region for region in self._regions if region.status.name == name)


def _is_in_place(tensor: Tensor) -> bool:
    """Whether the model has written the output to its region."""
    data: Any = tensor.data
    return isinstance(data, DeviceArray)


def _num_bytes(tensor: Tensor) -> int:
    """About how many bytes the elements of a BYTES output have."""
    if tensor.data.size > _MAX_BYTES_ON_LOOP // 4:
        return 4 * int(tensor.data.size)
    return sum(map(len, tensor.data.reshape(-1).tolist()))


def placeholder(tensor: Tensor) -> Tensor:
    """The placeholder of an output that is elsewhere: its name, datatype and shape, and no memory."""
    data = np.broadcast_to(np.zeros((), tensor.datatype.numpy), tensor.shape)
    return Tensor(tensor.name, tensor.datatype, data)
