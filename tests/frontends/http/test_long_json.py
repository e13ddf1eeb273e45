"""Long JSON is parsed in pieces beside the event loop: with the same result as at once, and in C as in Python."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core import accelerator, json_pieces
from modelserver.core.datatype import Datatype
from modelserver.core.json_pieces import parse_pieces
from modelserver.core.long_work import finish
from modelserver.core.response import ResponseStream
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, ServerError
from modelserver.frontends.http import json_tensor
from modelserver.frontends.http.decoder import InferDecoder
from modelserver.frontends.http.generate import decode_generate, generate_slices
from modelserver.protocol.limits import HttpLimits

LIMITS = HttpLimits()
TWINS = ["c", "python"] if accelerator.cut_data is not None else ["python"]
PAD = " " * 20_000  # what makes a text long

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=4), inner, max_size=6)),
    max_leaves=30,
)
JUNK = st.sampled_from([",", "[", "]", "{", "}", ":", '"', "1", " ", ",,", '""', "\\"])


@pytest.fixture(params=TWINS)
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        for name in ("cut_data", "flat_array", "measure_json", "cut_members", "split_elements"):
            monkeypatch.setattr(accelerator, name, None)
    return str(request.param)


def _said(text: bytes) -> Any:
    try:
        return parse_pieces(text, max_depth=LIMITS.max_json_depth, max_values=LIMITS.max_json_values)
    except InvalidArgumentError:
        return InvalidArgumentError


@settings(max_examples=400)
@given(document=VALUES, damage=st.none() | st.tuples(st.integers(0, 400), JUNK), has_spaces=st.booleans())
def test_a_document_in_pieces_is_that_at_once(document: Any, damage: Any, has_spaces: bool) -> None:
    text = json.dumps(document, indent=1 if has_spaces else None)
    if damage is not None:
        at = damage[0] % (len(text) + 1)
        text = text[:at] + damage[1] + text[at:]
    raw = text.encode()
    try:
        expected: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        expected = InvalidArgumentError
    for piece_bytes in (1, 7, 40):
        with patch.object(json_pieces, "_PIECE_BYTES", piece_bytes):
            assert _said(raw) == expected


def test_documents_have_bounds() -> None:
    with pytest.raises(InvalidArgumentError, match="nesting depth exceeds maximum"):
        parse_pieces(b"[" * 101 + b"]" * 101, max_depth=100, max_values=1000)
    with pytest.raises(PayloadTooLargeError, match="at most 4 are allowed"):
        parse_pieces(b"[1,2,3,4,5,6]", max_depth=100, max_values=4)


def _decode(data: str, datatype: str = "FP32", shape: Any = (2, 3), more: str = "") -> np.ndarray[Any, Any]:
    text = f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{list(shape)},"data":{data}{more}}}]}}' + PAD
    request, _ = InferDecoder(LIMITS).decode("m", None, text.encode(), None, ResponseStream())
    return request.inputs["x"].data


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("piece_bytes", [1, 9, 16384])
@pytest.mark.parametrize(
    ("data", "datatype"),
    [
        ("[1, 2.5, -0, NaN, -Infinity, Infinity]", "FP32"),
        ("[[1,2,3],\n[4,5,1e-320]]", "FP64"),
        ("[[[[1,2,3]]],[[[4,5,6]]]]", "INT64"),
        ('["a,b", "[", "\\"]", "\\u00e4\\ud83d\\ude00", "", "\\\\"]', "BYTES"),
        ('[["a","b","c"],["d","e","{"]]', "BYTES"),
        ("[true,false,true,true,true,false]", "BOOL"),
        ("[[1,2],[3,4],[5,6]]", "FP32"),
        ("[[1,2,3],4,[[5]],[],6]", "FP32"),
        ("[[],[],1,[2,3],[],[[4,5],[6]],[[]]]", "INT32"),
        ('[[], "a", ["b,", "c"], [["d"]], "e", "f"]', "BYTES"),
    ],
)
def test_long_data_is_what_short_data_is(data: str, datatype: str, piece_bytes: int) -> None:
    with patch.object(json_tensor, "_PIECE_BYTES", piece_bytes):
        found = _decode(data, datatype)
    values = np.array(_leaves(json.loads(data)), object)
    if datatype == "BYTES":
        assert found.ravel().tolist() == [text.encode() for text in values]
    else:
        assert found.tobytes() == values.astype(found.dtype).tobytes()
    assert found.shape == (2, 3)


def _leaves(values: Any) -> list[Any]:
    return [leaf for item in values for leaf in _leaves(item)] if isinstance(values, list) else [values]


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    "data",
    [
        "[1,2,3,4,5]",
        "[1,2,3,4,5,6,7]",
        "[[1,2,3],[4,5]]",
        "[[1,2,3],4,5,]",
        "[[1,2,3][4,5,6]]",
        "[[1,2,3],,4,5,6]",
        "[,[],1,2,3,4,5,6]",
        "[1,2,3,4,5,6,]",
        "[1 2,3,4,5,6]",
        '[1,2,3,4,5,"6"]',
        "[1,2,3,4,5,{}]",
        "[1,2,3,4,5,nan]",
        "[]",
        "5",
        "null",
    ],
)
def test_wrong_long_data_is_refused(data: str) -> None:
    with pytest.raises(InvalidArgumentError):
        _decode(data)


@pytest.mark.usefixtures("twin")
def test_a_member_that_is_no_input_is_json_too() -> None:
    more = ',"outputs":[{"name":"y","data":[1,2]}]}'
    text = '{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]' + more
    request, _ = InferDecoder(LIMITS).decode("m", None, (text + PAD).encode(), None, ResponseStream())
    assert request.inputs["x"].data.tolist() == [1]
    broken = (text.replace("[1,2]", "[1,,2]") + PAD).encode()
    with pytest.raises(InvalidArgumentError):
        InferDecoder(LIMITS).decode("m", None, broken, None, ResponseStream())


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("more", ["", ',"data":[2]'])
def test_the_last_of_equal_members_counts(more: str) -> None:
    assert _decode("[1]", shape=(1,), more=more).tolist() == [2 if more else 1]


def _generate(text: str, *, is_long: bool) -> Any:
    config = ModelConfig(
        name="m",
        input=(
            ModelInput(name="x", data_type=Datatype.INT32, dims=(-1,)),
            ModelInput(name="text", data_type=Datatype.BYTES, dims=(1,), optional=True),
        ),
    )
    decode = generate_slices if is_long else decode_generate
    try:
        found: Any = decode("m", None, config, text.encode(), LIMITS)
        request = finish(found) if is_long else found
    except ServerError as error:
        return type(error)
    return {name: tensor.data.tolist() for name, tensor in request.inputs.items()}, dict(request.parameters)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    "text",
    [
        '{"x":[1,2,3],"text":"a \\"x\\" b","other":5}',
        '{"x":[1],"parameters":{"text":"t","z":true}}',
        '{"x":[1],"x":[2]}',
        '{"parameters":{"x":[1]},"x":[2]}',
        '{"parameters":{"x":[1],"x":[2]}}',
        '{"x":["a"]}',
        "[1]",
        "",
    ],
)
def test_a_long_generate_call_is_what_a_short_one_is(text: str) -> None:
    assert _generate(text + PAD, is_long=True) == _generate(text, is_long=False)


@pytest.mark.usefixtures("twin")
def test_many_elements_of_a_generate_call() -> None:
    numbers = list(range(50_000))
    found, _ = _generate(json.dumps({"x": numbers}), is_long=True)
    assert found["x"] == numbers


_CHARACTERS = ["a", "é", "\u4e2d", "😀", "x" * 30, '"', "\\", "\x00"]
_ESCAPES = ["\\n", "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "\\\\", '\\"']


@given(st.lists(st.sampled_from(_CHARACTERS + _ESCAPES), min_size=20, max_size=200), st.binary(max_size=2))
def test_a_long_string_is_read_in_pieces_as_it_is_at_once(parts: list[str], damage: bytes) -> None:
    text = b'"%b%b"' % ("".join(parts).encode(), damage)
    with patch.object(json_pieces, "_LONG_STRING_BYTES", 32):
        try:
            found = finish(json_pieces.document_slices(memoryview(text)))
        except InvalidArgumentError:
            with pytest.raises(orjson.JSONDecodeError):
                orjson.loads(text)
        else:
            assert found == orjson.loads(text)
