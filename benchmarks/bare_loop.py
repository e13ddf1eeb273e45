"""`python -m benchmarks.bare_loop KIND FILE LOOPS SECONDS`: what a backend's library does without a server around it.

KIND is onnx or torch. So many threads call one model as fast as it answers, each with one thread of its own inside, on
an image [1, 3, 224, 224]. Prints JSON: runs, seconds, and CPU seconds of the process.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable

import numpy as np


def onnx_call(path: str) -> Callable[[], object]:
    """`session.run`, as ONNX Runtime's own guide has it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    image = np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)
    return lambda: session.run(None, {"image": image})


def torch_call(path: str) -> Callable[[], object]:
    """An exported program under inference mode, from an array to an array."""
    import torch

    module = torch.export.load(path).module()
    image = np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)

    def call() -> object:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode():
            return module(torch.from_numpy(image)).numpy()

    return call


def main() -> None:
    kind, path, num_loops, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    call = {"onnx": onnx_call, "torch": torch_call}[kind](path)
    counts = [0] * num_loops
    begin = threading.Barrier(num_loops + 1)
    is_over = threading.Event()

    def loop(index: int) -> None:
        for _ in range(3):
            call()
        begin.wait()
        while not is_over.is_set():
            call()
            counts[index] += 1

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(num_loops)]
    for thread in threads:
        thread.start()
    begin.wait()
    started, cpu_started = time.perf_counter(), time.process_time()
    is_over.wait(seconds)
    is_over.set()
    for thread in threads:
        thread.join()
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    print(json.dumps({"runs": sum(counts), "seconds": elapsed, "cpu_s": cpu}))


if __name__ == "__main__":
    main()
