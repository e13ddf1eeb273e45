"""Requests of different shapes in one batch, and batches formed by the model's own code, over both protocols."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.clients import ClientError, HttpClient, ProtocolClient
from support.model_files import write_identity
from support.onnx_models import onnx_model, value, write_model
from support.serving import RunningServer, running_server

from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout

# Kind of batch input -> the rank of its tensor in the model's file.
KINDS = {
    "BATCH_ELEMENT_COUNT": 1,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": 1,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": 1,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": 1,
    "BATCH_ITEM_SHAPE": 2,
    "BATCH_ITEM_SHAPE_FLATTEN": 1,
}
EXPECTED = {
    "BATCH_ELEMENT_COUNT": [3, 4, 5],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [3, 7, 12],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 3, 7, 12],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [0, 0, 0, 0, 0],
    "BATCH_ITEM_SHAPE": [3, 4, 5],
    "BATCH_ITEM_SHAPE_FLATTEN": [3, 4, 5],
}
# Never two requests whose first numbers are of different signs.
STRATEGY = """
def init(batcher):
    return {"sign": None}

def include_request(request, batch):
    sign = bool(request.inputs["INPUT0"].data.flat[0] < 0)
    if batch["sign"] is None:
        batch["sign"] = sign
    return batch["sign"] == sign
"""


def write_ragged(root: Path, kind: str) -> None:
    """An ONNX model: OUT is the flat input, scattered; TOLD is the batch input, a row of it for each request."""
    directory = root / kind.lower()
    told = value("TOLD_IN", ["k"] if KINDS[kind] == 1 else ["k", 1], TensorProto.INT32)
    nodes = [
        helper.make_node("Identity", ["IN"], ["OUT"]),
        helper.make_node("Flatten", ["TOLD_IN"], ["ROW"], axis=0),
        helper.make_node("Add", ["ROW", "ZERO"], ["TOLD"]),
    ]
    outputs = [value("OUT", ["n"]), value("TOLD", ["b", "k"], TensorProto.INT32)]
    zero = value("ZERO", ["b", 1], TensorProto.INT32)
    write_model(directory, onnx_model([value("IN", ["n"]), told, zero], outputs, nodes))
    (directory / "config.pbtxt").write_text(f"""
backend: "onnxruntime"
max_batch_size: 8
input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }}
input {{ name: "ZERO" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "TOLD" data_type: TYPE_INT32 dims: [ -1 ] }}
batch_input {{ kind: {kind} target_name: "TOLD_IN" data_type: TYPE_INT32 source_input: "IN" }}
batch_output {{ target_name: "OUT" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "IN" }}
dynamic_batching {{ }}
""")


@pytest.fixture
def ragged(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[RunningServer]:
    """One model of the kind that the test asks for; it waits for three requests first, as Triton's tests want it."""
    write_ragged(tmp_path, request.param)
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "3")
    with running_server(tmp_path) as running:
        yield running


@pytest.mark.parametrize(("ragged", "kind"), [(kind, kind) for kind in KINDS], indirect=["ragged"])
def test_a_batch_of_different_shapes(protocol: type[ProtocolClient], ragged: RunningServer, kind: str) -> None:
    model = kind.lower()

    def send(size: int) -> tuple[list[list[float]], list[int]]:
        data = np.full((1, size), size, np.float32)
        with protocol(ragged) as client:
            answer = client.infer(model, {"IN": data, "ZERO": np.zeros((1, 1), np.int32)})
        return answer["OUT"].tolist(), answer["TOLD"].tolist()[0]

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(send, (3, 4, 5)))
    assert [out for out, _ in answers] == [[[3.0] * 3], [[4.0] * 4], [[5.0] * 5]]
    # Whatever order they came in, the numbers are those of three requests in one batch.
    (told,) = {tuple(told) for _, told in answers}
    assert len(told) == len(EXPECTED[kind])
    if kind != "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        assert max(told) == max(EXPECTED[kind])
        assert told[0] in (0, 3, 4, 5)
    with protocol(ragged) as client:
        assert [tensor["name"] for tensor in client.model_metadata(model)["inputs"]] == ["IN", "ZERO"]
        (row,) = client.statistics(model)
        assert int(row["execution_count"]) == 1


@pytest.mark.parametrize("place", ["version", "model", "parameter"])
def test_a_models_own_code_forms_its_batches(
    layout: str, protocol: type[ProtocolClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    directory = write_identity(tmp_path / "models", "picky", more="dynamic_batching { }")
    file = {
        "version": directory / "1" / "batchstrategy.py",
        "model": directory / "batchstrategy.py",
        "parameter": tmp_path / "elsewhere.py",
    }[place]
    file.write_text(STRATEGY)
    if place == "parameter":
        parameter = f'parameters {{ key: "TRITON_BATCH_STRATEGY_PATH" value {{ string_value: "{file}" }} }}'
        (directory / "config.pbtxt").write_text((directory / "config.pbtxt").read_text() + parameter)
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "4")

    def send(number: float) -> float:
        with protocol(running) as client:
            return float(client.infer("picky", {"INPUT0": np.full((1, 1), number, np.float32)})["OUTPUT0"].item())

    with running_server(tmp_path / "models", allow_model_backends=True) as running:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(send, (1, 2, -3, -4))) == [1, 2, -3, -4]
        with protocol(running) as client:
            (row,) = client.statistics("picky")
            assert 2 <= int(row["execution_count"]) <= 4
            assert all(int(stat["batch_size"]) <= 2 for stat in row["batch_stats"])


def test_code_that_nobody_vouched_for_does_not_run(layout: str, tmp_path: Path) -> None:
    directory = write_identity(tmp_path, "picky", more="dynamic_batching { }")
    (directory / "batchstrategy.py").write_text("raise SystemExit('I ran')")
    with running_server(tmp_path) as running, HttpClient(running) as client:
        (row,) = client.index()
        assert row["state"] == "UNAVAILABLE"
        assert "--allow-model-backends" in row["reason"]
        with pytest.raises(ClientError) as caught:
            client.infer("picky", {"INPUT0": np.zeros((1, 1), np.float32)})
        assert caught.value.code in (ErrorCode.UNAVAILABLE, ErrorCode.NOT_FOUND, ErrorCode.INVALID_ARGUMENT)
