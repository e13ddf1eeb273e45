"""KServe's own Python server over an ONNX model, in an environment under `.bench/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.servers.environment import environment
from benchmarks.servers.process import ServerProcess, http_ready, run_server

# A predictor as KServe's guide to custom models has it. It computes on the event loop, which is cheaper than to
# hand so small a model to a thread; its answer is binary where the request is.
_PROGRAM = """
import sys

import onnxruntime
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.utils.numpy_codec import from_np_dtype
from kserve.utils.utils import generate_uuid


class Onnx(Model):
    def __init__(self, path: str) -> None:
        super().__init__("mlp")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options)
        self.names = [output.name for output in self.session.get_outputs()]
        self.ready = True

    def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        given = payload.inputs[0]
        outputs = []
        for name, array in zip(self.names, self.session.run(self.names, {given.name: given.as_numpy()})):
            output = InferOutput(name=name, shape=list(array.shape), datatype=from_np_dtype(array.dtype))
            output.set_data_from_numpy(array, binary_data=payload.use_binary_outputs)
            outputs.append(output)
        return InferResponse(model_name=self.name, infer_outputs=outputs, response_id=payload.id or generate_uuid())


path, http_port, grpc_port = sys.argv[1:]
server = ModelServer(http_port=int(http_port), grpc_port=int(grpc_port), workers=1, enable_latency_logging=False)
server.start([Onnx(path)])
"""


def kserve(onnx: Path) -> AbstractContextManager[ServerProcess]:
    """KServe in one process, serving the model file as `mlp`; installs it first if needed."""
    peer = environment("kserve", "kserve==0.21.0", "onnxruntime")
    program = peer.home / "serve_onnx.py"
    program.write_text(_PROGRAM)

    def command(ports: Mapping[str, int]) -> Sequence[str]:
        return [str(peer.programs / "python"), str(program), str(onnx), str(ports["http"]), str(ports["grpc"])]

    return run_server("kserve", command, ports=("http", "grpc"), ready=http_ready())
