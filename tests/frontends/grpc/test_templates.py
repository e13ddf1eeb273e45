"""Whatever is asked in whatever order, a decoder that knows requests says what one that knows none says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ResponseStream
from modelserver.core.tensor import Buffer, encode_bytes_elements
from modelserver.errors import ServerError
from modelserver.frontends.grpc.decoder import InferDecoder
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.limits import GrpcLimits

STREAM = ResponseStream()


def _decoder() -> InferDecoder:
    return InferDecoder(GrpcLimits(max_tensors=4))


def _message(*arrays: Any, **fields: Any) -> bytes:
    """FP32 inputs x0, x1 and so on, in raw contents."""
    message = pb.ModelInferRequest(**{"model_name": "m", **fields})
    for index, values in enumerate(arrays):
        data = np.array(values, np.float32)
        message.inputs.add(name=f"x{index}", datatype="FP32", shape=data.shape)
        message.raw_input_contents.append(data.tobytes())
    return message.SerializeToString()


def _said(decoder: InferDecoder, message: Buffer) -> str:
    """All that a decoder says of a message, comparable."""
    try:
        request = decoder.decode(message, STREAM)
    except ServerError as error:
        return repr((type(error), error.code, error.message))
    assert request.stream is STREAM
    return repr(_facts(request))


def _facts(request: InFlightRequest) -> object:
    inputs = [
        (name, tensor.name, tensor.datatype, tensor.data.shape, tensor.data.dtype, tensor.data.tolist())
        for name, tensor in request.inputs.items()
    ]
    fields = ("model_name", "version", "id", "outputs", "parameters", "priority", "timeout_us", "sequence_id")
    return inputs, [getattr(request, name) for name in (*fields, "sequence_start", "sequence_end", "rows")]


def _is_known(decoder: InferDecoder, message: Buffer) -> bool:
    return decoder.decode(message, STREAM).form is not None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_message([1, 2]), _message([3, 4])),
        (_message([[1]], [2, 3], [4]), _message([[5]], [6, 7], [8])),
        (_message([1], model_version="3"), _message([2], model_version="3")),
        (_message([1], id="a"), _message([2], id="other")),
        (_message([1], model_version="3", id="a"), _message([2], model_version="3", id="b")),
        (b"\x1a\x01i" + _message([1]), b"\x1a\x02jk" + _message([2])),
        (_message([1], id="n" * 127), _message([2], id="é" * 60)),
        (
            _message([1], outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="o")]),
            _message([7], outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="o")]),
        ),
        (_message(range(2000)), _message(range(2000, 4000))),
    ],
)
@pytest.mark.parametrize("as_buffer", [bytes, memoryview])
def test_the_second_request_is_known(first: bytes, second: bytes, as_buffer: Any) -> None:
    decoder = _decoder()
    assert not _is_known(decoder, as_buffer(first))
    assert _said(decoder, as_buffer(second)) == _said(_decoder(), second)
    assert _is_known(decoder, as_buffer(second))


@pytest.mark.parametrize(
    "message",
    [
        _message([]),
        _message([1], parameters={"a": pb.InferParameter(int64_param=1)}),
        _message([1], id="i" * 128),
        _message([1]) + b"\x0a\x01q",  # the model's name, again
        pb.ModelInferRequest(
            model_name="m",
            inputs=[pb.ModelInferRequest.InferInputTensor(name="b", datatype="BYTES", shape=[1])],
            raw_input_contents=[encode_bytes_elements([b"x"])],
        ).SerializeToString(),
        pb.ModelInferRequest(
            model_name="m",
            inputs=[
                pb.ModelInferRequest.InferInputTensor(
                    name="x", datatype="FP32", shape=[1], contents=pb.InferTensorContents(fp32_contents=[1])
                )
            ],
        ).SerializeToString(),
    ],
)
def test_what_is_unusual_is_decoded_in_full(message: bytes) -> None:
    decoder = _decoder()
    first = _said(decoder, message)
    for _ in range(2):
        assert _said(decoder, message) == first == _said(_decoder(), message)
        assert not _is_known(decoder, message)


def test_lengths_written_in_more_bytes_than_needed() -> None:
    head = _message([1]).removesuffix(b"\x3a\x04\0\0\x80\x3f")
    padded = head + b"\x3a\x84\x00" + b"\0\0\x80\x3f"
    decoder = _decoder()
    for _ in range(3):
        assert decoder.decode(padded, STREAM).inputs["x0"].data.tolist() == [1.0]
        assert _said(decoder, _message([2])) == _said(_decoder(), _message([2]))


def test_sizes_that_split_differently() -> None:
    """Two messages of one size and like beginnings, whose tensors begin at different places."""
    messages = [_message([1] * size, [2] * (12 - size)) for size in range(1, 12)]
    assert len({len(message) for message in messages}) == 1
    decoder = _decoder()
    for message in messages * 3:
        assert _said(decoder, message) == _said(_decoder(), message)


def test_an_id_that_is_not_utf8_is_refused_also_when_the_rest_is_known() -> None:
    decoder = _decoder()
    message = _message([1], id="ab")
    decoder.decode(message, STREAM)
    with pytest.raises(ServerError, match="not UTF-8"):
        decoder.decode(message.replace(b"ab", b"\xff\xfe"), STREAM)


def test_large_tensors_are_aligned_views_and_small_ones_copies() -> None:
    message = _message(range(2048), [1, 2])
    start = message.index(np.arange(2048, dtype=np.float32).tobytes())
    decoder = _decoder()
    for shift in range(4):
        room = np.empty(len(message) + 64, np.uint8)
        begin = -(room.ctypes.data + start) % 64 + shift
        room[begin : begin + len(message)] = np.frombuffer(message, np.uint8)
        decoder.decode(message, STREAM)
        inputs = decoder.decode(room.data[begin : begin + len(message)], STREAM).inputs
        large, small = inputs["x0"].data, inputs["x1"].data
        assert (np.shares_memory(large, room), np.shares_memory(small, room)) == (shift == 0, False)
        assert large.flags.aligned
        assert (large.tolist(), small.tolist()) == (list(range(2048)), [1, 2])


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelserver.frontends.grpc.decoder._MAX_TEMPLATES", 4)
    decoder = _decoder()
    for number in range(1, 20):
        for fields in ({}, {"id": "i"}):
            message = _message([1] * number, model_name=f"m{number}", **fields)
            decoder.decode(message, STREAM)
            assert _is_known(decoder, message)
    known = decoder._templates
    assert max(len(known._plain), len(known._with_id), len(known._data_lens)) <= 4


_TENSORS = [
    pb.ModelInferRequest.InferInputTensor(name=name, datatype="FP32", shape=[size])
    for name, size in (("x", 1), ("y", 2))
]
_FIELD = st.sampled_from(
    [
        b"\x0a\x01m",
        b"\x0a\x01n",
        b"\x12\x011",
        b"\x12\x00",
        b"\x1a\x01i",
        b"\x1a\x02jk",
        b"\x1a\x00",
        b"\x3a\x04\0\0\x80\x3f",
        b"\x3a\x08" + bytes(8),
        *(pb.ModelInferRequest(inputs=[tensor]).SerializeToString() for tensor in _TENSORS),
        b"\x32\x03" + pb.ModelInferRequest.InferRequestedOutputTensor(name="o").SerializeToString(),
    ]
)


@given(st.lists(st.lists(_FIELD, min_size=1, max_size=7), min_size=1, max_size=5), st.data())
def test_fields_in_any_order_whole_and_damaged(messages: list[list[bytes]], data: st.DataObject) -> None:
    decoder = _decoder()
    usual = _message([1], id="i")
    for _ in range(2):
        for fields in messages:
            damaged = bytearray(usual)
            damaged[data.draw(st.integers(0, len(usual) - 1))] = data.draw(st.integers(0, 255))
            for message in (
                b"".join(fields),
                b"".join(sorted(fields, key=lambda field: field[0])),
                usual,
                bytes(damaged),
            ):
                assert _said(decoder, message) == _said(_decoder(), message)


def test_every_datatype() -> None:
    decoder = _decoder()
    for datatype in Datatype:
        if datatype.itemsize is None:
            continue
        message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(range(1, 1 + datatype.itemsize))])
        message.inputs.add(name="x", datatype=datatype.value, shape=[1])
        serialized = message.SerializeToString()
        assert _said(decoder, serialized) == _said(decoder, serialized)
        assert _is_known(decoder, serialized)
