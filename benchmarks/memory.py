"""`python -m benchmarks.memory`: what a server still holds after many loads, unloads and requests.

For each backend one model is loaded, asked once and unloaded, again and again; then requests of varied shapes are
sent. Before and after, once things have settled, the server's processes are counted together: memory that they wrote,
file descriptors, threads, processes, and the host's shared memory. What grows with the number of cycles is a leak.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import models
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess

_MODELS = Path(__file__).parent.parent / "model_repository"
# One of each backend, an ensemble, and a decoupled Python model; by the name of what is measured.
CYCLED = {
    "identity": "identity",
    "ensemble": "chain",
    "sequence": "sequence",
    "python": "add_sub",
    "python-decoupled": "repeat_py",
    "onnxruntime": "digits_onnx",
    "pytorch": "digits_torchscript",
    "llm": "tiny_chat",
    "repeat": "repeat",
    "square": "square",
}
_WRITTEN = {
    "repeat": """
        backend: "repeat"
        model_transaction_policy { decoupled: true }
        input [
          { name: "IN", data_type: TYPE_INT32, dims: [ -1 ] },
          { name: "DELAY", data_type: TYPE_UINT32, dims: [ -1 ] },
          { name: "WAIT", data_type: TYPE_UINT32, dims: [ 1 ] }
        ]
        output [
          { name: "OUT", data_type: TYPE_INT32, dims: [ 1 ] },
          { name: "IDX", data_type: TYPE_UINT32, dims: [ 1 ] }
        ]
        """,
    "square": """
        backend: "square"
        model_transaction_policy { decoupled: true }
        input [ { name: "IN", data_type: TYPE_INT32, dims: [ 1 ] } ]
        output [ { name: "OUT", data_type: TYPE_INT32, dims: [ 1 ] } ]
        """,
    "chain": """
        platform: "ensemble"
        max_batch_size: 8
        input [ { name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
        output [ { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
        ensemble_scheduling { step [
          {
            model_name: "identity"
            input_map { key: "INPUT0" value: "INPUT0" }
            output_map { key: "OUTPUT0" value: "between" }
          },
          {
            model_name: "identity"
            input_map { key: "INPUT0" value: "between" }
            output_map { key: "OUTPUT0" value: "OUTPUT0" }
          }
        ] }
        """,
    "sequence": """
        backend: "sequence"
        max_batch_size: 4
        sequence_batching {
          oldest { max_candidate_sequences: 4 }
          control_input [
            { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
            { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
          ]
        }
        input [ { name: "INPUT", data_type: TYPE_INT32, dims: [ 1 ] } ]
        output [ { name: "OUTPUT", data_type: TYPE_INT32, dims: [ 1 ] } ]
        """,
    "repeat_py": """
        backend: "python"
        model_transaction_policy { decoupled: true }
        input [ { name: "IN", data_type: TYPE_INT32, dims: [ -1 ] } ]
        output [ { name: "OUT", data_type: TYPE_INT32, dims: [ 1 ] } ]
        """,
}
_REPEAT_PY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for element in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", element.reshape(1))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Models that requests of varied shapes are sent to.
ASKED = {"requests": "identity", "requests-python": "identity_py"}
# What a model is asked once in each cycle: the end of its path, and a JSON body.
_ROW = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
_IMAGE = {"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": [0.5] * 64}]}
_ROWS = [{"name": f"INPUT{index}", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]} for index in (0, 1)]
_ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "identity": ("infer", _ROW),
    "chain": ("infer", _ROW),
    "add_sub": ("infer", {"inputs": _ROWS}),
    "digits_onnx": ("infer", _IMAGE),
    "digits_torchscript": ("infer", _IMAGE),
    "repeat_py": ("generate_stream", {"IN": [1, 2, 3, 4]}),
    "tiny_chat": ("generate", {"text_input": "import", "max_tokens": 4}),
    "sequence": (
        "infer",
        {
            "inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [1]}],
            "parameters": {"sequence_id": 7, "sequence_start": True, "sequence_end": True},
        },
    ),
}
# The first cycles fill what is kept: allocators' arenas, pools of threads, imported libraries.
_WARM_SHARE = 0.2
_SETTLE_S = 2.0
_MAX_ELEMENTS = 20_000


@dataclass(frozen=True, slots=True)
class Held:
    """What the processes of a server hold together; shared memory is the host's."""

    memory_mib: float
    num_files: int
    num_threads: int
    num_processes: int
    num_regions: int

    @classmethod
    def of(cls, server: ServerProcess) -> Held:
        parent = psutil.Process(server.process.pid)
        processes = [parent, *parent.children(recursive=True)]
        return cls(
            sum(_own_kib(process.pid) for process in processes) / 1024,
            sum(process.num_fds() for process in processes),
            sum(process.num_threads() for process in processes),
            len(processes),
            len(list(Path("/dev/shm").iterdir())),
        )


def _own_kib(pid: int) -> int:
    """What a process wrote itself, shared memory by its share; pages of libraries depend on who else uses them."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


class Client:
    """One kept connection."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=60)

    def post(self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """The body of the answer. Raises SystemExit with it when the status is not 200."""
        self._connection.request("POST", path, body, dict(headers or {}))
        reply = self._connection.getresponse()
        answer = reply.read()
        if reply.status != 200:
            raise SystemExit(f"{path}: {reply.status} {answer[:500]!r}")
        return answer

    def close(self) -> None:
        self._connection.close()


def write_repository(root: Path) -> None:
    """The example models, and those of the test backends that need no files."""
    for name in set(CYCLED.values()) - set(_WRITTEN):
        shutil.copytree(_MODELS / name, root / name)
    for name, config in _WRITTEN.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "repeat_py" / "1" / "model.py").write_text(_REPEAT_PY)
    models.python_identity(root)


def cycle(client: Client, model: str, count: int) -> None:
    """Load, ask and unload, waiting for the end of each unload."""
    unload = json.dumps({"parameters": {"unload_dependents": True}}).encode()
    for _ in range(count):
        client.post(f"/v2/repository/models/{model}/load")
        if model in _ASKED:
            path, body = _ASKED[model]
            client.post(f"/v2/models/{model}/{path}", json.dumps(body).encode())
        client.post(f"/v2/repository/models/{model}/unload", unload)


def ask(client: Client, model: str, count: int, random_numbers: random.Random) -> None:
    """Requests to an identity model: rows and columns as they come, JSON now and then."""
    path = f"/v2/models/{model}/infer"
    for number in range(count):
        rows = random_numbers.randint(1, 8)
        columns = random_numbers.randint(1, random_numbers.choice((8, 200, _MAX_ELEMENTS // rows)))
        size = rows * columns * 4
        tensor: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [rows, columns]}
        if number % 10 == 0 and rows * columns < 1000:
            body = json.dumps({"inputs": [tensor | {"data": [number % 7] * (rows * columns)}]}).encode()
            client.post(path, body)
            continue
        tensor["parameters"] = {"binary_data_size": size}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        client.post(path, head + bytes(size), headers)


def _report(what: str, before: Held, after: Held, count: int, duration_s: float) -> None:
    first, last = astuple(before), astuple(after)
    growth = (after.memory_mib - before.memory_mib) * 1024 / count
    print(
        f"{what:24} {count:7d} in {duration_s:6.1f} s  "
        f"memory {first[0]:7.1f} -> {last[0]:7.1f} MiB ({growth:+.2f} KiB each)  "
        f"files {first[1]} -> {last[1]}  threads {first[2]} -> {last[2]}  processes {first[3]} -> {last[3]}  "
        f"regions {first[4]} -> {last[4]}",
        flush=True,
    )


def _settled(server: ServerProcess) -> Held:
    time.sleep(_SETTLE_S)
    return Held.of(server)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000, help="loads and unloads of each backend")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--only", choices=[*CYCLED, *ASKED], action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_repository(root)
        with modelserver(root, "--model-control-mode=explicit", "--log-info=false") as server:
            client = Client(server)
            for what, model in CYCLED.items():
                if options.only and what not in options.only:
                    continue
                cycle(client, model, max(1, int(options.cycles * _WARM_SHARE)))
                before, start_s = _settled(server), time.monotonic()
                cycle(client, model, options.cycles)
                duration_s = time.monotonic() - start_s
                _report(f"load, unload: {what}", before, _settled(server), options.cycles, duration_s)
            for what, model in ASKED.items():
                if options.only and what not in options.only:
                    continue
                client.post(f"/v2/repository/models/{model}/load")
                random_numbers = random.Random(7)
                ask(client, model, max(1, int(options.requests * _WARM_SHARE)), random_numbers)
                before, start_s = _settled(server), time.monotonic()
                ask(client, model, options.requests, random_numbers)
                duration_s = time.monotonic() - start_s
                _report(what, before, _settled(server), options.requests, duration_s)
            client.close()


if __name__ == "__main__":
    main()
