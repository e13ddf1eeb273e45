from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from modelserver.frontends.grpc import envelope
from modelserver.pb import grpc_service_pb2 as pb

RAWS = st.lists(st.binary(max_size=300), max_size=6)


@given(st.integers(0, (1 << 64) - 1))
def test_varint_is_protobufs(value: int) -> None:
    expected = pb.InferParameter(uint64_param=value).SerializeToString()
    assert b"\x28" + envelope.varint(value) == expected


@given(name=st.text(max_size=20), request_id=st.text(max_size=20), raws=RAWS, priority=st.integers(-5, 5))
def test_split_leaves_everything_but_the_raw_contents(
    name: str, request_id: str, raws: list[bytes], priority: int
) -> None:
    request = pb.ModelInferRequest(model_name=name, id=request_id)
    request.parameters["priority"].int64_param = priority
    request.inputs.add(name="a", datatype="FP32", shape=[1, 16])
    rest = request.SerializeToString()
    request.raw_input_contents.extend(raws)
    left, found = envelope.split_raw_contents(request.SerializeToString())
    assert (pb.ModelInferRequest.FromString(left), [bytes(raw) for raw in found]) == (
        pb.ModelInferRequest.FromString(rest),
        raws,
    )


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_split_gives_views_of_the_message(buffer: type) -> None:
    message = buffer(pb.ModelInferRequest(raw_input_contents=[b"abc"]).SerializeToString())
    (raw,) = envelope.split_raw_contents(message)[1]
    assert raw.obj is (message.obj if isinstance(message, memoryview) else message)


def test_split_keeps_unknown_fields_of_every_wire_type() -> None:
    unknown = b"\xa0\x06\x05" + b"\xa1\x06" + bytes(8) + b"\xa5\x06" + bytes(4) + b"\xa2\x06\x02hi"
    assert envelope.split_raw_contents(unknown + b"\x3a\x01x") == (unknown, [b"x"])


@given(st.binary(max_size=60))
def test_split_agrees_with_protobuf_on_what_is_malformed(message: bytes) -> None:
    """Whatever can be walked here is left to protobuf to judge; nothing that it accepts is refused here."""
    try:
        whole = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        return
    if any(message[index] & 7 in (3, 4) for index in range(len(message))):
        return  # groups: proto2, known to no gRPC client
    _, raws = envelope.split_raw_contents(message)
    assert [bytes(raw) for raw in raws] == list(whole.raw_input_contents)


@pytest.mark.parametrize(
    "message", [b"\x80", b"\x3a\x05abc", b"\x0b", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"]
)
def test_split_refuses_what_cannot_be_walked(message: bytes) -> None:
    with pytest.raises(envelope.MalformedError):
        envelope.split_raw_contents(message)
