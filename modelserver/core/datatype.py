"""The fourteen KServe tensor datatypes and their NumPy counterparts."""

from __future__ import annotations

import enum

import numpy as np


class Datatype(enum.Enum):
    """A tensor element type; the value is its wire name (`TYPE_STRING` in a config is `BYTES` here).

    BF16 has no NumPy dtype: its tensors hold the raw 16-bit patterns as uint16.
    """

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"
    BF16 = "BF16"

    # Filled in below; plain attributes, because they are read several times per request.
    numpy: np.dtype
    itemsize: int | None
    config_name: str

    # Each datatype exists once, so its identity can be its hash; enum's own hash is a Python function, slow in keys.
    __hash__ = object.__hash__

    @classmethod
    def from_config_name(cls, name: str) -> Datatype:
        """The datatype of a config enum name such as `TYPE_FP32`; KeyError if there is none."""
        return _BY_CONFIG_NAME[name]

    @classmethod
    def from_numpy(cls, dtype: np.dtype) -> Datatype:
        """The datatype that carries arrays of `dtype`; KeyError if none does.

        Object, bytes and str arrays are BYTES; uint16 is UINT16, never BF16.
        """
        if dtype.kind in "OSU":
            return cls.BYTES
        return _BY_NUMPY[dtype.newbyteorder("=")]


_NUMPY_NAMES = {
    Datatype.BOOL: "bool",
    Datatype.FP16: "float16",
    Datatype.FP32: "float32",
    Datatype.FP64: "float64",
    Datatype.BYTES: "object",
    Datatype.BF16: "uint16",
}

for _datatype in Datatype:
    _datatype.numpy = np.dtype(_NUMPY_NAMES.get(_datatype, _datatype.value.lower()))
    _datatype.itemsize = None if _datatype is Datatype.BYTES else _datatype.numpy.itemsize
    _datatype.config_name = "TYPE_STRING" if _datatype is Datatype.BYTES else f"TYPE_{_datatype.value}"

_BY_CONFIG_NAME = {datatype.config_name: datatype for datatype in Datatype}
_BY_NUMPY = {datatype.numpy: datatype for datatype in Datatype if datatype not in (Datatype.BYTES, Datatype.BF16)}
