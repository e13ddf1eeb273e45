"""Infer requests as bytes: KServe bodies over HTTP, gRPC messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelserver.bench.feed import HOLE_BYTES
from modelserver.bench.tensors import InputTensor
from modelserver.bench.work import Template
from modelserver.client.heads import HttpRequestHead
from modelserver.pb import grpc_service_pb2 as pb

Parameter = bool | int | str


@dataclass(frozen=True, slots=True)
class SharedOutput:
    """An output that the server writes into shared memory."""

    name: str
    region: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RequestForm:
    """Encodes the requests of a run."""

    model: str
    version: str
    has_sequence: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    outputs: Sequence[SharedOutput] = ()
    is_input_json: bool = False
    is_output_json: bool = False

    def http(self, head: HttpRequestHead, inputs: Sequence[InputTensor], expected: dict[str, bytes]) -> Template:
        """An HTTP request with its head."""
        raws = []
        entries: list[dict[str, Any]] = []
        for tensor in inputs:
            entry: dict[str, Any] = {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": list(tensor.shape),
            }
            if tensor.region:
                entry["parameters"] = _region(tensor.region, tensor.num_bytes, tensor.region_offset)
            elif self.is_input_json:
                entry["data"] = tensor.values()
            else:
                entry["parameters"] = {"binary_data_size": len(tensor.raw)}
                raws.append(tensor.raw)
            entries.append(entry)
        document: dict[str, Any] = {"inputs": entries}
        if self.outputs:
            document["outputs"] = [
                {"name": output.name, "parameters": _region(output.region, output.num_bytes, 0)}
                for output in self.outputs
            ]
        # The parameters are last, and end with the hole for those of a sequence.
        parameters = json.dumps({"binary_data_output": not self.is_output_json, **self.parameters})
        before = json.dumps(document)[:-1] + ', "parameters": ' + parameters[:-1]
        encoded = (before + " " * (HOLE_BYTES if self.has_sequence else 0) + "}}").encode()
        body = b"".join((encoded, *raws))
        start = head.encode(len(body), None if self.is_input_json else len(encoded))
        return Template(start + body, len(start) + len(before.encode()) if self.has_sequence else -1, expected)

    def grpc(self, inputs: Sequence[InputTensor], expected: dict[str, bytes], *, asks_for_final: bool) -> Template:
        """A gRPC message. `asks_for_final`: an empty final response is sent too, so that the end can be seen."""
        message = pb.ModelInferRequest(model_name=self.model, model_version=self.version)
        for tensor in inputs:
            entry = message.inputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
            if tensor.region:
                _set(entry.parameters, _region(tensor.region, tensor.num_bytes, tensor.region_offset))
            else:
                message.raw_input_contents.append(tensor.raw)
        for output in self.outputs:
            asked = message.outputs.add(name=output.name)
            _set(asked.parameters, _region(output.region, output.num_bytes, 0))
        _set(message.parameters, self.parameters)
        if asks_for_final:
            _set(message.parameters, {"triton_enable_empty_final_response": True})
        return Template(message.SerializeToString(), -1, expected)


def _region(region: str, num_bytes: int, offset: int) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {"shared_memory_region": region, "shared_memory_byte_size": num_bytes}
    if offset:
        found["shared_memory_offset"] = offset
    return found


def _set(parameters: Any, values: Mapping[str, Parameter]) -> None:
    """Write parameters into a protobuf map."""
    for name, value in values.items():
        if isinstance(value, bool):
            parameters[name].bool_param = value
        elif isinstance(value, int):
            parameters[name].int64_param = value
        else:
            parameters[name].string_param = value
