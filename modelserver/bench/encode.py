"""Requests as bytes: HTTP heads and KServe bodies, gRPC heads and messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from modelserver.bench.address import Address
from modelserver.bench.feed import HOLE_BYTES
from modelserver.bench.grpc_messages import SERVICE
from modelserver.bench.tensors import InputTensor
from modelserver.bench.work import Template
from modelserver.pb import grpc_service_pb2 as pb

USER_AGENT = "modelserver-bench"

Parameter = bool | int | str


@dataclass(frozen=True, slots=True)
class HttpHead:
    address: Address
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, content_length: int, json_len: int | None = None) -> bytes:
        """The head of a request whose body has `content_length` bytes, of which `json_len` are JSON."""
        lines = [f"{self.method} {self.path} HTTP/1.1", f"Host: {self.address}", f"User-Agent: {USER_AGENT}"]
        if self.method != "GET":
            lines.append(f"Content-Length: {content_length}")
            kind = "application/json" if json_len is None else "application/octet-stream"
            if not any(name.lower() == "content-type" for name in self.headers):
                lines.append(f"Content-Type: {kind}")
        if json_len is not None:
            lines.append(f"Inference-Header-Content-Length: {json_len}")
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass(frozen=True, slots=True)
class GrpcHead:
    address: Address
    method: str
    headers: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = "none"

    @property
    def fields(self) -> tuple[tuple[bytes, bytes], ...]:
        """The fields of every request's head, in the order in which gRPC sends them."""
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"https" if self.address.tls is not None else b"http"),
            (b":path", f"/{SERVICE}/{self.method}".encode()),
            (b":authority", str(self.address).encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", USER_AGENT.encode()),
        ]
        if self.algorithm != "none":
            fields.append((b"grpc-encoding", self.algorithm.encode()))
            fields.append((b"grpc-accept-encoding", f"identity,{self.algorithm}".encode()))
        return (*fields, *((name.lower().encode(), value.encode()) for name, value in self.headers.items()))


@dataclass(frozen=True, slots=True)
class SharedOutput:
    """An output that the server writes into shared memory."""

    name: str
    region: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RequestForm:
    """How requests of a run are written down."""

    model: str
    version: str
    has_sequence: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    outputs: Sequence[SharedOutput] = ()
    is_input_json: bool = False
    is_output_json: bool = False

    def http(self, head: HttpHead, inputs: Sequence[InputTensor], expected: dict[str, bytes]) -> Template:
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


def model_path(model: str, version: str) -> str:
    """The path of a model, or of one version."""
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
