"""From the body of an infer call to a request: by a template if the call is known, in full otherwise.
Or the body is the raw data of the only input.

A call that would block the event loop for more than a few milliseconds is decoded beside it in two steps: `outline`
reads everything but the elements, so that the call can be refused early, and `elements` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.long_work import Slices, finish
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ResponseStream
from modelserver.core.tensor import Buffer, Tensor
from modelserver.errors import InvalidArgumentError, ServerError
from modelserver.frontends.http.codec import OutputForm, decode_infer, element_slices, outline_infer
from modelserver.frontends.http.head import HeadReader, InferCallHead
from modelserver.frontends.http.templates import BinaryTemplates, JsonTemplates, Known, RecentCall
from modelserver.planes.data import ModelMetadata, TensorMetadata
from modelserver.protocol.limits import HttpLimits

# The slowest JSON takes 100 ms/MB; known calls, whose elements are read in C, 3.
_MAX_JSON_BYTES_ON_LOOP = 16 * 1024
_MAX_KNOWN_BYTES_ON_LOOP = 512 * 1024
# BYTES elements take up to 10 ms/MB.
_MAX_ELEMENT_BYTES_ON_LOOP = 128 * 1024


@dataclass(frozen=True, slots=True)
class Outline:
    """A call without its elements. The inputs of `request` have shapes but no content."""

    request: InFlightRequest
    form: OutputForm
    head: InferCallHead
    head_len: int


class InferDecoder:
    """Decodes infer calls within `limits`. Event loop thread only."""

    def __init__(self, limits: HttpLimits) -> None:
        self._heads = HeadReader(limits)
        self._binary = BinaryTemplates(is_on=limits.recognizes)
        self._json = JsonTemplates(is_on=limits.recognizes)

    def decode(
        self,
        name: str,
        version: int | None,
        body: Buffer,
        head_len: int | None,
        stream: ResponseStream,
        recent: RecentCall | None = None,
    ) -> Known:
        """The request, whose responses go to `stream`, and the encoding of its outputs.

        `head_len` is the size of the JSON part (None: all of the body). `recent` becomes this call if it is a known one
        with binary tensors. Tensors are views of `body`. Raises InvalidArgumentError, PayloadTooLargeError for what is
        over the limits, UnsupportedError for extensions that this server does not have.
        """
        known = self.decode_on_loop(name, version, body, head_len, stream, recent)
        if known is None:
            known = finish(self.elements(finish(self.outline(name, version, body, head_len)), body))
            known[0].stream = stream
        return known

    def decode_on_loop(
        self,
        name: str,
        version: int | None,
        body: Buffer,
        head_len: int | None,
        stream: ResponseStream,
        recent: RecentCall | None = None,
    ) -> Known | None:
        """As `decode`; None if that would block the event loop for long."""
        if head_len is None:
            if len(body) > _MAX_KNOWN_BYTES_ON_LOOP:
                return None
            text = bytes(body)
            known = self._json.find(name, version, text, stream)
        else:
            known = self._binary.find(name, version, body, head_len, stream, recent)
        if known is not None:
            return known
        if (len(body) if head_len is None else head_len) > _MAX_JSON_BYTES_ON_LOOP:
            return None
        head: InferCallHead | None = None
        try:
            if head_len is None:
                head = self._heads.read(text)
                request, form = decode_infer(name, version, body, head, len(text))
                self._json.learn(request, form, head, text)
            else:
                text = bytes(body[:head_len])
                head = self._heads.recall(text)
                if head.num_element_bytes > _MAX_ELEMENT_BYTES_ON_LOOP:
                    return None
                request, form = decode_infer(name, version, body, head, head_len)
                self._binary.learn(request, form, head, text)
        except ServerError as error:
            error.name_request(name, "" if head is None else head.id)
            raise
        request.stream = stream
        return request, form

    def outline(self, name: str, version: int | None, body: Buffer, head_len: int | None) -> Slices[Outline]:
        """A call without its elements. Raises as `decode`."""
        text = body if head_len is None else body[:head_len]
        head: InferCallHead | None = None
        try:
            if len(text) <= _MAX_JSON_BYTES_ON_LOOP:
                head = self._heads.recall(bytes(text))
            else:
                head = yield from self._heads.read_long(text)
            yield
            return Outline(*outline_infer(name, version, head), head, len(text))
        except ServerError as error:
            error.name_request(name, "" if head is None else head.id)
            raise

    def elements(self, outline: Outline, body: Buffer) -> Slices[Known]:
        """The whole call. Raises as `decode`."""
        request = outline.request
        try:
            request.inputs = yield from element_slices(request.model_name, body, outline.head, outline.head_len)
        except ServerError as error:
            error.name_request(request.model_name, request.id)
            raise
        return request, outline.form


def decode_raw(metadata: ModelMetadata, version: int | None, body: Buffer, *, is_batched: bool) -> InFlightRequest:
    """A request of batch size 1 whose only input is `body`; one variable dimension follows from its size.

    A BYTES input gets the body as its only element. Raises InvalidArgumentError when the model's inputs
    do not allow it or the size does not fit.
    """
    if len(metadata.inputs) != 1:
        raise InvalidArgumentError(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(metadata.inputs)} inputs in "
            f"'{metadata.name}' model configuration: describe the inputs in JSON in front of their bytes"
        )
    spec = metadata.inputs[0]
    dims = (1, *spec.shape[1:]) if is_batched else spec.shape
    datatype = Datatype(spec.datatype)
    if datatype is Datatype.BYTES:
        return InFlightRequest(
            model_name=metadata.name, version=version, inputs={spec.name: _bytes_tensor(spec, dims, body)}
        )
    shape = _resolve(spec, dims, datatype, len(body))
    data = np.frombuffer(body, datatype.numpy)
    if not data.flags.aligned:
        data = data.copy()
    return InFlightRequest(
        model_name=metadata.name, version=version, inputs={spec.name: Tensor(spec.name, datatype, data.reshape(shape))}
    )


def _bytes_tensor(spec: TensorMetadata, dims: tuple[int, ...], body: Buffer) -> Tensor:
    if any(dim != 1 for dim in dims):
        raise InvalidArgumentError(
            f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1], as the body is one "
            f"element; it has {list(spec.shape)}"
        )
    data = np.empty(1, dtype=object)
    data[0] = bytes(body)
    return Tensor(spec.name, Datatype.BYTES, data.reshape(dims))


def _resolve(spec: TensorMetadata, dims: tuple[int, ...], datatype: Datatype, num_bytes: int) -> tuple[int, ...]:
    assert datatype.itemsize is not None, "BYTES is handled by itself"
    if dims.count(-1) > 1:
        raise InvalidArgumentError(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            f"variable-sized dimension in {list(spec.shape)}"
        )
    known = prod(dim for dim in dims if dim != -1) * datatype.itemsize
    unknown = num_bytes // known if known else 0
    shape = tuple(unknown if dim == -1 else dim for dim in dims)
    expected = prod(shape) * datatype.itemsize
    if expected != num_bytes:
        raise InvalidArgumentError(
            f"input '{spec.name}': {num_bytes} bytes do not fit shape {list(dims)} of {datatype.value} "
            f"({known} bytes{' or a multiple' if -1 in dims else ''})"
        )
    return shape
