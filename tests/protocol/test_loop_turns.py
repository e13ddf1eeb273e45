"""No request within the limits holds the event loop for long: the CPU time of its longest turn, for each decoder.

The bound is generous, as machines differ. `benchmarks/loop_turns.py` has the figures.
"""

from __future__ import annotations

import gzip
import http.client
from collections.abc import Callable, Iterator
from itertools import repeat

import grpc
import pytest
from support.loop_turns import measured_turns
from support.model_files import write_identity
from support.serving import ADDRESS, RunningServer, running_server

from modelserver.core import accelerator
from modelserver.pb import grpc_service_pb2 as pb

MB = 1 << 20
MOST_S = 0.05
INFER = "/inference.GRPCInferenceService/ModelInfer"

Send = Callable[[RunningServer], object]


@pytest.fixture(scope="module")
def server(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("turns")
    write_identity(root, "echo")
    write_identity(root, "text", data_type="TYPE_STRING")
    with running_server(root) as running:
        yield running


def _post(path: str, body: bytes, **headers: str) -> Send:
    def send(running: RunningServer) -> int:
        connection = http.client.HTTPConnection(ADDRESS, running.server.http_port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("POST", path, body, named)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    return send


def _infer(data: bytes, count: int, *, datatype: bytes = b"FP32", more: bytes = b"", model: str = "echo") -> Send:
    head = b'{"inputs":[{"name":"INPUT0","datatype":"%b","shape":[1,%d],"data":%b}]%b}'
    return _post(f"/v2/models/{model}/infer", head % (datatype, count, data, more))


def _binary(elements: bytes, count: int, model: str) -> Send:
    head = b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1,%d],"parameters":{"binary_data_size":%d}}]}'
    text = head % (count, len(elements))
    return _post(f"/v2/models/{model}/infer", text + elements, Inference_Header_Content_Length=str(len(text)))


def _grpc(message: bytes) -> Send:
    def send(running: RunningServer) -> object:
        with grpc.insecure_channel(running.grpc_url, [("grpc.max_receive_message_length", -1)]) as channel:
            call = channel.unary_unary(INFER)
            try:
                call(message, timeout=60)
            except grpc.RpcError as error:
                return error.code()  # type: ignore[attr-defined]
            return grpc.StatusCode.OK

    return send


def _raw(elements: bytes, count: int, model: str) -> Send:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="BYTES", shape=[1, count])
    request = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[elements])
    return _grpc(request.SerializeToString())


def _joined(item: bytes, count: int) -> bytes:
    return b"[" + b",".join(repeat(item, count)) + b"]"


OK, REFUSED = (
    {200, grpc.StatusCode.OK},
    {400, 413, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED},
)
CASES: dict[str, tuple[Send, set[object]]] = {
    "BYTES of empty elements": (_binary(bytes(2 * MB), MB // 2, "text"), OK),
    "BYTES of short elements": (_binary(b"\2\0\0\0ab" * (MB // 6), MB // 6, "text"), OK),
    "BYTES for a model of numbers": (_binary(bytes(2 * MB), MB // 2, "echo"), REFUSED),
    "BYTES for no model": (_binary(bytes(2 * MB), MB // 2, "none"), {404}),
    "raw BYTES over gRPC": (_raw(bytes(2 * MB), MB // 2, "text"), OK),
    "raw BYTES for a model of numbers": (_raw(bytes(2 * MB), MB // 2, "echo"), REFUSED),
    "fields of a message": (_grpc(b"\x3a\0" * (MB // 2)), REFUSED),
    "inputs of a message": (_grpc(b"\x2a\0" * (MB // 2)), REFUSED),
    "outputs of a message": (_grpc(b"\x32\0" * (MB // 2)), REFUSED),
    "dimensions": (_grpc(b"\x2a\x80\x80\x40" + b"\x18\1" * (MB // 2)), REFUSED),
    "numbers": (_infer(_joined(b"1.5", MB // 4), MB // 4), OK),
    "NaN": (_infer(_joined(b"NaN", MB // 4), MB // 4), OK),
    "numbers that C leaves to Python": (_infer(_joined(b"-0", MB // 3), MB // 3), OK),
    "strings": (_infer(_joined(b'""', MB // 3), MB // 3, datatype=b"BYTES", model="text"), OK),
    "numbers that are strings": (_infer(_joined(b'""', MB // 3), MB // 3), REFUSED),
    "outputs": (_infer(b"[1]", 1, more=b',"outputs":' + _joined(b'{"name":"OUTPUT0"}', MB // 19)), REFUSED),
    "ignored members": (_infer(b"[1]", 1, more=b',"more":' + _joined(b"{}", MB // 3)), REFUSED),
    "nesting": (_post("/v2/models/echo/infer", b'{"a":' * (MB // 5)), REFUSED),
    "generate": (_post("/v2/models/echo/generate", b'{"more":' + _joined(b"{}", MB // 4) + b"}"), REFUSED),
    "chat": (_post("/v1/chat/completions", b'{"model":"x","a":' + _joined(b"[]", MB // 8) + b"}"), {404}),
    "index": (_post("/v2/repository/index", b'{"a":' + _joined(b"[]", MB // 8) + b"}"), OK),
    "logging": (_post("/v2/logging", b'{"a":' + _joined(b"[]", MB // 4) + b"}"), REFUSED),
    "gzip of empty members": (
        _post("/v2/models/echo/infer", gzip.compress(b"") * 50_000, Content_Encoding="gzip"),
        REFUSED,
    ),
}


@pytest.mark.skipif(accelerator.cut_data is None, reason="the bound holds where the accelerator was built")
@pytest.mark.parametrize("case", CASES)
def test_no_turn_is_long(server: RunningServer, case: str) -> None:
    send, expected = CASES[case]
    with measured_turns(server.loop) as turns:
        assert send(server) in expected
    assert turns.longest_s < MOST_S, f"{turns.longest_s:.3f} s in {turns.longest}"
