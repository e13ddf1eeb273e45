from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.twins import TWINS, using

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.json_tensor import tensor_from_json, tensor_to_json

INTEGERS = [datatype for datatype in Datatype if datatype.numpy.kind in "iu" and datatype is not Datatype.BF16]


def _decode(datatype: Datatype, shape: tuple[int, ...], text: str | bytes) -> Tensor:
    raw = msgspec.Raw(text if isinstance(text, bytes) else text.encode())
    return tensor_from_json("x", datatype, shape, int(np.prod(shape)), raw)


def _encode(datatype: Datatype, data: Any) -> bytes:
    array = data if isinstance(data, np.ndarray) else np.array(data, datatype.numpy)
    return tensor_to_json(Tensor("y", datatype, array))


@pytest.fixture(scope="module", autouse=True, params=TWINS)
def twin(request: pytest.FixtureRequest) -> Iterator[None]:
    """Numbers are read in C and in Python."""
    with using(request.param):
        yield


@pytest.mark.parametrize(
    ("datatype", "shape", "text", "expected"),
    [
        (Datatype.FP32, (4,), "[1, 2.5, -3e2, 0]", [1, 2.5, -300, 0]),
        (Datatype.FP32, (2, 2), "[1, 2, 3, 4]", [[1, 2], [3, 4]]),
        (Datatype.FP64, (2, 2), "[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
        # Deeper than the shape, as Triton takes it.
        (Datatype.FP32, (4,), "[[1, 2], [3, 4]]", [1, 2, 3, 4]),
        (Datatype.BYTES, (1, 2), '[[["a"], ["b"]]]', [[b"a", b"b"]]),
        (Datatype.INT8, (1, 2, 1), " [ [\n[-128],[127]]]", [[[-128], [127]]]),
        (Datatype.UINT64, (2,), "[0, 18446744073709551615]", [0, 2**64 - 1]),
        (Datatype.BOOL, (2,), "[true, false]", [True, False]),
        (Datatype.BYTES, (3,), '["a", "", "é\\u0000"]', [b"a", b"", "é\0".encode()]),
        (Datatype.BYTES, (2, 1), '[["a"], ["[b]"]]', [[b"a"], [b"[b]"]]),
        (Datatype.FP32, (), "[7]", 7),
        (Datatype.FP32, (0,), "[]", []),
        (Datatype.FP32, (0, 3), "[]", np.empty((0, 3))),
        (Datatype.INT32, (2, 0), "[[], []]", np.empty((2, 0))),
        (Datatype.BYTES, (0,), "[]", []),
        (Datatype.FP32, (3,), "[[1], [2, 3], []]", [1, 2, 3]),
        (Datatype.FP32, (3,), "[[], [], [1, [2], 3]]", [1, 2, 3]),
        (Datatype.FP32, (3,), "[[1, NaN], 3]", [1, np.nan, 3]),
        (Datatype.FP32, (2, 3), "[1, 2, [3, 4, 5, 6]]", [[1, 2, 3], [4, 5, 6]]),
        (Datatype.INT64, (2, 2), "[[1, 2, 3, 4]]", [[1, 2], [3, 4]]),
        (Datatype.UINT64, (2,), f"[[{2**64 - 1}], 1]", [2**64 - 1, 1]),
        (Datatype.INT32, (2, 2, 1), "[[1, 2], [3, 4]]", [[[1], [2]], [[3], [4]]]),
        (Datatype.BOOL, (2, 1), "[[true], false]", [[True], [False]]),
        (Datatype.BYTES, (2, 2), '[["a", "b"], ["c"], "d"]', [[b"a", b"b"], [b"c", b"d"]]),
        (Datatype.BYTES, (3,), '[["a"], ["b", "c"], []]', [b"a", b"b", b"c"]),
    ],
)
def test_decodes_flat_and_nested_data(datatype: Datatype, shape: tuple[int, ...], text: str, expected: Any) -> None:
    tensor = _decode(datatype, shape, text)
    assert tensor.shape == shape
    assert tensor.data.dtype == datatype.numpy
    equal_nan = datatype is Datatype.FP32
    assert np.array_equal(tensor.data, np.array(expected, datatype.numpy), equal_nan=equal_nan)


_TOO_FEW = "^Failed to parse 'data' field: shape does not match true shape: input 'x': expected 4 elements"
_TOO_MANY = "^Unable to parse 'data': Shape does not match true shape of 'data' field: input 'x': expected 4 elements"


@pytest.mark.parametrize(
    ("datatype", "shape", "text", "message"),
    [
        (Datatype.FP32, (2, 2), "[1, 2, 3]", rf"{_TOO_FEW} for shape \[2, 2\], got 3$"),
        (Datatype.FP32, (2, 2), "[1, 2, 3, 4, 5]", rf"{_TOO_MANY} for shape \[2, 2\], got 5$"),
        (Datatype.FP32, (2, 2), "[[1, 2], [3]]", rf"{_TOO_FEW} for shape \[2, 2\], got 3$"),
        (Datatype.FP32, (4,), "[[1, 2], [3, 4], [5, 6]]", rf"{_TOO_MANY} for shape \[4\], got 6$"),
        (Datatype.FP32, (4,), "[[], []]", rf"{_TOO_FEW} for shape \[4\], got 0$"),
        (
            Datatype.BYTES,
            (2, 2),
            '[["a", "b"], ["c"]]',
            "^expected 4 string elements for inference input 'x' for the model, got 3",
        ),
        (
            Datatype.BYTES,
            (1,),
            '["a", "b", "c"]',
            "^unexpected number of string elements 2 for inference input 'x' for the model, expecting 1",
        ),
        (Datatype.FP32, (1,), '["1"]', "^Unable to parse 'data': attempt to access JSON non-number as double"),
        (Datatype.INT8, (1,), '["1"]', "access JSON non-signed-integer as signed-integer"),
        (Datatype.UINT8, (1,), '["1"]', "access JSON non-unsigned-integer as unsigned-integer"),
        (Datatype.BOOL, (1,), "[1]", "access JSON non-boolean as boolean"),
        (Datatype.BYTES, (1,), "[1]", "^Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (Datatype.FP32, (1,), "1.5", "attempt to access JSON non-array as array"),
        (Datatype.FP16, (1,), "[1]", "^receiving FP16 data via JSON is not supported.*binary data format for input x"),
        (Datatype.FP32, (2, 1), "[[1], {}]", r"got `object`"),
        (Datatype.FP32, (1,), '["1"]', "Expected `float`, got `str`"),
        (Datatype.FP32, (1,), "[true]", "got `bool`"),
        (Datatype.FP32, (1,), "[null]", "got `null`"),
        (Datatype.FP32, (1,), "[1e39]", "out of range"),
        (Datatype.FP64, (1,), "[1e999]", "out of range"),
        (Datatype.FP32, (1,), '{"a": 1}', "non-array as array"),
        (Datatype.INT32, (1,), "[1.5]", "Expected `int`"),
        (Datatype.INT32, (1,), "[true]", "Expected `int`"),
        (Datatype.INT64, (1,), "[1" + "0" * 5000 + "]", "out of range"),
        (Datatype.BOOL, (1,), "[1]", "Expected `bool`"),
        (Datatype.BYTES, (1,), "[1]", "Expected `str`"),
        (Datatype.BYTES, (1,), b'["\xff"]', "utf-8"),
        (Datatype.BYTES, (1,), '["\\ud800"]', "x"),
        (Datatype.FP16, (1,), "[1]", "binary_data_size"),
        (Datatype.BF16, (1,), "[1]", "binary_data_size"),
    ],
)
def test_wrong_data_is_refused_by_name(
    datatype: Datatype, shape: tuple[int, ...], text: str | bytes, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        _decode(datatype, shape, text)
    assert "'x'" in caught.value.message or "input x" in caught.value.message


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_are_checked_against_their_range(datatype: Datatype) -> None:
    info = np.iinfo(datatype.numpy)
    tensor = _decode(datatype, (2,), f"[{info.min}, {info.max}]")
    assert tensor.data.tolist() == [info.min, info.max]
    for value in (int(info.min) - 1, int(info.max) + 1):
        with pytest.raises(InvalidArgumentError, match=f"'x'.*{datatype.value}"):
            _decode(datatype, (1,), f"[{value}]")


def test_data_that_was_parsed_already_is_checked_alike() -> None:
    tensor = tensor_from_json("x", Datatype.FP32, (1, 2), 2, [[float("nan"), 1]])
    assert np.array_equal(tensor.data, np.array([[np.nan, 1]], np.float32), equal_nan=True)
    for data in ([["a", 1]], [[1], [2], 3], [[[1, 2, 3]]], 5, [[1, {}]]):
        with pytest.raises(InvalidArgumentError, match="'x'"):
            tensor_from_json("x", Datatype.FP32, (1, 2), 2, data)


@pytest.mark.parametrize(
    ("datatype", "data", "text"),
    [
        (Datatype.FP32, [[0.1, 2], [1e-7, -0.0]], b"[0.1,2.0,1e-7,-0.0]"),
        (Datatype.FP64, [0.1], b"[0.1]"),
        (Datatype.FP32, [np.nan, np.inf, -np.inf, 1], b"[NaN,Infinity,-Infinity,1.0]"),
        (Datatype.UINT64, [2**64 - 1], b"[18446744073709551615]"),
        (Datatype.INT8, [[-128]], b"[-128]"),
        (Datatype.BOOL, [True, False], b"[true,false]"),
        (Datatype.BYTES, [[b"a", "é".encode()]], '["a","é"]'.encode()),
        (Datatype.BYTES, ["text"], b'["text"]'),
        (Datatype.FP32, [], b"[]"),
        (Datatype.FP32, np.float32(3), b"[3.0]"),
        (Datatype.INT32, np.arange(4, dtype=np.int32).reshape(2, 2).T, b"[0,2,1,3]"),
    ],
)
def test_outputs_are_flat(datatype: Datatype, data: Any, text: bytes) -> None:
    array = np.asarray(data, datatype.numpy)
    assert _encode(datatype, array) == text
    assert json.loads(text) is not None


@pytest.mark.parametrize(
    ("datatype", "data"),
    [(Datatype.FP16, [1.0]), (Datatype.BF16, [1]), (Datatype.BYTES, [b"ok", b"\xff\xfe"])],
)
def test_outputs_without_json_form_say_to_ask_for_binary(datatype: Datatype, data: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'y'.*'binary_data': true"):
        _encode(datatype, data)


@given(
    st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([3.4028235677973362e38, 3.4028235677973366e38])
)
def test_short_and_long_lists_round_alike(value: float) -> None:
    """Short lists of FP32 are converted in another way than long ones."""
    outcomes = []
    for count in (1, 2000):
        try:
            outcomes.append(_decode(Datatype.FP32, (count,), json.dumps([value] * count)).data[0].tobytes())
        except InvalidArgumentError as error:
            outcomes.append(error.message.encode())
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("shape", [(40000,), (1, 40000), (40000, 1), (3, 5, 4000), (2, 20000, 1), (20000, 0, 2)])
@pytest.mark.parametrize("datatype", [Datatype.INT32, Datatype.FP32, Datatype.BYTES])
@pytest.mark.parametrize("is_nested", [False, True])
def test_outputs_of_many_elements_are_written_as_short_ones_are(
    datatype: Datatype, shape: tuple[int, ...], is_nested: bool
) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    data = numbers.astype(datatype.numpy) if datatype is not Datatype.BYTES else numbers.astype(str).astype(object)
    text = tensor_to_json(Tensor("OUTPUT", datatype, data), is_nested=is_nested)
    assert json.loads(text) == (data.tolist() if is_nested else data.ravel().tolist())


def test_an_element_of_many_that_has_no_json_form_is_named() -> None:
    data = np.full((2, 30000), b"text", object)
    data[1, 7] = b"\xff"
    for is_nested in (False, True):
        with pytest.raises(InvalidArgumentError, match="element 30007 is not valid UTF-8"):
            tensor_to_json(Tensor("OUTPUT", Datatype.BYTES, data), is_nested=is_nested)
