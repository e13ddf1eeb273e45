"""Raw mode of the binary tensor extension: the whole body is the one input of the model, described by its config."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Buffer, Tensor
from modelserver.errors import InvalidArgumentError

if TYPE_CHECKING:
    from modelserver.planes.data import ModelMetadata, TensorMetadata


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
