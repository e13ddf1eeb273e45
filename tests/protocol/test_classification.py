"""The classification extension: the best classes of an output instead of the output, over both protocols."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.errors import ErrorCode

LABELS = "zero\none\ntwo\n"
_CONFIG = """
backend: "identity"
max_batch_size: {max_batch_size}
input [ {{ name: "INPUT0", data_type: {data_type}, dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0", data_type: {data_type}, dims: [ -1 ], label_filename: "labels.txt" }} ]
"""


def _write(root: Path, name: str, data_type: str, max_batch_size: int) -> None:
    directory = write_identity(root, name)
    (directory / "config.pbtxt").write_text(_CONFIG.format(data_type=data_type, max_batch_size=max_batch_size))
    (directory / "labels.txt").write_text(LABELS)


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    _write(root, "rows", "TYPE_FP32", 8)
    _write(root, "flat", "TYPE_INT64", 0)
    _write(root, "text", "TYPE_STRING", 8)
    _write(root, "half", "TYPE_FP16", 8)
    write_identity(root, "unlabelled")
    with running_server(root) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected


def _classify(client: ProtocolClient, model: str, data: np.ndarray, count: int, datatype: str = "") -> list[Any]:
    arguments = client._arguments(model, {"INPUT0": data}, None, "", {"INPUT0": datatype} if datatype else {})
    arguments["outputs"] = [client.library.InferRequestedOutput("OUTPUT0", class_count=count)]
    result = client._call(client.raw.infer, **arguments)
    found: list[Any] = result.as_numpy("OUTPUT0").tolist()
    return found


def test_each_row_has_its_highest_elements_first_with_their_labels(client: ProtocolClient) -> None:
    data = np.array([[1, 1, 1], [5, 6, 7]], np.float32)
    for _ in range(2):  # known requests are decoded another way
        assert _classify(client, "rows", data, 2) == [
            [b"1.000000:0:zero", b"1.000000:1:one"],
            [b"7.000000:2:two", b"6.000000:1:one"],
        ]


def test_no_more_classes_than_there_are_elements_and_no_label_beyond_the_file(client: ProtocolClient) -> None:
    data = np.array([[0.5, 1.23456789, 1e10, -1]], np.float32)
    expected = [b"10000000000.000000:2:two", b"1.234568:1:one", b"0.500000:0:zero", b"-1.000000:3"]
    assert _classify(client, "rows", data, 100) == [expected]


def test_without_a_batch_dimension_all_elements_are_one_row(client: ProtocolClient) -> None:
    data = np.array([5, -2, 10**17], np.int64)
    assert _classify(client, "flat", data, 2) == [b"100000000000000000:2:two", b"5:0:zero"]


def test_outputs_without_labels_have_an_index_only(client: ProtocolClient) -> None:
    assert _classify(client, "unlabelled", np.array([[1, 2]], np.float32), 1) == [[b"2.000000:1"]]


def test_halves_have_classes_too_and_what_is_no_number_is_the_lowest(client: ProtocolClient) -> None:
    data = np.array([[np.nan, 1, 2]], np.float16)
    assert _classify(client, "half", data, 3) == [[b"2.000000:2:two", b"1.000000:1:one", b"nan:0:zero"]]


def test_strings_have_no_order(client: ProtocolClient) -> None:
    with pytest.raises(ClientError, match="unsupported type 'BYTES'") as caught:
        _classify(client, "text", np.array([[b"a", b"b"]], object), 1)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_no_classes_are_the_tensor_itself(client: ProtocolClient) -> None:
    assert _classify(client, "rows", np.array([[1, 2]], np.float32), 0) == [[1.0, 2.0]]


@pytest.mark.parametrize("count", [-1, "a", True, 1.5])
def test_what_is_no_count_is_refused(served: RunningServer, count: object) -> None:
    document = {
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}],
        "outputs": [{"name": "OUTPUT0", "parameters": {"classification": count}}],
    }
    answer = httpx.post(f"http://{served.http_url}/v2/models/rows/infer", json=document)
    assert answer.status_code == 400
    assert "'classification' must be an unsigned integer" in answer.json()["error"]


def test_a_region_cannot_hold_classes(client: ProtocolClient) -> None:
    arguments = client._arguments("rows", {"INPUT0": np.ones((1, 2), np.float32)}, None, "", {})
    output = client.library.InferRequestedOutput("OUTPUT0", class_count=1)
    if client.name == "http":
        output._parameters |= {"shared_memory_region": "region", "shared_memory_byte_size": 8}
    else:
        output._output.parameters["shared_memory_region"].string_param = "region"
        output._output.parameters["shared_memory_byte_size"].int64_param = 8
    with pytest.raises(ClientError, match="can't set both 'shared_memory_region' and 'classification'"):
        client._call(client.raw.infer, **(arguments | {"outputs": [output]}))


def test_a_label_file_that_is_not_there_keeps_the_model_from_loading(tmp_path: Path) -> None:
    _write(tmp_path, "model", "TYPE_FP32", 8)
    (tmp_path / "model" / "labels.txt").unlink()
    with running_server(tmp_path) as running:
        rows = httpx.post(f"http://{running.http_url}/v2/repository/index").json()
    assert "label file" in rows[0]["reason"]
    assert rows[0]["state"] == "UNAVAILABLE"
