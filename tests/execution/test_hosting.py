from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from modelserver.backend import BackendContext, Placement
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.core.datatype import Datatype
from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.execution.hosting import backend_recipe, without_reshapes
from modelserver.execution.process import ProcessInstance

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
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    context = BackendContext("m", 1, parse_pbtxt(CONFIG, "config.pbtxt").config, tmp_path, tmp_path)
    instance = ProcessInstance("m_0", backend_recipe(backend, context, Placement("m_0")))
    try:
        rows = [np.full((count, 2), count, np.float32) for count in (1, 3)]
        requests = [InferRequest("m", 1, {"IN": Tensor("IN", Datatype.FP32, data)}, rows=len(data)) for data in rows]
        for data, entry in zip(rows, instance.execute(requests), strict=True):
            assert isinstance(entry, InferResponse)
            np.testing.assert_array_equal(entry.outputs[0].data, data * factor)
        assert instance.is_ready()
    finally:
        instance.close()


def test_the_child_does_not_reshape_again() -> None:
    config = parse_pbtxt('input { name: "IN" data_type: TYPE_FP32 dims: 4 reshape { shape: [2, 2] } }', "c").config
    (spec,) = without_reshapes(config).input
    assert (spec.dims, spec.reshape) == ((2, 2), None)
