from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserver.core.datatype import Datatype
from modelserver.core.long_work import finish
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.grpc.contents import tensor_from_contents, tensor_slices
from modelserver.pb import grpc_service_pb2 as pb

FIELDS = {
    Datatype.BOOL: ("bool_contents", st.booleans()),
    Datatype.INT8: ("int_contents", st.integers(-128, 127)),
    Datatype.INT16: ("int_contents", st.integers(-(1 << 15), (1 << 15) - 1)),
    Datatype.INT32: ("int_contents", st.integers(-(1 << 31), (1 << 31) - 1)),
    Datatype.INT64: ("int64_contents", st.integers(-(1 << 63), (1 << 63) - 1)),
    Datatype.UINT8: ("uint_contents", st.integers(0, 255)),
    Datatype.UINT16: ("uint_contents", st.integers(0, (1 << 16) - 1)),
    Datatype.UINT32: ("uint_contents", st.integers(0, (1 << 32) - 1)),
    Datatype.UINT64: ("uint64_contents", st.integers(0, (1 << 64) - 1)),
    Datatype.FP32: ("fp32_contents", st.floats(width=32)),
    Datatype.FP64: ("fp64_contents", st.floats()),
    Datatype.BYTES: ("bytes_contents", st.binary(max_size=20)),
}


@pytest.mark.parametrize("datatype", FIELDS)
@given(data=st.data())
def test_elements_arrive_unchanged(datatype: Datatype, data: st.DataObject) -> None:
    field, element = FIELDS[datatype]
    elements = data.draw(st.lists(element, max_size=12).filter(lambda drawn: len(drawn) % 2 == 0))
    shape = (2, len(elements) // 2)
    tensor = tensor_from_contents("x", datatype, shape, pb.InferTensorContents(**{field: elements}))
    assert (tensor.name, tensor.datatype, tensor.shape, tensor.data.dtype) == ("x", datatype, shape, datatype.numpy)
    np.testing.assert_array_equal(tensor.data.ravel(), np.array(elements, dtype=datatype.numpy))


@pytest.mark.parametrize("datatype", [Datatype.FP16, Datatype.BF16])
def test_half_precision_travels_raw_only(datatype: Datatype) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'x': {datatype.value} .* raw_input_contents"):
        tensor_from_contents("x", datatype, (1,), pb.InferTensorContents(fp32_contents=[1]))


@pytest.mark.parametrize("datatype", FIELDS)
def test_wrong_field_is_refused_by_name(datatype: Datatype) -> None:
    field, _ = FIELDS[datatype]
    wrong = "fp64_contents" if datatype is not Datatype.FP64 else "fp32_contents"
    with pytest.raises(
        InvalidArgumentError, match=f"'x' .* expected datatype '{datatype.value}': it belongs in {field}, got {wrong}"
    ):
        tensor_from_contents("x", datatype, (1,), pb.InferTensorContents(**{wrong: [1.0]}))


def test_two_fields_are_refused() -> None:
    contents = pb.InferTensorContents(fp32_contents=[1], int_contents=[1])
    with pytest.raises(InvalidArgumentError, match="belongs in fp32_contents, got int_contents and fp32_contents"):
        tensor_from_contents("x", Datatype.FP32, (1,), contents)


@pytest.mark.parametrize("count", [0, 5, 7])
def test_wrong_number_of_elements_is_refused(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"'x' .* Expected 24, got {4 * count}: expected 6 elements"):
        tensor_from_contents("x", Datatype.FP32, (2, 3), pb.InferTensorContents(fp32_contents=[0] * count))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"bytes_contents": [b"a"] * 2}, "^expected 3 string elements for inference input 'x' for the model, got 2"),
        (
            {"bytes_contents": [b"a"] * 5},
            "^unexpected number of string elements 4 for inference input 'x' for the model, expecting 3",
        ),
        (
            {"int_contents": [1]},
            "^unexpected explicit tensor data for input tensor 'x' for the model of type 'INT32', expected datatype "
            "'BYTES'",
        ),
    ],
)
@pytest.mark.parametrize("is_long", [False, True])
def test_refusals_begin_with_tritons_sentences(contents: Any, message: str, is_long: bool) -> None:
    made = pb.InferTensorContents(**contents)
    views = [memoryview(made.SerializeToString())]

    def decode() -> Tensor:
        if is_long:
            return finish(tensor_slices("x", Datatype.BYTES, (3,), views))
        return tensor_from_contents("x", Datatype.BYTES, (3,), made)

    with pytest.raises(InvalidArgumentError, match=message):
        decode()


def test_a_shape_that_its_contents_cannot_fill_allocates_nothing() -> None:
    views = [memoryview(pb.InferTensorContents(fp32_contents=[1, 2]).SerializeToString())]
    with pytest.raises(InvalidArgumentError, match=f"Expected {4 << 50}, got 8"):
        finish(tensor_slices("x", Datatype.FP32, (1 << 50,), views))


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        (Datatype.INT8, 128),
        (Datatype.INT8, -129),
        (Datatype.INT16, 1 << 15),
        (Datatype.INT16, -(1 << 15) - 1),
        (Datatype.UINT8, 256),
        (Datatype.UINT16, 1 << 16),
    ],
)
def test_element_out_of_range_is_named(datatype: Datatype, value: int) -> None:
    contents: Any = pb.InferTensorContents(**{FIELDS[datatype][0]: [1, value]})
    with pytest.raises(InvalidArgumentError, match=f"'x': element 1 is {value}, outside the range of {datatype.value}"):
        tensor_from_contents("x", datatype, (2,), contents)
