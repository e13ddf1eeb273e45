"""The clients that `record.py` records: a few requests each, small, and of as many kinds as the client has."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import numpy as np
import tritonclient.grpc
import tritonclient.http

from modelserver.pb import grpc_service_pb2 as pb

_SERVICE = "/inference.GRPCInferenceService/"
_INFER = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [float(n) for n in range(16)]}]}
)
_INFER_PATH = "/v2/models/identity/infer"


@dataclass(frozen=True, slots=True)
class Client:
    """`run` gets the address of the server; `program` must be installed; `port` is the server's that it asks."""

    name: str
    run: Callable[[str], None]
    program: str = ""
    port: str = "http"


def _command(*words: str) -> Callable[[str], None]:
    """Runs a program; `URL` in its arguments is the server's."""

    def run(address: str) -> None:
        subprocess.run(
            [word.replace("URL", f"http://{address}") for word in words],
            check=True,
            timeout=30,
            input=_INFER.encode(),
            stdout=subprocess.DEVNULL,
        )

    return run


def _http_client(address: str) -> None:
    connection = http.client.HTTPConnection(address)
    for method, path, body in (("GET", "/v2", None), ("POST", _INFER_PATH, _INFER), ("HEAD", "/v2", None)):
        connection.request(method, path, body)
        connection.getresponse().read()
    connection.request("POST", _INFER_PATH, iter([_INFER[:100].encode(), _INFER[100:].encode()]), encode_chunked=True)
    connection.getresponse().read()
    connection.close()


def _httpx(address: str) -> None:
    with httpx.Client(base_url=f"http://{address}") as client:
        client.get("/v2/models/identity/config")
        client.post(_INFER_PATH, content=gzip.compress(_INFER.encode()), headers={"content-encoding": "gzip"})
        client.post(_INFER_PATH, content=iter([_INFER.encode()]))


def _triton_http(address: str) -> None:
    with tritonclient.http.InferenceServerClient(address) as client:
        client.is_server_ready()
        client.get_model_metadata("identity")
        for binary in (True, False):
            tensor = tritonclient.http.InferInput("INPUT0", [2, 16], "FP32")
            tensor.set_data_from_numpy(np.ones((2, 16), np.float32), binary_data=binary)
            client.infer("identity", [tensor], request_id="7")
            client.infer("identity", [tensor], request_compression_algorithm="gzip")


def _triton_grpc(address: str) -> None:
    with tritonclient.grpc.InferenceServerClient(address) as client:
        client.is_server_live()
        client.get_model_config("identity")
        tensor = tritonclient.grpc.InferInput("INPUT0", [2, 16], "FP32")
        tensor.set_data_from_numpy(np.ones((2, 16), np.float32))
        for _ in range(3):
            client.infer("identity", [tensor], request_id="7", client_timeout=5)
        client.infer("identity", [tensor], compression_algorithm="gzip")
        client.start_stream(lambda result, error: None)
        for _ in range(3):
            client.async_stream_infer("identity", [tensor])
        client.stop_stream()


def _infer_message(num_floats: int = 16) -> bytes:
    data = np.arange(num_floats, dtype=np.float32)
    request = pb.ModelInferRequest(model_name="identity", raw_input_contents=[data.tobytes()])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, num_floats])
    return request.SerializeToString()


def _grpcio_unary(address: str, num_floats: int = 5_000) -> None:
    with grpc.insecure_channel(address) as channel:
        infer = channel.unary_unary(_SERVICE + "ModelInfer")
        infer(_infer_message(), timeout=5, wait_for_ready=True)
        infer(_infer_message(), timeout=0.75)
        infer(_infer_message(num_floats), metadata=[("key", "value"), ("key", "again"), ("data-bin", b"\xff\x00")])
        infer(_infer_message(100), compression=grpc.Compression.Deflate)
        infer(_infer_message(100), compression=grpc.Compression.Gzip)


def _grpcio_errors(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        for method, message in (("ModelInfer", b"nonsense"), ("NoSuchMethod", b""), ("ModelReady", b"")):
            call = channel.unary_unary(_SERVICE + method).future(message)
            call.exception(timeout=10)
        cancelled = channel.stream_stream(_SERVICE + "ModelStreamInfer")(iter([_infer_message()]))
        next(cancelled)
        cancelled.cancel()


def _grpcio_many(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        infer = channel.unary_unary(_SERVICE + "ModelInfer")
        calls = [infer.future(_infer_message(), timeout=10) for _ in range(20)]
        for call in calls:
            call.result(timeout=10)


def _node(script: str) -> Callable[[str], None]:
    return _command("node", str(Path(__file__).with_name(script)), "URL")


# Proxies, with the place of their files, their port and the server's.
_NGINX = """
daemon off; pid {directory}/pid; error_log {directory}/log; worker_processes 1; events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/1; proxy_temp_path {directory}/2; fastcgi_temp_path {directory}/3;
    uwsgi_temp_path {directory}/4; scgi_temp_path {directory}/5;
    server {{ listen 127.0.0.1:{port} http2; location / {{ grpc_pass grpc://{address}; }} }}
}}
"""
_HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
frontend all
    bind 127.0.0.1:{port} proto h2
    default_backend servers
backend servers
    server first {address} proto h2
"""


def _behind(command: list[str], configuration: str) -> Callable[[str], None]:
    """What a proxy says for a client of grpcio."""

    def run(address: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "proxy.conf"
            path.write_text(configuration.format(directory=directory, port=port, address=address))
            proxy = subprocess.Popen([*command, str(path)], stderr=subprocess.DEVNULL)
            try:
                # Small ones: the window that haproxy opens has no room for more than what was sent, and in a replay
                # it is opened before a large answer is sent.
                _grpcio_unary(f"127.0.0.1:{port}", num_floats=1_000)
            finally:
                proxy.terminate()
                proxy.wait(10)

    return run


_CURL: Sequence[str] = ("curl", "--silent", "--show-error", "--output", "/dev/null")
_JSON: Sequence[str] = ("--data-binary", "@-", "--header", "Content-Type: application/json")
_URL = f"URL{_INFER_PATH}"
_BODY_FILE = Path(__file__)  # any: what counts is how it is sent
_H2: Sequence[str] = ("--http2-prior-knowledge",)

CLIENTS = [
    Client("curl_get", _command(*_CURL, "URL/v2/health/ready", "--next", *_CURL[1:], "URL/v2?a=b%20c"), "curl"),
    Client("curl_post", _command(*_CURL, *_JSON, _URL), "curl"),
    Client("curl_chunked", _command(*_CURL, *_JSON, "--header", "Transfer-Encoding: chunked", _URL), "curl"),
    Client("curl_expect", _command(*_CURL, *_JSON, "--header", "Expect: 100-continue", _URL), "curl"),
    Client("curl_upgrade", _command(*_CURL, "--http2", "URL/v2"), "curl"),
    Client("curl_http1_0", _command(*_CURL, "--http1.0", "URL/v2"), "curl"),
    Client("h2load_http1", _command("h2load", "--h1", "-n5", "-c1", "-m2", "URL/v2/health/live"), "h2load"),
    Client("http_client", _http_client),
    Client("httpx", _httpx),
    Client("tritonclient_http", _triton_http),
    Client("node_http", _node("http1.mjs"), "node"),
    # One request: curl 7.88 does not get a second one over the same connection right, with other servers neither.
    Client("curl_http2_get", _command(*_CURL, *_H2, "URL/v2?a=b%20c"), "curl"),
    Client("curl_http2_post", _command(*_CURL, *_H2, *_JSON, _URL), "curl"),
    Client("nghttp", _command("nghttp", "--null-out", "URL/v2", "URL/v2/health/live"), "nghttp"),
    Client("nghttp_post", _command("nghttp", "--null-out", f"--data={_BODY_FILE}", _URL), "nghttp"),
    Client("nghttp_small_table", _command("nghttp", "--null-out", "--header-table-size=0", "URL/v2"), "nghttp"),
    Client("h2load", _command("h2load", "-n20", "-c1", "-m8", "URL/v2/health/live"), "h2load"),
    Client("node_http2", _node("http2.mjs"), "node"),
    Client("grpcio_unary", _grpcio_unary, port="grpc"),
    Client("grpcio_errors", _grpcio_errors, port="grpc"),
    Client("grpcio_many", _grpcio_many, port="grpc"),
    Client("tritonclient_grpc", _triton_grpc, port="grpc"),
    Client("nginx", _behind(["nginx", "-c"], _NGINX), "nginx", port="grpc"),
    Client("haproxy", _behind(["haproxy", "-f"], _HAPROXY), "haproxy", port="grpc"),
]
