"""The CUDA layer under TensorRT, without TensorRT: memory, streams, events, graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.steps import require_gpu


def new_device() -> Any:
    require_gpu()
    from modelserver_backends.tensorrt.device import Device

    return Device(0)


def step_blocks_are_aligned() -> dict[str, Any]:
    device = new_device()
    blocks = [device.empty(size) for size in (0, 1, 3, 257, 4096, 1_000_003)]
    alignments = [block.data_ptr() & -block.data_ptr() for block in blocks]
    assert min(alignments) >= 256, alignments
    return {"least_alignment": min(alignments)}


def step_bytes_go_there_and_back() -> dict[str, Any]:
    device = new_device()
    torch = device.torch
    stream, done = device.new_stream(), device.new_event()
    sent = np.random.default_rng(0).random((1 << 20,)).astype(np.float32)
    with torch.cuda.stream(stream):
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


def step_a_graph_replays() -> dict[str, Any]:
    device = new_device()
    torch = device.torch
    stream = device.new_stream()
    data = torch.ones(16, device=device.name)
    with torch.cuda.stream(stream):
        data.mul_(2)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        data.mul_(2)
    with torch.cuda.stream(stream):
        for _ in range(3):
            graph.replay()
    stream.synchronize()
    assert float(data[0]) == 16.0, float(data[0])
    return {}


def step_memory_does_not_grow() -> dict[str, Any]:
    device = new_device()
    torch = device.torch
    stream = device.new_stream()
    array = np.zeros(1 << 18, np.float32)

    def once() -> None:
        with torch.cuda.stream(stream):
            staged = device.host_copy(array)
            there = device.empty(array.nbytes)
            there[: staged.numel()].copy_(staged, non_blocking=True)
            stream.synchronize()

    for _ in range(10):
        once()
    before = torch.cuda.memory_reserved()
    for _ in range(1000):
        once()
    assert torch.cuda.memory_reserved() == before, (before, torch.cuda.memory_reserved())
    return {"reserved_bytes": before}
