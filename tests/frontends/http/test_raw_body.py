from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.decoder import decode_raw
from modelserver.planes.data import ModelMetadata, TensorMetadata


def _metadata(*tensors: tuple[str, tuple[int, ...]]) -> ModelMetadata:
    inputs = tuple(TensorMetadata(f"IN{index}", datatype, shape) for index, (datatype, shape) in enumerate(tensors))
    return ModelMetadata("m", ("1",), "echo", inputs, ())


@pytest.mark.parametrize(
    ("datatype", "shape", "is_batched", "body", "expected"),
    [
        ("FP32", (2,), False, np.array([1, 2], "<f4"), [1, 2]),
        ("FP32", (-1,), False, np.array([1, 2, 3], "<f4"), [1, 2, 3]),
        ("INT8", (-1, 2), True, np.array([1, 2], "i1"), [[1, 2]]),
        ("INT16", (-1, 2, -1), True, np.arange(6, dtype="<i2"), [[[0, 1, 2], [3, 4, 5]]]),
        ("FP16", (-1,), False, np.array([0.5], "<f2"), [0.5]),
        ("FP32", (-1,), False, np.array([], "<f4"), []),
        ("BOOL", (1,), False, np.array([True]), [True]),
    ],
)
def test_the_body_is_the_input(
    datatype: str, shape: tuple[int, ...], is_batched: bool, body: Any, expected: Any
) -> None:
    request = decode_raw(_metadata((datatype, shape)), 4, body.tobytes(), is_batched=is_batched)
    assert (request.model_name, request.version, list(request.inputs)) == ("m", 4, ["IN0"])
    tensor = request.inputs["IN0"]
    assert tensor.datatype.value == datatype
    assert tensor.data.tolist() == expected
    assert tensor.data.flags.aligned


@pytest.mark.parametrize(("shape", "is_batched"), [((1,), False), ((1, 1), False), ((-1, 1), True)])
def test_a_string_is_one_element(shape: tuple[int, ...], is_batched: bool) -> None:
    request = decode_raw(_metadata(("BYTES", shape)), None, b"any \xff bytes", is_batched=is_batched)
    assert request.inputs["IN0"].data.shape == (1,) * len(shape)
    assert request.inputs["IN0"].data.item() == b"any \xff bytes"


@pytest.mark.parametrize(
    ("tensors", "body", "message"),
    [
        ((), b"", "must only have 1 input .* to be deduced but got 0 inputs in 'm' model"),
        ((("FP32", (1,)), ("FP32", (1,))), b"1234", "but got 2 inputs"),
        ((("FP32", (2,)),), b"1234", "4 bytes do not fit"),
        ((("FP32", (-1,)),), b"12345", "5 bytes do not fit"),
        ((("FP32", (-1, 0)),), b"1234", "do not fit"),
        ((("FP32", (-1, -1)),), b"1234", "can not be deduced because there are more than one variable-sized"),
        ((("BYTES", (2,)),), b"1234", "For BYTE datatype raw input"),
        ((("BYTES", (-1,)),), b"1234", r"^For BYTE datatype raw input 'IN0', the model must have input shape \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused(tensors: Any, body: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        decode_raw(_metadata(*tensors), None, body, is_batched=False)
