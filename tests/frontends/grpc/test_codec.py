from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.grpc_calls import decode_infer_request

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest, RegionSlice
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor, encode_bytes_elements
from modelserver.errors import InvalidArgumentError, NotFoundError, PayloadTooLargeError, ServerError
from modelserver.frontends.grpc import codec
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.limits import GrpcLimits

Array = np.ndarray[Any, Any]
LARGE = 64 * 1024


def message(**fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="m", **fields)


def tensor(name: str = "x", datatype: str = "FP32", shape: tuple[int, ...] = (2,), **fields: Any) -> Any:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **fields)


def decode(request: pb.ModelInferRequest, **limits: int) -> InFlightRequest:
    return decode_infer_request(request.SerializeToString(), GrpcLimits(**limits))


def refusal(request: pb.ModelInferRequest, **limits: int) -> ServerError:
    with pytest.raises(ServerError) as caught:
        decode(request, **limits)
    return caught.value


def sample(datatype: Datatype, count: int) -> Array:
    if datatype is Datatype.BYTES:
        elements = np.empty(count, dtype=object)
        elements[:] = [b"\x00" * (index % 7) + str(index).encode() for index in range(count)]
        return elements
    return np.random.default_rng(1).integers(0, 2, count).astype(datatype.numpy)


def raw_of(data: Array) -> bytes:
    return encode_bytes_elements(data.ravel()) if data.dtype == object else data.tobytes()


def test_request_fields() -> None:
    request = decode(
        message(
            model_version="3",
            id="q",
            inputs=[tensor()],
            outputs=[{"name": "b"}, {"name": "a"}],
            raw_input_contents=[bytes(8)],
            parameters={"k": pb.InferParameter(int64_param=4)},
        )
    )
    assert (request.model_name, request.version, request.id) == ("m", 3, "q")
    assert request.outputs == ("b", "a")
    assert request.parameters == {"k": 4}
    assert request.deadline_ns is None


def test_absent_fields_mean_the_defaults() -> None:
    request = decode(message())
    assert (request.version, request.id, request.outputs, request.inputs, request.parameters) == (
        None,
        "",
        None,
        {},
        {},
    )


@pytest.mark.parametrize("datatype", Datatype)
@pytest.mark.parametrize("size", [6, LARGE])
def test_every_datatype_arrives_raw(datatype: Datatype, size: int) -> None:
    data = sample(datatype, size).reshape(2, -1)
    request = decode(
        message(inputs=[tensor(datatype=datatype.value, shape=data.shape)], raw_input_contents=[raw_of(data)])
    )
    decoded = request.inputs["x"]
    assert (decoded.datatype, decoded.shape, decoded.data.dtype) == (datatype, data.shape, datatype.numpy)
    np.testing.assert_array_equal(decoded.data, data)


@pytest.mark.parametrize("padding", range(8))
def test_large_tensors_are_aligned_views_or_copies(padding: int) -> None:
    data = np.arange(LARGE, dtype=np.int64)
    request = decode(
        message(
            id="i" * padding, inputs=[tensor(datatype="INT64", shape=data.shape)], raw_input_contents=[data.tobytes()]
        )
    )
    decoded = request.inputs["x"].data
    assert decoded.flags.aligned
    np.testing.assert_array_equal(decoded, data)


def test_large_aligned_tensor_is_not_copied() -> None:
    request = message(inputs=[tensor(datatype="UINT8", shape=(LARGE,))], raw_input_contents=[bytes(LARGE)])
    serialized = request.SerializeToString()
    decoded = decode_infer_request(serialized).inputs["x"].data
    assert np.shares_memory(decoded, np.frombuffer(serialized, np.uint8))


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=8))
def test_bytes_elements_round_trip(elements: list[bytes]) -> None:
    data = np.empty(len(elements), dtype=object)
    data[:] = elements
    request = decode(
        message(
            inputs=[tensor(datatype="BYTES", shape=(len(elements),))], raw_input_contents=[encode_bytes_elements(data)]
        )
    )
    assert request.inputs["x"].data.tolist() == elements
    response = InferResponse([Tensor("y", Datatype.BYTES, data)])
    reply = pb.ModelInferResponse.FromString(b"".join(codec.encode_infer_response(request, response)))
    assert reply.raw_output_contents[0] == encode_bytes_elements(elements)


def test_typed_contents() -> None:
    contents = pb.InferTensorContents(fp32_contents=[1, 2])
    np.testing.assert_array_equal(decode(message(inputs=[tensor(contents=contents)])).inputs["x"].data, [1, 2])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    raw = decode(message(inputs=[tensor(shape=shape)], raw_input_contents=[b""]))
    typed = decode(message(inputs=[tensor(shape=shape, contents=pb.InferTensorContents())]))
    assert raw.inputs["x"].shape == typed.inputs["x"].shape == shape


def test_scalar_tensor() -> None:
    assert decode(message(inputs=[tensor(shape=())], raw_input_contents=[bytes(4)])).inputs["x"].shape == ()


def test_raw_and_contents_do_not_mix() -> None:
    inputs = [tensor("a"), tensor("b", contents=pb.InferTensorContents(fp32_contents=[1, 2]))]
    error = refusal(message(inputs=inputs, raw_input_contents=[bytes(8), bytes(8)]))
    assert isinstance(error, InvalidArgumentError)
    assert "contents field must not be specified when using raw_input_contents for input 'b'" in error.message


@pytest.mark.parametrize(("num_raws", "missing"), [(1, "unable to find data for 'b'"), (3, "got 3")])
def test_raw_count_mismatch(num_raws: int, missing: str) -> None:
    error = refusal(message(inputs=[tensor("a"), tensor("b")], raw_input_contents=[bytes(8)] * num_raws))
    assert isinstance(error, InvalidArgumentError)
    assert "expected 2 entries in raw_input_contents" in error.message
    assert missing in error.message


def test_input_without_data() -> None:
    assert (
        "unable to find data for input tensor 'x' for the model in request."
        in refusal(message(inputs=[tensor()])).message
    )


def test_wrong_byte_size_names_the_tensor() -> None:
    error = refusal(message(inputs=[tensor()], raw_input_contents=[bytes(7)]))
    assert error.message == (
        "input byte size mismatch for input 'x' for the model. Expected 8, got 7: its shape is [2] of FP32"
    )


@pytest.mark.parametrize("raw", [b"\x01", b"\x05\x00\x00\x00ab", b"\x00\x00\x00\x00" * 3, b"\xff\xff\xff\xff" * 2])
def test_malformed_bytes_tensors_name_the_tensor(raw: bytes) -> None:
    error = refusal(message(inputs=[tensor(datatype="BYTES")], raw_input_contents=[raw]))
    assert isinstance(error, InvalidArgumentError)
    assert "input 'x'" in error.message


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((-1,), "negative dimension"),
        ((-1, -2), "negative dimension"),
        ((1 << 62, 4), "too large"),
        ((0, 1 << 40, 1 << 40), "too large"),
        ((1,) * 33, "33 dimensions, at most 32"),
    ],
)
@pytest.mark.parametrize("is_raw", [True, False])
def test_impossible_shapes(shape: tuple[int, ...], text: str, is_raw: bool) -> None:
    data = {"raw_input_contents": [bytes(8)]} if is_raw else {}
    contents = {} if is_raw else {"contents": pb.InferTensorContents(fp32_contents=[1, 2])}
    error = refusal(message(inputs=[tensor(shape=shape, **contents)], **data))
    assert isinstance(error, InvalidArgumentError)
    assert "input 'x'" in error.message
    assert text in error.message


@pytest.mark.parametrize("is_raw", [True, False])
def test_a_name_beyond_the_limit_is_refused_and_not_repeated(is_raw: bool) -> None:
    data = {"raw_input_contents": [bytes(8)]} if is_raw else {}
    contents = {} if is_raw else {"contents": pb.InferTensorContents(fp32_contents=[1, 2])}
    error = refusal(message(inputs=[tensor(name="n" * 1025, **contents)], **data))
    assert isinstance(error, InvalidArgumentError)
    assert error.message == f"an input's name is longer than 1024 characters: '{'n' * 40}...'"
    longest = "n" * 1024
    assert longest in decode(message(inputs=[tensor(name=longest, **contents)], **data)).inputs


def test_unknown_datatype_lists_the_known() -> None:
    error = refusal(message(inputs=[tensor(datatype="FP8")], raw_input_contents=[bytes(2)]))
    assert "unknown datatype 'FP8', expected one of BOOL, UINT8" in error.message


@pytest.mark.parametrize("is_raw", [True, False])
def test_duplicate_input_names(is_raw: bool) -> None:
    contents = {} if is_raw else {"contents": pb.InferTensorContents(fp32_contents=[1, 2])}
    raws = [bytes(8)] * 2 if is_raw else []
    error = refusal(message(inputs=[tensor(**contents)] * 2, raw_input_contents=raws))
    assert error.message == "input 'x' already exists in request"


@pytest.mark.parametrize("is_raw", [True, False])
def test_duplicate_output_names(is_raw: bool) -> None:
    contents = {} if is_raw else {"contents": pb.InferTensorContents(fp32_contents=[1, 2])}
    outputs = [pb.ModelInferRequest.InferRequestedOutputTensor(name="y")] * 2
    raws = [bytes(8)] if is_raw else []
    error = refusal(message(inputs=[tensor(**contents)], outputs=outputs, raw_input_contents=raws))
    assert error.message == "output 'y' already exists in request"


@pytest.mark.parametrize("count", [3, 4])
def test_number_of_tensors_is_limited(count: int) -> None:
    inputs = [tensor(str(index)) for index in range(count)]
    outputs = [{"name": str(index)} for index in range(count)]
    both = [message(inputs=inputs, raw_input_contents=[bytes(8)] * count), message(outputs=outputs)]
    for request in both:
        if count == 3:
            decode(request, max_tensors=3)
        else:
            error = refusal(request, max_tensors=3)
            assert isinstance(error, PayloadTooLargeError)
            assert "at most 3 of each are allowed" in error.message


@pytest.mark.parametrize("version", ["v1", "-1", "1.0", " 1", "\u0661", "9" * 40])
def test_version_must_be_a_number(version: str) -> None:
    assert "model version must be a number" in refusal(message(model_version=version)).message


REGION = {
    "shared_memory_region": pb.InferParameter(string_param="r"),
    "shared_memory_byte_size": pb.InferParameter(int64_param=8),
}


def test_raw_contents_are_those_of_the_inputs_that_are_not_in_a_region() -> None:
    inputs = [tensor("a", parameters=REGION), tensor("b")]
    request = decode(message(inputs=inputs, raw_input_contents=[bytes(8)]))
    assert list(request.inputs) == ["b"]
    assert request.transfer is not None
    assert [item.name for item in request.transfer.inputs] == ["a"]
    assert "expected 1 entries" in refusal(message(inputs=inputs, raw_input_contents=[bytes(8)] * 2)).message


def test_outputs_in_regions_and_as_classes() -> None:
    count = {"classification": pb.InferParameter(int64_param=3)}
    outputs = [{"name": "y", "parameters": REGION}, {"name": "z", "parameters": count}]
    transfer = decode(message(outputs=outputs)).transfer
    assert transfer is not None
    assert (transfer.placed, transfer.class_counts) == ({"y": RegionSlice("r", 0, 8)}, {"z": 3})
    error = refusal(message(outputs=[{"name": "y", "parameters": REGION | count}]))
    assert "requested output 'y'" in error.message


@pytest.mark.parametrize("garbage", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\xff" * LARGE, b"\x0a\x7f" * LARGE])
def test_garbage_is_the_callers_fault(garbage: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"not a serialized inference\.ModelInferRequest"):
        decode_infer_request(garbage)


def test_id_must_be_utf8() -> None:
    with pytest.raises(InvalidArgumentError, match="id is not UTF-8"):
        decode_infer_request(b"\x0a\x01m\x1a\x01\xff")


def test_requests_that_differ_in_id_and_data_only() -> None:
    requests = [
        decode(message(id=str(value), inputs=[tensor()], raw_input_contents=[np.float32([value, -value]).tobytes()]))
        for value in (1.0, 2.0)
    ]
    assert [request.id for request in requests] == ["1.0", "2.0"]
    assert [request.inputs["x"].data.tolist() for request in requests] == [[1, -1], [2, -2]]
    assert requests[0].inputs is not requests[1].inputs
    assert requests[0].parameters is not requests[1].parameters


def test_requests_that_differ_in_parameters_only() -> None:
    requests = [
        decode(
            message(
                inputs=[tensor()],
                raw_input_contents=[bytes(8)],
                parameters={
                    "sequence_id": pb.InferParameter(int64_param=value),
                    "k": pb.InferParameter(int64_param=value),
                },
            )
        )
        for value in (1, 2)
    ]
    assert [(request.sequence_id, request.parameters) for request in requests] == [(1, {"k": 1}), (2, {"k": 2})]


def reply_of(response: InferResponse, **fields: Any) -> pb.ModelInferResponse:
    request = InFlightRequest(model_name="m", version=2, inputs={}, **fields)
    return pb.ModelInferResponse.FromString(b"".join(codec.encode_infer_response(request, response)))


@pytest.mark.parametrize("datatype", Datatype)
@pytest.mark.parametrize("size", [6, LARGE])
def test_outputs_are_raw(datatype: Datatype, size: int) -> None:
    data = sample(datatype, size).reshape(2, -1)
    reply = reply_of(InferResponse([Tensor("y", datatype, data)]))
    assert (reply.model_name, reply.model_version, reply.id) == ("m", "2", "")
    (output,) = reply.outputs
    assert (output.name, output.datatype, tuple(output.shape)) == ("y", datatype.value, data.shape)
    assert not output.HasField("contents")
    assert list(reply.raw_output_contents) == [raw_of(data)]


@pytest.mark.parametrize("size", [4, 500])
def test_strided_outputs_are_laid_out_in_order(size: int) -> None:
    data = np.arange(size * size, dtype=np.float32).reshape(size, size).T
    reply = reply_of(InferResponse([Tensor("y", Datatype.FP32, data)]))
    assert reply.raw_output_contents[0] == data.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_outputs_without_dimensions_or_elements(shape: tuple[int, ...]) -> None:
    data = np.ones(shape, np.float64)
    reply = reply_of(InferResponse([Tensor("y", Datatype.FP64, data)]))
    assert (tuple(reply.outputs[0].shape), reply.raw_output_contents[0]) == (shape, data.tobytes())


def test_reply_is_what_protobuf_would_write() -> None:
    first = Tensor("a", Datatype.INT32, np.arange(200, dtype=np.int32))
    second = Tensor("b", Datatype.FP32, np.zeros((1, 3), np.float32))
    response = InferResponse([first, second], parameters={"k": "v"})
    request = InFlightRequest(model_name="m", version=2, inputs={}, id="\u00e9" * 100)
    encoded = b"".join(codec.encode_infer_response(request, response))
    assert encoded == pb.ModelInferResponse.FromString(encoded).SerializeToString()


def test_reply_carries_id_and_parameters() -> None:
    reply = reply_of(InferResponse(parameters={"n": 1 << 63, "ok": True}), id="\u00e9")
    assert reply.id == "\u00e9"
    assert reply.parameters["n"].uint64_param == 1 << 63
    assert reply.parameters["ok"].bool_param is True


@pytest.mark.parametrize("is_final", [True, False])
@pytest.mark.parametrize("size", [1, LARGE])
def test_stream_response_tells_whether_it_is_final(is_final: bool, size: int) -> None:
    data = np.zeros(size, np.uint8)
    response = InferResponse([Tensor("y", Datatype.UINT8, data)], parameters={"k": 1}, is_final=is_final)
    encoded = b"".join(
        codec.encode_stream_response(InFlightRequest(model_name="m", version=1, inputs={}, id="q"), response)
    )
    reply = pb.ModelStreamInferResponse.FromString(encoded)
    assert reply.error_message == ""
    assert reply.infer_response.id == "q"
    assert reply.infer_response.parameters["triton_final_response"].bool_param is is_final
    assert reply.infer_response.parameters["k"].int64_param == 1
    assert reply.infer_response.raw_output_contents[0] == data.tobytes()


@pytest.mark.parametrize(("text", "shown"), [("no such model", "no such model"), ("", "not_found"), ("\ud800", "?")])
def test_stream_error_names_request_and_reason(text: str, shown: str) -> None:
    reply = pb.ModelStreamInferResponse.FromString(codec.encode_stream_error("q", NotFoundError(text)))
    assert (reply.error_message, reply.infer_response.id) == (shown, "q")
    assert reply.infer_response.parameters["triton_final_response"].bool_param is True


def test_id_of_an_undecodable_request() -> None:
    assert codec.request_id(message(id="q", model_version="x").SerializeToString()) == "q"
    assert codec.request_id(b"\xff") == ""
