"""The access log: a line for each call over either protocol, answered, refused or left."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from support.clients import ClientError, GrpcClient, HttpClient, ProtocolClient
from support.gate import BACKEND_DIRECTORY
from support.keys import KeyFile
from support.latches import latch_of, write_latched
from support.model_files import write_identity
from support.serving import RunningServer, running_server
from support.waiting import until_true

from modelserver.app.logs import JsonFormatter
from modelserver.auth.api_keys import Scope
from modelserver.pb import grpc_service_pb2 as pb

TRACE = "0af7651916cd43dd8448eb211c80319c"
Take = Callable[..., dict[str, Any]]


class Lines(logging.Handler):
    """What the access log got."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(scope="module")
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("modelserver.auth.access"), Lines()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    return KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")


@pytest.fixture(scope="module")
def served(layout: str, lines: Lines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("logged")
    write_identity(repository, "one")
    write_latched(repository, "held", held="batch", more="dynamic_batching { }")
    with running_server(repository, access_log=True, backend_directory=(BACKEND_DIRECTORY,)) as running:
        yield running


@pytest.fixture
def take(served: RunningServer, lines: Lines) -> Take:
    """The fields of the one line that is about what was just done."""
    lines.records.clear()

    def line(**expected: str) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            rows = [record.fields for record in list(lines.records)]  # type: ignore[attr-defined]
            return [row for row in rows if expected.items() <= row.items()]

        until_true(lambda: bool(found()), f"a line of {expected}")
        (row,) = found()
        return row

    return line


@pytest.fixture(params=[HttpClient, GrpcClient], ids=["http", "grpc"])
def caller(request: pytest.FixtureRequest, served: RunningServer) -> Iterator[ProtocolClient]:
    with request.param(served) as client:
        yield client


PATHS = {"http": "/v2/models/one/infer", "grpc": "/inference.GRPCInferenceService/ModelInfer"}


def test_an_inference_has_sizes_model_and_ids(caller: ProtocolClient, take: Take) -> None:
    headers = {"traceparent": f"00-{TRACE}-{'1' * 16}-01"}
    caller.infer("one", {"INPUT0": np.zeros((1, 16), np.float32)}, request_id="a b", headers=headers)
    row = take(path=PATHS[caller.name])
    assert (row["method"], row["model"], row["request_id"], row["trace_id"]) == ("POST", "one", "a b", TRACE)
    assert (row["protocol"], row["status"]) == (("HTTP", "200") if caller.name == "http" else ("gRPC", "OK"))
    assert row["bytes_in"] > 64
    assert row["bytes_out"] > 64
    assert row["duration_ms"] > 0
    assert "127.0.0.1" in row["peer"]


def test_what_is_refused_has_a_line_too(caller: ProtocolClient, take: Take) -> None:
    with pytest.raises(ClientError):
        caller.infer("nobody", {"INPUT0": np.zeros((1, 16), np.float32)})
    row = take(model="nobody")
    assert row["status"] in ("404", "NOT_FOUND", "INVALID_ARGUMENT")


@pytest.mark.direct
def test_calls_that_infer_nothing_have_lines(caller: ProtocolClient, take: Take) -> None:
    assert caller.is_live()
    row = take(path="/v2/health/live" if caller.name == "http" else "/inference.GRPCInferenceService/ServerLive")
    assert "model" not in row
    assert row["status"] in ("200", "OK")


def test_an_unknown_path_has_a_line_that_cannot_be_forged(served: RunningServer, take: Take) -> None:
    httpx.get(f"http://{served.http_url}/nowhere%20status=200%0Aprotocol=x")
    row = take(status="404")
    assert row["path"] == "/nowhere%20status=200%0Aprotocol=x", "as it came"


def test_a_line_is_one_line_with_quoted_parts(lines: Lines, served: RunningServer, take: Take) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    httpx.post(f"http://{served.http_url}{PATHS['http']}", json={"id": "no where\n", "inputs": [tensor]})
    take(status="200")
    (record,) = lines.records
    assert 'request_id="no where\\n"' in record.getMessage()
    assert "\n" not in record.getMessage()
    document = json.loads(JsonFormatter().format(record))
    assert (document["request_id"], document["status"]) == ("no where\n", "200")


def test_a_client_that_leaves_is_told(served: RunningServer, take: Take) -> None:
    host, _, port = served.http_url.rpartition(":")
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}).encode()
    head = b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        until_true(lambda: served.call(lambda: served.server.dataplane.load_of("held").num_inflight) == 1, "arrived")
    latch_of(served, "held").open()
    row = take(path="/v2/models/held/infer")
    assert row["status"] in ("left", "200")  # a wire may find out only when it answers


def test_a_stream_is_one_call_with_many_requests(served: RunningServer, take: Take) -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 1])
    request = pb.ModelInferRequest(model_name="one", inputs=[tensor], raw_input_contents=[b"\0" * 4])
    with grpc.insecure_channel(served.grpc_url) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        assert len(list(call(iter([request] * 3)))) == 3
    row = take(path="/inference.GRPCInferenceService/ModelStreamInfer")
    assert (row["status"], row["requests"], row["model"]) == ("OK", "3", "one")
    assert row["bytes_in"] == 3 * request.ByteSize()
    assert row["bytes_out"] > row["bytes_in"]
    assert "127.0.0.1" in row["peer"]


def test_keys_are_told_by_name_only(layout: str, keys: KeyFile, lines: Lines, tmp_path: Path) -> None:
    text = keys.add("tenant", Scope.INFER)
    write_identity(tmp_path, "one")
    with running_server(tmp_path, access_log=True, api_keys_file=str(keys.path)) as running:
        lines.records.clear()
        url = f"http://{running.http_url}/v2/models/one"
        assert httpx.get(url, headers={"Authorization": f"Bearer {text}"}).status_code == 200
        assert httpx.get(url, headers={"Authorization": "Bearer wrong"}).status_code == 401
        until_true(lambda: len(lines.records) >= 2, "two lines")
    rows = {record.fields["status"]: record.fields for record in lines.records}  # type: ignore[attr-defined]
    assert rows["200"]["key"] == "tenant"
    assert "key" not in rows["401"]
    assert all(text not in record.getMessage() for record in lines.records)


@pytest.mark.direct
def test_what_is_refused_by_its_head_has_a_line_too(layout: str, keys: KeyFile, lines: Lines, tmp_path: Path) -> None:
    """Large enough that it is not all there when the head is."""
    write_identity(tmp_path, "one")
    with running_server(tmp_path, access_log=True, api_keys_file=str(keys.path)) as running:
        lines.records.clear()
        body = bytes(3 << 20)
        url = f"http://{running.http_url}{PATHS['http']}"
        assert httpx.post(url, content=body, headers={"x-api-key": "wrong"}).status_code == 401
        with grpc.insecure_channel(running.grpc_url) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(PATHS["grpc"])(body, timeout=30)
        until_true(lambda: len(lines.records) >= 2, "two lines")
    rows = {record.fields["status"]: record.fields for record in lines.records}  # type: ignore[attr-defined]
    assert set(rows) == {"401", "UNAUTHENTICATED"}
    assert [rows[status]["path"] for status in ("401", "UNAUTHENTICATED")] == [PATHS["http"], PATHS["grpc"]]
    assert all("127.0.0.1" in row["peer"] for row in rows.values())
