"""System shared memory that clients have registered: named regions, in which tensors of requests may lie.

A client may make the file of a region smaller at any time. Each use checks that it is still large enough; a change
between the check and the use fails only that request. With the C part, tensors are views of the region's guarded
memory; without it they are copied by system calls, which report missing bytes.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.core.accelerator import guard, is_broken, unguard
from modelserver.core.tensor import Buffer
from modelserver.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ServerError,
    UnsupportedError,
)
from modelserver.telemetry.audit import audited

Array = np.ndarray[Any, np.dtype[Any]]

# POSIX shared memory objects are files of this directory.
DIRECTORY = Path("/dev/shm")  # noqa: S108 - where the C library's shm_open looks, not a temporary file of ours
# Regions of Triton's own Python backend; its clients know that these are refused.
RESERVED_PREFIX = "triton_python_backend_shm_region_"
_MAX_NAME_BYTES = 255
_MAX_UINT64 = 2**64 - 1
# A cudaIpcMemHandle_t.
CUDA_HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """A region as its client described it; sizes in bytes."""

    name: str
    key: str
    offset: int
    num_bytes: int


class Region:
    """A registered region, and how many requests in flight use it. Event loop thread only."""

    __slots__ = ("_descriptor", "_memory", "_was_smaller", "is_leaving", "num_users", "status")

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
        if offset >= status.num_bytes:
            raise InvalidArgumentError(
                f"Invalid offset for shared memory region: '{status.name}' has {status.num_bytes} bytes, got {offset}"
            )
        if offset + num_bytes > _MAX_UINT64:
            raise InvalidArgumentError(
                f"Integer overflow detected: byte_size ({num_bytes}) + offset ({offset}) exceeds maximum value "
                f"({_MAX_UINT64}) for region '{status.name}', which has {status.num_bytes} bytes"
            )
        if offset + num_bytes > status.num_bytes:
            raise InvalidArgumentError(
                f"Invalid offset + byte size for shared memory region: '{status.name}' has {status.num_bytes} bytes, "
                f"got {offset} + {num_bytes}"
            )
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
    """The regions by name. Event loop thread only."""

    def __init__(self, *, is_allowed: bool = False) -> None:
        """Without `is_allowed` nothing can be registered; queries then find no regions."""
        self.is_allowed = is_allowed
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, num_bytes: int) -> None:
        """Register a region by that name.

        Raises UnsupportedError without the flag, AlreadyExistsError, or InvalidArgumentError.
        """
        with audited("register shared memory", name):
            self._register(name, key, offset, num_bytes)

    def _register(self, name: str, key: str, offset: int, num_bytes: int) -> None:
        self.check_allowed()
        if not name or name.startswith(RESERVED_PREFIX) or key.lstrip("/").startswith(RESERVED_PREFIX):
            raise InvalidArgumentError(
                f"cannot register shared memory region '{name}' with key '{key}' as the {_fault(name)}"
            )
        if name in self._regions:
            raise AlreadyExistsError(f"shared memory region '{name}' already in manager")
        self._regions[name] = Region(RegionStatus(name, key, offset, num_bytes))

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them; one in use is forgotten when its last request has ended.

        An unknown name is ignored. Raises UnsupportedError for a name, if the flag is not set.
        """
        with audited("unregister shared memory", name):
            if name:
                self.check_allowed()
        for region in [region for region in self._regions.values() if name in ("", region.status.name)]:
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
        if name and name not in self._regions:
            raise NotFoundError(f"Unable to find system shared memory region: '{name}'")
        return [region.status for region in self._regions.values() if not name or region.status.name == name]

    def find(self, name: str) -> Region:
        """The region of that name. Raises NotFoundError."""
        region = self._regions.get(name)
        if region is None:
            raise NotFoundError(f"Unable to find shared memory region: '{name}'")
        return region

    def acquire(self, regions: Sequence[Region]) -> None:
        """A request uses these until `release`."""
        for region in regions:
            region.num_users += 1

    def release(self, regions: Sequence[Region]) -> None:
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

    def _close_unused(self, region: Region) -> None:
        if region.num_users == 0 and self._regions.pop(region.status.name, None) is not None:
            region.close()


class CudaSharedMemory:
    """CUDA regions: this server shares no GPU memory, so it refuses to register any and lists none."""

    def register(self, name: str, raw_handle: bytes, device_id: int, num_bytes: int) -> None:
        """Raises UnsupportedError always; the arguments are those of the protocol."""
        del raw_handle, num_bytes
        raise UnsupportedError(
            f"failed to register CUDA shared memory region: '{name}', GPUs not supported: this server does not share "
            f"the memory of device {device_id}; use system shared memory, or send tensors in the message"
        )

    def statuses(self, name: str = "") -> Sequence[RegionStatus]:
        """The status of one region, which is never found, or of all."""
        if name:
            raise NotFoundError(f"Unable to find cuda shared memory region: '{name}'")
        return ()


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
