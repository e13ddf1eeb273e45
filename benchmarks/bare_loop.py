"""What a backend's library does without a server around it: threads that call one model as fast as it answers.

Each has one thread of its own inside, and an image [1, 3, 224, 224].
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_NUM_WARMUPS = 3


@dataclass(frozen=True, slots=True)
class Slice:
    """Some time of computing: how often, how long, and CPU seconds of the process meanwhile."""

    runs: int
    seconds: float
    cpu_s: float


def image() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)


def onnx_call(path: str) -> Callable[[], object]:
    """`session.run`, as ONNX Runtime's own guide has it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {"image": image()}
    return lambda: session.run(None, feeds)


def torch_call(path: str) -> Callable[[], object]:
    """An exported program under inference mode, from an array to an array."""
    import torch

    module = torch.export.load(path).module()
    array = image()

    def call() -> object:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode():
            return module(torch.from_numpy(array)).numpy()

    return call


def bare_call(kind: str, path: str) -> Callable[[], object]:
    """What a loop calls: `kind` is onnx or torch."""
    call = {"onnx": onnx_call, "torch": torch_call}[kind](path)
    for _ in range(_NUM_WARMUPS):
        call()
    return call


def run_loops(call: Callable[[], object], num_loops: int, seconds: float) -> Slice:
    """So many threads call it for so long; what has begun by then is counted."""
    counts = [0] * num_loops
    begin = threading.Barrier(num_loops + 1)
    is_over = threading.Event()

    def loop(index: int) -> None:
        begin.wait()
        while not is_over.is_set():
            call()
            counts[index] += 1

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(num_loops)]
    for thread in threads:
        thread.start()
    started, cpu_started = time.perf_counter(), time.process_time()
    begin.wait()
    is_over.wait(seconds)
    is_over.set()
    for thread in threads:
        thread.join()
    return Slice(sum(counts), time.perf_counter() - started, time.process_time() - cpu_started)
