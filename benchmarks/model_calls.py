"""What a call of another model costs a Python model (BLS): `python -m benchmarks.model_calls`.

A Python model that calls an identity, which is executed on the event loop, some times for each request: one call after
the other, and all at once as coroutines. What further calls add is a call's price: the time that passes, and the CPU of
the server and of the model's process; the best of many rounds, because other processes disturb it least.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess

Costs = np.ndarray[tuple[int], np.dtype[np.float64]]

NUM_ROUNDS = 9
NUM_REQUESTS = 100
FEW, MANY = 1, 33

_IDENTITY = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""
_CALLER = """
backend: "python"
input { name: "COUNT" data_type: TYPE_INT32 dims: 1 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""
_SYNC = """
import numpy as np
import triton_python_backend_utils as pb_utils

ROW = np.ones(16, np.float32)


def called():
    return pb_utils.InferenceRequest(
        model_name="identity", requested_output_names=["OUTPUT0"], inputs=[pb_utils.Tensor("INPUT0", ROW)]
    )


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        for _ in range(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0]):
            response = called().exec()
        return [pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(response, "OUTPUT0")])]
"""
_ASYNC = (
    _SYNC.partition("class ")[0]
    + """
import asyncio


class TritonPythonModel:
    async def execute(self, requests):
        (request,) = requests
        count = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0]
        responses = await asyncio.gather(*(called().async_exec() for _ in range(count)))
        return [pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(responses[0], "OUTPUT0")])]
"""
)


def write_models(root: Path) -> None:
    for name, config, code in (("identity", _IDENTITY, ""), ("exec", _CALLER, _SYNC), ("async_exec", _CALLER, _ASYNC)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        if code:
            (root / name / "1" / "model.py").write_text(code)


class Caller:
    """A connection to the server, and the clocks of its processes."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=60)
        parent = psutil.Process(server.process.pid)
        self._pids = [parent.pid, *(child.pid for child in parent.children(recursive=True))]

    def request_us(self, name: str, count: int) -> Costs:
        """Time and CPU time of one request with so many calls in microseconds, the best rounds."""
        rounds = []
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter(), self._cpu_s()
            for _ in range(NUM_REQUESTS):
                self._ask(name, count)
            rounds.append(np.subtract((time.perf_counter(), self._cpu_s()), start))
        best: Costs = np.min(rounds, axis=0) / NUM_REQUESTS * 1e6
        return best

    def close(self) -> None:
        self._connection.close()

    def _ask(self, name: str, count: int) -> None:
        body = {"inputs": [{"name": "COUNT", "datatype": "INT32", "shape": [1], "data": [count]}]}
        self._connection.request("POST", f"/v2/models/{name}/infer", json.dumps(body))
        reply = self._connection.getresponse()
        answer = reply.read()
        if reply.status != 200:
            raise SystemExit(f"{name}: {reply.status} {answer[:500]!r}")

    def _cpu_s(self) -> float:
        # Finer than /proc/<pid>/stat, which counts in hundredths of seconds.
        tasks = [task for pid in self._pids for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_models(Path(directory))
        with modelserver(Path(directory), "--log-info=false") as server:
            caller = Caller(server)
            for name in ("exec", "async_exec"):
                wall_us, cpu_us = (caller.request_us(name, MANY) - caller.request_us(name, FEW)) / (MANY - FEW)
                print(f"{name:<12} a call takes {wall_us:6.1f} us, and {cpu_us:6.1f} us of CPU")
            caller.close()


if __name__ == "__main__":
    main()
