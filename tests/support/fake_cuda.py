# ruff: noqa: N801, N802, N815 - the names are the library's
"""A CUDA driver without a GPU, for one process: memory of the host stands for a device's. It records what it is called
with, and holds callers to the driver's rules: a context, known addresses, copies that are waited for.

`runtime_modules` are what tritonclient's utilities for CUDA shared memory import, over the same memory.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_HANDLE_BYTES = 64
_BASE = 0x7F00_0000_0000
_NO_CONTEXT, _INVALID_VALUE = 201, 1


@dataclass
class Allocation:
    address: int
    memory: bytearray
    is_freed: bool = False
    num_maps: int = 0

    @property
    def handle(self) -> bytes:
        return f"handle of {self.address}".encode().ljust(_HANDLE_BYTES, b"\0")

    @property
    def is_alive(self) -> bool:
        """A device keeps memory as long as a process maps it."""
        return not self.is_freed or self.num_maps > 0


@dataclass
class FakeCuda:
    """The functions of libcuda.so.1 that the server calls. `calls` has their names, in order."""

    num_devices: int = 1
    calls: list[str] = field(default_factory=list)
    allocations: dict[int, Allocation] = field(default_factory=dict)
    # Of the streams with copies that were not waited for, and the copies.
    pending: dict[Any, list[Any]] = field(default_factory=dict)
    _stacks: Any = field(default_factory=threading.local)

    def allocate(self, num_bytes: int) -> Allocation:
        address = _BASE + 0x1000_0000 * len(self.allocations)
        found = self.allocations[address] = Allocation(address, bytearray(num_bytes))
        return found

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Between addresses of the host and of the device."""
        data = self._view(source, num_bytes)
        data = ctypes.string_at(source, num_bytes) if data is None else bytes(data)
        view = self._view(target, num_bytes)
        if view is None:
            ctypes.memmove(target, data, num_bytes)
        else:
            view[:] = data

    def bytes_at(self, address: int, num_bytes: int) -> memoryview:
        """Memory of the device, as its kernels see it."""
        view = self._view(address, num_bytes)
        assert view is not None, "a kernel uses memory that is not the device's"
        return view

    def _view(self, address: int, num_bytes: int) -> memoryview | None:
        found = self._at(address)
        if found is None:
            return None
        start = address - found.address
        assert found.is_alive, "freed memory is used"
        assert start + num_bytes <= len(found.memory), "memory behind an allocation is used"
        return memoryview(found.memory)[start : start + num_bytes]

    def _at(self, address: int) -> Allocation | None:
        for found in self.allocations.values():
            if found.address <= address < found.address + len(found.memory):
                return found
        return None

    def _note(self, name: str, *, in_context: bool = True) -> int:
        self.calls.append(name)
        return 0 if not in_context or getattr(self._stacks, "contexts", None) else _NO_CONTEXT

    # The driver's functions; results go to what `ctypes.byref` points at.
    def cuInit(self, _flags: int) -> int:
        return self._note("cuInit", in_context=False) if self.num_devices else 100

    def cuDeviceGet(self, device: Any, number: Any) -> int:
        device._obj.value = number.value
        return 0 if number.value < self.num_devices else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 0x100 + device.value
        return self._note("cuDevicePrimaryCtxRetain", in_context=False)

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        if not hasattr(self._stacks, "contexts"):
            self._stacks.contexts = []
        self._stacks.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self._stacks.contexts.pop()
        return 0

    def cuCtxSynchronize(self) -> int:
        for copies in self.pending.values():
            for copy in copies:
                copy()
        self.pending.clear()
        return self._note("cuCtxSynchronize")

    def cuStreamCreate(self, stream: Any, _flags: Any) -> int:
        stream._obj.value = 0x200
        return self._note("cuStreamCreate")

    def cuStreamSynchronize(self, stream: Any) -> int:
        for copy in self.pending.pop(stream.value, []):
            copy()
        return self._note("cuStreamSynchronize")

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, _flags: Any) -> int:
        for found in self.allocations.values():
            if found.handle == bytes(handle) and found.is_alive:
                assert not found.num_maps, "a process may open a handle once"
                found.num_maps += 1
                address._obj.value = found.address
                return self._note("cuIpcOpenMemHandle")
        return _INVALID_VALUE

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        self.allocations[address.value].num_maps -= 1
        return self._note("cuIpcCloseMemHandle")

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        found = self._at(address.value)
        assert found is not None
        base._obj.value, size._obj.value = found.address, len(found.memory)
        return self._note("cuMemGetAddressRange")

    def cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, num_bytes: Any, stream: Any) -> int:
        self._queue(stream, target.value, source.value, num_bytes.value)
        return self._note("cuMemcpyDtoHAsync")

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, num_bytes: Any, stream: Any) -> int:
        self._queue(stream, target.value, source.value, num_bytes.value)
        return self._note("cuMemcpyHtoDAsync")

    def cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, num_bytes: Any, stream: Any) -> int:
        self._queue(stream, target.value, source.value, num_bytes.value)
        return self._note("cuMemcpyDtoDAsync")

    def _queue(self, stream: Any, *copied: int) -> None:
        """Nothing is copied before the stream is waited for."""
        self.pending.setdefault(stream.value, []).append(lambda: self.copy(*copied))

    def cuGetErrorString(self, _code: int, text: Any) -> int:
        text._obj.value = b"invalid argument"
        return 0


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0


class cudaIpcMemHandle_t:
    def __init__(self, handle: bytes) -> None:
        self._bytes = ctypes.create_string_buffer(handle, _HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


def runtime_modules(cuda: FakeCuda) -> dict[str, ModuleType]:
    """`cuda.bindings.runtime` and `.driver`, for `sys.modules`."""
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    runtime, driver = ModuleType("cuda.bindings.runtime"), ModuleType("cuda.bindings.driver")
    package.__path__, bindings.__path__ = [], []  # type: ignore[attr-defined]
    done = cudaError_t.cudaSuccess

    def malloc(num_bytes: int) -> tuple[cudaError_t, int]:
        return done, cuda.allocate(num_bytes).address

    def free(address: int) -> tuple[cudaError_t]:
        cuda.allocations[address].is_freed = True
        return (done,)

    def copy(target: Any, source: Any, num_bytes: int, _kind: object, _stream: object) -> tuple[cudaError_t]:
        places = [place if isinstance(place, int) else _address(place) for place in (target, source)]
        cuda.copy(*places, num_bytes)
        return (done,)

    runtime.__dict__.update(
        cudaError_t=cudaError_t,
        CUDA_IPC_HANDLE_SIZE=_HANDLE_BYTES,
        cudaIpcMemHandle_t=cudaIpcMemHandle_t,
        cudaMalloc=malloc,
        cudaFree=free,
        cudaMemcpyAsync=copy,
        cudaIpcGetMemHandle=lambda address: (done, cudaIpcMemHandle_t(cuda.allocations[address].handle)),
        cudaGetDevice=lambda: (done, 0),
        cudaSetDevice=lambda _device: (done,),
        cudaStreamCreate=lambda: (done, 0x300),
        cudaStreamDestroy=lambda _stream: (done,),
        cudaStreamSynchronize=lambda _stream: (done,),
        cudaDeviceGetAttribute=lambda _attribute, _device: (done, 1),
        cudaDeviceAttr=enum.Enum("cudaDeviceAttr", ["cudaDevAttrUnifiedAddressing"]),
        cudaMemcpyKind=enum.Enum("cudaMemcpyKind", ["cudaMemcpyDefault"]),
    )
    succeeded = CUresult.CUDA_SUCCESS
    driver.__dict__.update(
        CUresult=CUresult,
        cuDeviceGet=lambda device: (succeeded, device),
        cuDevicePrimaryCtxGetState=lambda _device: (succeeded, 0, 1),
    )
    bindings.__dict__.update(runtime=runtime, driver=driver)
    package.__dict__["bindings"] = bindings
    return {module.__name__: module for module in (package, bindings, runtime, driver)}


def _address(place: Any) -> int:
    if isinstance(place, bytes):
        return ctypes.cast(ctypes.c_char_p(place), ctypes.c_void_p).value or 0
    return ctypes.addressof(place)
