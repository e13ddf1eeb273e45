"""HTTP as plain clients speak it: curl, httpx, and bytes on a socket."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.model_files import write_identity
from support.serving import ADDRESS, RunningServer, running_server

INFER = "/v2/models/echo/infer"
DATA = np.arange(6, dtype=np.float32).reshape(2, 3)
DOCUMENT = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2, 3], "data": DATA.ravel().tolist()}]}


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_identity(root, "echo")
    config = write_identity(root, "text", data_type="TYPE_STRING") / "config.pbtxt"
    config.write_text(config.read_text().replace("dims: [ -1 ]", "dims: [ 1 ]"))  # what a raw body may be for
    write_identity(root, "half", data_type="TYPE_FP16")
    write_identity(root, "slow", execute_delay_ms=100)
    with running_server(root) as running:
        yield running


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http_url}", timeout=20) as client:
        yield client


Curl = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def curl(served: RunningServer) -> Curl:
    def run(path: str, *arguments: str, body: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        data = [] if body is None else ["--data-binary", "@-"]
        url = f"http://{served.http_url}{path}"
        command = ["curl", "--silent", "--show-error", "--max-time", "20", *arguments, *data, url]
        done = subprocess.run(command, input=body, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done

    return run


def _header(curl_output: bytes, name: str) -> str:
    head = curl_output.split(b"\r\n\r\n")[0].decode()
    values = [line.split(":", 1)[1].strip() for line in head.splitlines() if line.lower().startswith(f"{name}:")]
    return values[0] if values else ""


def test_curl_sends_json(curl: Curl) -> None:
    answer = json.loads(curl(INFER, body=json.dumps(DOCUMENT).encode()).stdout)
    assert answer["outputs"] == [
        {"name": "OUTPUT0", "datatype": "FP32", "shape": [2, 3], "data": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}
    ]
    assert "id" not in answer


def test_curl_sends_a_raw_tensor(curl: Curl) -> None:
    row = DATA[:1]
    done = curl(INFER, "--include", "--header", "Inference-Header-Content-Length: 0", body=row.tobytes())
    head, body = done.stdout.split(b"\r\n\r\n", 1)
    assert _header(head, "content-type") == "application/octet-stream"
    length = int(_header(head, "inference-header-content-length"))
    assert body[length:] == row.tobytes()
    assert json.loads(body[:length])["outputs"][0]["shape"] == [1, 3]


def test_curl_sends_raw_text(curl: Curl) -> None:
    done = curl(
        "/v2/models/text/infer", "--include", "--header", "Inference-Header-Content-Length: 0", body=b"a \x00 b"
    )
    head, body = done.stdout.split(b"\r\n\r\n", 1)
    assert body[int(_header(head, "inference-header-content-length")) :] == b"\x05\x00\x00\x00a \x00 b"


def test_curl_asks_before_it_sends_much(curl: Curl) -> None:
    """curl sends `Expect: 100-continue` with a body over a megabyte, and waits a second for the answer."""
    data = np.zeros((1, 500_000), np.float32)
    done = curl(
        INFER,
        "--include",
        "--header",
        "Inference-Header-Content-Length: 0",
        "--header",
        "Expect: 100-continue",
        "--expect100-timeout",
        "15",
        "--write-out",
        "%{time_total}",
        body=data.tobytes(),
    )
    assert done.stdout.startswith(b"HTTP/1.1 100")
    assert float(done.stdout[-8:]) < 10


@pytest.mark.parametrize("chunked", [True, False])
def test_curl_sends_chunks(curl: Curl, chunked: bool) -> None:
    header = ("--header", "Transfer-Encoding: chunked") if chunked else ()
    assert json.loads(curl(INFER, *header, body=json.dumps(DOCUMENT).encode()).stdout)["model_name"] == "echo"


def test_curl_asks_for_compression(curl: Curl) -> None:
    document = {"inputs": [DOCUMENT["inputs"][0] | {"shape": [1, 5000], "data": [0.0] * 5000}]}
    plain = curl(INFER, body=json.dumps(document).encode())
    packed = curl(INFER, "--compressed", "--write-out", "%{size_download}", body=json.dumps(document).encode())
    assert packed.stdout.startswith(plain.stdout)
    assert int(packed.stdout[len(plain.stdout) :]) < len(plain.stdout) / 10


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/health/live", 200),
        ("GET", "/v2/health/live/", 200),
        ("HEAD", "/v2/health/ready", 200),
        ("GET", "/v2", 200),
        ("GET", "/v2/", 200),
        ("GET", "/v2/models", 200),
        ("GET", "/v2/models/echo/", 200),
        ("GET", "/v2/models/echo/versions/1/ready", 200),
        ("GET", "/v2/models/echo/versions/2/ready", 404),
        ("GET", "/v2/models/echo/versions/v10", 404),
        ("GET", "/v2/models/echo/versions/-1", 404),
        ("GET", "/v2/models/echo/versions/99999999999999999999", 404),
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/stats", 200),
        ("GET", "/nothing", 404),
        ("GET", "/", 200),
        ("POST", "/", 405),
        ("GET", INFER, 405),
        ("DELETE", "/v2/models/echo", 405),
        ("POST", "/v2/health/live", 405),
        ("PUT", INFER, 405),
        ("OPTIONS", INFER, 405),
    ],
)
def test_paths_and_methods(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    if status >= 400:
        assert answer.json()["error"]
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize("content_type", [None, "application/json", "application/octet-stream", "text/plain; x=y"])
def test_any_content_type_will_do(http: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = http.post(INFER, content=json.dumps(DOCUMENT), headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress), ("identity", bytes)],
)
def test_packed_bodies(http: httpx.Client, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    answer = http.post(
        INFER,
        content=pack(json.dumps(DOCUMENT).encode()),
        headers={"content-encoding": encoding, "accept-encoding": ""},
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip"])
def test_unknown_packings_are_told_the_known_ones(http: httpx.Client, encoding: str) -> None:
    answer = http.post(INFER, content=b"x", headers={"content-encoding": encoding})
    assert answer.status_code == 501
    assert "gzip" in answer.headers["accept-encoding"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have(http: httpx.Client, value: str) -> None:
    text = json.dumps({"inputs": [DOCUMENT["inputs"][0] | {"shape": [1, 1], "data": ["VALUE"]}]})
    answer = http.post(INFER, content=text.replace('"VALUE"', value))
    assert answer.status_code == 200
    assert f'"data":[{value}]' in answer.text.replace(" ", "")


def test_half_precision_has_no_json_form_either_way(http: httpx.Client) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP16", "shape": [1, 1], "data": [1.0]}
    answer = http.post("/v2/models/half/infer", json={"inputs": [tensor]})
    assert answer.status_code == 400
    assert "binary" in answer.json()["error"]
    header = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": 2}, "data": None}]}).encode()
    headers = {"inference-header-content-length": str(len(header))}
    answer = http.post("/v2/models/half/infer", content=header + b"\x00\x3c", headers=headers)
    assert answer.status_code == 400
    assert "binary_data" in answer.json()["error"]


def test_a_listed_output_without_a_word_is_json_and_the_default_is_for_the_others(http: httpx.Client) -> None:
    document: dict[str, Any] = DOCUMENT | {"parameters": {"binary_data_output": True}}
    assert http.post(INFER, json=document).headers["content-type"] == "application/octet-stream"
    listed = document | {"outputs": [{"name": "OUTPUT0"}]}
    assert http.post(INFER, json=listed).headers["content-type"] == "application/json"


def test_many_requests_on_one_connection(served: RunningServer) -> None:
    body = json.dumps(DOCUMENT).encode()
    one = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(body), body)
    with socket.create_connection((ADDRESS, served.server.http_port), timeout=20) as connection:
        connection.sendall(one * 100)  # pipelined
        received = b""
        while received.count(b"HTTP/1.1 200") < 100 or not received.endswith(b"}"):
            received += (piece := connection.recv(1 << 16))
            assert piece, "the connection was closed"
    assert received.count(b'"model_name":"echo"') == 100


def test_pipelined_answers_keep_their_order(served: RunningServer) -> None:
    def ask(model: str, number: int) -> bytes:
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [number]}
        body = json.dumps({"id": f"{number}", "inputs": [tensor]}).encode()
        return b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
            model.encode(),
            len(body),
            body,
        )

    with socket.create_connection((ADDRESS, served.server.http_port), timeout=20) as connection:
        connection.sendall(ask("slow", 0) + ask("echo", 1) + ask("nobody", 2) + ask("echo", 3))
        received = b""
        while received.count(b"HTTP/1.1 ") < 4 or not received.endswith(b"}"):
            received += (piece := connection.recv(1 << 16))
            assert piece, "the connection was closed"
    assert [received.find(mark) for mark in (b'"id":"0"', b'"id":"1"', b"nobody", b'"id":"3"')] == sorted(
        received.find(mark) for mark in (b'"id":"0"', b'"id":"1"', b"nobody", b'"id":"3"')
    )


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_who_wants_the_connection_closed_gets_its_answer_first(served: RunningServer, version: bytes) -> None:
    with socket.create_connection((ADDRESS, served.server.http_port), timeout=20) as connection:
        head = b"GET /v2/health/live HTTP/%s\r\nHost: x\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
        connection.sendall(head % version)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    assert received.startswith(b"HTTP/1.1 200")
    assert received.endswith(b'{"live":true}')


def test_a_body_that_comes_byte_by_byte(served: RunningServer) -> None:
    body = json.dumps(DOCUMENT).encode()
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(body), body)
    with socket.create_connection((ADDRESS, served.server.http_port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request:
            connection.send(bytes([byte]))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("accept", ["*/*", ""])
def test_answers_whose_status_says_it_all_are_empty(http: httpx.Client, accept: str) -> None:
    """As of Triton: `curl -w %{http_code}` writes the status behind the body, and scripts look for it alone."""
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/echo/ready", "/health", "/ping"):
        answer = http.get(path, headers={"Accept": accept})
        assert (answer.status_code, answer.content) == (200, b"")


def test_the_openapi_shapes_of_the_bodies(http: httpx.Client) -> None:
    """What KServe's specification requires to be there, where Triton answers with a status alone."""
    json_please = {"Accept": "application/json"}
    assert http.get("/v2/health/live", headers=json_please).json() == {"live": True}
    assert http.get("/v2/health/ready", headers=json_please).json() == {"ready": True, "inflight_requests": 0}
    assert http.get("/v2/models/echo/ready", headers=json_please).json() == {"name": "echo", "ready": True}
    assert {"name", "version", "extensions"} <= set(http.get("/v2").json())
    assert set(http.get("/v2/models/echo").json()) >= {"name", "versions", "platform", "inputs", "outputs"}
    assert "echo" in http.get("/v2/models").json()["models"]


@pytest.mark.direct
def test_metrics_have_a_port_of_their_own_and_are_on_the_http_port(served: RunningServer, http: httpx.Client) -> None:
    for text in (http.get("/metrics").text, httpx.get(f"http://{served.metrics_url}/metrics").text):
        assert 'nv_inference_request_success{model="echo",version="1"}' in text
