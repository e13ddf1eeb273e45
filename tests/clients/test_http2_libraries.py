"""REST over HTTP/2 by Python's libraries: httpx, and the h2 state machine on a bare socket."""

from __future__ import annotations

import socket

import h2.config
import h2.connection
import h2.events
import httpx
import numpy as np
import pytest
from support.certificates import Authority
from support.serving import RunningServer
from support.wires import RunningWire


def test_httpx(wire: RunningWire) -> None:
    with httpx.Client(base_url=f"http://{wire.url}", http1=False, http2=True) as client:
        answer = client.get("/")
        assert (answer.status_code, answer.http_version, answer.text) == (200, "HTTP/2", "hello")
        for size in (0, 1, 70_000, 5 << 20):
            assert client.post("/echo", content=bytes(size)).content == bytes(size)
            assert len(client.get(f"/size/{size}").content) == size
        assert client.get("/nowhere").status_code == 404
        assert client.head("/").headers["content-length"] == "5"


def test_httpx_reads_pieces(wire: RunningWire) -> None:
    with httpx.Client(base_url=f"http://{wire.url}", http1=False, http2=True) as client:
        with client.stream("GET", "/pieces/100/10000") as answer:
            assert sum(map(len, answer.iter_raw())) == 1_000_000
        with client.stream("GET", "/pieces/1000000/10000") as answer:
            next(answer.iter_raw())
        assert client.get("/").text == "hello"


def test_httpx_sends_a_body_of_unknown_length(wire: RunningWire) -> None:
    with httpx.Client(base_url=f"http://{wire.url}", http1=False, http2=True) as client:
        assert client.post("/echo", content=(b"%d" % number for number in range(1000))).content == b"".join(
            b"%d" % number for number in range(1000)
        )


@pytest.mark.parametrize("is_http2", [False, True], ids=["http1", "http2"])
def test_httpx_with_tls(tls_wire: RunningWire, authority: Authority, is_http2: bool) -> None:
    """ALPN decides."""
    with httpx.Client(base_url=f"https://{tls_wire.url}", http2=is_http2, verify=authority.client_context()) as client:
        answer = client.post("/echo", content=b"body" * 10000)
        assert answer.content == b"body" * 10000
        assert answer.http_version == ("HTTP/2" if is_http2 else "HTTP/1.1")


@pytest.mark.parametrize("is_http2", [False, True], ids=["http1", "http2"])
def test_inference_by_httpx(one_port: RunningServer, is_http2: bool) -> None:
    values = [float(number) for number in range(16)]
    document = {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": values}]}
    with httpx.Client(base_url=f"http://{one_port.http_url}", http1=not is_http2, http2=is_http2) as client:
        answer = client.post("/v2/models/identity/infer", json=document)
        assert answer.status_code == 200
        assert answer.json()["outputs"][0]["data"] == values
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v2/models/nothing").json()["error"]
        compressed = client.post(
            "/v2/models/identity/infer", json=document, headers={"accept-encoding": "gzip", "x-large": "v" * 3000}
        )
        assert compressed.json()["outputs"][0]["data"] == values


def test_the_h2_library(wire: RunningWire) -> None:
    """It checks all that a server sends, and indexes what it sends itself."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    with socket.create_connection(wire.address, timeout=10) as connected:
        connection.initiate_connection()
        for number in range(50):
            stream_id = connection.get_next_available_stream_id()
            head = [(":method", "POST"), (":scheme", "http"), (":path", "/echo"), (":authority", "test")]
            connection.send_headers(stream_id, [*head, ("x-number", str(number % 7))])
            connection.send_data(stream_id, b"%d" % number, end_stream=True)
            connected.sendall(connection.data_to_send())
            assert _body(connection, connected, stream_id) == b"%d" % number
        connection.close_connection()
        connected.sendall(connection.data_to_send())


def test_the_h2_library_with_small_windows_and_padding(wire: RunningWire) -> None:
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    with socket.create_connection(wire.address, timeout=10) as connected:
        connection.initiate_connection()
        connection.update_settings({4: 1000, 1: 0})
        connection.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", "/echo"), (":authority", "a")])
        for _ in range(10):
            connection.send_data(1, b"x" * 1000, pad_length=200)
        connection.end_stream(1)
        connected.sendall(connection.data_to_send())
        assert _body(connection, connected, 1) == b"x" * 10000


def _body(connection: h2.connection.H2Connection, connected: socket.socket, stream_id: int) -> bytes:
    body = b""
    while True:
        for event in connection.receive_data(connected.recv(65536)):
            if isinstance(event, h2.events.DataReceived) and event.stream_id == stream_id:
                body += event.data
                connection.acknowledge_received_data(event.flow_controlled_length, stream_id)
            elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream_id:
                connected.sendall(connection.data_to_send())
                return body
            else:
                assert not isinstance(event, (h2.events.StreamReset, h2.events.ConnectionTerminated)), event
        connected.sendall(connection.data_to_send())


def test_binary_tensors_over_http2(one_port: RunningServer) -> None:
    array = np.arange(1 << 18, dtype=np.float32)
    head = (
        b'{"inputs":[{"name":"INPUT0","shape":[1,262144],"datatype":"FP32","parameters":{"binary_data_size":1048576}}],'
        b'"parameters":{"binary_data_output":true}}'
    )
    with httpx.Client(base_url=f"http://{one_port.http_url}", http1=False, http2=True) as client:
        answer = client.post(
            "/v2/models/identity/infer",
            content=head + array.tobytes(),
            headers={"inference-header-content-length": str(len(head))},
        )
    assert answer.status_code == 200, answer.text
    start = int(answer.headers["inference-header-content-length"])
    np.testing.assert_array_equal(np.frombuffer(answer.content[start:], np.float32), array)
