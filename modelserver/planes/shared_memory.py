"""Shared memory that clients have registered: named regions of a host or of a GPU, in which tensors may lie.

A client may make the file of a region smaller at any time. Each use checks that it is still large enough; a change
between the check and the use fails only that request. With the C part, tensors are views of the region's guarded
memory; without it they are copied by system calls, which report missing bytes.

Regions of a GPU are opened by the handle of the process that has allocated them. Their memory stays until the region is
unregistered, even if that process ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from modelserver.core.accelerator import guard, is_broken, unguard
from modelserver.core.long_work import Result, Slices, at_once, long_work
from modelserver.core.tensor import Buffer
from modelserver.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ServerError,
    UnsupportedError,
)
from modelserver.platform.cuda import HANDLE_BYTES, Cuda, DeviceArray
from modelserver.telemetry.audit import audited

_logger = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]

# POSIX shared memory objects are files of this directory.
DIRECTORY = Path("/dev/shm")  # noqa: S108 - where the C library's shm_open looks, not a temporary file of ours
# Regions of Triton's own Python backend; its clients know that these are refused.
RESERVED_PREFIX = "triton_python_backend_shm_region_"
_MAX_NAME_BYTES = 255
_MAX_UINT64 = 2**64 - 1
# Bytes: of an address at which a GPU's library takes a tensor.
_DEVICE_BOUNDARY = 256


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """A region as its client described it; sizes in bytes."""

    name: str
    key: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CudaRegionStatus:
    """A region of a GPU as its client described it; the size in bytes."""

    name: str
    device_id: int
    num_bytes: int


def _check_bounds(name: str, total: int, offset: int, num_bytes: int) -> None:
    """Raise InvalidArgumentError if these bytes are not all among the `total` of a region."""
    if offset >= total:
        raise InvalidArgumentError(f"Invalid offset for shared memory region: '{name}' has {total} bytes, got {offset}")
    if offset + num_bytes > _MAX_UINT64:
        raise InvalidArgumentError(
            f"Integer overflow detected: byte_size ({num_bytes}) + offset ({offset}) exceeds maximum value "
            f"({_MAX_UINT64}) for region '{name}', which has {total} bytes"
        )
    if offset + num_bytes > total:
        raise InvalidArgumentError(
            f"Invalid offset + byte size for shared memory region: '{name}' has {total} bytes, "
            f"got {offset} + {num_bytes}"
        )


class Region:
    """A registered region, and how many requests in flight use it. Event loop thread only."""

    __slots__ = ("_descriptor", "_memory", "_was_smaller", "is_leaving", "num_users", "status")
    is_on_device = False

    def __init__(self, status: RegionStatus) -> None:
        """Map the memory. Raises InvalidArgumentError for a key without memory, or with too little."""
        self.status = status
        self.num_users = 0
        # Unregistered while in use: it is released with its last user.
        self.is_leaving = False
        self._descriptor = _open(status.name, status.key)
        try:
            end = status.offset + status.num_bytes
            if status.num_bytes < 1 or end > os.fstat(self._descriptor).st_size:
                raise InvalidArgumentError(
                    f"failed to register shared memory region '{status.name}': invalid args: '{status.key}' has no "
                    f"{status.num_bytes} bytes at {status.offset}"
                )
            self._memory = None if guard is None else _GuardedMemory(self._descriptor, end)
            self._was_smaller = False
        except BaseException:
            os.close(self._descriptor)
            raise

    def check(self, offset: int, num_bytes: int) -> None:
        """Raise InvalidArgumentError if these bytes are not all in the region, or no longer in its file."""
        status = self.status
        _check_bounds(status.name, status.num_bytes, offset, num_bytes)
        end = status.offset + offset + num_bytes
        if not self.is_whole or end > os.fstat(self._descriptor).st_size:
            raise self.smaller()

    @property
    def is_whole(self) -> bool:
        """Whether the file had all the bytes of the region that were used. Once False, it stays False."""
        return not self._was_smaller and (self._memory is None or self._memory.is_whole)

    def check_whole(self) -> None:
        """Raise InvalidArgumentError if the file is smaller than the region, or was when the region was used."""
        if not self.is_whole or self.status.offset + self.status.num_bytes > os.fstat(self._descriptor).st_size:
            raise self.smaller()

    def holds(self, array: Array) -> bool:
        """Whether an array is memory of the region."""
        return self._memory is not None and np.may_share_memory(array, np.frombuffer(self._memory, np.uint8))

    def smaller(self) -> InvalidArgumentError:
        """The error for a request that uses bytes beyond the end of a shortened file."""
        return InvalidArgumentError(
            f"Invalid shared memory region: the file of '{self.status.name}' has become smaller since it was "
            "registered; unregister it, and register it as it is now"
        )

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """These bytes as a live view, or a copy. Raises InvalidArgumentError as `check` does.

        If the file loses bytes later, they read as zeros, which `is_whole` reports.
        """
        self.check(offset, num_bytes)
        start = self.status.offset + offset
        if self._memory is not None:
            return memoryview(self._memory)[start : start + num_bytes].toreadonly()
        copy = bytearray(num_bytes)
        if os.preadv(self._descriptor, [copy], start) < num_bytes:
            self._was_smaller = True
            raise self.smaller()
        return memoryview(copy).toreadonly()

    def write(self, offset: int, data: Buffer) -> None:
        """Raises InvalidArgumentError as `check` does."""
        self.check(offset, len(data))
        start = self.status.offset + offset
        if self._memory is None:
            os.pwrite(self._descriptor, data, start)
        else:
            memoryview(self._memory)[start : start + len(data)] = data
        if not self.is_whole:
            raise self.smaller()

    def close(self) -> None:
        """The memory is released with the last tensor that views it."""
        os.close(self._descriptor)
        self._memory = None


class CudaRegion:
    """A region of a GPU, as `Region`. Its memory is read and written by copies, which take long, or used in place."""

    __slots__ = ("_cuda", "_handle", "address", "is_leaving", "num_users", "status")
    is_on_device = True
    is_whole = True

    def __init__(self, status: CudaRegionStatus, handle: bytes, cuda: Cuda) -> None:
        """Map the memory, which takes long. Raises InvalidArgumentError for a handle without memory, or too little."""
        self.status = status
        self.num_users = 0
        self.is_leaving = False
        self._cuda = cuda
        self._handle = handle
        failed = f"failed to register CUDA shared memory region: '{status.name}'"
        try:
            self.address = cuda.open(handle, status.device_id)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{failed}: failed to open CUDA IPC handle: {error}") from None
        try:
            size = cuda.size(self.address, status.device_id)
            if not 0 < status.num_bytes <= size:
                raise InvalidArgumentError(f"{failed}: its handle has {size} bytes, got {status.num_bytes}")
        except BaseException:
            self.close()
            raise

    def check(self, offset: int, num_bytes: int) -> None:
        """Raise InvalidArgumentError if these bytes are not all in the region."""
        _check_bounds(self.status.name, self.status.num_bytes, offset, num_bytes)

    def check_whole(self) -> None:
        """Device memory does not shrink."""

    def holds(self, _array: Array) -> bool:
        """No array is memory of a device."""
        return False

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """A copy of these bytes. Raises InvalidArgumentError as `check` does."""
        self.check(offset, num_bytes)
        return memoryview(self._cuda.read(self.address + offset, num_bytes, self.status.device_id)).toreadonly()

    def write(self, offset: int, data: Buffer) -> None:
        """The bytes are there when it returns. Raises InvalidArgumentError as `check` does."""
        self.check(offset, len(data))
        self._cuda.write(self.address + offset, data, self.status.device_id)

    def is_usable(self, offset: int) -> bool:
        """Whether tensors may begin there for every library that computes on GPUs (TensorRT asks for the most)."""
        return (self.address + offset) % _DEVICE_BOUNDARY == 0

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """The memory itself. Raises InvalidArgumentError as `check` does."""
        found = DeviceArray(self._cuda, self.status.device_id, self.address + offset, dtype, shape)
        self.check(offset, found.nbytes)
        return found

    def close(self) -> None:
        """Unmap the memory, which may take long."""
        self._cuda.close(self._handle, self.status.device_id)


AnyRegion = Region | CudaRegion


class _GuardedMemory(mmap.mmap):
    """The memory of a file that others may make smaller: missing bytes read as zeros instead of killing the process."""

    _number: int | None = None

    def __init__(self, *_arguments: object) -> None:
        """Raises InvalidArgumentError when there are too many."""
        super().__init__()
        assert guard is not None, "the caller has looked"
        self._number = guard(self)
        if self._number is None:
            raise InvalidArgumentError(
                "Unable to register shared memory region: too many regions are registered; unregister some"
            )

    @property
    def is_whole(self) -> bool:
        """Whether all touched bytes were there."""
        assert is_broken is not None, "there is a guard"
        return self._number is not None and not is_broken(self._number)

    def __del__(self) -> None:
        if self._number is not None and unguard is not None:
            unguard(self._number)


class SharedMemory:
    """The regions by name, of both kinds. Event loop thread only."""

    def __init__(self, *, is_allowed: bool = False, new_cuda: Callable[[], Cuda] = Cuda) -> None:
        """Without `is_allowed` nothing can be registered; queries then find no regions. `new_cuda` opens the driver,
        when a region of a GPU is first registered."""
        self.is_allowed = is_allowed
        self._regions: dict[str, AnyRegion] = {}
        self._new_cuda = new_cuda
        self._cuda: Cuda | None = None
        # Regions of a GPU that are registered; while there are none, no request is asked for them.
        self.num_cuda_regions = 0

    def register(self, name: str, key: str, offset: int, num_bytes: int) -> None:
        """Register a region by that name.

        Raises UnsupportedError without the flag, AlreadyExistsError, or InvalidArgumentError.
        """
        with audited("register shared memory", name):
            self._check_name(name, key)
            self._regions[name] = Region(RegionStatus(name, key, offset, num_bytes))

    def register_cuda(self, name: str, handle: bytes, device_id: int, num_bytes: int, then: Registered) -> None:
        """Register a region of a GPU by the handle of the process that allocated it, beside the event loop.

        `then` gets a function that raises what went wrong: as `register`, and UnsupportedError without a GPU. Raises
        at once what needs no GPU.
        """
        with audited("register CUDA shared memory", name):
            self._check_name(name, "")
            if len(handle) != HANDLE_BYTES:
                raise InvalidArgumentError(
                    f"failed to register CUDA shared memory region: '{name}': its handle has {len(handle)} bytes, "
                    f"expected the {HANDLE_BYTES} of a cudaIpcMemHandle_t"
                )

        def opened() -> Slices[CudaRegion]:
            yield
            try:
                cuda = self._cuda = self._cuda or self._new_cuda()
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"failed to register CUDA shared memory region: '{name}', {error}; use system shared memory, or "
                    "send tensors in the message"
                ) from None
            return CudaRegion(CudaRegionStatus(name, device_id, num_bytes), handle, cuda)

        def take(result: Result[CudaRegion]) -> None:
            def registered() -> None:
                region = result()
                if name in self._regions:
                    _close(region)
                    raise _exists(name)
                self._regions[name] = region
                self.num_cuda_regions += 1

            then(registered)

        long_work().start(opened(), take)

    def _check_name(self, name: str, key: str) -> None:
        self.check_allowed()
        if not name or name.startswith(RESERVED_PREFIX) or key.lstrip("/").startswith(RESERVED_PREFIX):
            raise InvalidArgumentError(
                f"cannot register shared memory region '{name}' with key '{key}' as the {_fault(name)}"
            )
        if name in self._regions:
            raise _exists(name)

    def unregister(self, name: str = "", *, is_cuda: bool = False) -> None:
        """Forget a region, or all of this kind; one in use is forgotten when its last request has ended.

        An unknown name is ignored. Raises UnsupportedError for a name, if the flag is not set.
        """
        with audited("unregister CUDA shared memory" if is_cuda else "unregister shared memory", name):
            if name:
                self.check_allowed()
        for region in [region for region in self._regions.values() if name in ("", region.status.name)]:
            if region.is_on_device is is_cuda:
                region.is_leaving = True
                self._close_unused(region)

    def check_allowed(self) -> None:
        """Raise UnsupportedError if the server was not started with the flag."""
        if not self.is_allowed:
            raise UnsupportedError(
                "Client shared memory is disabled: start the server with --allow-client-shm=true to let clients "
                "register regions, or send tensors in the message"
            )

    def statuses(self, name: str = "") -> Sequence[RegionStatus]:
        """The status of one region, or of all. Raises NotFoundError for an unknown name."""
        found = [region.status for region in self._regions.values() if isinstance(region, Region)]
        return _named(name, found, "system")

    def cuda_statuses(self, name: str = "") -> Sequence[CudaRegionStatus]:
        """As `statuses`, of regions of GPUs."""
        found = [region.status for region in self._regions.values() if isinstance(region, CudaRegion)]
        return _named(name, found, "cuda")

    def find(self, name: str) -> AnyRegion:
        """The region of that name. Raises NotFoundError."""
        region = self._regions.get(name)
        if region is None:
            raise NotFoundError(f"Unable to find shared memory region: '{name}'")
        return region

    def is_on_device(self, name: str) -> bool:
        """Whether it is a region of a GPU."""
        region = self._regions.get(name)
        return region is not None and region.is_on_device

    def acquire(self, regions: Sequence[AnyRegion]) -> None:
        """A request uses these until `release`."""
        for region in regions:
            region.num_users += 1

    def release(self, regions: Sequence[AnyRegion]) -> None:
        """The request has ended."""
        for region in regions:
            region.num_users -= 1
            if region.is_leaving:
                self._close_unused(region)

    def close(self) -> None:
        """Release all regions, at the end of the server."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    def _close_unused(self, region: AnyRegion) -> None:
        if region.num_users == 0 and self._regions.pop(region.status.name, None) is not None:
            if region.is_on_device:
                self.num_cuda_regions -= 1
            _close(region)


# Called on the event loop with a function that raises why nothing was registered.
Registered = Callable[[Callable[[], None]], None]
StatusT = TypeVar("StatusT", RegionStatus, CudaRegionStatus)


def _named(name: str, statuses: Sequence[StatusT], kind: str) -> Sequence[StatusT]:
    found = [status for status in statuses if name in ("", status.name)]
    if name and not found:
        raise NotFoundError(f"Unable to find {kind} shared memory region: '{name}'")
    return found


def _close(region: AnyRegion) -> None:
    """That of a device beside the event loop."""
    if region.is_on_device:
        long_work().start(at_once(region.close), _ended)
    else:
        region.close()


def _ended(result: Result[None]) -> None:
    try:
        result()
    except ServerError as error:
        _logger.error("a CUDA shared memory region was not unmapped: %s", error)


def _exists(name: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"shared memory region '{name}' already in manager")


def too_small(output: str, num_bytes: int, needed_bytes: int) -> ServerError:
    """The error for an output that its slice of a region cannot hold."""
    return InternalError(
        f"shared memory size specified with the request for output '{output}' ({num_bytes} bytes) should be at least "
        f"{needed_bytes} bytes to hold the results"
    )


def _open(region: str, key: str) -> int:
    """A descriptor of the shared memory object that is called `key`. Raises InvalidArgumentError."""
    name = key.removeprefix("/")
    if (
        not name
        or "/" in name
        or "\0" in name
        or name in (".", "..")
        or len(name.encode(errors="replace")) > _MAX_NAME_BYTES
    ):
        raise InvalidArgumentError(
            f"cannot register shared memory region '{region}' - invalid shm key '{key:.100}': it is not the name of an "
            "object"
        )
    try:
        descriptor = os.open(DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgumentError(f"Unable to open shared memory region: '{key}': {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArgumentError(f"Unable to open shared memory region: '{key}' is not shared memory")
    return descriptor


def _fault(name: str) -> str:
    """The fault of the region's name, or else of its key."""
    if not name:
        return "name is empty"
    kind = "name" if name.startswith(RESERVED_PREFIX) else "key"
    return f"{kind} contains the reserved prefix '{RESERVED_PREFIX}'"
