"""Whatever is asked in whatever order, a decoder that knows calls says what one that knows none says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_calls import binary_body, fp32
from support.twins import TWINS, using

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import ServerError
from modelserver.frontends.http import templates
from modelserver.frontends.http.decoder import InferDecoder
from modelserver.protocol.limits import HttpLimits

LIMITS = HttpLimits(max_body_bytes=1 << 20, max_tensors=4, max_name_len=20, max_rank=8)
LENGTH = "inference-header-content-length"
STREAM = ResponseStream()

Call = tuple[str, int | None, bytes, int | None]


@pytest.fixture(scope="module", autouse=True, params=TWINS)
def twin(request: pytest.FixtureRequest) -> Iterator[None]:
    """Numbers are read in C and in Python."""
    with using(request.param):
        yield


def _said(decoder: InferDecoder, call: Call) -> object:
    """All that a decoder says of a call, comparable."""
    try:
        request, form = decoder.decode(*call, STREAM)
    except ServerError as error:
        return type(error), error.code, error.message
    assert request.stream is STREAM
    return _facts(request), form


def _facts(request: InFlightRequest) -> object:
    inputs = [
        (name, tensor.name, tensor.datatype, tensor.data.shape, tensor.data.dtype, tensor.data.tolist())
        for name, tensor in request.inputs.items()
    ]
    fields = ("model_name", "version", "id", "outputs", "parameters", "priority", "timeout_us", "sequence_id")
    return inputs, [getattr(request, name) for name in (*fields, "sequence_start", "sequence_end", "rows")]


def _is_known(decoder: InferDecoder, call: Call) -> bool:
    return decoder.decode(*call, STREAM)[0].form is not None


def _binary(*tensors: Tensor, **fields: Any) -> Call:
    body, headers = binary_body(list(tensors), **fields)
    return "m", None, body, int(headers[LENGTH])


def _json(text: str | dict[str, Any], name: str = "m") -> Call:
    return name, None, (text if isinstance(text, str) else json.dumps(text)).encode(), None


def _input(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]} | changes


def test_no_call_is_known_when_requests_are_not_recognized() -> None:
    decoder = InferDecoder(replace(LIMITS, recognizes=False))
    for call in (_binary(fp32("x", [1, 2])), _json({"inputs": [_input()]})):
        said = [_said(decoder, call) for _ in range(3)]
        assert not _is_known(decoder, call)
        assert said == [_said(InferDecoder(LIMITS), call)] * 3


def test_the_second_call_is_known() -> None:
    decoder = InferDecoder(LIMITS)
    for first, second in (
        (_binary(fp32("x", [1, 2])), _binary(fp32("x", [3, 4]))),
        (_binary(fp32("x", [1]), fp32("y", [2, 3])), _binary(fp32("x", [4]), fp32("y", [5, 6]))),
        (_json({"inputs": [_input()]}), _json({"inputs": [_input(data=[0.5, -3])]})),
        (
            _json({"inputs": [_input(), _input(name="y", data=[7, 8])], "outputs": [{"name": "o"}]}),
            _json({"inputs": [_input(data=[3, 4]), _input(name="y", data=[-1, 1e9])], "outputs": [{"name": "o"}]}),
        ),
        (
            _json({"inputs": [_input(datatype="BYTES", data=["a", "b"])]}),
            _json({"inputs": [_input(datatype="BYTES", data=['"data"]', "\\"])]}),
        ),
    ):
        assert not _is_known(decoder, first)
        assert _is_known(decoder, second)
        assert _said(decoder, second) == _said(InferDecoder(LIMITS), second)


@pytest.mark.parametrize("first_id", ["1", "", "x y[~]"])
def test_an_id_that_stands_first_may_differ(first_id: str) -> None:
    decoder = InferDecoder(LIMITS)

    def call(request_id: str) -> Call:
        header = {"id": request_id} if request_id else {}
        header["inputs"] = [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}]
        head = json.dumps(header, separators=(",", ":")).encode()
        return "m", None, head + b"\0\0\x80\x3f", len(head)

    decoder.decode(*call(first_id), STREAM)
    decoder.decode(*call("other"), STREAM)
    for request_id in ("7", "longer than the first", "é", 'a"b', "\\", "", first_id):
        request, _ = decoder.decode(*call(request_id), STREAM)
        assert request.id == request_id
        assert request.inputs["x"].data.tolist() == [1.0]
    assert _is_known(decoder, call("12345"))


def test_a_second_id_counts_and_prevents_a_template() -> None:
    decoder = InferDecoder(LIMITS)
    rest = b'"inputs":[{"name":"x","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]'
    for later in (b'"id":"b"', b'"\\u0069d":"b"'):
        for first in (b"a", b"c"):
            head = b'{"id":"' + first + b'",' + rest + b"," + later + b"}"
            request, _ = decoder.decode("m", None, head + bytes(4), len(head), STREAM)
            assert (request.id, request.form) == ("b", None)


def test_what_follows_an_id_is_no_call_of_its_own() -> None:
    decoder = InferDecoder(LIMITS)
    rest = b'"inputs":[{"name":"x","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}'
    head = b'{"id":"a",' + rest
    decoder.decode("m", None, head + bytes(4), len(head), STREAM)
    with pytest.raises(ServerError, match="is not valid"):
        decoder.decode("m", None, rest + bytes(4), len(rest), STREAM)


def test_parameters_are_set_as_if_they_were_read() -> None:
    parameters = {"priority": 3, "timeout": 5, "sequence_id": 9, "sequence_start": True, "free": "x"}
    for call in (
        _binary(fp32("x", [1]), parameters=parameters | {"binary_data_output": True}),
        _json({"inputs": [_input()], "parameters": parameters}),
    ):
        decoder = InferDecoder(LIMITS)
        first = _said(decoder, call)
        assert _is_known(decoder, call)
        assert _said(decoder, call) == first


def test_models_and_versions_are_told_apart() -> None:
    decoder = InferDecoder(LIMITS)
    _, _, body, length = _binary(fp32("x", [1]))
    for name, version in (("a", None), ("a", 1), ("b", None), ("b", 1)):
        for _ in range(2):
            request, _ = decoder.decode(name, version, body, length, STREAM)
            assert (request.model_name, request.version) == (name, version)


def test_large_tensors_are_aligned_views_and_small_ones_copies() -> None:
    decoder = InferDecoder(LIMITS)
    large, small = fp32("x", list(range(2048))), fp32("y", [1, 2])
    _, _, body, length = _binary(large, small)
    assert length is not None
    for shift in range(4):
        room = np.empty(len(body) + 128, np.uint8)
        start = -(room.ctypes.data + length) % 64 + shift
        room[start : start + len(body)] = np.frombuffer(body, np.uint8)
        decoder.decode("m", None, body, length, STREAM)
        request, _ = decoder.decode("m", None, room.data[start : start + len(body)], length, STREAM)
        x, y = request.inputs["x"].data, request.inputs["y"].data
        assert (np.shares_memory(x, room), np.shares_memory(y, room)) == (shift == 0, False)
        assert x.flags.aligned
        assert (x.tolist(), y.tolist()) == (list(range(2048)), [1, 2])


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_MAX_TEMPLATES", 4)
    monkeypatch.setattr(templates, "_MAX_MODELS", 4)
    decoder = InferDecoder(LIMITS)
    for number in range(20):
        for call in (_binary(fp32(f"x{number}", [1])), _json({"inputs": [_input(name=f"x{number}")]}, f"m{number}")):
            decoder.decode(*call, STREAM)
            assert _is_known(decoder, call)
    assert len(decoder._binary._plain.known) <= 4
    assert len(decoder._json._templates.known) <= 4


def test_clients_that_repeat_nothing_are_not_learned_from_forever() -> None:
    decoder = InferDecoder(LIMITS)
    for number in range(1000):
        decoder.decode(*_binary(fp32(f"x{number}", [1])), STREAM)
    assert len(decoder._binary._plain.known) < 100


_NUMBERS = st.one_of(st.integers(-5, 5), st.floats(width=32), st.sampled_from([1e400, True, None, "1", [1], 2**70]))
_TENSOR = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "y", "data"]),
        "datatype": st.sampled_from(["FP32", "FP64", "INT8", "INT64", "UINT16", "UINT64", "BYTES", "BOOL", "FP16"]),
        "shape": st.sampled_from([[2], [1, 2], [0], [], [3]]),
        "data": st.one_of(
            st.lists(_NUMBERS, max_size=3),
            st.lists(st.lists(_NUMBERS, min_size=1, max_size=2), max_size=2),
            st.lists(st.sampled_from(["", "a", "é", '"', "[1, 2]"]), min_size=2, max_size=2),
        ),
    }
)
_DOCUMENT = st.builds(
    lambda inputs, extra: {"inputs": inputs} | extra,
    st.lists(_TENSOR, max_size=2),
    st.sampled_from([{}, {"id": "a"}, {"outputs": [{"name": "o"}]}, {"parameters": {"priority": 1}}]),
)


@given(st.lists(_DOCUMENT, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_json_calls_in_any_order(documents: list[dict[str, Any]], random: Any) -> None:
    decoder = InferDecoder(LIMITS)
    for _ in range(3):
        for document in documents:
            text = json.dumps(document)
            if random.random() < 0.3:  # other elements in the same text
                elements = random.choice(["1, 2", "", "NaN, 2", "1,,2", "[1"])
                text = re.sub(r'"data": \[[^\]"]*\]', f'"data": [{elements}]', text)
            call = _json(text)
            assert repr(_said(decoder, call)) == repr(_said(InferDecoder(LIMITS), call))


@given(st.data())
def test_binary_calls_damaged_and_whole(data: st.DataObject) -> None:
    decoder = InferDecoder(LIMITS)
    tensors = [fp32("x", [1, 2]), fp32("y", [3]), Tensor("b", Datatype.BYTES, np.array([b"q", b""], object))]
    chosen = data.draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=2, unique_by=lambda tensor: tensor.name))
    fields = data.draw(st.sampled_from([{}, {"id": "i"}, {"parameters": {"binary_data_output": True}}]))
    for _ in range(4):
        name, version, body, length = _binary(*chosen, **fields)
        changed = bytearray(body)
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, len(changed) - 1))
            if data.draw(st.booleans()):
                changed[at] = data.draw(st.integers(0, 255))
            else:
                del changed[at : at + data.draw(st.integers(1, 4))]
        length = min(length or 0, len(changed))
        call = (name, version, bytes(changed), length)
        assert repr(_said(decoder, call)) == repr(_said(InferDecoder(LIMITS), call))
