"""Servers of a pickled scikit-learn model, each as its documentation shows: MLServer, LitServe, BentoML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.servers.environment import environment
from benchmarks.servers.process import ServerProcess, http_ready, run_server

_LITSERVE = """
import sys

import joblib
import litserve
import numpy


class Table(litserve.LitAPI):
    def setup(self, device):
        self.model = joblib.load(sys.argv[1])

    def decode_request(self, request):
        return numpy.array(request["instances"][0])

    def batch(self, rows):
        return numpy.stack(rows)

    def predict(self, rows):
        return self.model.predict(rows)

    def unbatch(self, found):
        return list(found)

    def encode_response(self, found):
        return {"predictions": [int(found)]}


if __name__ == "__main__":
    api = Table(max_batch_size=32, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="error", generate_client_file=False)
"""
_BENTOML = """
import bentoml
import joblib
import numpy as np


@bentoml.service(workers=1, logging={{"access": {{"enabled": False}}}})
class Table:
    def __init__(self) -> None:
        self.model = joblib.load({model!r})

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=1000)
    def predict(self, instances: np.ndarray) -> np.ndarray:
        return self.model.predict(instances)
"""


def mlserver_table(model: Path) -> AbstractContextManager[ServerProcess]:
    """MLServer's runtime for scikit-learn in one process, with its adaptive batching."""
    peer = environment("mlserver-tables", "mlserver==1.7.1", "mlserver-sklearn==1.7.1")
    folder = peer.home / "models"
    folder.mkdir(exist_ok=True)
    settings = {
        "name": "table",
        "implementation": "mlserver_sklearn.SKLearnModel",
        "parameters": {"uri": str(model)},
        "max_batch_size": 32,
        "max_batch_time": 0.001,
    }
    (folder / "model-settings.json").write_text(json.dumps(settings))

    def command(ports: Mapping[str, int]) -> Sequence[str]:
        server = {
            "http_port": ports["http"],
            "grpc_port": ports["grpc"],
            "metrics_port": ports["metrics"],
            "parallel_workers": 0,
            "host": "127.0.0.1",
            "debug": False,
        }
        (folder / "settings.json").write_text(json.dumps(server))
        return [str(peer.programs / "mlserver"), "start", str(folder)]

    return run_server("mlserver", command, ports=("http", "grpc", "metrics"), ready=http_ready())


def litserve_table(model: Path) -> AbstractContextManager[ServerProcess]:
    """LitServe with one API server and one worker; POST /predict."""
    peer = environment("litserve-tables", "litserve==0.2.19", "scikit-learn")
    program = peer.home / "serve_table.py"
    program.write_text(_LITSERVE)

    def command(ports: Mapping[str, int]) -> Sequence[str]:
        return [str(peer.programs / "python"), str(program), str(model), str(ports["http"])]

    return run_server("litserve", command, ready=http_ready("/health"))


def bentoml_table(model: Path) -> AbstractContextManager[ServerProcess]:
    """BentoML with one worker; POST /predict."""
    peer = environment("bentoml", "bentoml==1.4.40", "scikit-learn")
    (peer.home / "service.py").write_text(_BENTOML.format(model=str(model)))

    def command(ports: Mapping[str, int]) -> Sequence[str]:
        place = ("--working-dir", str(peer.home), "--host", "127.0.0.1", "--port", str(ports["http"]))
        return [str(peer.programs / "bentoml"), "serve", "service:Table", *place]

    return run_server("bentoml", command, ready=http_ready("/readyz"))
