"""Similar requests: what was parsed and checked in one request is reused for the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest, RequestForm
from modelserver.core.response import ResponseStream
from modelserver.core.tensor import Buffer, Tensor

# Smaller tensors are copied out of their message: cheaper than a view of it, and aligned.
VIEW_BYTES = 4096


class TensorPlace:
    """A tensor whose bytes begin at `start`, relative to the first tensor's. Never of BYTES: their size varies."""

    __slots__ = ("datatype", "dtype", "end", "is_small", "name", "shape", "start")

    def __init__(self, name: str, datatype: Datatype, shape: tuple[int, ...], start: int, end: int) -> None:
        self.name = name
        self.datatype = datatype
        self.dtype = datatype.numpy
        self.shape = shape
        self.start = start
        self.end = end
        self.is_small = end - start < VIEW_BYTES


class RequestTemplate(RequestForm):
    """Requests that differ in their ids and in the contents of their tensors only.

    Made from a request that was decoded and found valid. `settings` are the fields of `InFlightRequest` that its
    parameters have set; `data_len` is the number of bytes from the first tensor to the message's end.
    """

    __slots__ = ("_lone", "data_len", "outputs", "places", "settings")

    def __init__(
        self,
        places: Sequence[TensorPlace],
        data_len: int,
        outputs: tuple[str, ...] | None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.places = tuple(places)
        place = self.places[0] if len(self.places) == 1 else None
        is_rest = place is not None and place.is_small and (place.start, place.end) == (0, data_len)
        self._lone = place if is_rest else None  # a small tensor that is all that follows
        self.data_len = data_len
        self.outputs = outputs
        self.settings = settings

    def fill(
        self,
        model_name: str,
        version: int | None,
        request_id: str,
        message: Buffer,
        offset: int,
        stream: ResponseStream,
    ) -> InFlightRequest:
        """The request whose first tensor is at `offset` in `message`; large tensors are views of it."""
        place = self._lone
        if place is not None and type(message) is bytes:
            data = np.ndarray(place.shape, place.dtype, message[offset:])
            inputs = {place.name: Tensor(place.name, place.datatype, data)}
        else:
            inputs = self._inputs(message, offset)
        request = InFlightRequest(
            model_name=model_name,
            version=version,
            inputs=inputs,
            id=request_id,
            outputs=self.outputs,
            form=self,
            stream=stream,
        )
        if self.settings is not None:
            apply_settings(request, self.settings)
        return request

    def _inputs(self, message: Buffer, offset: int) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        for place in self.places:
            start, end = offset + place.start, offset + place.end
            if not place.is_small:
                data = np.ndarray(place.shape, place.dtype, memoryview(message)[start:end])
                # A view may start at any byte; kernels expect aligned elements.
                if not data.flags.aligned:
                    data = data.copy()
            elif type(message) is bytes:
                data = np.ndarray(place.shape, place.dtype, message[start:end])
            else:
                data = np.ndarray(place.shape, place.dtype, bytes(message[start:end]))
            inputs[place.name] = Tensor(place.name, place.datatype, data)
        return inputs


def settings_of(request: InFlightRequest) -> Mapping[str, Any] | None:
    """The settings that the parameters of a decoded request made; None if they made none."""
    return {name: value for name in _SETTINGS if (value := getattr(request, name))} or None


def apply_settings(request: InFlightRequest, settings: Mapping[str, Any]) -> None:
    """Apply the settings that `settings_of` found on a similar request."""
    for name, value in settings.items():
        setattr(request, name, value)


_SETTINGS = ("parameters", "priority", "timeout_us", "sequence_id", "sequence_start", "sequence_end", "transfer")
