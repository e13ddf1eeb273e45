"""Inputs and shapes as words."""

import pytest

from modelserver.config.signature import TensorSpec
from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError
from modelserver.toolkit.tensor_spec import parse_shape, parse_tensor_spec


def test_inputs_are_read() -> None:
    assert parse_tensor_spec("image:FP32:3,224,-1") == TensorSpec("image", Datatype.FP32, (3, 224, -1))
    assert parse_tensor_spec("n:type_int64:") == TensorSpec("n", Datatype.INT64, ())
    assert parse_shape("a:b:1,2") == ("a:b", (1, 2))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("image", "expects NAME:DATATYPE:DIMS"),
        (":FP32:1", "expects NAME:DATATYPE:DIMS"),
        ("image:FP23:1", "unknown datatype 'FP23'.*did you mean 'FP32'"),
        ("image:FP32:0", "expected sizes such as"),
        ("image:FP32:1,x", "expected sizes such as"),
    ],
)
def test_wrong_inputs_are_explained(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        parse_tensor_spec(text)


@pytest.mark.parametrize("text", ["ids", "ids:-1", "ids:a", ":1"])
def test_wrong_shapes_are_explained(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--shape"):
        parse_shape(text)
