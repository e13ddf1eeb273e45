"""Bounds and malformed requests over sockets: each is refused in words, and its connection goes on."""

from __future__ import annotations

import gzip
import http.client
import json
import select
import socket
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import grpc
import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.model_files import write_identity
from support.serving import ADDRESS, RunningServer, running_server

from modelserver.errors import ErrorCode
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.wire.limits import HeadLimits

MAX_BYTES = 100_000
INFER = "/v2/models/echo/infer"
TENSOR: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
LENGTH = "Inference-Header-Content-Length"


@pytest.fixture(scope="module")
def bounded(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("bounded")
    write_identity(root, "echo")
    write_identity(root, "text", data_type="TYPE_STRING")
    options = {
        "http_max_input_size": MAX_BYTES,
        "model_control_mode": "explicit",
        "load_model": ("*",),
    }
    with running_server(root, **options) as running:
        yield running


class Connection:
    """One HTTP connection that is not opened twice, unless an answer announced its close."""

    def __init__(self, server: RunningServer) -> None:
        self._connection = http.client.HTTPConnection(ADDRESS, server.server.http_port, timeout=20)
        self._connection.connect()
        self._socket = self._connection.sock
        self._is_closed = False

    def ask(
        self, path: str, body: bytes | dict[str, Any] | list[Any] | Iterator[bytes] = b"", **headers: str
    ) -> tuple[int, str]:
        """POST; the status and the text of the error, if it is one."""
        content = json.dumps(body).encode() if isinstance(body, dict | list) else body
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("POST", path, content, named, encode_chunked=not isinstance(content, bytes))
        answer = self._connection.getresponse()
        self._is_closed |= answer.will_close
        received = answer.read()
        text = json.loads(received)["error"] if answer.status >= 400 else ""
        return answer.status, text

    def check(self) -> None:
        """The connection is still the first one, unless its close was announced, and works."""
        assert self.ask(INFER, {"inputs": [TENSOR]}) == (200, "")
        assert self._is_closed or self._connection.sock is self._socket, "the connection was closed in between"

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def connection(bounded: RunningServer) -> Iterator[Connection]:
    opened = Connection(bounded)
    yield opened
    try:
        opened.check()
    finally:
        opened.close()


@pytest.fixture
def client(protocol: type[ProtocolClient], bounded: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(bounded) as connected:
        yield connected
        np.testing.assert_array_equal(
            connected.infer("echo", {"INPUT0": np.ones((1, 2), np.float32)})["OUTPUT0"], [[1, 1]]
        )


Pieces = Callable[[bytes], bytes | Iterator[bytes]]


def _pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 30_000):
        yield body[start : start + 30_000]


def _padded(num_bytes: int) -> bytes:
    """A valid infer request of exactly that size."""
    document = json.dumps({"inputs": [TENSOR]}).encode()
    return document + b" " * (num_bytes - len(document))


@pytest.mark.parametrize("send", [bytes, _pieces])
def test_the_body_may_be_as_large_as_the_limit(connection: Connection, send: Pieces) -> None:
    assert connection.ask(INFER, send(_padded(MAX_BYTES))) == (200, "")


@pytest.mark.parametrize("send", [bytes, _pieces])
@pytest.mark.parametrize("excess", [1, 1000 * MAX_BYTES])
def test_a_larger_body_is_refused(connection: Connection, send: Pieces, excess: int) -> None:
    if excess == 1:
        status, text = connection.ask(INFER, send(_padded(MAX_BYTES + excess)))
    else:
        status, text = connection.ask(INFER, send(bytes(20 * MAX_BYTES)))
    assert status == 413
    assert "--http-max-input-size" in text
    assert str(MAX_BYTES) in text


def test_a_packed_body_may_unpack_to_the_limit(connection: Connection) -> None:
    body = gzip.compress(_padded(MAX_BYTES))
    assert connection.ask(INFER, body, Content_Encoding="gzip") == (200, "")


@pytest.mark.parametrize("num_bytes", [MAX_BYTES + 1, 80_000_000])
def test_a_packed_body_that_unpacks_to_more_is_refused(connection: Connection, num_bytes: int) -> None:
    body = gzip.compress(_padded(num_bytes))
    assert len(body) < MAX_BYTES
    status, text = connection.ask(INFER, body, Content_Encoding="gzip")
    assert (status, "--http-max-input-size" in text) == (413, True)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: b"\x1f\x8b" + packed, lambda _: b"no"])
def test_a_packed_body_that_is_damaged_is_refused(
    connection: Connection, encoding: str, damage: Callable[[bytes], bytes]
) -> None:
    status, text = connection.ask(INFER, damage(gzip.compress(_padded(5000))), Content_Encoding=encoding)
    assert (status, encoding in text) == (400, True)


def test_the_control_routes_have_the_same_bound(connection: Connection) -> None:
    for path in ("/v2/repository/index", "/v2/repository/models/echo/load", "/v2/repository/models/echo/unload"):
        assert connection.ask(path, bytes(MAX_BYTES + 1))[0] == 413


@pytest.mark.parametrize("path", [INFER, "/v2/repository/index", "/v2/repository/models/echo/load"])
def test_json_may_nest_a_hundred_levels(connection: Connection, path: str) -> None:
    # The object is a level, and so is its parameter's.
    for num_levels, is_deeper in ((100, False), (101, True)):
        inner = num_levels - 2
        body = b'{"inputs":[],"parameters":{"p":' + b"[" * inner + b"]" * inner + b"}}"
        status, text = connection.ask(path, body)
        assert ("JSON nesting depth exceeds maximum allowed limit (100)" in text) is is_deeper
        assert status == 400 or (path.endswith("index") and not is_deeper)
    status, _ = connection.ask(path, b"[" * 49_000 + b"]" * 49_000)
    assert status == 400


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shape": [1, 10_000_000]}, "limit"),
        ({"shape": [2**40, 2**40]}, "INPUT0"),
        ({"shape": [2**63, 2**63, 0]}, "INPUT0"),
        ({"shape": [-1, 1]}, "INPUT0"),
        ({"shape": [1] * 33}, "at most 32"),
        ({"shape": [1.5]}, "shape"),
        ({"shape": "1"}, "shape"),
        ({"shape": [2**70]}, "shape"),
        ({"shape": [1, 2]}, "INPUT0"),
        ({"data": [1.0, 2.0]}, "INPUT0"),
        ({"data": []}, "INPUT0"),
        ({"data": [[1.0], [2.0, 3.0]], "shape": [2, 1]}, "INPUT0"),
        ({"data": [[[1.0]], [[2.0]]]}, "INPUT0"),
        ({"data": ["1"]}, "INPUT0"),
        ({"data": [None]}, "INPUT0"),
        ({"data": 1.0}, "INPUT0"),
        ({"data": {"a": 1}}, "INPUT0"),
        ({"datatype": "FP31"}, "FP31"),
        ({"datatype": 7}, "datatype"),
        ({"datatype": "INT32"}, "INT32"),
        ({"name": 7}, "name"),
        ({"name": "x" * 2000}, "x" * 20),
        ({"parameters": {"binary_data_size": 4}}, "only one of"),
        ({"parameters": {"binary_data_size": -1}}, "binary_data_size"),
        ({"parameters": {"binary_data_size": "4"}}, "binary_data_size"),
        ({"parameters": {"shared_memory_region": "r"}}, "shared_memory_region"),
    ],
)
def test_tensors_that_cannot_be(connection: Connection, change: dict[str, Any], told: str) -> None:
    status, text = connection.ask(INFER, {"inputs": [TENSOR | change]})
    assert status in (400, 413, 501)
    assert told in text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"7",
        b"[]",
        b"{}",
        b"{",
        b'{"inputs":',
        b'{"inputs": {}}',
        b'{"inputs": [7]}',
        b'{"inputs": [{}]}',
        b'{"inputs": []} trailing',
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"inputs": [], "outputs": 7}',
        b'{"inputs": [], "outputs": [{"name": 7}]}',
        b'{"inputs": [], "id": 7}',
        b'{"inputs": [], "parameters": []}',
        b'{"inputs": [], "parameters": {"timeout": -1}}',
        b'{"inputs": [], "parameters": {"priority": "high"}}',
        b'{"inputs": [], "parameters": {"x": {"y": 1}}}',
        b'{"inputs": [], "parameters": {"triton_x": 1}}',
        b"\x00" * 1000,
    ],
)
def test_bodies_that_are_no_request(connection: Connection, body: bytes) -> None:
    status, text = connection.ask(INFER, body)
    assert status == 400
    assert text


@pytest.mark.parametrize(
    ("length", "body", "told"),
    [
        ("x", b"{}", "number"),
        ("-1", b"{}", "number"),
        ("3", b"{}", "inference header size should be in range (0, 2)"),
        ("1" * 400, b"{}", "inference header size should be in range (0, 2)"),
        ("", b"{}", "number"),
        ("0", b"\x00" * 3, "bytes"),
        ("0", b"", ""),
    ],
)
def test_header_lengths_that_cannot_be(connection: Connection, length: str, body: bytes, told: str) -> None:
    status, text = connection.ask(INFER, body, **{LENGTH: length})
    if body:
        assert (status, told in text) == (400, True)


@pytest.mark.parametrize("size", [3, 5])
def test_binary_tensors_of_another_size(connection: Connection, size: int) -> None:
    tensor = {**TENSOR, "parameters": {"binary_data_size": 4}}
    del tensor["data"]
    header = json.dumps({"inputs": [tensor]}).encode()
    status, text = connection.ask(INFER, header + bytes(size), **{LENGTH: f"{len(header)}"})
    assert status == 400
    assert ("additional bytes" if size == 3 else "unexpected additional input data") in text


@pytest.mark.parametrize(
    "elements",
    [b"\xff\xff\xff\xff", struct.pack("<I", 5) + b"abc", struct.pack("<I", 1) + b"ab", b"\x00", b"\x00" * 8],
)
def test_text_whose_lengths_lie(connection: Connection, elements: bytes) -> None:
    tensor = {
        "name": "INPUT0",
        "datatype": "BYTES",
        "shape": [1, 1],
        "parameters": {"binary_data_size": len(elements)},
    }
    header = json.dumps({"inputs": [tensor]}).encode()
    status, text = connection.ask("/v2/models/text/infer", header + elements, **{LENGTH: f"{len(header)}"})
    assert status == 400
    assert "INPUT0" in text


def test_tensors_are_counted(client: ProtocolClient) -> None:
    data = np.ones((1, 1), np.float32)
    for count, code in ((1024, ErrorCode.INVALID_ARGUMENT), (1025, ErrorCode.PAYLOAD_TOO_LARGE)):
        with pytest.raises(ClientError) as refused:
            client.infer("echo", {f"I{number}": data for number in range(count)})
        assert refused.value.code is code
        with pytest.raises(ClientError) as refused:
            client.infer("echo", {"INPUT0": data}, [f"O{number}" for number in range(count)])
        assert refused.value.code is code


@pytest.mark.parametrize("name", ["x" * 5000, "ü", "%", "a b", "echo;", "..", "\n", "'\"<>"])
def test_names_that_no_model_has(client: ProtocolClient, name: str) -> None:
    with pytest.raises(ClientError) as refused:
        client.infer(name, {"INPUT0": np.ones((1, 1), np.float32)})
    assert refused.value.code in (ErrorCode.NOT_FOUND, ErrorCode.INVALID_ARGUMENT)
    with pytest.raises(ClientError) as refused:
        client.infer("echo", {name: np.ones((1, 1), np.float32)})
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    with pytest.raises(ClientError) as refused:
        client.infer("echo", {"INPUT0": np.ones((1, 1), np.float32)}, [name])
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("path", ["/v2/models/../echo", "/v2/models/%2e%2e/config", "/v2/models/echo%2f..%2f", "//v2"])
def test_paths_lead_nowhere_else(connection: Connection, path: str) -> None:
    assert connection.ask(path)[0] in (400, 404, 405)


@pytest.mark.parametrize("path", ["/" + "x" * 60_000, "/v2/models/" + "/" * 50_000, "/v2/models/%ff%fe/infer", "/%"])
def test_paths_that_make_no_sense(connection: Connection, path: str) -> None:
    assert connection.ask(path)[0] in (400, 404, 414)


def test_headers_are_bounded(bounded: RunningServer) -> None:
    line = b"x: " + b"y" * 1000 + b"\r\n"
    num_bytes = 0
    with socket.create_connection((ADDRESS, bounded.server.http_port), timeout=20) as opened:
        opened.sendall(b"GET /v2/health/live HTTP/1.1\r\n")
        # Line by line, so that nothing is left unread when the server closes: a reset would overtake its answer.
        while not select.select([opened], [], [], 0.01)[0]:
            opened.sendall(line)
            num_bytes += len(line)
            assert num_bytes < 1 << 20, "there is no bound"
        answer = opened.recv(1 << 16)
    assert num_bytes > HeadLimits().max_http1_bytes - len(line)
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"headers" in answer


@pytest.mark.parametrize("seed", range(10))
def test_damaged_requests_do_no_harm(bounded: RunningServer, connection: Connection, seed: int) -> None:
    """Whatever arrives, the server answers with a refusal, or closes that connection; never with a fault of its own."""
    random = Random(seed)
    body = json.dumps({"inputs": [TENSOR]}).encode()
    whole = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(body), body)
    for _ in range(30):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            start = random.randrange(len(damaged))
            replacement = random.choice([random.randbytes(random.randint(0, 3)), b"\r\n", b"\x00", b"9" * 20])
            damaged[start : start + random.randint(0, 3)] = replacement
        with socket.create_connection((ADDRESS, bounded.server.http_port), timeout=20) as opened:
            opened.sendall(damaged)
            opened.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while piece := opened.recv(1 << 16):
                    answer += piece
            except ConnectionResetError:
                continue
        assert not answer or answer.startswith(b"HTTP/1."), bytes(damaged)
        assert b" 500 " not in answer, bytes(damaged)
    connection.check()


# What only gRPC can get wrong.


@pytest.fixture
def call(bounded: RunningServer) -> Iterator[Callable[[str, bytes], bytes]]:
    with grpc.insecure_channel(bounded.grpc_url) as channel:

        def ask(method: str, message: bytes) -> bytes:
            return channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(message, timeout=20)

        yield ask
        assert pb.ModelInferResponse.FromString(ask("ModelInfer", _infer().SerializeToString())).model_name == "echo"


def _infer(**change: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="echo")
    fields = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1]} | change
    request.inputs.add(**fields)
    request.raw_input_contents.append(struct.pack("<f", 1))
    return request


METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
UNARY = [name for name in METHODS if name != "ModelStreamInfer"]


@pytest.mark.parametrize("method", UNARY)
@pytest.mark.parametrize("message", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x00" * 100])
def test_messages_that_are_none(call: Callable[[str, bytes], bytes], method: str, message: bytes) -> None:
    with pytest.raises(grpc.RpcError, match="serialized") as refused:
        call(method, message)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", ["ModelInfer", "ModelReady", "ModelMetadata", "RepositoryModelLoad"])
def test_names_that_are_no_text(call: Callable[[str, bytes], bytes], method: str) -> None:
    with pytest.raises(grpc.RpcError, match="serialized"):
        call(method, b"\x0a\x02\xff\xfe")


@pytest.mark.parametrize(
    "request_message",
    [
        _infer(shape=[2**40, 2**40]),
        _infer(shape=[-1, 1]),
        _infer(shape=[1] * 33),
        _infer(shape=[2**62, 0]),
        _infer(shape=[1, 2]),
        _infer(datatype="FP31"),
        _infer(datatype=""),
        _infer(name=""),
        _infer(contents=pb.InferTensorContents(fp32_contents=[1])),
        pb.ModelInferRequest(model_name="echo"),
        pb.ModelInferRequest(model_name="echo", raw_input_contents=[b"1234"]),
        pb.ModelInferRequest(model_name="echo", model_version="v10"),
    ],
    ids=lambda message: str(message)[:60].replace("\n", " "),
)
def test_requests_that_cannot_be(call: Callable[[str, bytes], bytes], request_message: pb.ModelInferRequest) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call("ModelInfer", request_message.SerializeToString())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details()


def test_two_many_or_too_few_raw_tensors(call: Callable[[str, bytes], bytes]) -> None:
    request = _infer()
    request.raw_input_contents.append(b"1234")
    with pytest.raises(grpc.RpcError, match="raw_input_contents") as refused:
        call("ModelInfer", request.SerializeToString())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_methods_that_are_not_there(call: Callable[[str, bytes], bytes]) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call("ModelInfers", b"")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
