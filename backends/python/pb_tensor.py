"""`pb_utils.Tensor`: a named array, in and out of NumPy and DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from modelserver.backend import Array, Datatype
from modelserver.backend import Tensor as CoreTensor

from .pb_datatype import NUMBERS, text_elements
from .pb_device_tensor import DeviceTensor
from .pb_error import TritonModelException, text_of

_DLPACK_CPU = (1, 0)
_DLPACK_UINT, _DLPACK_BFLOAT = 1, 4
# In a DLTensor the device (type, id: 4 bytes each) lies behind the data pointer, and the datatype (code, bits, lanes)
# behind that and the number of dimensions.
_DLPACK_DEVICE_OFFSET = ctypes.sizeof(ctypes.c_void_p)
_DLPACK_DATATYPE_OFFSET = _DLPACK_DEVICE_OFFSET + 8 + 4

# Of arrays that are taken as they are.
_DATATYPES: dict[np.dtype[Any], Datatype] = {
    datatype.numpy: datatype for datatype in Datatype if datatype is not Datatype.BF16
}


class Tensor:
    """An input, or an output that the model makes of a NumPy array."""

    __slots__ = ("_array", "_datatype", "_device_tensor", "_name")

    def __init__(self, name: str, array: Array) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"Tensor '{name}' must be made of a numpy.ndarray, got {type(array).__name__}; "
                "for other libraries' arrays use Tensor.from_dlpack"
            )
        datatype = _DATATYPES.get(array.dtype)
        if datatype is None:
            datatype, array = _converted(name, array)
        self._name = name if type(name) is str and name else _checked_name(name)
        self._array = array
        self._datatype = datatype
        self._device_tensor: DeviceTensor | None = None

    @classmethod
    def of(cls, tensor: CoreTensor) -> Tensor:
        """The model's view of a request's input."""
        self = cls.__new__(cls)
        self._name = tensor.name
        self._array = tensor.data
        self._datatype = tensor.datatype
        self._device_tensor = None
        return self

    def core_tensor(self) -> CoreTensor:
        """The tensor as the server carries it: in the host's memory."""
        if self._device_tensor is not None:
            return self._device_tensor.on_host(self._name)
        array = self._array
        if self._datatype is Datatype.BYTES:
            array = text_elements(array)
        return CoreTensor(self._name, self._datatype, array)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """The elements; inputs share memory with the request. BF16 has no NumPy type: use DLPack."""
        if self._device_tensor is not None:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._datatype is Datatype.BF16:
            raise TritonModelException(
                f"tensor '{self._name}' is BF16, which NumPy does not have: use torch.from_dlpack(tensor)"
            )
        return self._array

    def triton_dtype(self) -> int:
        """The number of the datatype in TRITONSERVER_DataType."""
        return NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        return list(self._array.shape if self._device_tensor is None else self._device_tensor.shape)

    def is_cpu(self) -> bool:
        """Whether the elements are in the host's memory; inputs always are."""
        return self._device_tensor is None

    def to_dlpack(self) -> Any:
        """A DLPack capsule that shares the tensor's memory."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor that shares memory with a DLPack capsule, or with an array of a library that speaks DLPack."""
        name = _checked_name(name)
        is_array = hasattr(tensor, "__dlpack_device__")
        device = _number_pair(tensor.__dlpack_device__()) if is_array else _capsule_device(tensor)
        if device[0] != _DLPACK_CPU[0]:
            return Tensor._on_device(DeviceTensor(name, tensor, device), name)
        if is_array:
            tensor = tensor.__dlpack__()
        is_bfloat = _datatype_code(tensor) == (_DLPACK_BFLOAT, 16)
        if is_bfloat:
            _set_datatype_code(tensor, _DLPACK_UINT)
        try:
            array = np.from_dlpack(_Capsule(tensor))
        except (BufferError, RuntimeError, TypeError) as error:
            raise TritonModelException(f"Tensor '{name}': cannot read the DLPack tensor: {error}") from error
        made = Tensor(name, array)
        if is_bfloat:
            made._datatype = Datatype.BF16
        return made

    @classmethod
    def _on_device(cls, device_tensor: DeviceTensor, name: str) -> Tensor:
        self = cls.__new__(cls)
        self._name = _checked_name(name)
        self._array = np.empty(0, device_tensor.datatype.numpy)
        self._datatype = device_tensor.datatype
        self._device_tensor = device_tensor
        return self

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: object = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Raises BufferError if the elements would have to move to `dl_device`, as the protocol wants it."""
        del max_version  # consumers offer newer versions; the plain capsule is what all of them take
        if self._device_tensor is not None:
            return self._device_tensor.dlpack(stream=stream, dl_device=dl_device, copy=copy)
        if dl_device is not None and dl_device[0] != _DLPACK_CPU[0]:
            raise BufferError(f"tensor '{self._name}' is in the host's memory, and not moved to a device by itself")
        if self._datatype is Datatype.BYTES:
            raise TritonModelException(
                f"tensor '{self._name}' is TYPE_STRING, which DLPack cannot carry: use as_numpy()"
            )
        array = self._array
        capsule = (array if array.flags.writeable and not copy else array.copy()).__dlpack__()
        if self._datatype is Datatype.BF16:
            _set_datatype_code(capsule, _DLPACK_BFLOAT)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU if self._device_tensor is None else self._device_tensor.device


def _checked_name(name: object) -> str:
    text = text_of("the name of a Tensor", name)
    if not text:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return text


def _converted(name: str, array: Array) -> tuple[Datatype, Array]:
    """Datatype and elements in the machine's byte order; raises TritonModelException for what none carries."""
    try:
        datatype = Datatype.from_numpy(array.dtype)
    except KeyError:
        raise TritonModelException(f"Tensor '{name}': no Triton datatype carries numpy dtype {array.dtype}") from None
    return datatype, array if array.dtype.isnative else array.astype(datatype.numpy)


class _Capsule:
    """A bare capsule with the methods that np.from_dlpack asks for."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU


def _number_pair(pair: Any) -> tuple[int, int]:
    first, second = pair
    return int(first), int(second)


def _capsule_device(capsule: Any) -> tuple[int, int]:
    """Type and id of the device of a DLPack capsule. Raises TritonModelException if it is none or was consumed."""
    kind, number = (ctypes.c_int32 * 2).from_address(_dltensor_address(capsule) + _DLPACK_DEVICE_OFFSET)
    return kind, number


def _datatype_code(capsule: Any) -> tuple[int, int]:
    """Type code and bits of a DLPack capsule. Raises TritonModelException if it is none or was consumed."""
    address = _dltensor_address(capsule) + _DLPACK_DATATYPE_OFFSET
    return ctypes.c_uint8.from_address(address).value, ctypes.c_uint8.from_address(address + 1).value


def _set_datatype_code(capsule: Any, code: int) -> None:
    # NumPy has no BF16: the same 16 bits pass through it as UINT16.
    ctypes.c_uint8.from_address(_dltensor_address(capsule) + _DLPACK_DATATYPE_OFFSET).value = code


def _dltensor_address(capsule: Any) -> int:
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    try:
        pointer = get_pointer(capsule, b"dltensor")
    except (ValueError, ctypes.ArgumentError) as error:
        raise TritonModelException(f"expected an unused DLPack capsule or an array, got {capsule!r}") from error
    return int(pointer)
