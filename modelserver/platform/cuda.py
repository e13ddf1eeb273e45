"""The part of CUDA's driver that opens another process's device memory and copies to and from it (CUDA Driver API,
"Memory Management" and "Stream Management").

It is called through the driver's own library, so that no CUDA toolkit is needed. A call works in the primary context
of its device, which is that of the CUDA runtime and so of the libraries that compute, and leaves the calling thread's
current context as it was.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from modelserver.errors import InternalError, InvalidArgumentError, UnsupportedError

LIBRARY = "libcuda.so.1"
# Of a cudaIpcMemHandle_t, and of a CUipcMemHandle, which is the same.
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_MOST_DEVICES = 1 << 31


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class Cuda:
    """From any thread. A device's context and stream are made with its first use, which takes long.

    `library` has the driver's functions; the tests give one without a GPU.
    """

    def __init__(self, library: Any = None) -> None:
        """Raises UnsupportedError where there is no driver, or no GPU."""
        if library is None:
            try:
                library = ctypes.CDLL(LIBRARY)
            except OSError:
                raise UnsupportedError(f"GPUs not supported: this machine has no CUDA driver ({LIBRARY})") from None
        self._library = library
        self._lock = threading.Lock()  # guards the attributes below
        # By device: its primary context, and a stream on which the copies of this process wait for nothing else.
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._streams: dict[int, ctypes.c_void_p] = {}
        # By device and handle: its address, and how often it is open. A process can open a handle once.
        self._opened: dict[tuple[int, bytes], tuple[int, int]] = {}
        if library.cuInit(0) != 0:
            raise UnsupportedError("GPUs not supported: the CUDA driver finds no GPU")

    def open(self, handle: bytes, device_id: int) -> int:
        """The address of the memory that a handle of another process names. Raises InvalidArgumentError."""
        with self._lock:
            address, count = self._opened.get((device_id, handle), (0, 0))
            if not count:
                with self._context(device_id):
                    opened = ctypes.c_uint64()
                    self._call(
                        "cuIpcOpenMemHandle_v2",
                        ctypes.byref(opened),
                        _Handle.from_buffer_copy(handle),
                        ctypes.c_uint(_LAZY_PEER_ACCESS),
                    )
                    address = opened.value
            self._opened[device_id, handle] = address, count + 1
            return address

    def close(self, handle: bytes, device_id: int) -> None:
        """Undo one `open`; the last one unmaps the memory, after all work on it that was queued."""
        with self._lock:
            address, count = self._opened[device_id, handle]
            if count > 1:
                self._opened[device_id, handle] = address, count - 1
                return
            del self._opened[device_id, handle]
            with self._context(device_id):
                self._call("cuCtxSynchronize")
                self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def size(self, address: int, device_id: int) -> int:
        """How many bytes the allocation has from this address on."""
        base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self._lock, self._context(device_id):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(num_bytes), ctypes.c_uint64(address))
        return base.value + num_bytes.value - address

    def read(self, address: int, num_bytes: int, device_id: int) -> bytearray:
        """These bytes, once the copy is done."""
        target = bytearray(num_bytes)
        if num_bytes:
            place = ctypes.c_void_p(np.frombuffer(target, np.uint8).ctypes.data)
            self._copy("cuMemcpyDtoHAsync_v2", place, ctypes.c_uint64(address), num_bytes, device_id)
        return target

    def write(self, address: int, data: bytes | bytearray | memoryview, device_id: int) -> None:
        """Returns when the bytes are there: another process may read them at once."""
        num_bytes = memoryview(data).nbytes
        if num_bytes:
            source = np.frombuffer(data, np.uint8)
            place = ctypes.c_void_p(source.ctypes.data)
            self._copy("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), place, num_bytes, device_id)

    def move(self, target: int, source: int, num_bytes: int, device_id: int) -> None:
        """Copy within the device's memory; returns when the bytes are there."""
        if num_bytes:
            places = ctypes.c_uint64(target), ctypes.c_uint64(source)
            self._copy("cuMemcpyDtoDAsync_v2", *places, num_bytes, device_id)

    def _copy(self, name: str, target: Any, source: Any, num_bytes: int, device_id: int) -> None:
        with self._lock, self._context(device_id):
            stream = self._streams[device_id]
            self._call(name, target, source, ctypes.c_size_t(num_bytes), stream)
            self._call("cuStreamSynchronize", stream)

    @contextmanager
    def _context(self, device_id: int) -> Iterator[None]:
        """Make the device's primary context the thread's."""
        context = self._contexts.get(device_id)
        if context is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            is_number = 0 <= device_id < _MOST_DEVICES
            if not is_number or self._library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(device_id)) != 0:
                raise InvalidArgumentError(f"there is no GPU {device_id}: they are numbered from 0")
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device_id] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            if device_id not in self._streams:
                stream = ctypes.c_void_p()
                self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
                self._streams[device_id] = stream
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        """Raises InvalidArgumentError if a handle cannot be opened, InternalError if anything else fails."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode(errors="replace")
            kind = InvalidArgumentError if name.startswith("cuIpcOpen") else InternalError
            raise kind(f"CUDA's {name} failed: {reason} ({code})")


class DeviceArray:
    """Numbers in the memory of a GPU that a client has registered, in C order; valid until its request is answered.

    A library that computes there takes it by `address`, or as an object with CUDA's array interface (version 3). The
    client has no work queued on the memory. NumPy's functions get a copy on the host. Shapes are in elements.
    """

    __slots__ = ("_cuda", "address", "dtype", "gpu", "shape")

    def __init__(self, cuda: Cuda, gpu: int, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """The elements begin at `address`. The memory stays mapped for as long as a request uses its region."""
        self._cuda = cuda
        self.gpu = gpu
        self.address = address
        self.dtype = dtype
        self.shape = shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        place = (self.address, False)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": place, "strides": None, "version": 3}

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """A copy on the host. Raises ValueError where none is allowed."""
        if copy is False:
            raise ValueError("the array lies in the memory of a GPU: NumPy needs a copy of it")
        copied = np.frombuffer(self._cuda.read(self.address, self.nbytes, self.gpu), self.dtype).reshape(self.shape)
        return copied if dtype is None else copied.astype(dtype, copy=False)

    def reshape(self, *sizes: Any) -> DeviceArray:
        """The same elements; as NumPy's `reshape`, with one size or shape, or several sizes."""
        shape = np.broadcast_to(np.zeros((), self.dtype), self.shape).reshape(*sizes).shape
        return self.beginning(self.dtype, shape)

    def beginning(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """The memory, or the beginning of it, as other elements."""
        return DeviceArray(self._cuda, self.gpu, self.address, dtype, shape)

    def fill(self, address: int) -> None:
        """Copy the elements from that address of the same GPU. They must be there; returns when the copy is."""
        self._cuda.move(self.address, address, self.nbytes, self.gpu)

    def copy_to(self, address: int) -> None:
        """Copy the elements to that address of the same GPU; returns when they are there."""
        self._cuda.move(address, self.address, self.nbytes, self.gpu)
