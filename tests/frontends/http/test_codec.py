from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.http_calls import binary_body, fp32, json_body, read

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest, RegionSlice
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, ServerError
from modelserver.frontends.http.codec import OutputForm, encode_infer
from modelserver.frontends.http.decoder import InferDecoder
from modelserver.protocol.limits import HttpLimits

LIMITS = HttpLimits(max_body_bytes=1 << 20, max_tensors=4, max_name_len=20, max_rank=8)
DECODER = InferDecoder(LIMITS)
NUMERIC = [datatype for datatype in Datatype if datatype.itemsize is not None]
JSON_DATATYPES = [datatype for datatype in Datatype if datatype not in (Datatype.FP16, Datatype.BF16)]


def _decode(body: bytes, header_length: int | None = None) -> tuple[InFlightRequest, OutputForm]:
    return DECODER.decode("m", None, body, header_length, ResponseStream())


def _decode_object(document: dict[str, Any]) -> tuple[InFlightRequest, OutputForm]:
    return _decode(json.dumps(document).encode())


def _decode_tensors(tensors: list[Tensor], **fields: Any) -> tuple[InFlightRequest, OutputForm]:
    body, headers = binary_body(tensors, **fields)
    return _decode(body, int(headers["inference-header-content-length"]))


def _input(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]} | changes
    return {"inputs": [{key: value for key, value in tensor.items() if value is not None}]}


def _arrays(datatype: Datatype) -> st.SearchStrategy[Any]:
    shape = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    if datatype is Datatype.BYTES:
        return hnp.arrays(np.dtype(object), shape, elements=st.text(st.characters(codec="utf-8")).map(str.encode))
    return hnp.arrays(datatype.numpy, shape)


def _same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.tolist().__repr__() == repr(right.tolist())


def test_a_json_request_in_full() -> None:
    request, form = _decode_object(
        {
            "id": "42",
            "model_name": "ignored",
            "parameters": {"priority": 1, "mine": "yes"},
            "inputs": [
                {"name": "a", "datatype": "INT32", "shape": [1, 2], "data": [[1, 2]], "parameters": {"x": 1}},
                {"name": "b", "datatype": "BYTES", "shape": [1], "data": ["t"], "parameters": None},
            ],
            "outputs": [{"name": "y"}, {"name": "x", "parameters": {"binary_data": True}}],
        }
    )
    assert (request.model_name, request.version, request.id, request.priority) == ("m", None, "42", 1)
    assert dict(request.parameters) == {"mine": "yes"}
    assert request.inputs["a"].data.tolist() == [[1, 2]]
    assert request.inputs["b"].data.tolist() == [b"t"]
    assert request.outputs == ("y", "x")
    assert form.listed == {"y": False, "x": True}


def test_null_members_are_absent_members() -> None:
    request, form = _decode_object(_input() | {"id": None, "parameters": None, "outputs": None})
    assert (request.id, request.outputs, form.is_binary, form.listed) == ("", None, False, None)


def test_binary_inputs_are_views_of_the_body_in_order() -> None:
    body, headers = binary_body([fp32("a", [[1, 2]]), fp32("b", [3])])
    aligned = np.empty(len(body) + 64, np.uint8)
    length = int(headers["inference-header-content-length"])
    start = -(aligned.ctypes.data + length) % 64
    aligned[start : start + len(body)] = np.frombuffer(body, np.uint8)
    request, _ = DECODER.decode("m", 3, aligned.data[start : start + len(body)], length, ResponseStream())
    assert request.version == 3
    assert request.inputs["a"].data.tolist() == [[1, 2]]
    assert request.inputs["b"].data.tolist() == [3]
    assert all(np.shares_memory(tensor.data, aligned) for tensor in request.inputs.values())


@pytest.mark.parametrize("padding", range(8))
def test_tensors_are_aligned_whatever_the_header_s_length(padding: int) -> None:
    request, _ = _decode_tensors([Tensor("a", Datatype.FP64, np.arange(4.0))], id="x" * padding)
    assert request.inputs["a"].data.flags.aligned
    assert request.inputs["a"].data.tolist() == [0, 1, 2, 3]


def test_json_and_binary_inputs_mix() -> None:
    text = json.dumps(
        {
            "inputs": [
                {"name": "a", "datatype": "FP32", "shape": [1], "data": [5]},
                {"name": "b", "datatype": "INT8", "shape": [2], "parameters": {"binary_data_size": 2}},
                {"name": "c", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
            ]
        }
    ).encode()
    request, _ = _decode(text + b"\x01\xff" + b"\x01\x00\x00\x00z", len(text))
    assert [tensor.data.tolist() for tensor in request.inputs.values()] == [[5], [1, -1], [b"z"]]


@pytest.mark.parametrize("datatype", list(Datatype))
@given(data=st.data())
def test_every_datatype_survives_binary(datatype: Datatype, data: st.DataObject) -> None:
    array = data.draw(_arrays(datatype))
    request, _ = _decode_tensors([Tensor("x", datatype, array)])
    assert _same(request.inputs["x"].data, array)
    request.version = 1
    answer = read(encode_infer(request, InferResponse([request.inputs["x"]]), OutputForm(is_binary=True)))
    row = answer.json()["outputs"][0]
    assert (row["datatype"], row["shape"]) == (datatype.value, list(array.shape))
    assert row["parameters"]["binary_data_size"] == len(answer.blobs)
    again, _ = _decode_tensors([Tensor("x", datatype, array)])
    assert _same(again.inputs["x"].data, array)


@pytest.mark.parametrize("datatype", JSON_DATATYPES)
@given(data=st.data())
def test_every_datatype_survives_json(datatype: Datatype, data: st.DataObject) -> None:
    array = data.draw(_arrays(datatype))
    request = InFlightRequest(model_name="m", version=1, inputs={})
    answer = read(encode_infer(request, InferResponse([Tensor("x", datatype, array)]), OutputForm()))
    assert answer.headers["content-type"] == "application/json"
    row = answer.json()["outputs"][0]
    decoded, _ = _decode(json_body("x", row["datatype"], row["shape"], row["data"]))
    assert _same(decoded.inputs["x"].data, array)


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.FP64])
def test_nan_and_infinity_survive_json(datatype: Datatype) -> None:
    array = np.array([[np.nan, np.inf], [-np.inf, 0.5]], datatype.numpy)
    request, _ = _decode(json_body("x", datatype.value, [2, 2], array.tolist(), id="NaN"))
    assert _same(request.inputs["x"].data, array)
    assert request.id == "NaN"
    request.version = 1
    answer = read(encode_infer(request, InferResponse([request.inputs["x"]]), OutputForm()))
    assert b'"data":[NaN,Infinity,-Infinity,0.5]' in answer.body


def test_the_answer_byte_for_byte() -> None:
    request = InFlightRequest(model_name="m", version=2, inputs={}, id="7", outputs=("b", "a"))
    response = InferResponse([fp32("a", [[1]]), fp32("b", [2]), fp32("unasked", [3])], parameters={"k": True})
    answer = read(encode_infer(request, response, OutputForm(listed={"b": False, "a": True})))
    head = (
        b'{"model_name":"m","model_version":"2","id":"7","parameters":{"k":true},"outputs":['
        b'{"name":"b","datatype":"FP32","shape":[1],"data":[2.0]},'
        b'{"name":"a","datatype":"FP32","shape":[1,1],"parameters":{"binary_data_size":4}}]}'
    )
    assert answer.body == head + b"\x00\x00\x80\x3f"
    assert answer.headers == {
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(head)),
    }


@given(st.data(), st.booleans(), st.sampled_from(["", "7", 'a"b']))
def test_several_outputs_are_answered_alike_on_the_quick_and_on_the_slow_way(
    data: st.DataObject, is_binary: bool, request_id: str
) -> None:
    datatypes = data.draw(st.lists(st.sampled_from(list(Datatype)), min_size=2, max_size=4))
    outputs = [Tensor(f'o"{place}', kind, data.draw(_arrays(kind))) for place, kind in enumerate(datatypes)]
    answers: list[object] = []
    # Who names the outputs gets them on the slow way.
    for names in (None, tuple(output.name for output in outputs)):
        request = InFlightRequest(model_name="m", version=1, inputs={}, id=request_id, outputs=names)
        try:
            answers.append(read(encode_infer(request, InferResponse(list(outputs)), OutputForm(is_binary=is_binary))))
        except InvalidArgumentError as error:
            answers.append(error.message)
    assert answers[0] == answers[1]


def test_the_answer_holds_a_large_tensor_s_own_memory() -> None:
    array = np.arange(2000, dtype=np.float32)
    response = encode_infer(
        InFlightRequest(model_name="m", version=1, inputs={}),
        InferResponse([Tensor("y", Datatype.FP32, array)]),
        OutputForm(is_binary=True),
    )
    assert np.shares_memory(np.frombuffer(response.body[1], np.float32), array)


def test_a_listed_output_is_json_unless_it_says_binary() -> None:
    request, form = _decode_object(_input() | {"outputs": [{"name": "y"}], "parameters": {"binary_data_output": True}})
    request.version = 1
    assert "data" in read(encode_infer(request, InferResponse([fp32("y", [1])]), form)).json()["outputs"][0]


def test_id_is_absent_when_none_was_sent() -> None:
    answer = read(encode_infer(InFlightRequest(model_name="m", version=1, inputs={}), InferResponse([]), OutputForm()))
    assert answer.body == b'{"model_name":"m","model_version":"1","outputs":[]}'


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "inputs"),
        ({"inputs": {}}, r"\$.inputs"),
        ({"inputs": [1]}, r"\$.inputs\[0\]"),
        ({"inputs": [], "id": 5}, r"\$.id"),
        ({"inputs": [], "parameters": [1]}, r"\$.parameters"),
        ({"inputs": [], "outputs": [{}]}, "name"),
        ({"inputs": [{"name": "x"}]}, "datatype"),
        (_input(shape=["2"]), r"\$.inputs\[0\].shape\[0\]"),
        (_input(shape=[2.5]), r"shape\[0\]"),
        (_input(shape=None), "shape"),
        (_input(shape=[-1]), r"invalid shape for input 'x': shape \[-1\] contains one or more invalid dimensions"),
        (_input(shape=[-1, -2]), "invalid shape for input 'x': .* contains one or more invalid"),
        (
            _input(shape=[2**62, 4]),
            "invalid shape for input 'x': .* causes total element count to exceed maximum size of",
        ),
        (_input(shape=[4, 2**60 + 2]), "byte size overflow for input 'x': element count"),
        (
            _input(shape=[0, 2**62, 4]),
            "invalid shape for input 'x': .* causes total element count to exceed maximum size of",
        ),
        (_input(shape=[1] * 9), "'x'.*at most 8 dimensions, got 9"),
        (_input(datatype="FLOAT"), "invalid datatype for input x: 'FLOAT'"),
        (_input(name="n" * 21), "longer than 20"),
        (_input(data=None), "'x' has no data"),
        (_input(data=[1]), "'x': expected 2 elements"),
        (_input(parameters={"binary_data_size": 8}), "'x': only one of"),
        (_input(data=None, parameters={"binary_data_size": "8"}), "binary_data_size"),
        (_input(data=None, parameters={"binary_data_size": 8}), "'x', expecting 8 additional bytes"),
        ({"inputs": _input()["inputs"] * 2}, "input 'x' already exists in request"),
        (_input() | {"outputs": [{"name": "y"}] * 2}, "output 'y' already exists in request"),
        (_input() | {"parameters": {"priority": "high"}}, "'priority'"),
        (_input() | {"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "'y'.*'binary_data'"),
    ],
)
def test_wrong_requests_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        _decode_object(document)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b'{"inputs": [}', b"nul", b'"', b'{"inputs": NaN', b'{"inputs":[],"x":NaN,}']
)
def test_malformed_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="malformed"):
        _decode(body)


@pytest.mark.parametrize(
    ("body", "text_len", "message"),
    [
        (b"abc", 8, "'x', expecting 5 additional bytes"),
        (bytes(9), 8, "1 bytes after the last"),
        (bytes(4), 4, "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 4"),
    ],
)
def test_binary_sizes_must_fit(body: bytes, text_len: int, message: str) -> None:
    text = json.dumps(_input(data=None, parameters={"binary_data_size": text_len})).encode()
    with pytest.raises(InvalidArgumentError, match=message):
        _decode(text + body, len(text))


@pytest.mark.parametrize("raw", [b"\x05\x00\x00\x00a", b"\x01\x00\x00\x00ab", b"\x00\x00", b"\x00" * 8])
def test_broken_binary_strings_are_refused(raw: bytes) -> None:
    document = _input(datatype="BYTES", shape=[1], data=None, parameters={"binary_data_size": len(raw)})
    text = json.dumps(document).encode()
    with pytest.raises(InvalidArgumentError, match="'x'"):
        _decode(text + raw, len(text))


_REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


def test_inputs_and_outputs_in_regions_are_told_apart_from_those_in_the_body() -> None:
    document = _input(data=None, parameters=_REGION | {"shared_memory_offset": 4})
    document["outputs"] = [
        {"name": "y", "parameters": _REGION},
        {"name": "z", "parameters": {"classification": 3}},
    ]
    request, _ = _decode_object(document)
    assert request.inputs == {}
    transfer = request.transfer
    assert transfer is not None
    assert [(item.name, item.place) for item in transfer.inputs] == [("x", RegionSlice("r", 4, 8))]
    assert (transfer.placed, transfer.class_counts) == ({"y": RegionSlice("r", 0, 8)}, {"z": 3})


@pytest.mark.parametrize(
    "document",
    [
        _input(parameters=_REGION),
        _input(data=None, parameters=_REGION | {"binary_data_size": 8}),
        _input(data=None, parameters={"shared_memory_region": "r"}),
        _input(data=None, parameters=_REGION | {"shared_memory_region": 7}),
        _input(data=None, parameters=_REGION | {"shared_memory_offset": -1}),
        _input() | {"outputs": [{"name": "y", "parameters": _REGION | {"classification": 3}}]},
        _input() | {"outputs": [{"name": "y", "parameters": _REGION | {"binary_data": True}}]},
        _input() | {"outputs": [{"name": "y", "parameters": {"classification": -3}}]},
    ],
)
def test_what_contradicts_a_region_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'[xy]'"):
        _decode_object(document)


def test_limits_at_the_limit() -> None:
    tensors = [fp32(f"t{index}", [1]) for index in range(5)]
    assert len(_decode_tensors(tensors[:4])[0].inputs) == 4
    with pytest.raises(PayloadTooLargeError, match="more than 4"):
        _decode_tensors(tensors)
    with pytest.raises(PayloadTooLargeError, match="more than 4"):
        _decode_object(_input() | {"outputs": [{"name": f"y{index}"} for index in range(5)]})
    assert _decode_object(_input(name="n" * 20))[0].inputs.keys() == {"n" * 20}
    assert _decode_object(_input(shape=[1] * 7 + [2]))[0].inputs["x"].shape == (1,) * 7 + (2,)


def test_a_json_tensor_may_not_grow_beyond_the_body_s_limit() -> None:
    with pytest.raises(PayloadTooLargeError, match="--http-max-input-size"):
        _decode_object(_input(datatype="FP64", shape=[(1 << 17) + 1], data=[0]))
    with pytest.raises(InvalidArgumentError, match="expected 131072 elements"):
        _decode_object(_input(datatype="FP64", shape=[1 << 17], data=[0]))


def test_depth_is_limited_before_parsing() -> None:
    nested: Any = []
    for _ in range(97):
        nested = [nested]
    _decode_object(_input() | {"extra": [nested]})
    with pytest.raises(InvalidArgumentError, match=r"JSON nesting depth exceeds maximum allowed limit \(100\)"):
        _decode_object(_input() | {"extra": [[[nested]]]})


@given(st.data())
def test_mutated_bodies_are_decoded_or_refused_and_nothing_else(data: st.DataObject) -> None:
    body, headers = binary_body([fp32("a", [1, 2]), Tensor("b", Datatype.BYTES, np.array([b"xy"], object))], id="1")
    mutated = bytearray(body)
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(mutated) - 1))
        match data.draw(st.sampled_from(("set", "cut", "insert"))):
            case "set":
                mutated[position] = data.draw(st.integers(0, 255))
            case "cut":
                del mutated[position : position + data.draw(st.integers(1, 8))]
            case "insert":
                mutated[position:position] = data.draw(
                    st.sampled_from((b"[", b"NaN", b"-", b"9999", b'"', b"{", b"\\"))
                )
        if not mutated:
            break
    length = min(int(headers["inference-header-content-length"]), len(mutated))
    with contextlib.suppress(ServerError):
        _decode(bytes(mutated), data.draw(st.sampled_from((length, None))))
