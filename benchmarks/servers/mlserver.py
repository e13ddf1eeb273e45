"""MLServer with an identity runtime, in an environment under `.bench/`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.servers.process import ServerProcess, http_ready, run_server

_HOME = Path(os.environ.get("MODELSERVER_BENCH_HOME", ".bench")).resolve() / "mlserver"

_RUNTIME = """
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Identity(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = payload.inputs[0]
        output = ResponseOutput(name="OUTPUT0", datatype=given.datatype, shape=given.shape, data=given.data)
        return InferenceResponse(model_name=self.name, outputs=[output])
"""


def mlserver() -> AbstractContextManager[ServerProcess]:
    """MLServer in one process, serving `identity`; installs it first if needed."""
    python = _HOME / "venv" / "bin" / "python"
    if not (_HOME / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(_HOME / "venv")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "mlserver==1.7.1"], check=True)
        (_HOME / "ready").touch()
    folder = _HOME / "models"
    folder.mkdir(exist_ok=True)
    (folder / "identity_runtime.py").write_text(_RUNTIME)
    settings = {"name": "identity", "implementation": "identity_runtime.Identity"}
    (folder / "model-settings.json").write_text(json.dumps(settings))

    def command(ports: Mapping[str, int]) -> Sequence[str]:
        server_settings = {
            "http_port": ports["http"],
            "grpc_port": ports["grpc"],
            "metrics_port": ports["metrics"],
            "parallel_workers": 0,
            "host": "127.0.0.1",
            "debug": False,
        }
        (folder / "settings.json").write_text(json.dumps(server_settings))
        return [str(_HOME / "venv" / "bin" / "mlserver"), "start", str(folder)]

    return run_server("mlserver", command, ports=("http", "grpc", "metrics"), ready=http_ready())
