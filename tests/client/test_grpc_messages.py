"""Messages of gRPC in frames, and what those of a stream say."""

from __future__ import annotations

import pytest

from modelserver.client.grpc_messages import frame, read_stream_answer, status_name, unframe
from modelserver.pb import grpc_service_pb2 as pb


@pytest.mark.parametrize("algorithm", ["none", "gzip", "deflate"])
def test_frames_come_back(algorithm: str) -> None:
    framed = frame(b"message" * 100, algorithm)
    assert framed[0] == (algorithm != "none")
    assert int.from_bytes(framed[1:5], "big") == len(framed) - 5
    assert unframe(framed, algorithm) == b"message" * 100


def test_an_error_of_a_stream() -> None:
    answer = read_stream_answer(pb.ModelStreamInferResponse(error_message="bad").SerializeToString())
    assert (answer.error, answer.is_final, answer.has_outputs) == ("bad", None, False)


@pytest.mark.parametrize("is_final", [True, False, None])
@pytest.mark.parametrize("has_outputs", [True, False])
def test_what_a_response_says(is_final: bool | None, has_outputs: bool) -> None:
    message = pb.ModelStreamInferResponse()
    message.infer_response.model_name = "m"
    message.infer_response.parameters["other"].int64_param = 300
    if is_final is not None:
        message.infer_response.parameters["triton_final_response"].bool_param = is_final
    if has_outputs:
        message.infer_response.outputs.add(name="OUT", datatype="FP32", shape=[1])
        message.infer_response.raw_output_contents.append(b"1234")
    answer = read_stream_answer(message.SerializeToString())
    assert (answer.error, answer.is_final, answer.has_outputs) == ("", is_final, has_outputs)


@pytest.mark.parametrize("raw", [b"\x0a\xff", b"\x0a", b"\x0b", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"])
def test_what_is_no_message(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a message of ModelStreamInfer"):
        read_stream_answer(raw)


def test_status_names() -> None:
    assert status_name(14) == "UNAVAILABLE"
    assert status_name(99) == "status 99"
