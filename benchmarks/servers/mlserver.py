"""MLServer with a runtime that echoes and one that runs an ONNX model, in an environment under `.bench/`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.servers.environment import environment
from benchmarks.servers.process import ServerProcess, http_ready, run_server

_RUNTIMES = """
import numpy
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Identity(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = payload.inputs[0]
        output = ResponseOutput(name="OUTPUT0", datatype=given.datatype, shape=given.shape, data=given.data)
        return InferenceResponse(model_name=self.name, outputs=[output])


class Onnx(MLModel):
    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(self.settings.parameters.uri, options)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = payload.inputs[0]
        data = NumpyCodec.decode_input(given).reshape(given.shape)
        names = [output.name for output in self.session.get_outputs()]
        found = self.session.run(names, {given.name: data})
        outputs = [NumpyCodec.encode_output(name, array) for name, array in zip(names, found)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
"""


def mlserver(
    onnx: Path | None = None, *, batches: bool = False, name: str = "mlserver"
) -> AbstractContextManager[ServerProcess]:
    """MLServer in one process, serving `identity`, or the model file as `mlp`; installs it first if needed.

    `batches`: with its adaptive batching, for up to 32 requests that come within a millisecond.
    """
    peer = environment("mlserver", "mlserver==1.7.1", "onnxruntime")
    folder = peer.home / "models"
    folder.mkdir(exist_ok=True)
    (folder / "bench_runtimes.py").write_text(_RUNTIMES)
    settings: dict[str, object] = {"name": "identity", "implementation": "bench_runtimes.Identity"}
    if onnx is not None:
        settings = {"name": "mlp", "implementation": "bench_runtimes.Onnx", "parameters": {"uri": str(onnx)}}
    if batches:
        settings |= {"max_batch_size": 32, "max_batch_time": 0.001}
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
        return [str(peer.programs / "mlserver"), "start", str(folder)]

    return run_server(name, command, ports=("http", "grpc", "metrics"), ready=http_ready())
