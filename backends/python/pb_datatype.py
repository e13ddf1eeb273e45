"""Triton's numbers and names of datatypes, and the layout of serialized BYTES, as pb_utils has them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from modelserver.backend import Datatype
from modelserver.backend.child import encode_bytes_elements

from .pb_error import TritonModelException

Array = np.ndarray[Any, Any]

_TEXTS = {bytes, str}

# In the order of TRITONSERVER_DataType, where 0 is "invalid".
_ORDER = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"]
_ORDER += ["BYTES", "BF16"]
NUMBERS = {Datatype(name): number for number, name in enumerate(_ORDER, start=1)}

TRITON_TO_NUMPY_TYPE: dict[int, type] = {
    number: np.object_ if datatype is Datatype.BYTES else datatype.numpy.type
    for datatype, number in NUMBERS.items()
    if datatype is not Datatype.BF16
}
NUMPY_TO_TRITON_TYPE: dict[type, int] = {numpy_type: number for number, numpy_type in TRITON_TO_NUMPY_TYPE.items()}
NUMPY_TO_TRITON_TYPE[np.bytes_] = NUMBERS[Datatype.BYTES]
# BF16 has no NumPy type.
TRITON_STRING_TO_NUMPY: dict[str, type] = {
    datatype.config_name: TRITON_TO_NUMPY_TYPE[number]
    for datatype, number in NUMBERS.items()
    if datatype is not Datatype.BF16
}


def triton_to_numpy_type(data_type: int) -> type:
    """The NumPy type of a Triton datatype number; KeyError for BF16, which has none."""
    return TRITON_TO_NUMPY_TYPE[data_type]


def numpy_to_triton_type(data_type: type) -> int:
    """The Triton datatype number of a NumPy type."""
    return NUMPY_TO_TRITON_TYPE[data_type]


def triton_string_to_numpy(triton_type_string: str) -> type:
    """The NumPy type of a config's data type such as "TYPE_FP32"."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: Array) -> bytes:
    """Each element behind its length (uint32, little-endian), in row-major order."""
    if input_tensor.dtype.kind not in "OS":
        raise TritonModelException(f"cannot serialize bytes tensor: invalid datatype {input_tensor.dtype}")
    return encode_bytes_elements(text_elements(input_tensor).ravel().tolist())


def text_elements(array: Array) -> Array:
    """An object array of bytes and str: of any other element, a number say, its `str`, as Triton sends it."""
    array = array if array.dtype.kind == "O" else array.astype(object)
    elements = array.ravel().tolist()
    if _TEXTS.issuperset(map(type, elements)):
        return array
    texts = np.empty(len(elements), dtype=object)
    texts[:] = [each if isinstance(each, bytes | str | bytearray | memoryview) else str(each) for each in elements]
    return texts.reshape(array.shape)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The elements of a serialized BYTES tensor, as a flat object array of bytes."""
    elements: list[bytes] = []
    offset = 0
    while offset < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, offset)
        offset += 4
        elements.append(bytes(encoded_tensor[offset : offset + length]))
        offset += length
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array
