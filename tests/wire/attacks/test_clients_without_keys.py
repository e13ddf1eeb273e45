"""Clients without a key on a server with keys: refused by their heads, before their bodies cost others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.http2_frames import block, headers
from support.keys import KeyFile
from support.model_files import write_identity
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer, get_fields
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import Scope
from modelserver.pb import grpc_service_pb2 as pb

MIB = 1 << 20
INFER = "/v2/models/echo/infer"
SERVICE = "/inference.GRPCInferenceService"
# Groups that need a header, besides keys.
RULES = ("model-repository:admin-key=secret",)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    file.add("infer", Scope.INFER)
    file.add("admin", Scope.ADMIN)
    file.add("tenant", Scope.INFER, models=("other*",))
    return file


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "fronts"])
def served(
    request: pytest.FixtureRequest, keys: KeyFile, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    root: Path = tmp_path_factory.mktemp("served")
    write_identity(root, "echo")
    options: dict[str, Any] = {
        "wire_processes": request.param,
        "model_control_mode": "explicit",
        "load_model": ("*",),
        "http_restricted_api": RULES,
        "grpc_restricted_protocol": RULES,
    }
    with running_server(root, api_keys_file=str(keys.path), **options) as running:
        yield running


def _http(served: RunningServer) -> tuple[str, int]:
    return "127.0.0.1", served.server.http_port


def _grpc(served: RunningServer) -> tuple[str, int]:
    return "127.0.0.1", served.server.grpc_port


def _post(path: str, num_bytes: int, *more: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {num_bytes}", *more, "", "")
    return "\r\n".join(lines).encode()


def test_bodies_of_others_are_served_beside_many_who_have_no_key(served: RunningServer, keys: KeyFile) -> None:
    """Before keys were looked at by the head, six of these filled the budget of large bodies."""
    strangers = [Http1Peer(_http(served)) for _ in range(8)]
    for stranger in strangers:
        stranger.send(_post(INFER, 60 * MIB) + bytes(100_000))
        answer = stranger.read_answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        assert answer.headers["www-authenticate"] == "Bearer"
        stranger.try_send(bytes(MIB))
    data = [0.5] * 700_000
    document = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, len(data)], "data": data}]}
    content = json.dumps(document).encode()
    assert len(content) > 3 * MIB
    key = {"x-api-key": keys.texts["infer"]}
    url = f"http://{served.http_url}{INFER}"
    assert httpx.post(url, content=content, headers=key, timeout=60).status_code == 200
    message = _message(MIB)
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(served.grpc_url, options) as channel:
        infer = channel.unary_unary(f"{SERVICE}/ModelInfer")
        assert len(infer(message, metadata=tuple(key.items()), timeout=60)) > 4 * MIB
        with pytest.raises(grpc.RpcError) as error:
            infer(message, timeout=60)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for stranger in strangers:
        stranger.close()


def _message(num_elements: int) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, num_elements])
    raw = [bytes(4 * num_elements)]
    return pb.ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=raw).SerializeToString()


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        (INFER, None, 401),
        (INFER, "msk_wrong", 401),
        (INFER, "admin", 403),
        (INFER, "tenant", 403),  # for other models
        ("/v1/chat/completions", None, 401),
        ("/v2/repository/models/echo/load", "infer", 403),
        ("/v2/repository/models/echo/load", "admin", 403),  # without the header that restricts it
        ("/v2/nothing", None, 401),
    ],
)
@pytest.mark.parametrize("framing", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
def test_a_request_is_refused_by_its_head(
    served: RunningServer, keys: KeyFile, path: str, key: str | None, status: int, framing: str
) -> None:
    """Its body has not come, and never does; who waits to be asked for it is not asked."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", framing, "Expect: 100-continue"]
    if key is not None:
        lines.append(f"Authorization: Bearer {keys.texts.get(key, key)}")
    with Http1Peer(_http(served)) as peer:
        peer.send("\r\n".join([*lines, "", ""]).encode())
        received = peer.read_all()
    assert received.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"100 Continue" not in received
    assert b"\r\nConnection: close\r\n" in received
    assert (b'"error":{' in received) == path.startswith("/v1")


def test_who_has_a_key_is_asked_for_the_body(served: RunningServer, keys: KeyFile) -> None:
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}).encode()
    with Http1Peer(_http(served)) as peer:
        peer.send(_post(INFER, len(body), "Expect: 100-continue", f"x-api-key: {keys.texts['infer']}"))
        assert peer._read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        peer.send(body)
        assert peer.read_answer().status == 200
        peer.ask("/v2/health/ready")
        assert peer.read_answer().status == 200


def test_an_answer_before_the_one_that_is_refused_still_comes(served: RunningServer, keys: KeyFile) -> None:
    with Http1Peer(_http(served)) as peer:
        first = f"GET /v2/models HTTP/1.1\r\nHost: test\r\nx-api-key: {keys.texts['infer']}\r\n\r\n"
        peer.send(first.encode() + _post(INFER, 10 * MIB))
        assert [peer.read_answer().status, peer.read_answer().status] == [200, 401]
        assert peer.read_all() == b""


def test_what_needs_no_key_takes_no_large_body(served: RunningServer) -> None:
    """Else clients without a key could fill the memory with such bodies."""
    for path in ("/v2/health/ready", "/health", "/ping"):
        with Http1Peer(_http(served)) as peer:
            peer.send(f"GET {path} HTTP/1.1\r\nHost: test\r\nContent-Length: 60000000\r\n\r\n".encode())
            assert peer.read_answer().status == 413
        with Http1Peer(_http(served)) as peer:
            peer.ask(path, body=b"{}")
            assert peer.read_answer().status == 200
    with grpc.insecure_channel(served.grpc_url) as channel:
        for method in (f"{SERVICE}/ServerReady", "/grpc.health.v1.Health/Check"):
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(method)(bytes(100_000), timeout=60)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            channel.unary_unary(method)(b"", timeout=60)


@pytest.mark.parametrize("key", [None, "msk_wrong"])
def test_http2_is_refused_by_its_head(served: RunningServer, keys: KeyFile, key: str | None) -> None:
    given = [] if key is None else [("x-api-key", key)]
    with Peer(_http(served)) as peer:
        fields = get_fields(INFER, ("content-length", "1000000"), *given, method="POST")
        peer.send(headers(1, block(fields), end=False))
        peer.until(lambda: peer.answer(1).fields is not None, "an answer")
        assert peer.answer(1).status == 401
        ready = get_fields("/v2/health/ready")
        peer.send(headers(3, block(ready)))
        assert peer.expect_answer(3).status == 200, "the connection goes on"


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "RepositoryIndex"])
@pytest.mark.parametrize("key", [None, "msk_wrong", "metrics"])
def test_grpc_is_refused_by_its_head(served: RunningServer, keys: KeyFile, method: str, key: str | None) -> None:
    if key == "metrics" and key not in keys.texts:
        keys.add(key, Scope.METRICS)
    fields = [
        *((":method", "POST"), (":scheme", "http"), (":path", f"{SERVICE}/{method}"), (":authority", "test")),
        *(("content-type", "application/grpc"), ("te", "trailers")),
    ]
    if key is not None:
        fields.append(("authorization", f"Bearer {keys.texts.get(key, key)}"))
    with Peer(_grpc(served)) as peer:
        peer.send(headers(1, block(fields), end=False))
        peer.until(lambda: peer.answer(1).has_ended, "an answer")
        # A key that is new to the server counts as wrong until it looks at the file again.
        assert peer.answer(1).grpc_status in ((16,) if key != "metrics" else (7, 16))
