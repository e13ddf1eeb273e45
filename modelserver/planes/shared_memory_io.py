"""Requests with tensors outside their messages: regions become inputs, and outputs are written to regions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from modelserver.core.relay import RelayStream
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor, tensor_from_bytes, tensor_to_bytes
from modelserver.core.transfer import RegionInput, Transfer
from modelserver.errors import InternalError, InvalidArgumentError, ServerError
from modelserver.planes.classification import classify
from modelserver.planes.shared_memory import Region, SharedMemory, too_small

if TYPE_CHECKING:
    from modelserver.execution.model import Model

logger = logging.getLogger(__name__)


def resolve(request: InFlightRequest, transfer: Transfer, memory: SharedMemory) -> Sequence[Region]:
    """Add the request's inputs from regions; returns all regions that it uses.

    Raises NotFoundError for an unknown region, InvalidArgumentError for a slice that is outside its region or not of
    its tensor's size.
    """
    regions = []
    for item in transfer.inputs:
        region = memory.find(item.place.region)
        request.inputs[item.name] = _input(request.model_name, item, region)
        regions.append(region)
    for place in transfer.placed.values():
        region = memory.find(place.region)
        region.check(place.offset, place.num_bytes)
        regions.append(region)
    return regions


def _input(model_name: str, item: RegionInput, region: Region) -> Tensor:
    place = item.place
    itemsize = item.datatype.itemsize
    data = region.read(place.offset, place.num_bytes)
    if itemsize is not None and place.num_bytes != prod(item.shape) * itemsize:
        raise InvalidArgumentError(
            f"input byte size mismatch for input '{item.name}' for model '{model_name}'. "
            f"Expected {prod(item.shape) * itemsize}, got {place.num_bytes}"
        )
    tensor = tensor_from_bytes(item.name, item.datatype, item.shape, data)
    if not tensor.data.flags.aligned:
        tensor.data = tensor.data.copy()
    return tensor


class TransferStream(RelayStream):
    """Writes outputs into their regions and ranks classes, before a response goes to its reader.

    Uses the regions from construction to the last response, or `release`.
    """

    __slots__ = ("_memory", "_model", "_regions", "_transfer")

    def __init__(
        self,
        request: InFlightRequest,
        transfer: Transfer,
        model: Model,
        regions: Sequence[Region],
        memory: SharedMemory,
    ) -> None:
        super().__init__(request.stream)
        self._transfer = transfer
        self._model = model
        self._regions = regions
        self._memory = memory
        memory.acquire(regions)

    def pass_on(self, response: InferResponse) -> InferResponse:
        try:
            if response.error is None and response.outputs:
                # A new response: others may share this one (a cache, requests that wait for the same answer).
                response = replace(response, outputs=[self._delivered(tensor) for tensor in response.outputs])
            for region in self._regions:
                region.check_whole()  # else the model may have read zeros
        except ServerError as error:
            response = InferResponse(error=error, is_final=response.is_final)
        except Exception as error:
            logger.exception("outputs could not be delivered to a client")
            text = f"outputs could not be delivered: {type(error).__name__}; the server's log has the details"
            response = InferResponse(error=InternalError(text), is_final=response.is_final)
        if response.is_final:
            self.release()
        return response

    def release(self) -> None:
        """The request has ended, or was not accepted. Safe to repeat."""
        regions, self._regions = self._regions, ()
        self._memory.release(regions)

    def _delivered(self, tensor: Tensor) -> Tensor:
        """The output as the message has it: itself, its placeholder, or its classes."""
        transfer, model = self._transfer, self._model
        place = transfer.placed.get(tensor.name)
        if place is not None:
            data = tensor_to_bytes(tensor)
            if len(data) > place.num_bytes:
                raise too_small(tensor.name, place.num_bytes, len(data))
            self._region(place.region).write(place.offset, data)
            return placeholder(tensor)
        count = transfer.class_counts.get(tensor.name)
        if count is None:
            if any(region.holds(tensor.data) for region in self._regions):
                # The input itself: after this check its client must not be able to remove it.
                return Tensor(tensor.name, tensor.datatype, tensor.data.copy())
            return tensor
        is_batched = model.config.max_batch_size > 0
        return classify(tensor, count, model.labels.get(tensor.name, ()), is_batched=is_batched)

    def _region(self, name: str) -> Region:
        return next(region for region in self._regions if region.status.name == name)


def placeholder(tensor: Tensor) -> Tensor:
    """The placeholder of an output that is elsewhere: its name, datatype and shape, and no memory."""
    data = np.broadcast_to(np.zeros((), tensor.datatype.numpy), tensor.shape)
    return Tensor(tensor.name, tensor.datatype, data)
