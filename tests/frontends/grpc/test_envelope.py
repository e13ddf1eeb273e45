from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from modelserver.core.long_work import finish
from modelserver.frontends.grpc import envelope
from modelserver.pb import grpc_service_pb2 as pb


@given(st.integers(0, (1 << 64) - 1))
def test_varint_is_protobufs(value: int) -> None:
    expected = pb.InferParameter(uint64_param=value).SerializeToString()
    assert b"\x28" + envelope.varint(value) == expected


@given(
    name=st.text(max_size=20),
    request_id=st.text(max_size=20),
    raws=st.lists(st.binary(max_size=300) | st.sampled_from([bytes(4095), bytes(4096), bytes(20_000)]), max_size=5),
    parameters=st.dictionaries(st.text(max_size=3), st.integers(-5, 5), max_size=2),
    num_outputs=st.integers(0, 2),
)
def test_split_takes_out_id_and_raw_contents(
    name: str, request_id: str, raws: list[bytes], parameters: dict[str, int], num_outputs: int
) -> None:
    request = pb.ModelInferRequest(model_name=name)
    request.inputs.add(name="a", datatype="FP32", shape=[1, 16])
    for key, value in parameters.items():
        request.parameters[key].int64_param = value
    for _ in range(num_outputs):
        request.outputs.add(name="o" * 200)
    head = pb.ModelInferRequest.FromString(request.SerializeToString())
    request.id = request_id
    request.raw_input_contents.extend(raws)
    split = envelope.split_request(request.SerializeToString())
    assert pb.ModelInferRequest.FromString(split.head) == head
    assert (split.id.decode(), [bytes(raw) for raw in split.raws]) == (request_id, raws)
    assert split.num_parameters == len(parameters)


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_large_contents_are_views_of_the_message(buffer: type) -> None:
    message = buffer(pb.ModelInferRequest(raw_input_contents=[bytes(5000), b"small"]).SerializeToString())
    large, small = envelope.split_request(message).raws
    assert isinstance(large, memoryview)
    assert large.obj is (message.obj if isinstance(message, memoryview) else message)
    assert (bytes(large), bytes(small)) == (bytes(5000), b"small")


def test_fields_may_come_in_any_order() -> None:
    fields = [b"\x3a\x01x", b"\x0a\x01m", b"\x3a\x01y", b"\x1a\x01p", b"\x12\x011", b"\x1a\x01q"]
    split = envelope.split_request(b"".join(fields))
    assert (split.head, split.id, split.raws) == (b"\x0a\x01m\x12\x011", b"q", [b"x", b"y"])


def test_longer_forms_of_tags_and_lengths_are_understood() -> None:
    split = envelope.split_request(b"\x9a\x00\x81\x00q" + b"\xba\x80\x00\x01x" + b"\xa2\x00\x00")
    assert (split.id, split.raws, split.num_parameters) == (b"q", [b"x"], 1)


@pytest.mark.parametrize("owner", ["inputs", "outputs"])
def test_parameters_of_tensors_are_counted(owner: str) -> None:
    request = pb.ModelInferRequest(model_name="m")
    getattr(request, owner).add(name="few").parameters["p"].int64_param = 1
    tensor = getattr(request, owner).add(name="many")
    for number in range(3):
        tensor.parameters[f"p{number}"].string_param = "p" * 200
    head = request.SerializeToString()
    envelope.check_tensor_fields(head, 3)
    with pytest.raises(envelope.TooManyFieldsError):
        envelope.check_tensor_fields(head, 2)
    for cut in (b"\x2a\x02\x22\x09", b"\x2a\x01\x23", b"\x32\x01\x12"):
        with pytest.raises(envelope.MalformedError):
            envelope.check_tensor_fields(cut, 3)


def test_unknown_fields_of_every_wire_type_are_kept() -> None:
    unknown = b"\xa0\x06\x05" + b"\xa1\x06" + bytes(8) + b"\xa5\x06" + bytes(4) + b"\xa2\x06\x02hi"
    assert envelope.split_request(unknown + b"\x3a\x01x").head == unknown


@given(st.binary(max_size=60))
def test_what_protobuf_accepts_is_split_as_protobuf_reads_it(message: bytes) -> None:
    try:
        whole = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        return
    if any(byte & 7 in (3, 4) for byte in message):
        return  # perhaps a group, which no gRPC client writes
    split = envelope.split_request(message)
    assert ([bytes(raw) for raw in split.raws], split.id.decode()) == (list(whole.raw_input_contents), whole.id)


@pytest.mark.parametrize(
    "message",
    [
        b"\x80",
        b"\x3a",
        b"\x3a\x05abc",
        b"\x3a\x80",
        b"\x0b",
        b"\x08\x80",
        b"\x09abc",
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    ],
)
def test_what_cannot_be_walked_is_malformed(message: bytes) -> None:
    with pytest.raises(envelope.MalformedError):
        envelope.split_request(message)


def test_a_long_head_stays_in_views_of_the_message() -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(bytes(1 << 20))
    message = pb.ModelInferRequest(model_name="m", id="i", inputs=[tensor]).SerializeToString()
    split = envelope.split_request(message)
    assert (split.head, bytes(split.id)) == (b"", b"i")
    assert b"".join(split.pieces) == message.replace(b"\x1a\1i", b"", 1)
    assert [piece.obj is message for piece in split.pieces if isinstance(piece, memoryview)] == [True]
    parts, contents = finish(envelope.cut_contents(split.pieces))
    assert len(b"".join(parts)) < 64
    assert [view.obj is message for views in contents for view in views] == [True]
