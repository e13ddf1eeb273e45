"""Headers that become parameters of a request, over both protocols and in every kind of call."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.clients import ClientError, GrpcClient, ProtocolClient
from support.reflecting import write_reflecting
from support.serving import RunningServer, running_server

from modelserver.errors import ErrorCode

PATTERN = "^x-|trace|priority|triton"
TEXT = np.array([b"x"], dtype=object)


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_reflecting(root)
    options = {"http_header_forward_pattern": PATTERN, "grpc_header_forward_pattern": PATTERN}
    with running_server(root, **options) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected


def _told(client: ProtocolClient, **details: Any) -> dict[str, Any]:
    answer = client.infer("reflect", {"TEXT": TEXT}, **details)["TOLD"].item()
    parameters: dict[str, Any] = json.loads(answer)["parameters"]
    return parameters


@pytest.mark.direct
def test_headers_that_match_reach_the_model_each_with_its_call(client: ProtocolClient) -> None:
    for value in ("1", "2"):  # known requests are decoded another way
        headers = {"x-user": value, "my-trace-id": "t", "other": "o"}
        assert _told(client, headers=headers) == {"x-user": value, "my-trace-id": "t"}
    assert _told(client, headers={"other": "o"}) == {}


@pytest.mark.direct
def test_a_header_wins_over_the_parameter_of_its_name(client: ProtocolClient) -> None:
    told = _told(client, headers={"x-user": "proxy"}, parameters={"x-user": "body", "more": 1})
    assert told == {"x-user": "proxy", "more": 1}


@pytest.mark.parametrize("name", ["priority", "triton_final_response"])
def test_reserved_names_are_refused(client: ProtocolClient, name: str) -> None:
    with pytest.raises(ClientError, match=f"header '{name}' cannot be forwarded") as caught:
        _told(client, headers={name: "1"})
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.direct
@pytest.mark.parametrize("name", ["X-User", "x-user", "X-USER"])
def test_names_of_http_headers_are_as_they_came(served: RunningServer, name: str) -> None:
    """But of the reference wire, whose library puts them in lower case."""
    expected = {name.lower() if served.server.options.wire == "grpcio" else name: "Me"}
    url = f"http://{served.http_url}/v2/models/reflect"
    with httpx.Client(headers=[(name, "Me")]) as client:
        for _ in range(2):  # a head that came before is not read again
            answer = client.post(f"{url}/generate", json={"TEXT": "x"})
            assert json.loads(answer.json()["TOLD"])["parameters"] == expected
            tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["x"]}
            outputs = client.post(f"{url}/infer", json={"inputs": [tensor]}).json()["outputs"]
            (told,) = [output["data"][0] for output in outputs if output["name"] == "TOLD"]
            assert json.loads(told)["parameters"] == expected


@pytest.mark.direct
def test_headers_of_a_stream_are_those_of_all_its_requests(served: RunningServer) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with GrpcClient(served) as client:
        client.raw.start_stream(lambda result, error: answers.put((result, error)), headers={"x-user": "me"})
        for _ in range(2):
            client.raw.async_stream_infer(**client._arguments("reflect", {"TEXT": TEXT}, None, "", {}))
        for _ in range(2):
            result, error = answers.get(timeout=10)
            assert error is None
            assert json.loads(result.as_numpy("TOLD").item())["parameters"] == {"x-user": "me"}
        client.raw.stop_stream()


def test_case_matters_where_the_pattern_says_so(layout: str, protocol: type[ProtocolClient], tmp_path: Path) -> None:
    """By RE2's switch, as in Triton's documentation. HTTP/2, and HTTP beside grpcio, have names in lower case only."""
    write_reflecting(tmp_path)
    pattern = "(?-i)x-user|OTHER"
    options = {"http_header_forward_pattern": pattern, "grpc_header_forward_pattern": pattern}
    with running_server(tmp_path, **options) as running, protocol(running) as client:
        assert _told(client, headers={"x-user": "1", "other": "2"}) == {"x-user": "1"}
        if protocol.name == "http" and layout != "grpcio":
            assert _told(client, headers={"X-User": "1", "x-user-name": "2", "OTHER": "3"}) == {
                "x-user-name": "2",
                "OTHER": "3",
            }
