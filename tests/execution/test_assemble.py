from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.batching import batching_config, tensor

from modelserver.config.schema import ModelConfig, ModelInput, ModelOutput, ModelTensorReshape
from modelserver.config.signature import ModelSignature
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import InternalError, InvalidArgumentError
from modelserver.execution.assemble import Assembler

FP32, BYTES = Datatype.FP32, Datatype.BYTES


def assembler(config: ModelConfig | None = None, **fields: Any) -> Assembler:
    return Assembler(ModelSignature(config or batching_config(**fields)))


def sent(outputs: tuple[str, ...] | None = None, **inputs: Any) -> InFlightRequest:
    tensors = {name: tensor(name, data) for name, data in inputs.items()}
    rows = next(iter(tensors.values())).data.shape[0]
    return InFlightRequest(model_name="m", version=None, inputs=tensors, rows=rows, outputs=outputs)


def f32(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def test_gather_passes_a_lone_request_as_it_is() -> None:
    request = sent(IN=f32([1, 2]))
    assert assembler().gather([request])["IN"] is request.inputs["IN"].data


@pytest.mark.parametrize("dtype", [np.float32, np.int8, bool, object])
def test_gather_joins_rows_in_order(dtype: Any) -> None:
    arrays = [np.array([[0], [1]]).astype(dtype), np.array([[2]]).astype(dtype)]
    joined = assembler().gather([sent(IN=array) for array in arrays])["IN"]
    assert joined.dtype == dtype
    np.testing.assert_array_equal(joined, np.concatenate(arrays))


def test_gather_leaves_out_what_the_requests_leave_out() -> None:
    config = batching_config(
        input=(ModelInput("A", FP32, dims=(1,)), ModelInput("B", FP32, dims=(1,), optional=True, reshape=_reshape())),
    )
    assert assembler(config).gather([sent(A=f32([1])), sent(A=f32([2]))]).keys() == {"A"}


def test_scatter_gives_each_request_a_view_of_its_rows() -> None:
    batch = f32([1], [2], [3], [4])
    requests = [sent(IN=f32([0], [0])), sent(IN=f32([0])), sent(IN=f32([0]))]
    responses = assembler().scatter(requests, {"OUT": batch})
    assert [response.outputs[0].data.tolist() for response in responses] == [[[1], [2]], [[3]], [[4]]]
    assert all(np.shares_memory(response.outputs[0].data, batch) for response in responses)


TWO_OUTPUTS = {"output": (ModelOutput("X", FP32, dims=(-1,)), ModelOutput("Y", BYTES, dims=(-1,)))}


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, ["X", "Y"]), (("Y",), ["Y"]), (("Y", "X"), ["Y", "X"]), (("X",), ["X"])]
)
def test_outputs_are_those_asked_for_in_that_order(asked: Any, expected: list[str]) -> None:
    outputs = {"Y": np.array([[b"y"]], object), "X": f32([1]), "extra": f32([1])}
    whole = assembler(**TWO_OUTPUTS)
    [scattered] = whole.scatter([sent(asked, IN=f32([1]))], outputs)
    assert [output.name for output in scattered.outputs] == expected
    entry = InferResponse([tensor("X", f32([1])), tensor("Y", np.array([[b"y"]], object))])
    [collected] = whole.collect([sent(asked, IN=f32([1]))], [entry])
    assert [output.name for output in collected.outputs] == expected


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (None, "is missing"),
        ([[1.0], [2.0]], "is a list"),
        (np.zeros((2, 1)), "has dtype float64, expected float32 for FP32"),
        (f32([1]), "has shape [1, 1], expected 2 rows"),
        (np.zeros((), np.float32), "has shape []"),
    ],
)
def test_a_wrong_output_fails_only_those_who_asked_for_it(output: Any, problem: str) -> None:
    outputs = {"X": f32([1], [2])} | ({} if output is None else {"W": output})
    config = batching_config(output=(ModelOutput("X", FP32, dims=(1,)), ModelOutput("W", FP32, dims=(1,))))
    requests = [sent(("X",), IN=f32([1])), sent(("W",), IN=f32([1]))]
    good, bad = assembler(config).scatter(requests, outputs)
    assert good.error is None
    assert isinstance(bad.error, InternalError)
    assert "output 'W'" in bad.error.message
    assert problem in bad.error.message


@pytest.mark.parametrize(
    ("shape", "is_right"), [((1, 5, 4), True), ((1, 0, 4), True), ((1, 5, 3), False), ((1, 4), False)]
)
def test_variable_dims_take_any_size_and_no_other_rank(
    shape: tuple[int, ...], is_right: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = batching_config(output=(ModelOutput("OUT", FP32, dims=(-1, 4)),))
    [response] = assembler(config).scatter([sent(IN=f32([1]))], {"OUT": np.zeros(shape, np.float32)})
    assert response.error is None
    assert (not caplog.records) is is_right


def test_without_batching_the_dims_are_the_whole_shape(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(batching_config(output=(ModelOutput("OUT", FP32, dims=(2,)),)), max_batch_size=0)
    assembler(config).scatter([sent(IN=f32([1]))], {"OUT": np.zeros(2, np.float32)})
    assert not caplog.records
    assembler(config).scatter([sent(IN=f32([1]))], {"OUT": np.zeros((1, 2), np.float32)})
    assert "items of shape [1, 2] and dims [2]" in caplog.text


def test_run_must_return_a_mapping() -> None:
    with pytest.raises(InternalError, match="run\\(\\) returned list, expected a mapping"):
        assembler().scatter([sent(IN=f32([1]))], [f32([1])])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["S3", "U3"])
def test_fixed_width_strings_become_bytes_elements(dtype: str) -> None:
    config = batching_config(output=(ModelOutput("OUT", BYTES, dims=(1,)),))
    [response] = assembler(config).scatter([sent(IN=f32([1]))], {"OUT": np.array([["abc"]], dtype)})
    assert response.outputs[0].data.dtype == object


def _reshape(*shape: int) -> ModelTensorReshape:
    return ModelTensorReshape(shape)


@pytest.mark.parametrize(
    ("dims", "reshape", "client_shape", "model_shape"),
    [
        ((1,), (), (2, 1), (2,)),
        ((4,), (2, 2), (3, 4), (3, 2, 2)),
        ((-1, 2, -1), (2, -1, 1, -1), (1, 3, 2, 5), (1, 2, 3, 1, 5)),
    ],
)
def test_reshape_both_ways(dims: Any, reshape: Any, client_shape: Any, model_shape: Any) -> None:
    config = batching_config(
        input=(ModelInput("IN", FP32, dims=dims, reshape=_reshape(*reshape)),),
        output=(ModelOutput("OUT", FP32, dims=dims, reshape=_reshape(*reshape)),),
    )
    data = np.arange(np.prod(client_shape), dtype=np.float32).reshape(client_shape)
    whole = assembler(config)
    request = sent(IN=data)
    gathered = whole.gather([request])["IN"]
    assert gathered.shape == model_shape
    [response] = whole.scatter([request], {"OUT": gathered})
    np.testing.assert_array_equal(response.outputs[0].data, data)

    [shaped] = whole.shape_inputs([request])
    assert shaped.inputs["IN"].data.shape == model_shape
    [collected] = whole.collect([request], [InferResponse([Tensor("OUT", FP32, shaped.inputs["IN"].data)])])
    np.testing.assert_array_equal(collected.outputs[0].data, data)


def test_reshape_without_batching() -> None:
    config = batching_config(0, input=(ModelInput("IN", FP32, dims=(4,), reshape=_reshape(2, 2)),))
    request = InFlightRequest(model_name="m", version=None, inputs={"IN": tensor("IN", f32(1, 2, 3, 4))})
    assert assembler(config).gather([request])["IN"].shape == (2, 2)


def test_an_output_that_cannot_be_reshaped_is_an_error() -> None:
    config = batching_config(output=(ModelOutput("OUT", FP32, dims=(4,), reshape=_reshape(2, 2)),))
    [response] = assembler(config).scatter([sent(IN=f32([1]))], {"OUT": f32([1, 2, 3])})
    assert isinstance(response.error, InternalError)
    assert "cannot be reshaped to dims [4]" in response.error.message


@pytest.mark.parametrize("entries", [None, [], [InferResponse()] * 3, {"OUT": 1}, 5])
def test_execute_must_return_one_entry_for_each_request(entries: Any) -> None:
    with pytest.raises(InternalError, match="expected a list of 2 responses"):
        assembler().collect([sent(IN=f32([1])), sent(IN=f32([2]))], entries)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (InvalidArgumentError("no"), "no"),
        (InferResponse(error=InvalidArgumentError("no")), "no"),
        (None, "NoneType"),
        (InferResponse(is_final=False), "not final"),
        (InferResponse([tensor("OTHER", f32([1]))]), "unexpected output 'OTHER'"),
        (InferResponse([Tensor("OUT", FP32, np.zeros((1, 1)))]), "has dtype float64"),
        (InferResponse([Tensor("OUT", Datatype.INT32, np.zeros((1, 1)))]), "expected int32 for INT32"),
        (InferResponse([]), "output 'OUT' was asked for and is missing"),
    ],
)
def test_a_wrong_entry_fails_its_request_alone(entry: Any, problem: str) -> None:
    requests = [sent(("OUT",), IN=f32([value])) for value in range(3)]
    good = [InferResponse([tensor("OUT", f32([value]))]) for value in range(2)]
    responses = assembler().collect(requests, [good[0], entry, good[1]])
    assert [response.error is None for response in responses] == [True, False, True]
    assert problem in responses[1].error.message


def test_another_datatype_than_the_configs_is_sent_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    whole = assembler()
    for _ in range(2):
        sends = InferResponse([tensor("OUT", np.zeros((1, 1), np.int32))])
        [response] = whole.collect([sent(("OUT",), IN=f32([1]))], [sends])
        assert (response.error, response.outputs[0].datatype) == (None, Datatype.INT32)
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': output 'OUT' is TYPE_INT32 and its config says TYPE_FP32; it is sent as it is"
    ]


def test_a_batch_instance_may_leave_out_outputs_that_nobody_named() -> None:
    [response] = assembler().collect([sent(IN=f32([1]))], [InferResponse()])
    assert response.error is None


def test_dims_that_are_not_the_configs_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    whole = assembler(batching_config(dims=(1,)))
    for _ in range(3):
        [response] = whole.scatter([sent(IN=f32([1]))], {"OUT": np.zeros((1, 3), np.float32)})
        assert response.outputs[0].shape == (1, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': output 'OUT' has items of shape [3] and dims [1] in its config; clients are told the latter"
    ]
