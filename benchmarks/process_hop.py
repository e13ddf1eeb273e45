"""What the hop to a child process costs: `python -m benchmarks.process_hop` prints µs per batch, small and 1 MiB.

An add_sub `model.py` (two inputs, two outputs) and an echo without pb_utils, so that the hop can be told from the
model. CPU is given for both sides; wall time includes two wake-ups of a sleeping process.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from modelserver.backend import BackendContext, BatchInstance, Datatype, Placement, Tensor
from modelserver.backend.discovery import find_backend
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.core.request import InFlightRequest
from modelserver.execution.process.hosting import backend_recipe
from modelserver.execution.process.instance import ProcessInstance

ADD_SUB = Path(__file__).parent.parent / "model_repository" / "add_sub"
SIZES = {"64 B": 16, "16 KiB": 4 << 10, "1 MiB": 1 << 18}
SECONDS_PER_CASE = 1.5


def main() -> None:
    print(f"{'case':<28} {'batches':>8} {'wall µs':>9} {'server CPU µs':>14} {'child CPU µs':>13}")
    for instance, inputs in ((python_instance(), ("INPUT0", "INPUT1")), (echo_instance(), ("INPUT",))):
        try:
            for size, count in SIZES.items():
                data = np.arange(count, dtype=np.float32)
                measure(f"{instance.name} {size}", instance, dict.fromkeys(inputs, data))
        finally:
            instance.close()


def python_instance() -> ProcessInstance:
    config = parse_pbtxt((ADD_SUB / "config.pbtxt").read_text(), "config.pbtxt").config
    context = BackendContext("add_sub", 1, config, ADD_SUB, ADD_SUB / "1")
    instance = find_backend("python")(context).create_instance(Placement("add_sub (model.py)"))
    assert isinstance(instance, ProcessInstance)
    return instance


def echo_instance() -> ProcessInstance:
    tensor = "{ name: '%s' data_type: TYPE_FP32 dims: -1 }"
    config = parse_pbtxt(f"input {tensor % 'INPUT'} output {tensor % 'OUTPUT'}", "config.pbtxt").config
    with tempfile.TemporaryDirectory() as directory:
        context = BackendContext("echo", 1, config, Path(directory), Path(directory))
        recipe = backend_recipe("modelserver_backends.identity:BACKEND", context, Placement("echo"))
        return ProcessInstance("echo (no pb_utils)", recipe)


def measure(title: str, instance: ProcessInstance, arrays: dict[str, np.ndarray]) -> None:
    request = InFlightRequest(
        model_name="model", version=1, inputs={name: Tensor(name, Datatype.FP32, data) for name, data in arrays.items()}
    )
    run(instance, request, 0.3)
    child = psutil.Process(instance.pid)
    wall, server, hosted = time.perf_counter(), time.process_time(), cpu_s(child)
    count = run(instance, request, SECONDS_PER_CASE)
    per_batch = 1e6 / count
    print(
        f"{title:<28} {count:>8} {(time.perf_counter() - wall) * per_batch:>9.1f} "
        f"{(time.process_time() - server) * per_batch:>14.1f} {(cpu_s(child) - hosted) * per_batch:>13.1f}"
    )


def run(instance: BatchInstance, request: InFlightRequest, seconds: float) -> int:
    count = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        (response,) = instance.execute([request])
        assert not isinstance(response, Exception), response
        count += 1
    return count


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
