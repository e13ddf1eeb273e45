"""LitServe over an ONNX model, in an environment under `.bench/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.servers.environment import environment
from benchmarks.servers.process import ServerProcess, http_ready, run_server

# It has no protocol of its own and no tensors: the requests are those that the others get, under the same path.
_PROGRAM = """
import sys

import litserve
import numpy
import onnxruntime

_DATATYPES = {"float32": "FP32", "int64": "INT64"}


class Onnx(litserve.LitAPI):
    def setup(self, device: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(sys.argv[1], options)
        self.given = self.session.get_inputs()[0].name
        self.names = [output.name for output in self.session.get_outputs()]

    def decode_request(self, request: dict) -> numpy.ndarray:
        given = request["inputs"][0]
        return numpy.array(given["data"], numpy.float32).reshape(given["shape"])

    def predict(self, image: numpy.ndarray) -> list:
        return self.session.run(self.names, {self.given: image})

    def encode_response(self, found: list) -> dict:
        outputs = []
        for name, array in zip(self.names, found):
            datatype = _DATATYPES[array.dtype.name]
            outputs.append({"name": name, "datatype": datatype, "shape": array.shape, "data": array.ravel().tolist()})
        return {"model_name": "mlp", "outputs": outputs}


if __name__ == "__main__":
    api = Onnx(api_path="/v2/models/mlp/infer")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="error", generate_client_file=False)
"""


def litserve(onnx: Path) -> AbstractContextManager[ServerProcess]:
    """LitServe with one API server and one worker, serving the model file as `mlp`; installs it first if needed."""
    peer = environment("litserve", "litserve==0.2.17", "onnxruntime")
    program = peer.home / "serve_onnx.py"
    program.write_text(_PROGRAM)

    def command(ports: Mapping[str, int]) -> Sequence[str]:
        return [str(peer.programs / "python"), str(program), str(onnx), str(ports["http"])]

    return run_server("litserve", command, ready=http_ready("/health"))
