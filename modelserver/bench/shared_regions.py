"""Shared memory with the server: regions for inputs and outputs, created, registered and removed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from modelserver.bench.encode import SharedOutput
from modelserver.bench.input_data import Step
from modelserver.bench.interface import Interface
from modelserver.bench.options import RequestOptions, SharedMemory
from modelserver.client.control import ControlClient, Document
from modelserver.errors import InternalError, ServerError, UnavailableError, UnsupportedError

_ALIGNMENT = 64
_DIRECTORY = Path("/dev/shm")  # noqa: S108  (where POSIX shared memory is on Linux)


class Region(Protocol):
    """Memory that the server can map."""

    details: Document

    def write(self, offset: int, data: bytes) -> None: ...

    def close(self) -> None: ...


class SystemRegion:
    """POSIX shared memory. Raises UnavailableError when there is no room."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self._path = _DIRECTORY / name
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise UnavailableError(f"cannot make shared memory '{self._path}': {error.strerror}") from None
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            self._memory = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            self._path.unlink()
            raise UnavailableError(f"no {num_bytes} bytes of shared memory: {error.strerror}") from None
        finally:
            os.close(descriptor)
        self.details: Document = {"key": f"/{name}", "offset": 0, "byte_size": num_bytes}

    def write(self, offset: int, data: bytes) -> None:
        self._memory[offset : offset + len(data)] = data

    def close(self) -> None:
        self._memory.close()
        self._path.unlink(missing_ok=True)


class _Cuda:
    """The few calls of the CUDA driver that are needed. Raises UnsupportedError where it is not there."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise UnsupportedError(
                "--shared-memory cuda needs an NVIDIA driver on this machine (libcuda.so.1 is not there)"
            ) from None
        self.call("cuInit", ctypes.c_uint(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise InternalError(f"CUDA: {name} failed with status {status}")


class CudaRegion:
    """Memory of the first GPU, shared by an IPC handle."""

    def __init__(self, cuda: _Cuda, num_bytes: int) -> None:
        self._cuda = cuda
        self._pointer = ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(num_bytes))
        handle = (ctypes.c_char * 64)()
        cuda.call("cuIpcGetMemHandle", ctypes.byref(handle), self._pointer)
        raw = base64.b64encode(bytes(handle)).decode()
        self.details: Document = {"raw_handle": {"b64": raw}, "device_id": 0, "byte_size": num_bytes}

    def write(self, offset: int, data: bytes) -> None:
        target = ctypes.c_uint64(self._pointer.value + offset)
        self._cuda.call("cuMemcpyHtoD_v2", target, ctypes.c_char_p(data), ctypes.c_size_t(len(data)))

    def close(self) -> None:
        self._cuda.call("cuMemFree_v2", self._pointer)


class Regions:
    """The regions of a run; an async context manager, at whose end they are gone. Nothing without --shared-memory.

    All requests in flight share the regions of the outputs, as in perf_analyzer, because they are never read.
    """

    def __init__(self, options: RequestOptions, control: ControlClient, interface: Interface) -> None:
        self._options = options
        self._control = control
        self._interface = interface
        self._kind = options.shared_memory
        self._cuda: _Cuda | None = None
        self._regions: list[Region] = []
        self._registered: list[str] = []
        self.outputs: tuple[SharedOutput, ...] = ()

    async def __aenter__(self) -> Regions:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._registered:
            # The server may be gone; its mapping went with it.
            with contextlib.suppress(ServerError):
                await asyncio.to_thread(self._control.unregister_region, name, self._kind.value)
        for region in self._regions:
            region.close()

    async def place(self, streams: Sequence[Sequence[Step]]) -> tuple[tuple[Step, ...], ...]:
        """The streams with their inputs in shared memory. Raises ServerError, with the server's words if it refuses."""
        if self._kind is SharedMemory.NONE:
            return tuple(tuple(stream) for stream in streams)
        total = sum(_aligned(tensor.num_bytes) for stream in streams for step in stream for tensor in step.inputs)
        name = f"modelserver_bench_{os.getpid()}_inputs"
        region = self._make(name, max(total, _ALIGNMENT))
        offset = 0
        placed = []
        for stream in streams:
            steps = []
            for step in stream:
                inputs = []
                for tensor in step.inputs:
                    region.write(offset, tensor.raw)
                    inputs.append(replace(tensor, region=name, region_offset=offset))
                    offset += _aligned(tensor.num_bytes)
                steps.append(replace(step, inputs=tuple(inputs)))
            placed.append(tuple(steps))
        await self._register(name, region)
        await self._place_outputs()
        return tuple(placed)

    async def _place_outputs(self) -> None:
        outputs = []
        for place, spec in enumerate(self._interface.outputs):
            num_bytes = self._options.output_region_bytes * self._options.data.batch_size
            if spec.is_fixed and spec.datatype.itemsize is not None:
                num_bytes = spec.datatype.itemsize * self._options.data.batch_size
                for size in spec.dims:
                    num_bytes *= size
            name = f"modelserver_bench_{os.getpid()}_output_{place}"
            region = self._make(name, max(num_bytes, _ALIGNMENT))
            await self._register(name, region)
            outputs.append(SharedOutput(spec.name, name, num_bytes))
        self.outputs = tuple(outputs)

    def _make(self, name: str, num_bytes: int) -> Region:
        region: Region
        if self._kind is SharedMemory.SYSTEM:
            region = SystemRegion(name, num_bytes)
        else:
            self._cuda = self._cuda or _Cuda()
            region = CudaRegion(self._cuda, num_bytes)
        self._regions.append(region)
        return region

    async def _register(self, name: str, region: Region) -> None:
        try:
            await asyncio.to_thread(self._control.register_region, name, self._kind.value, region.details)
        except ServerError as error:
            raise type(error)(
                f"the server does not take {self._kind.value} shared memory: {error.message}", code=error.code
            ) from None
        self._registered.append(name)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
