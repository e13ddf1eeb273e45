"""NumPy arrays <-> torch tensors, datatype by datatype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from modelserver.backend import Array, Datatype, InvalidArgumentError

TORCH_DTYPES: dict[Datatype, Any] = {
    Datatype.BOOL: torch.bool,
    Datatype.UINT8: torch.uint8,
    Datatype.UINT16: torch.uint16,
    Datatype.UINT32: torch.uint32,
    Datatype.UINT64: torch.uint64,
    Datatype.INT8: torch.int8,
    Datatype.INT16: torch.int16,
    Datatype.INT32: torch.int32,
    Datatype.INT64: torch.int64,
    Datatype.FP16: torch.float16,
    Datatype.FP32: torch.float32,
    Datatype.FP64: torch.float64,
    Datatype.BF16: torch.bfloat16,
}
DATATYPES = {dtype: datatype for datatype, dtype in TORCH_DTYPES.items()}


def to_torch(array: Array, is_bfloat16: bool) -> Any:
    """A tensor over the array's memory.

    A read-only array is copied: torch has no read-only tensors, and a model may write into its input. That is
    20 µs for 1 MiB, and only when a batch is a single request: gathered batches are fresh memory.
    """
    if not array.flags.carray:
        array = np.array(array)
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def to_texts(name: str, array: Array) -> list[str]:
    """The strings of a BYTES array of one dimension, as TorchScript takes them. Raises InvalidArgumentError."""
    try:
        return [element.decode() for element in array.tolist()]
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"input '{name}': TorchScript's strings are UTF-8, got an element that is not"
        ) from error


def from_texts(texts: list[str]) -> Array:
    """The BYTES array of a model's list of strings."""
    array = np.empty(len(texts), object)
    array[:] = [text.encode() for text in texts]
    return array


def to_numpy(tensor: Any) -> Array:
    """The tensor's memory as an array, on the CPU; BF16 as uint16 bit patterns."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array
