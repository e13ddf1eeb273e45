"""The CUDA layer under TensorRT, without TensorRT: memory, streams, events, graphs; and memory of another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from gpu.steps import IS_REHEARSAL, require_device, sized, takes

# What a client of CUDA shared memory does, by the driver alone: it writes numbers, says the handle of their memory, and
# when it is told to, says what the memory has then.
CLIENT = """
import array, ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, f"{name} failed: {code}"
class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)
context, address, handle = ctypes.c_void_p(), ctypes.c_uint64(), Handle()
numbers = array.array("f", range(int(sys.argv[1])))
size, place = ctypes.c_size_t(len(numbers) * 4), ctypes.c_void_p(numbers.buffer_info()[0])
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxPushCurrent_v2", context)
call("cuMemAlloc_v2", ctypes.byref(address), size)
call("cuMemcpyHtoD_v2", address, place, size)
call("cuIpcGetMemHandle", ctypes.byref(handle), address)
print(bytes(handle).hex(), flush=True)
sys.stdin.readline()
call("cuMemcpyDtoH_v2", place, address, size)
print(bytes(numbers).hex(), flush=True)
"""


class Client(Protocol):
    """Of CUDA shared memory: `handle` names its numbers, and `read` has them as they are now."""

    handle: bytes

    def read(self) -> bytes: ...


class ClientProcess:
    def __init__(self, count: int) -> None:
        command = [sys.executable, "-c", CLIENT, str(count)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.handle = bytes.fromhex(self._line())

    def read(self) -> bytes:
        assert self._process.stdin is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()
        return bytes.fromhex(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the client ended with {self._process.wait()}"
        return line

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def client_of(count: int) -> Iterator[tuple[Any, Client]]:
    """The driver for this process, and a client with that many float32 from 0 on."""
    from modelserver.platform.cuda import Cuda

    if IS_REHEARSAL:
        from support.rehearsed_cuda import RehearsedClient

        client = RehearsedClient(np.arange(count, dtype=np.float32).tobytes())
        yield Cuda(client.cuda), client
        return
    process = ClientProcess(count)
    try:
        yield Cuda(), process
    finally:
        process.end()


def new_device() -> Any:
    require_device()
    from modelserver_backends.tensorrt.device import Device

    if IS_REHEARSAL:
        from support.rehearsed_cuda import use_fake_device

        use_fake_device()
    return Device(0)


@takes(8, worth=8)
def step_memory_of_another_process_is_used_in_place() -> dict[str, Any]:
    """CUDA shared memory: a handle is opened, read, written by the driver and by PyTorch, and closed."""
    device = new_device()
    from modelserver.errors import InvalidArgumentError
    from modelserver.platform.cuda import DeviceArray

    count = sized(1 << 20, 64)
    expected = np.arange(count, dtype=np.float32)
    with client_of(count) as (cuda, client):
        address = cuda.open(client.handle, 0)
        assert cuda.open(client.handle, 0) == address, "it is opened once"
        size = cuda.size(address, 0)
        assert size >= expected.nbytes, size
        array = DeviceArray(cuda, 0, address, expected.dtype, expected.shape)
        assert np.array_equal(np.asarray(array), expected)
        stream = device.new_stream()
        with device.activate(), device.torch.cuda.stream(stream):
            there = device.borrow(array)
            assert there.data_ptr() == address
            back = device.pinned(array.nbytes)
            back.copy_(there, non_blocking=True)
        stream.synchronize()
        assert np.array_equal(back.numpy().view(np.float32), expected)
        # The second half becomes the first one, and then the beginning something else.
        half = array.nbytes // 2
        DeviceArray(cuda, 0, address, expected.dtype, (count // 2,)).fill(address + half)
        cuda.write(address, np.full(4, 7.0, np.float32).tobytes(), 0)
        expected[: count // 2] = expected[count // 2 :]
        expected[:4] = 7
        assert np.array_equal(np.frombuffer(client.read(), np.float32), expected)
        for _ in range(2):
            cuda.close(client.handle, 0)
        try:
            cuda.open(bytes(64), 0)
        except InvalidArgumentError as error:
            said = error.message
        else:
            raise AssertionError("a handle without memory was opened")
    return {"bytes": size, "said of a wrong handle": said}


@takes(1, worth=2)
def step_blocks_are_aligned() -> dict[str, Any]:
    device = new_device()
    blocks = [device.empty(size) for size in (0, 1, 3, 257, 4096, 1_000_003)]
    alignments = [block.data_ptr() & -block.data_ptr() for block in blocks]
    assert min(alignments) >= 256, alignments
    return {"least_alignment": min(alignments)}


@takes(1, worth=4)
def step_bytes_go_there_and_back() -> dict[str, Any]:
    device = new_device()
    torch = device.torch
    stream, done = device.new_stream(), device.new_event()
    sent = np.random.default_rng(0).random((sized(1 << 20, 1000),)).astype(np.float32)
    with device.activate(), torch.cuda.stream(stream):
        staged = device.host_copy(sent)
        assert staged.is_pinned()
        there = device.empty(sent.nbytes)
        there[: staged.numel()].copy_(staged, non_blocking=True)
        back = device.pinned(sent.nbytes)
        back.copy_(there, non_blocking=True)
        done.record(stream)
    done.synchronize()
    assert np.array_equal(back.numpy().view(np.float32), sent)
    return {"bytes": sent.nbytes}


@takes(1, worth=4)
def step_a_graph_replays() -> dict[str, Any]:
    device = new_device()
    from modelserver.backend import capture_turn

    torch = device.torch
    stream = device.new_stream()
    data = torch.ones(16, device=device.name)
    with device.activate(), torch.cuda.stream(stream):
        data.copy_(data * 2)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture_turn(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        data.copy_(data * 2)
    with torch.cuda.stream(stream):
        for _ in range(3):
            graph.replay()
    stream.synchronize()
    assert float(data[0]) == 16.0, float(data[0])
    return {}


@takes(2, worth=2)
def step_memory_does_not_grow() -> dict[str, Any]:
    device = new_device()
    torch = device.torch
    stream = device.new_stream()
    array = np.zeros(sized(1 << 18, 16), np.float32)

    def once() -> None:
        with device.activate(), torch.cuda.stream(stream):
            staged = device.host_copy(array)
            there = device.empty(array.nbytes)
            there[: staged.numel()].copy_(staged, non_blocking=True)
            stream.synchronize()

    for _ in range(10):
        once()
    before = torch.cuda.memory_reserved()
    for _ in range(sized(1000, 3)):
        once()
    assert torch.cuda.memory_reserved() == before, (before, torch.cuda.memory_reserved())
    return {"reserved_bytes": before}
