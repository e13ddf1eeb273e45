"""What a refused request was about goes with its answer, and does not wait for the garbage collector."""

from __future__ import annotations

import gc
import http.client
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import grpc
import pytest
from support.model_files import write_identity
from support.serving import ADDRESS, RunningServer, running_server

import modelserver
from modelserver.pb import grpc_service_pb2 as pb

LONG = 1 << 20
PACKAGE = str(Path(modelserver.__file__).parent)
HEAD = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,%d],"data":'
INFER = "/v2/models/echo/infer"
Send = Callable[[RunningServer], object]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("refused")
    write_identity(root, "echo")
    write_identity(root, "text", data_type="TYPE_STRING")
    with running_server(root) as running:
        yield running
    gc.unfreeze()


def _post(path: str, body: bytes, **headers: str) -> Send:
    def send(running: RunningServer) -> int:
        connection = http.client.HTTPConnection(ADDRESS, running.server.http_port, timeout=60)
        try:
            connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    return send


def _numbers(item: bytes, count: int) -> bytes:
    return HEAD % count + b"[" + b",".join([item] * count) + b"]}]}"


def _call(message: bytes) -> Send:
    def send(running: RunningServer) -> object:
        with grpc.insecure_channel(running.grpc_url) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.RpcError) as caught:
                call(message, timeout=60)
            return caught.value.code()

    return send


def _stream(message: bytes) -> Send:
    def send(running: RunningServer) -> object:
        with grpc.insecure_channel(running.grpc_url) as channel:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            return list(call(iter([message]), timeout=60))

    return send


def _message(model: str, datatype: str, raw: bytes, count: int) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype=datatype, shape=[1, count])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw]).SerializeToString()


CASES: dict[str, Send] = {
    "nested": _post(INFER, b'{"a":' * (LONG // 5)),
    "too many numbers": _post(INFER, _numbers(b"1.5", LONG // 4).replace(b"[1,%d]" % (LONG // 4), b"[1,2]")),
    "no number": _post(INFER, _numbers(b'"a"', LONG // 4)),
    "unknown input": _post(INFER, _numbers(b"1.5", LONG // 4).replace(b"INPUT0", b"INPUT1")),
    "small": _post(INFER, _numbers(b'"a"', 2)),
    "no model": _post("/v2/models/none/infer", _numbers(b"1.5", LONG // 4)),
    "compressed": _post(INFER, zlib.compress(_numbers(b'"a"', LONG // 4), 1), Content_Encoding="deflate"),
    "badly compressed": _post(INFER, zlib.compress(bytes(LONG), 0)[:-5], Content_Encoding="deflate"),
    "generate": _post("/v2/models/echo/generate", b'{"INPUT0":[' + b"1," * LONG + b"]}"),
    "load": _post("/v2/repository/models/echo/load", b'{"parameters":{"config":"' + b"a" * LONG + b'"}}'),
    "index": _post("/v2/repository/index", b"[" + b"1," * LONG + b"]"),
    "chat": _post(
        "/v1/chat/completions", b'{"model":"echo","messages":[{"role":"user","content":"' + b"a" * LONG + b'"}]}'
    ),
    "completion": _post("/v1/completions", b'{"model":"none","prompt":"' + b"a" * LONG + b'"}'),
    "embeddings": _post("/v1/embeddings", b'{"model":"none","input":"' + b"a" * LONG + b'"}'),
    "tokenize": _post("/tokenize", b'{"model":"echo","prompt":"' + b"a" * LONG + b'"}'),
    "gRPC": _call(_message("echo", "FP32", bytes(LONG), 2)),
    "gRPC, texts": _call(_message("text", "BYTES", b"\1\0\0\0" * (LONG // 4), LONG // 4)),
    "gRPC, no model": _call(_message("none", "FP32", bytes(LONG), LONG // 4)),
    "gRPC, fields": _call(b"\x3a\0" * (LONG // 2)),
    "stream": _stream(_message("echo", "FP32", bytes(LONG), 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_refused_request_leaves_no_cycle(server: RunningServer, case: str) -> None:
    send = CASES[case]
    send(server)  # what is made once is made
    time.sleep(0.05)
    gc.collect()
    gc.freeze()  # the next collection looks at what is new
    gc.disable()
    try:
        for _ in range(3):
            send(server)
        time.sleep(0.2)  # threads go on to what they do next
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [str(each.tb_frame) for each in gc.garbage if isinstance(each, TracebackType)]
        left = [frame for frame in left if PACKAGE in frame]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left, f"left to the garbage collector: {left}"
