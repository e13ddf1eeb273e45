from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from modelserver.backend import BackendContext, Placement
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.execution.process.hosting import backend_recipe, without_reshapes
from modelserver.execution.process.instance import ProcessInstance

CONFIG = """
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
"""


@pytest.mark.parametrize(
    ("backend", "factor"), [("modelserver_backends.identity:BACKEND", 1), ("support.hosted:DoublingBackend", 2)]
)
def test_a_backend_of_either_kind_runs_in_a_child(
    backend: str, factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent.parent))
    context = BackendContext("m", 1, parse_pbtxt(CONFIG, "config.pbtxt").config, tmp_path, tmp_path)
    instance = ProcessInstance("m_0", backend_recipe(backend, context, Placement("m_0")))
    try:
        rows = [np.full((count, 2), count, np.float32) for count in (1, 3)]
        requests = [
            InFlightRequest(model_name="m", version=1, inputs={"IN": Tensor("IN", Datatype.FP32, data)}, rows=len(data))
            for data in rows
        ]
        for data, entry in zip(rows, instance.execute(requests), strict=True):
            assert isinstance(entry, InferResponse)
            np.testing.assert_array_equal(entry.outputs[0].data, data * factor)
        assert instance.is_ready()
    finally:
        instance.close()


def test_states_and_ragged_inputs_cross_the_hop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child gathers batches by itself, and gives states back as outputs: the server keeps them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent.parent))
    config = parse_pbtxt(
        """
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_INT32 source_input: "IN" }
sequence_batching { state { input_name: "SUM" output_name: "SUM" data_type: TYPE_FP32 dims: 1 } }
""",
        "config.pbtxt",
    ).config
    context = BackendContext("m", 1, config, tmp_path, tmp_path)
    instance = ProcessInstance("m_0", backend_recipe("support.hosted:SummingBackend", context, Placement("m_0")))
    try:
        requests = [
            InFlightRequest(
                model_name="m",
                version=1,
                inputs={
                    "IN": Tensor("IN", Datatype.FP32, np.ones((1, size), np.float32)),
                    "SUM": Tensor("SUM", Datatype.FP32, np.full((1, 1), 10, np.float32)),
                },
            )
            for size in (2, 3)
        ]
        for size, entry in zip((2, 3), instance.execute(requests), strict=True):
            assert isinstance(entry, InferResponse)
            assert {tensor.name: tensor.data.tolist() for tensor in entry.outputs} == {
                "OUT": [[10 + size]],
                "SUM": [[10 + size]],
            }
    finally:
        instance.close()


def test_the_child_does_not_reshape_again() -> None:
    config = parse_pbtxt('input { name: "IN" data_type: TYPE_FP32 dims: 4 reshape { shape: [2, 2] } }', "c").config
    (spec,) = without_reshapes(config).input
    assert (spec.dims, spec.reshape) == ((2, 2), None)
