"""`python -m benchmarks.memory`: what a server still holds after many loads, unloads and requests.

For each backend one model is loaded and unloaded again and again, then requests of varied shapes are sent. Before
and after, once things have settled, the server's processes are counted together: memory (PSS), file descriptors,
threads, processes, and the host's shared memory. What grows with the number of cycles is a leak.
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

from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess

_MODELS = Path(__file__).parent.parent / "model_repository"
# One of each backend, and an ensemble; by the name of what is measured.
CYCLED = {
    "identity": "identity",
    "python": "add_sub",
    "onnxruntime": "digits_onnx",
    "pytorch": "digits_torchscript",
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
            sum(process.memory_full_info().pss for process in processes) / 2**20,
            sum(process.num_fds() for process in processes),
            sum(process.num_threads() for process in processes),
            len(processes),
            len(list(Path("/dev/shm").iterdir())),
        )


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


def cycle(server: ServerProcess, client: Client, model: str, count: int) -> None:
    """Load and unload, waiting for the end of each unload."""
    for _ in range(count):
        client.post(f"/v2/repository/models/{model}/load")
        client.post(f"/v2/repository/models/{model}/unload")


def ask(client: Client, count: int, random_numbers: random.Random) -> None:
    """Requests to the identity model: rows and columns as they come, JSON now and then."""
    for number in range(count):
        rows = random_numbers.randint(1, 8)
        columns = random_numbers.randint(1, random_numbers.choice((8, 200, _MAX_ELEMENTS // rows)))
        size = rows * columns * 4
        tensor: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [rows, columns]}
        if number % 10 == 0 and rows * columns < 1000:
            body = json.dumps({"inputs": [tensor | {"data": [number % 7] * (rows * columns)}]}).encode()
            client.post("/v2/models/identity/infer", body)
            continue
        tensor["parameters"] = {"binary_data_size": size}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        client.post("/v2/models/identity/infer", head + bytes(size), headers)


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
    parser.add_argument("--only", choices=[*CYCLED, "requests"], action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_repository(root)
        with modelserver(root, "--model-control-mode=explicit", "--log-info=false") as server:
            client = Client(server)
            for what, model in CYCLED.items():
                if options.only and what not in options.only:
                    continue
                num_warm = max(1, int(options.cycles * _WARM_SHARE))
                cycle(server, client, model, num_warm)
                before, start_s = _settled(server), time.monotonic()
                cycle(server, client, model, options.cycles)
                duration_s = time.monotonic() - start_s
                _report(f"load, unload: {what}", before, _settled(server), options.cycles, duration_s)
            if not options.only or "requests" in options.only:
                client.post("/v2/repository/models/identity/load")
                random_numbers = random.Random(7)
                ask(client, max(1, int(options.requests * _WARM_SHARE)), random_numbers)
                before, start_s = _settled(server), time.monotonic()
                ask(client, options.requests, random_numbers)
                duration_s = time.monotonic() - start_s
                _report("requests", before, _settled(server), options.requests, duration_s)
            client.close()


if __name__ == "__main__":
    main()
