"""Tensors and errors of Triton's in-process API. A tensor is a datatype, a shape and memory, exchanged
with other libraries by DLPack.

DLPack: https://dmlc.github.io/dlpack. Elements of BYTES lie one after the other, each after its length in four bytes.
"""

from __future__ import annotations

import enum
import importlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from modelserver.backend import Array, Datatype
from modelserver.backend import Tensor as CoreTensor
from modelserver.embed.values import texts
from modelserver.errors import ErrorCode, ServerError

_LENGTH = struct.Struct("<I")


class DataType(enum.IntEnum):
    """The datatypes by Triton's names and numbers."""

    INVALID = 0
    BOOL = 1
    UINT8 = 2
    UINT16 = 3
    UINT32 = 4
    UINT64 = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FP16 = 10
    FP32 = 11
    FP64 = 12
    BYTES = 13
    BF16 = 14


class MemoryType(enum.IntEnum):
    CPU = 0
    CPU_PINNED = 1
    GPU = 2


class DLDeviceType(enum.IntEnum):
    """The devices of DLPack that Triton knows."""

    kDLCPU = 1  # noqa: N815  # DLPack's name
    kDLCUDA = 2  # noqa: N815  # as above


_DEVICES = {
    MemoryType.CPU: DLDeviceType.kDLCPU,
    MemoryType.CPU_PINNED: DLDeviceType.kDLCPU,
    MemoryType.GPU: DLDeviceType.kDLCUDA,
}
DeviceOrMemoryType = tuple[MemoryType, int] | MemoryType | tuple[DLDeviceType, int] | str


@dataclass
class MemoryBuffer:
    """`size` bytes at an address, which `owner` keeps."""

    data_ptr: int
    memory_type: MemoryType
    memory_type_id: int
    size: int
    owner: Any

    @staticmethod
    def from_dlpack(owner: Any) -> MemoryBuffer:
        """The memory of an array of any library. Raises InvalidArgumentError for other objects, and for gaps in it."""
        return Tensor.from_dlpack(owner).memory_buffer


@dataclass
class Tensor:
    """A tensor on a CPU or a GPU. A change of `shape` or `data_type` leaves the memory as it is."""

    data_type: DataType
    shape: Sequence[int]
    memory_buffer: MemoryBuffer

    _BF16: ClassVar[str] = "torch.bfloat16"

    @property
    def data_ptr(self) -> int:
        return self.memory_buffer.data_ptr

    @property
    def memory_type(self) -> MemoryType:
        return self.memory_buffer.memory_type

    @property
    def memory_type_id(self) -> int:
        return self.memory_buffer.memory_type_id

    @property
    def size(self) -> int:
        return self.memory_buffer.size

    def __dlpack__(self, *, stream: Any = None, **details: Any) -> Any:
        if self.memory_type is MemoryType.GPU:
            return self.memory_buffer.owner.__dlpack__(stream=stream, **details)
        if self.data_type is DataType.BYTES:
            raise UnsupportedError("DLPack has no texts: use to_bytes_array() or to_string_array()")
        if self.data_type is DataType.BF16:
            torch = importlib.import_module("torch")
            return torch.from_numpy(self._array(np.dtype(np.int16))).view(torch.bfloat16).__dlpack__()
        return self._array().__dlpack__(**details)

    def __dlpack_device__(self) -> tuple[DLDeviceType, int]:
        return _DEVICES[self.memory_type], self.memory_type_id

    def to_bytes_array(self) -> Array:
        """The elements of BYTES. Raises InvalidArgumentError for other datatypes."""
        if self.data_type is not DataType.BYTES:
            raise InvalidArgumentError(f"Tensor has type {self.data_type.name}, not BYTES")
        buffer = self.to_host()._memory().tobytes()
        elements, at = [], 0
        while at < len(buffer):
            (length,) = _LENGTH.unpack_from(buffer, at)
            at += _LENGTH.size + length
            elements.append(buffer[at - length : at])
        array = np.empty(len(elements), object)
        array[:] = elements
        return array.reshape(tuple(self.shape))

    def to_string_array(self) -> Array:
        """The elements of BYTES as texts, in UTF-8. Raises InvalidArgumentError for other datatypes."""
        array = self.to_bytes_array()
        return np.array([each.decode() for each in array.reshape(-1)], str).reshape(array.shape)

    @staticmethod
    def from_bytes_array(bytes_array: list[Any] | Array) -> Tensor:
        """A tensor of BYTES. Raises InvalidArgumentError for elements that are neither bytes nor texts."""
        array = np.asarray(bytes_array, object)
        elements = [each.encode() if isinstance(each, str) else each for each in array.reshape(-1).tolist()]
        if not all(isinstance(each, bytes) for each in elements):
            raise InvalidArgumentError("a tensor of BYTES is made of bytes or texts")
        joined = b"".join(part for each in elements for part in (_LENGTH.pack(len(each)), each))
        memory = np.frombuffer(joined, np.uint8)
        buffer = MemoryBuffer(memory.ctypes.data, MemoryType.CPU, 0, memory.nbytes, memory)
        return Tensor(DataType.BYTES, array.shape, buffer)

    from_string_array = from_bytes_array

    @staticmethod
    def from_dlpack(obj: Any) -> Tensor:
        """The same memory as that of an array of any library.

        Raises InvalidArgumentError for an object that is no such array, for a datatype that requests cannot carry, and
        for memory with gaps.
        """
        if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
            raise InvalidArgumentError("Object does not support DLpack protocol")
        device, index = obj.__dlpack_device__()
        is_on_gpu = int(device) == DLDeviceType.kDLCUDA
        if is_on_gpu or str(getattr(obj, "dtype", "")) == Tensor._BF16:
            return Tensor._from_torch(obj, index, is_on_gpu=is_on_gpu)
        try:
            array = obj if isinstance(obj, np.ndarray) else np.from_dlpack(obj)
            datatype = DataType[Datatype.from_numpy(array.dtype).value]
        except (KeyError, BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"requests cannot carry this array: {error}") from error
        if not array.flags.c_contiguous:
            raise InvalidArgumentError("Only contiguous memory is supported")
        buffer = MemoryBuffer(array.ctypes.data, MemoryType.CPU, 0, array.nbytes, obj)
        return Tensor(datatype, array.shape, buffer)

    @staticmethod
    def _from_torch(obj: Any, index: int, *, is_on_gpu: bool) -> Tensor:
        """Memory that NumPy cannot describe: that of GPUs, and BF16."""
        torch = importlib.import_module("torch")
        made = obj if isinstance(obj, torch.Tensor) else torch.from_dlpack(obj)
        if not made.is_contiguous():
            raise InvalidArgumentError("Only contiguous memory is supported")
        name = "BF16" if str(made.dtype) == Tensor._BF16 else Datatype.from_numpy(_numpy_type(made)).value
        kind = MemoryType.GPU if is_on_gpu else MemoryType.CPU
        buffer = MemoryBuffer(made.data_ptr(), kind, index, made.element_size() * made.numel(), made)
        return Tensor(DataType[name], tuple(made.shape), buffer)

    def to_host(self) -> Tensor:
        return self.to_device("cpu")

    def to_device(self, device: DeviceOrMemoryType) -> Tensor:
        """The tensor on a device; itself, if it is there. By torch.

        Raises InvalidArgumentError for what names no device, UnsupportedError where the device cannot be reached.
        """
        kind, index = parse_device(device)
        is_there = self.memory_type is kind and self.memory_type_id == index
        if is_there or {self.memory_type, kind} <= {MemoryType.CPU, MemoryType.CPU_PINNED}:
            return self
        try:
            torch = importlib.import_module("torch")
            place = f"cuda:{index}" if kind is MemoryType.GPU else "cpu"
            memory = self._memory() if self.memory_type is not MemoryType.GPU else None
            source = self.memory_buffer.owner if memory is None else torch.from_numpy(memory.copy())
            moved = Tensor._from_torch(source.to(place), index, is_on_gpu=kind is MemoryType.GPU)
        except (ImportError, RuntimeError, AssertionError) as error:
            raise UnsupportedError(
                f"Conversion from {self.memory_type.name} to {kind.name}:{index} not supported: {error}"
            ) from error
        return Tensor(self.data_type, self.shape, moved.memory_buffer)

    def core(self, name: str) -> CoreTensor:
        """As an input of a request."""
        if self.data_type is DataType.BYTES:
            return CoreTensor(name, Datatype.BYTES, self.to_bytes_array())
        return CoreTensor(name, Datatype[self.data_type.name], self.to_host()._array())

    @staticmethod
    def of(value: Any) -> Tensor:
        """A tensor of what a request may be given: arrays, lists, texts, numbers."""
        if isinstance(value, Tensor):
            return value
        if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic):
            return Tensor.from_dlpack(value)
        if not isinstance(value, np.ndarray | np.generic | list | tuple | str | bytes | bool | int | float):
            raise InvalidArgumentError(
                f"Input type {type(value)} not supported. Must be an array, a list, a text or a number, or the type "
                "must support __dlpack__"
            )
        array = np.asarray(value, object if isinstance(value, bytes) else None)
        if array.dtype.kind in "OSU":
            return Tensor.from_bytes_array(array)
        return Tensor.from_dlpack(np.ascontiguousarray(array))

    @staticmethod
    def of_core(tensor: CoreTensor) -> Tensor:
        """An output of the server."""
        if tensor.datatype is Datatype.BYTES:
            return Tensor.from_bytes_array(texts(tensor.data))
        array = np.ascontiguousarray(tensor.data)
        if not array.flags.writeable:
            array = array.copy()  # DLPack has no read-only memory
        buffer = MemoryBuffer(array.ctypes.data, MemoryType.CPU, 0, array.nbytes, array)
        return Tensor(DataType[tensor.datatype.value], array.shape, buffer)

    def _memory(self) -> Array:
        return self._array(np.dtype(np.uint8), (self.size,))

    def _array(self, dtype: np.dtype[Any] | None = None, shape: tuple[int, ...] | None = None) -> Array:
        """The memory as an array that keeps this tensor."""
        kind = np.dtype(Datatype[self.data_type.name].numpy) if dtype is None else dtype
        return np.asarray(_Exported(self, kind, tuple(self.shape) if shape is None else shape))


class _Exported:
    """Memory as NumPy's array interface describes it."""

    def __init__(self, tensor: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._tensor = tensor
        address = (tensor.data_ptr, False)
        self.__array_interface__ = {"data": address, "shape": shape, "typestr": dtype.str, "version": 3}


def _numpy_type(tensor: Any) -> np.dtype[Any]:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))


def parse_device(device: DeviceOrMemoryType) -> tuple[MemoryType, int]:
    """The memory that "cpu", "gpu:1", a MemoryType or a pair of a type and a number names.

    Raises InvalidArgumentError.
    """
    kind: Any = device
    index: Any = 0
    if isinstance(device, str):
        kind, _, index = device.upper().partition(":")
        index = index or "0"
    elif isinstance(device, tuple) and len(device) == 2:
        kind, index = device
    by_name: dict[Any, MemoryType] = dict(MemoryType.__members__)
    try:
        if isinstance(kind, DLDeviceType):
            return (MemoryType.GPU if kind is DLDeviceType.kDLCUDA else MemoryType.CPU), int(index)
        return (kind if isinstance(kind, MemoryType) else by_name[kind]), int(index)
    except (KeyError, TypeError, ValueError):
        raise InvalidArgumentError(f"Invalid memory type {device}: expected 'cpu', 'gpu' or 'gpu:NUMBER'") from None


class TritonError(Exception):
    """Base of the errors that the server answers with."""


class UnknownError(TritonError):
    pass


class InternalError(TritonError):
    pass


class NotFoundError(TritonError):
    pass


class InvalidArgumentError(TritonError):
    pass


class UnavailableError(TritonError):
    pass


class UnsupportedError(TritonError):
    pass


class AlreadyExistsError(TritonError):
    pass


_BY_CODE: dict[ErrorCode, type[TritonError]] = {
    ErrorCode.INTERNAL: InternalError,
    ErrorCode.NOT_FOUND: NotFoundError,
    ErrorCode.INVALID_ARGUMENT: InvalidArgumentError,
    ErrorCode.PAYLOAD_TOO_LARGE: InvalidArgumentError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.OVERLOADED: UnavailableError,
    ErrorCode.TIMED_OUT: UnavailableError,
    ErrorCode.UNSUPPORTED: UnsupportedError,
    ErrorCode.ALREADY_EXISTS: AlreadyExistsError,
}


def translated(error: ServerError) -> TritonError:
    """The error by its name here; a cancelled request is an UnknownError, for which Triton has no name either."""
    return _BY_CODE.get(error.code, UnknownError)(error.message)
