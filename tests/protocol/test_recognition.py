"""Requests that repeat are recognised by their bytes, or every one is read in full: the answers are the same."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.pb import grpc_service_pb2 as pb

DATA = np.arange(6, dtype=np.float32).reshape(2, 3)
FLAT: list[float] = DATA.ravel().tolist()
NUM_TIMES = 4


@dataclass(frozen=True, slots=True)
class Served:
    """The same models, with and without recognition."""

    recognizing: RunningServer
    reading: RunningServer


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("recognition")
    write_identity(root, "echo")
    write_identity(root, "text", data_type="TYPE_STRING")
    with running_server(root) as recognizing, running_server(root, recognize_requests=False) as reading:
        yield Served(recognizing, reading)


def _binary(model: str = "echo", data: bytes = DATA.tobytes(), **more: Any) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": len(data)}}
    parameters = {"binary_data_output": True} | more.pop("parameters", {})
    head = json.dumps(more | {"inputs": [tensor], "parameters": parameters}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


def _json(data: Any = FLAT, datatype: str = "FP32", **more: Any) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "INPUT0", "datatype": datatype, "shape": [2, 3], "data": data}
    return json.dumps(more | {"inputs": [tensor]}).encode(), {}


ELEMENTS = [f"element {number}" for number in range(6)]
HTTP_CALLS = {
    "binary": [("echo", _binary(data=(DATA + number).tobytes())) for number in range(NUM_TIMES)],
    "binary with ids": [("echo", _binary(id=f"call {number}")) for number in range(NUM_TIMES)],
    "binary with parameters": [("echo", _binary(parameters={"priority": 1, "mine": "x"}))] * NUM_TIMES,
    "binary with a wrong size": [("echo", _binary()), ("echo", _binary(data=b"12345"))] * NUM_TIMES,
    "binary with bytes behind": [("echo", _binary()), ("echo", (_binary()[0] + b"!", _binary()[1]))] * NUM_TIMES,
    "JSON": [("echo", _json((DATA * number).ravel().tolist())) for number in range(NUM_TIMES)],
    "JSON, nested": [("echo", _json((DATA * number).tolist())) for number in range(NUM_TIMES)],
    "JSON with ids": [("echo", _json(id=f"{number}")) for number in range(NUM_TIMES)],
    "JSON with a wrong element": [("echo", _json()), ("echo", _json([1, 2, "three", 4, 5, 6]))] * NUM_TIMES,
    "JSON with too few elements": [("echo", _json()), ("echo", _json([1, 2, 3]))] * NUM_TIMES,
    "text": [("text", _json(ELEMENTS, "BYTES"))] * NUM_TIMES,
    "a datatype that is not the model's": [("text", _json()), ("text", _json(ELEMENTS, "BYTES"))] * NUM_TIMES,
    "an unknown output": [("echo", _json(outputs=[{"name": "OUTPUT9"}]))] * NUM_TIMES,
    "an unknown model": [("nothing", _binary())] * NUM_TIMES,
    "no JSON": [("echo", (b'{"inputs": [', {})), ("echo", _json())] * NUM_TIMES,
}


@pytest.mark.parametrize("name", HTTP_CALLS)
def test_http_answers_are_the_same(served: Served, name: str) -> None:
    answers = [_ask(server.http_url, name) for server in (served.recognizing, served.reading)]
    assert answers[0] == answers[1]
    assert any(status == 200 for status, *_ in answers[0]) or "unknown" in name


def _ask(url: str, name: str) -> list[tuple[int, str | None, str | None, bytes]]:
    """The answers to the calls of this name on one connection."""
    connection = http.client.HTTPConnection(url, timeout=20)
    answers = []
    try:
        for model, (body, headers) in HTTP_CALLS[name]:
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            answer = connection.getresponse()
            told = answer.getheader("Content-Type"), answer.getheader("Inference-Header-Content-Length")
            answers.append((answer.status, *told, answer.read()))
    finally:
        connection.close()
    return answers


def _message(data: bytes = DATA.tobytes(), **fields: Any) -> bytes:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [2, 3]}
    request = ParseDict({"model_name": "echo", "inputs": [tensor]} | fields, pb.ModelInferRequest())
    request.raw_input_contents.append(data)
    return request.SerializeToString()


GRPC_CALLS = {
    "raw": [_message((DATA + number).tobytes()) for number in range(NUM_TIMES)],
    "with ids": [_message(id=f"call {number}") for number in range(NUM_TIMES)],
    "with parameters": [_message(parameters={"mine": {"stringParam": "x"}})] * NUM_TIMES,
    "a wrong size": [_message(), _message(b"1234")] * NUM_TIMES,
    "an unknown model": [_message(model_name="nothing")] * NUM_TIMES,
    "no message": [_message(), b"\xff\xff"] * NUM_TIMES,
}


@pytest.mark.parametrize("name", GRPC_CALLS)
def test_grpc_answers_are_the_same(served: Served, name: str) -> None:
    answers = [_call(server.grpc_url, GRPC_CALLS[name]) for server in (served.recognizing, served.reading)]
    assert answers[0] == answers[1]
    assert any(isinstance(answer, bytes) for answer in answers[0]) or "unknown" in name


def _call(url: str, messages: list[bytes]) -> list[bytes | tuple[object, object]]:
    """The reply to each message, or status and text."""
    answers: list[bytes | tuple[object, object]] = []
    with grpc.insecure_channel(url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for message in messages:
            try:
                answers.append(infer(message, timeout=20))
            except grpc.RpcError as error:
                answers.append((error.code(), error.details()))
    return answers


@pytest.mark.parametrize("name", GRPC_CALLS)
def test_streams_are_the_same(served: Served, name: str) -> None:
    streams = [_stream(server.grpc_url, GRPC_CALLS[name]) for server in (served.recognizing, served.reading)]
    assert streams[0] == streams[1]


def _stream(url: str, messages: list[bytes]) -> list[bytes]:
    with grpc.insecure_channel(url) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        return list(stream(iter(messages), timeout=20))
