"""Long typed contents are decoded in pieces beside the event loop: as at once, and in C as in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grpc_calls import decode_infer_request

from modelserver.core import accelerator
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, ServerError
from modelserver.frontends.grpc import contents, envelope
from modelserver.frontends.grpc.envelope import varint
from modelserver.pb import grpc_service_pb2 as pb

TWINS = ["c", "python"] if accelerator.pass_fields is not None else ["python"]
TYPED = {
    "BOOL": ("bool_contents", st.booleans()),
    "INT8": ("int_contents", st.integers(-140, 140)),
    "INT64": ("int64_contents", st.integers(-(2**63), 2**63 - 1)),
    "UINT16": ("uint_contents", st.integers(0, 70_000)),
    "UINT64": ("uint64_contents", st.integers(0, 2**64 - 1)),
    "FP32": ("fp32_contents", st.floats(width=32, allow_nan=False)),
    "FP64": ("fp64_contents", st.floats(allow_nan=False)),
    "BYTES": ("bytes_contents", st.binary(max_size=9)),
}


def _said(message: bytes) -> object:
    try:
        request = decode_infer_request(message)
    except ServerError as error:
        return type(error)
    return {name: (tensor.datatype, tensor.shape, tensor.data.tolist()) for name, tensor in request.inputs.items()}


@st.composite
def messages(draw: Any) -> bytes:
    request = pb.ModelInferRequest(model_name="m")
    for name in draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=2, unique=True)):
        datatype = draw(st.sampled_from(sorted(TYPED)))
        field, elements = TYPED[datatype]
        values = draw(st.lists(elements, max_size=12))
        shape = [len(values) + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))]
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        getattr(tensor.contents, field).extend(values)
        if draw(st.integers(0, 9)) == 0:
            tensor.contents.int_contents.append(1)
        if draw(st.booleans()):
            tensor.parameters["p"].int64_param = 1
    return request.SerializeToString()


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("piece_bytes", [8, 24, 65536])
def test_in_pieces_is_as_at_once(twin: str, piece_bytes: int) -> None:
    @settings(max_examples=60)
    @given(message=messages(), damage=st.none() | st.tuples(st.integers(0, 300), st.integers(0, 255)))
    def check(message: bytes, damage: tuple[int, int] | None) -> None:
        if damage is not None:
            at = damage[0] % len(message)
            message = message[:at] + bytes((damage[1],)) + message[at + 1 :]
        expected = _said(message)
        with pytest.MonkeyPatch.context() as patch:
            if twin == "python":
                patch.setattr(accelerator, "pass_fields", None)
            patch.setattr(envelope, "_MAX_JOINED_BYTES", 0)
            patch.setattr(contents, "_PIECE_BYTES", piece_bytes)
            assert _said(message) == expected

    check()


def _field(tag: int, content: bytes) -> bytes:
    return bytes((tag,)) + varint(len(content)) + content


@pytest.mark.parametrize("twin", TWINS)
def test_numbers_in_several_fields_are_one_tensor(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if twin == "python":
        monkeypatch.setattr(accelerator, "pass_fields", None)
    head = _field(0x0A, b"x") + _field(0x12, b"INT32") + _field(0x1A, varint(200_005))
    some = _field(0x12, b"\1" * 200_000) + b"\x10\2\x10\3"
    rest = _field(0x12, b"\x80\1\5\6")
    message = _field(0x0A, b"m") + _field(0x2A, head + _field(0x2A, some) + _field(0x2A, rest))
    found: Tensor = decode_infer_request(message).inputs["x"]
    expected = np.array([1] * 200_000 + [2, 3, 128, 5, 6], np.int32)
    assert np.array_equal(found.data, expected)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("end", [b"\x12", b"\x12\x80", b"\x10", b"\x10\x80"])
def test_contents_that_end_within_a_field_are_refused(twin: str, end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if twin == "python":
        monkeypatch.setattr(accelerator, "pass_fields", None)
    head = _field(0x0A, b"x") + _field(0x12, b"INT32") + _field(0x1A, varint(200_000))
    message = _field(0x0A, b"m") + _field(0x2A, head + _field(0x2A, _field(0x12, b"\1" * 200_000) + end))
    with pytest.raises(InvalidArgumentError):
        decode_infer_request(message)


def test_contents_beside_raw_contents_are_refused_without_being_parsed() -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="BYTES", shape=[20_000])
    tensor.contents.bytes_contents.extend([b""] * 20_000)
    message = pb.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[b""]).SerializeToString()
    with pytest.raises(InvalidArgumentError, match="contents field must not be specified when using raw_input_content"):
        decode_infer_request(message)


def test_the_fields_of_all_tensors_are_bounded() -> None:
    tensor = _field(0x0A, b"x") + b"\x18\1" * 60
    with pytest.raises(PayloadTooLargeError, match="at most 32768 fields"):
        decode_infer_request(_field(0x0A, b"m") + _field(0x2A, tensor) * 600)


def test_a_long_id_is_refused() -> None:
    message = pb.ModelInferRequest(model_name="m", id="i" * 70_000).SerializeToString()
    with pytest.raises(PayloadTooLargeError, match="the request's id has 70000 bytes, at most 65536"):
        decode_infer_request(message)
