"""Clients that leave at every point of a request, read slowly or not at all, or send bombs: all against one server."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.asking import ask, infer, infer_body, metric, wait_for
from support.http2_frames import PREFACE, data, headers, settings
from support.layouts import ADDRESS
from support.model_files import write_identity
from support.processes import ServerProcess, serving_process
from support.raw_http1 import Http1Peer
from support.raw_http2 import call_fields, prefixed

MIB = 1 << 20
# One that has answered before the client has left, and one that has not.
MODELS = ["identity", pytest.param("slow", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    write_identity(root)
    write_identity(root, "slow", execute_delay_ms=30)
    flags = [f"--http-max-input-size={4 * MIB}", f"--grpc-max-request-size={4 * MIB}"]
    with serving_process(root, *flags) as server:
        server.wait_until_started()
        yield server
        expect_idle(server)
        assert "Traceback" not in server.output
        server.signal()
        assert server.wait() == 0


def metrics_of(server: ServerProcess) -> str:
    return f"127.0.0.1:{server.port('metrics')}"


def expect_idle(server: ServerProcess) -> None:
    """Nothing is left of who has gone, and others are served."""
    wait_for(lambda: metric(metrics_of(server), "modelserver_inflight_requests") == 0, "no request is left")
    wait_for(lambda: metric(metrics_of(server), "modelserver_connections") <= 1, "no connection is left")
    assert infer(server.http_url, 1.0) == (200, 1.0)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_http_clients_that_leave_at_any_byte(server: ServerProcess, model: str, is_reset: bool) -> None:
    body = infer_body()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    address = (ADDRESS, server.port("HTTP"))
    for num_bytes in range(0, len(request) + 1, 5):
        peer = Http1Peer(address)
        peer.send(request[:num_bytes])
        if is_reset:
            peer.vanish()
        else:
            peer.close()
    expect_idle(server)


@pytest.mark.parametrize("model", MODELS)
def test_grpc_clients_that_leave_at_any_byte(server: ServerProcess, model: str) -> None:
    """In the middle of frames, of headers and of messages."""
    message = _model_infer(model)
    fields = call_fields("/inference.GRPCInferenceService/ModelInfer")
    frames = (settings(), headers(1, fields, end=False), data(1, prefixed(message), end=True))
    sent = PREFACE + b"".join(frame.encode() for frame in frames)
    for num_bytes in range(0, len(sent) + 1, 9):
        with Http1Peer((ADDRESS, server.port("gRPC"))) as peer:
            peer.send(sent[:num_bytes])
    expect_idle(server)


def _model_infer(model: str) -> bytes:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
    tensor.contents.fp32_contents.extend([1.0, 2.0])
    content: bytes = request.SerializeToString()
    return content


def test_clients_that_do_not_read_hold_up_nobody(server: ServerProcess) -> None:
    """Each asks for megabytes, many times, and takes nothing."""
    body = infer_body(1.0, 100_000)
    head = f"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    peers = [Http1Peer((ADDRESS, server.port("HTTP")), receive_buffer_bytes=4096) for _ in range(4)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda peer: peer.try_send(request * 8), peers))
        for value in range(20):
            assert infer(server.http_url, float(value)) == (200, float(value))
    for peer in peers:
        peer.vanish()
    expect_idle(server)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_bodies_that_grow_are_refused_before_they_have_grown(server: ServerProcess, encoding: str) -> None:
    import psutil

    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    bomb = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding](bytes(256 * MIB), 9)
    status, answer = ask(server.http_url, "POST", "/v2/models/identity/infer", bomb, {"Content-Encoding": encoding})
    assert status == 413, answer
    assert process.memory_info().rss - before < 64 * MIB
    expect_idle(server)


BOMBS = {
    "a long target": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", (414, 431)),
    "a long header": (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", (431,)),
    "many headers": (b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + b"x: y\r\n" * 3000 + b"\r\n", (431,)),
    "a long body": (
        b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        (413,),
    ),
    "many chunks": (
        b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\n{\r\n" * 100_000
        + b"0\r\n\r\n",
        (400, 413),
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_of_heads_and_bodies_are_refused(server: ServerProcess, name: str) -> None:
    bomb, statuses = BOMBS[name]
    with Http1Peer((ADDRESS, server.port("HTTP"))) as peer:
        peer.try_send(bomb, 5.0)
        answer = peer.read_answer()
        assert answer.status in statuses, answer
    expect_idle(server)


def _tensor(name: str, shape: list[int]) -> dict[str, object]:
    return {"name": name, "datatype": "FP32", "shape": shape, "data": [1] * (shape == [1])}


DOCUMENTS = {
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"inputs":' * 50_000 + b"1" + b"}" * 50_000,
    "a huge shape": json.dumps({"inputs": [_tensor("INPUT0", [2**40, 2**40])]}).encode(),
    "many inputs": json.dumps({"inputs": [_tensor(f"I{number}", [1]) for number in range(20_000)]}).encode(),
    "a long number": infer_body().replace(b"1.0", b"9" * 500_000, 1),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_that_are_bombs_are_refused(server: ServerProcess, name: str) -> None:
    status, answer = ask(server.http_url, "POST", "/v2/models/identity/infer", DOCUMENTS[name])
    assert status in (400, 413), answer
    assert len(answer["error"]) < 1000, "the error does not repeat the bomb"
    expect_idle(server)
