"""The requests under measurement, built once as bytes: KServe v2 over HTTP (binary and JSON) and gRPC."""

from __future__ import annotations

import json

import numpy as np

from benchmarks.load import Load
from modelserver.core.datatype import Datatype
from modelserver.pb import grpc_service_pb2 as pb

GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"
Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def http_binary(model: str, name: str, data: Array) -> Load:
    """One input as binary; all outputs as binary."""
    header = {
        "inputs": [
            {
                "name": name,
                "shape": list(data.shape),
                "datatype": Datatype.from_numpy(data.dtype).value,
                "parameters": {"binary_data_size": data.nbytes},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return Load("http", f"/v2/models/{model}/infer", head + data.tobytes(), headers)


def http_shared(model: str, name: str, data: Array, region: str) -> Load:
    """One input that lies in a region of shared memory; all outputs as binary."""
    parameters = {"shared_memory_region": region, "shared_memory_byte_size": data.nbytes}
    datatype = Datatype.from_numpy(data.dtype).value
    tensor = {"name": name, "shape": list(data.shape), "datatype": datatype, "parameters": parameters}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return Load("http", f"/v2/models/{model}/infer", body, {"Content-Type": "application/json"})


def http_json(model: str, name: str, data: Array) -> Load:
    """One input as a flat JSON list; outputs as JSON."""
    tensor = {
        "name": name,
        "shape": list(data.shape),
        "datatype": Datatype.from_numpy(data.dtype).value,
        "data": data.ravel().tolist(),
    }
    body = json.dumps({"inputs": [tensor]}).encode()
    return Load("http", f"/v2/models/{model}/infer", body, {"Content-Type": "application/json"})


def grpc_raw(model: str, name: str, data: Array) -> Load:
    """One input in raw_input_contents."""
    tensor = pb.ModelInferRequest.InferInputTensor(
        name=name, datatype=Datatype.from_numpy(data.dtype).value, shape=data.shape
    )
    message = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[data.tobytes()])
    return Load("grpc", GRPC_INFER, message.SerializeToString())
