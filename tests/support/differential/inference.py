"""One inference in neutral words, and how each protocol says it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.differential import facts as told
from support.differential.target import LENGTH, HttpReply, Target
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

FORMS = ("http-json", "http-binary", "grpc-raw", "grpc-contents")

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@dataclass(frozen=True)
class Input:
    """`data` is flat, row-major; texts for BYTES. None: no data is sent."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: tuple[Any, ...] | None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def blob(self) -> bytes:
        if self.datatype == "BYTES":
            texts = np.array([text.encode() for text in self.data or ()], dtype=object)
            packed = serialize_byte_tensor(texts)
            return bytes(packed.item()) if packed.size else b""
        return np.array(self.data or (), dtype=triton_to_np_dtype(self.datatype) or np.uint8).tobytes()


@dataclass(frozen=True)
class Output:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inference:
    """A request. `outputs` None: all of them."""

    model: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...] | None = None
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def can_be(self, form: str) -> bool:
        """Whether this form has words for it."""
        if form == "grpc-contents":
            return all(each.datatype in _CONTENTS for each in self.inputs)
        return form != "http-json" or all(each.datatype not in ("FP16", "BF16") for each in self.inputs)

    def ask(self, target: Target, form: str, wanted: tuple[str, ...] = ()) -> dict[str, Any]:
        """The answer in neutral words; of an error its status and which of the wanted phrases it has."""
        if form.startswith("http"):
            return self._ask_http(target, wanted, is_binary=form == "http-binary")
        reply = target.rpc("ModelInfer", self.message(is_raw=form == "grpc-raw"))
        if reply.code != "OK":
            return {"code": reply.code, "says": told.phrases(reply.text, wanted)}
        return message_facts(reply.message)

    def _ask_http(self, target: Target, wanted: tuple[str, ...], *, is_binary: bool) -> dict[str, Any]:
        body, headers = self.body(is_binary=is_binary)
        reply = target.http("POST", self.path("infer"), body, headers)
        document = reply.document()
        if reply.status >= 400:
            text = document.get("error", "") if isinstance(document, dict) else document
            return {"status": reply.status, "says": told.phrases(text, wanted)}
        return {"status": reply.status, **body_facts(reply)}

    def path(self, verb: str) -> str:
        version = f"/versions/{self.version}" if self.version else ""
        return f"/v2/models/{self.model}{version}/{verb}"

    def body(self, *, is_binary: bool) -> tuple[bytes, dict[str, str]]:
        tensors, blobs = [], b""
        for each in self.inputs:
            tensor: dict[str, Any] = {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)}
            parameters = dict(each.parameters)
            if each.data is not None and is_binary:
                parameters["binary_data_size"] = len(each.blob())
                blobs += each.blob()
            elif each.data is not None:
                tensor["data"] = list(each.data)
            tensors.append(tensor | ({"parameters": parameters} if parameters else {}))
        document: dict[str, Any] = {"inputs": tensors}
        if self.outputs is not None:
            document["outputs"] = [
                {"name": each.name, "parameters": {"binary_data": is_binary} | dict(each.parameters)}
                for each in self.outputs
            ]
        parameters = dict(self.parameters)
        if is_binary and self.outputs is None:
            parameters["binary_data_output"] = True
        if parameters:
            document["parameters"] = parameters
        if self.id:
            document["id"] = self.id
        text = json.dumps(document).encode()
        return text + blobs, {LENGTH: str(len(text))} if is_binary else {}

    def message(self, *, is_raw: bool = True) -> service_pb2.ModelInferRequest:
        message = service_pb2.ModelInferRequest(model_name=self.model, model_version=self.version, id=self.id)
        _set_parameters(message.parameters, self.parameters)
        for each in self.inputs:
            tensor = message.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
            _set_parameters(tensor.parameters, each.parameters)
            if each.data is None:
                continue
            if is_raw:
                message.raw_input_contents.append(each.blob())
            else:
                data = [value.encode() for value in each.data] if each.datatype == "BYTES" else each.data
                getattr(tensor.contents, _CONTENTS[each.datatype]).extend(data)
        for wanted in self.outputs or ():
            _set_parameters(message.outputs.add(name=wanted.name).parameters, wanted.parameters)
        return message


def body_facts(reply: HttpReply) -> dict[str, Any]:
    """An HTTP answer in neutral words."""
    document = reply.document()
    blobs = reply.blobs
    outputs = []
    for output in document.get("outputs", []):
        size = output.get("parameters", {}).get("binary_data_size")
        data = output.get("data")
        if size is not None:
            data, blobs = _values(output["datatype"], blobs[:size]), blobs[size:]
        outputs.append(_output_facts(output["name"], output["datatype"], output["shape"], data))
    return {
        "model": document.get("model_name"),
        "version": document.get("model_version"),
        "id": document.get("id", ""),
        "parameters": document.get("parameters", {}),
        "outputs": outputs,
        "left over": len(blobs),
        "is_binary": LENGTH.lower() in reply.headers,
        "type": reply.headers.get("content-type", ""),
    }


def message_facts(message: service_pb2.ModelInferResponse) -> dict[str, Any]:
    """A gRPC answer in neutral words."""
    outputs = []
    for output, blob in zip(message.outputs, message.raw_output_contents, strict=True):
        facts = _output_facts(output.name, output.datatype, list(output.shape), _values(output.datatype, blob))
        outputs.append(facts)
    return {
        "code": "OK",
        "model": message.model_name,
        "version": message.model_version,
        "id": message.id,
        "parameters": {
            key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in message.parameters.items()
        },
        "outputs": outputs,
    }


def _output_facts(name: str, datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    if datatype == "BYTES" and data and all(str(each)[:1] in "{[" for each in data):
        data = [json.loads(each) for each in data]
    return {"name": name, "datatype": datatype, "shape": str(shape), "data": data}


def _values(datatype: str, blob: bytes) -> Any:
    if datatype == "BYTES":
        return [each.decode(errors="replace") for each in deserialize_bytes_tensor(blob)]
    if datatype == "BF16":
        return list(struct.unpack(f"<{len(blob) // 2}H", blob))
    return np.frombuffer(blob, dtype=triton_to_np_dtype(datatype)).tolist()


def _set_parameters(target: Any, parameters: Mapping[str, Any]) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for key, value in parameters.items():
        setattr(target[key], kinds[type(value)], value)
