from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batching import tensor

from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core.datatype import Datatype
from modelserver.core.long_work import finish
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError
from modelserver.frontends.http.generate import decode_generate, encode_generate, generate_slices
from modelserver.protocol.limits import HttpLimits


def config(*dims: int, datatype: Datatype = Datatype.FP32, max_batch_size: int = 0) -> ModelConfig:
    return ModelConfig(
        name="m", backend="b", max_batch_size=max_batch_size, input=(ModelInput("IN", datatype, dims=dims),)
    )


def decode(document: object, of: ModelConfig, limits: HttpLimits | None = None) -> InFlightRequest:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_generate("m", 3, of, body, limits or HttpLimits())


@pytest.mark.parametrize(
    ("dims", "max_batch_size", "value", "shape"),
    [
        ((-1,), 0, 5, (1,)),
        ((-1,), 0, [1, 2, 3], (3,)),
        ((-1,), 0, [], (0,)),
        ((1,), 0, [5], (1,)),
        ((-1, -1), 0, [1, 2, 3], (1, 3)),
        ((2, -1), 0, [1, 2, 3, 4], (2, 2)),
        ((-1, 2), 0, [1, 2, 3, 4], (2, 2)),
        ((2, 2), 0, [1, 2, 3, 4], (2, 2)),
        ((-1, 2), 0, [[1, 2], [3, 4], [5, 6]], (3, 2)),
        ((), 0, 5, ()),
        ((-1,), 4, [1, 2, 3], (1, 3)),
        ((1,), 4, [1, 2, 3], (3, 1)),
        ((2,), 4, [1, 2, 3, 4], (2, 2)),
        ((-1,), 4, [[1, 2], [3, 4]], (2, 2)),
        ((2, -1), 4, [[1, 2], [3, 4]], (1, 2, 2)),
        ((2, -1), 4, [[[1], [2]], [[3], [4]]], (2, 2, 1)),
        ((-1,), 0, [[1], [2]], (2,)),
        ((2, 2), 0, [[[1, 2], [3, 4]]], (2, 2)),
        ((2, 2), 0, [[1, 2, 3, 4]], (2, 2)),
        ((2, 2), 4, [[1, 2], [3, 4]], (1, 2, 2)),
    ],
)
def test_shapes(dims: tuple[int, ...], max_batch_size: int, value: object, shape: tuple[int, ...]) -> None:
    request = decode({"IN": value}, config(*dims, max_batch_size=max_batch_size))
    assert request.inputs["IN"].data.shape == shape
    assert request.inputs["IN"].data.ravel().tolist() == np.ravel(np.array(value)).tolist()


@pytest.mark.parametrize(
    ("dims", "value"),
    [((2,), [1, 2, 3]), ((2, -1), [1, 2, 3]), ((), [1, 2]), ((2,), [[1], [2, 3]]), ((2, 2), [[1, 2], [3]])],
)
def test_what_fits_no_shape(dims: tuple[int, ...], value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="can not convert input 'IN' to tensor with proper shape"):
        decode({"IN": value}, config(*dims))


@pytest.mark.parametrize(
    ("dims", "value", "shape"),
    [
        ((-1,), [[1], 2], (2,)),
        ((-1,), [1, [2, [3]]], (3,)),
        ((-1,), [[], [1], [2, 3]], (3,)),
        ((-1, -1), [[1, 2], [3]], (1, 3)),
        ((2, 2), [[1, 2, 3], 4], (2, 2)),
    ],
)
def test_uneven_lists_are_read_in_order(dims: tuple[int, ...], value: object, shape: tuple[int, ...]) -> None:
    data = decode({"IN": value}, config(*dims)).inputs["IN"].data
    assert (data.shape, data.ravel().tolist()) == (shape, list(range(1, data.size + 1)))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"id": "r", "IN": ["a"]}, "^Unable to parse 'data': attempt to access JSON non-number as double"),
        ({"id": "r", "IN": 1, "k": []}, "^parameter 'k' has invalid type. It should be either 'int', 'bool', or"),
        ({"id": "r", "IN": 1, "parameters": 1}, "^Expected JSON object for keyword: 'parameters': attempt to access"),
        (b'{"id": "r", "IN": 1, "IN": 2}', "^input 'IN' already exists in request"),
    ],
)
@pytest.mark.parametrize(
    "decode_by",
    [
        lambda body: decode(body, config(-1)),
        lambda body: finish(generate_slices("m", 3, config(-1), body, HttpLimits())),
    ],
    ids=["short", "long"],
)
def test_an_error_names_model_and_request(
    document: object, message: str, decode_by: Callable[[bytes], InFlightRequest]
) -> None:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(InvalidArgumentError, match=rf"{message}.* \(model 'm', request id 'r'\)$"):
        decode_by(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"id": 7}', "^Unable to parse 'id': attempt to access JSON non-string as string"),
        (b"[]", "^attempt to get members for non-object"),
        (b'{"IN": [1', "^failed to parse the request JSON buffer"),
    ],
)
def test_an_error_without_an_id_names_the_model(body: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{message}.* \(model 'm'\)$"):
        decode(body, config(-1))


def test_names_ids_and_parameters() -> None:
    document = {"IN": 1, "id": "x", "timeout": 7, "k": 1.5, "parameters": {"priority": 2, "flag": True}}
    request = decode(document, config(-1))
    assert (request.model_name, request.version, request.id) == ("m", 3, "x")
    assert (request.timeout_us, request.priority) == (7, 2)
    assert request.parameters == {"k": 1.5, "flag": True}


@pytest.mark.parametrize(
    "text", [b'{"IN": 1, "IN": 2}', b'{"IN": 1, "parameters": {"IN": 2}}', b'{"parameters": {"IN": 2, "IN": 2}}']
)
def test_an_input_is_there_once(text: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="input 'IN' already exists in request"):
        decode(text, config(-1))


def test_the_first_input_that_comes_again_is_named() -> None:
    inputs = (ModelInput("A", Datatype.INT32, dims=(-1,)), ModelInput("B", Datatype.INT32, dims=(-1,)))
    with pytest.raises(InvalidArgumentError, match="input 'B' already exists in request"):
        decode(b'{"A": 1, "B": 1, "B": 2, "A": 2}', ModelConfig(name="m", backend="b", input=inputs))


def test_a_nested_parameter_says_that_it_was_nested() -> None:
    message = "^Converting keyword: 'parameters': parameter 'nested' has invalid type. It should be either"
    with pytest.raises(InvalidArgumentError, match=message):
        decode({"IN": 1, "parameters": {"nested": {"twice": 1}}}, config(-1))


def test_a_value_may_be_the_name_of_an_input() -> None:
    request = decode({"IN": "IN", "k": "IN"}, config(-1, datatype=Datatype.BYTES))
    assert (request.inputs["IN"].data.tolist(), request.parameters) == ([b"IN"], {"k": "IN"})


def test_inputs_may_have_the_names_of_keys() -> None:
    inputs = (ModelInput("id", Datatype.BYTES, dims=(-1,)), ModelInput("parameters", Datatype.INT32, dims=(-1,)))
    request = decode({"id": "a", "parameters": 5}, ModelConfig(name="m", backend="b", input=inputs))
    assert request.inputs["id"].data.tolist() == [b"a"]
    assert request.inputs["parameters"].data.tolist() == [5]
    assert (request.id, request.parameters) == ("", {})


def test_numbers_that_are_not_finite() -> None:
    request = decode(b'{"IN": [NaN, Infinity, 1], "k": -Infinity}', config(-1))
    assert np.array_equal(request.inputs["IN"].data, np.array([np.nan, np.inf, 1], np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("limits", "document"),
    [
        (HttpLimits(max_body_bytes=8), {"IN": [1, 2, 3]}),
        (HttpLimits(max_tensors=2), {"IN": 1, "a": 1, "b": 2}),
    ],
)
def test_limits(limits: HttpLimits, document: object) -> None:
    with pytest.raises(PayloadTooLargeError):
        decode(document, config(-1), limits)


def test_depth_is_limited() -> None:
    with pytest.raises(InvalidArgumentError, match="JSON nesting depth exceeds maximum allowed limit"):
        decode({"IN": [[[1]]]}, config(-1, -1, -1), HttpLimits(max_json_depth=3))


def encode(*outputs: Any, **fields: Any) -> dict[str, Any]:
    request = InFlightRequest(model_name="m", version=3, inputs={}, **fields)
    document: dict[str, Any] = json.loads(encode_generate(request, InferResponse(list(outputs))))
    return document


def test_one_element_is_a_value_and_more_are_a_flat_list() -> None:
    document = encode(tensor("A", np.ones((1, 1), np.int32)), tensor("B", np.arange(4, dtype=np.int32).reshape(2, 2)))
    assert document == {"A": 1, "B": [0, 1, 2, 3], "model_name": "m", "model_version": "3"}
    assert list(document) == sorted(document)


def test_outputs_win_over_parameters() -> None:
    request = InFlightRequest(model_name="m", version=3, inputs={}, id="x")
    response = InferResponse([tensor("id", np.zeros(2, np.int32))], parameters={"p": True, "model_name": "q"})
    assert json.loads(encode_generate(request, response)) == {
        "id": [0, 0],
        "model_name": "q",
        "model_version": "3",
        "p": True,
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=8,
)


@given(
    value=json_values,
    datatype=st.sampled_from(Datatype),
    dims=st.lists(st.sampled_from((-1, 1, 2)), max_size=3),
    max_batch_size=st.sampled_from((0, 4)),
)
def test_any_value_becomes_a_fitting_tensor_or_a_refusal(
    value: object, datatype: Datatype, dims: list[int], max_batch_size: int
) -> None:
    of = config(*dims, datatype=datatype, max_batch_size=max_batch_size)
    try:
        shape = decode({"IN": value}, of).inputs["IN"].data.shape
    except InvalidArgumentError:
        return
    expected = [-1, *dims] if max_batch_size else dims
    assert len(shape) == len(expected)
    assert isinstance(value, list) or np.prod(shape) == 1
