from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.batching import batching_config, tensor

from modelserver.config.schema import BatchInput, BatchInputKind, BatchOutput, ModelConfig, ModelInput, ModelOutput
from modelserver.config.signature import ModelSignature
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.execution.assemble import Assembler
from modelserver.execution.batch_tensors import BatchTensors

RAGGED = ModelInput("IN", Datatype.FP32, dims=(-1,), allow_ragged_batch=True)


def config_of(kind: BatchInputKind | None = None, datatype: Datatype = Datatype.INT32, **fields: Any) -> ModelConfig:
    batch_input = (BatchInput(kind, ("TOLD",), datatype, ("IN",)),) if kind is not None else ()
    return batching_config(input=fields.pop("input", (RAGGED,)), batch_input=batch_input, **fields)


def assembler_of(config: ModelConfig) -> Assembler:
    return Assembler(ModelSignature(config), batch_tensors=BatchTensors(config))


def sent(*shape: int, outputs: tuple[str, ...] | None = None) -> InFlightRequest:
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return InFlightRequest(
        model_name="m", version=None, inputs={"IN": tensor("IN", data)}, rows=shape[0], outputs=outputs
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (BatchInputKind.BATCH_ELEMENT_COUNT, [3, 4, 5]),
        (BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT, [3, 7, 12]),
        (BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, [0, 3, 7, 12]),
        (BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, [0, 0, 0, 0, 0]),
        (BatchInputKind.BATCH_ITEM_SHAPE, [[3], [4], [5]]),
        (BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN, [3, 4, 5]),
    ],
)
@pytest.mark.parametrize("datatype", [Datatype.INT32, Datatype.FP32])
def test_batch_inputs_tell_the_shapes(kind: BatchInputKind, expected: list[Any], datatype: Datatype) -> None:
    inputs = assembler_of(config_of(kind, datatype)).gather([sent(1, 3), sent(1, 4), sent(1, 5)])
    assert inputs["TOLD"].tolist() == expected
    assert inputs["TOLD"].dtype == datatype.numpy


def test_item_shapes_are_those_of_rows() -> None:
    matrix = ModelInput("IN", Datatype.FP32, dims=(-1, 2), allow_ragged_batch=True)
    config = config_of(BatchInputKind.BATCH_ITEM_SHAPE, input=(matrix,))
    inputs = assembler_of(config).gather([sent(2, 3, 2), sent(1, 4, 2)])
    assert inputs["TOLD"].tolist() == [[3, 2], [3, 2], [4, 2]]
    flat = config_of(BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN, input=(matrix,))
    assert assembler_of(flat).gather([sent(2, 3, 2), sent(1, 4, 2)])["TOLD"].tolist() == [3, 2, 3, 2, 4, 2]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_ragged_input_is_flat(num_requests: int) -> None:
    requests = [sent(1, 3), sent(2, 2)][:num_requests]
    inputs = assembler_of(config_of()).gather(requests)
    assert inputs["IN"].tolist() == [0, 1, 2, 0, 1, 2, 3][: 3 + 4 * (num_requests - 1)]


def test_other_inputs_are_joined_by_rows() -> None:
    config = config_of(input=(RAGGED, ModelInput("FIXED", Datatype.FP32, dims=(2,))))
    requests = [sent(1, 3), sent(1, 4)]
    for request in requests:
        request.inputs["FIXED"] = tensor("FIXED", np.ones((1, 2), np.float32))
    assert assembler_of(config).gather(requests)["FIXED"].shape == (2, 2)


def test_outputs_are_scattered_by_the_shape_of_an_input() -> None:
    config = config_of(
        output=(ModelOutput("OUT", Datatype.FP32, dims=(-1, 2)), ModelOutput("ROWS", Datatype.FP32, dims=(1,))),
        batch_output=(BatchOutput(("OUT",), source_input=("IN",)),),
    )
    requests = [sent(1, 3), sent(2, 2), sent(1, 1, outputs=("OUT",))]
    flat = np.arange((3 + 4 + 1) * 2, dtype=np.float32)
    rows = np.arange(4, dtype=np.float32).reshape(4, 1)
    one, two, three = assembler_of(config).scatter(requests, {"OUT": flat, "ROWS": rows})
    assert one.outputs[0].data.tolist() == [[[0, 1], [2, 3], [4, 5]]]
    assert two.outputs[0].data.tolist() == [[[6, 7], [8, 9]], [[10, 11], [12, 13]]]
    assert two.outputs[1].data.tolist() == [[1], [2]]
    assert [output.name for output in three.outputs] == ["OUT"]
    assert three.outputs[0].data.tolist() == [[[14, 15]]]


def test_an_output_that_does_not_add_up_fails_who_asked_for_it() -> None:
    config = config_of(
        output=(ModelOutput("OUT", Datatype.FP32, dims=(-1,)), ModelOutput("ROWS", Datatype.FP32, dims=(1,))),
        batch_output=(BatchOutput(("OUT",), source_input=("IN",)),),
    )
    outputs = {"OUT": np.zeros(4, np.float32), "ROWS": np.zeros((2, 1), np.float32)}
    asking, other = assembler_of(config).scatter([sent(1, 3), sent(1, 2, outputs=("ROWS",))], outputs)
    assert asking.error is not None
    assert "has 4 elements, expected 5, the sum for the shapes [[1, 3], [1, 2]]" in asking.error.message
    assert other.error is None


def test_a_shape_tensor_is_not_joined() -> None:
    shape = ModelInput("S", Datatype.FP32, dims=(2,), is_shape_tensor=True)
    plain = ModelInput("IN", Datatype.FP32, dims=(3,))
    requests = [sent(2, 3), sent(1, 3)]
    for request in requests:
        request.inputs["S"] = tensor("S", np.array([4.0, 5.0], dtype=np.float32))
    inputs = assembler_of(config_of(input=(plain, shape))).gather(requests)
    assert inputs["IN"].shape == (3, 3)
    assert inputs["S"].tolist() == [4.0, 5.0]
