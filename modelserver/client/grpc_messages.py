"""gRPC messages as a client reads and writes them: framed, and what an answer of a stream says."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from modelserver.pb import grpc_service_pb2 as pb

PREFIX_BYTES = 5
SERVICE = "inference.GRPCInferenceService"

# google.rpc.Code.
STATUS_NAMES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
UNIMPLEMENTED = 12

_IS_FINAL = "triton_final_response"


def frame(message: bytes, algorithm: str = "none") -> bytes:
    """The message behind its prefix: one byte that says whether it is compressed, four of length."""
    if algorithm == "none":
        return b"\x00" + len(message).to_bytes(4, "big") + message
    packed = gzip.compress(message, 6, mtime=0) if algorithm == "gzip" else zlib.compress(message)
    return b"\x01" + len(packed).to_bytes(4, "big") + packed


def unframe(framed: bytes, algorithm: str) -> bytes:
    """The message of one frame that is complete."""
    body = framed[PREFIX_BYTES:]
    if not framed[0]:
        return body
    return gzip.decompress(body) if algorithm == "gzip" else zlib.decompress(body)


def status_name(code: int) -> str:
    return STATUS_NAMES[code] if 0 <= code < len(STATUS_NAMES) else f"status {code}"


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """The contents of one message of ModelStreamInfer. `is_final` is None where the server does not say."""

    error: str
    is_final: bool | None
    has_outputs: bool


def read_stream_answer(message: bytes) -> StreamAnswer:
    """Raises ValueError for bytes that are not a ModelStreamInferResponse."""
    try:
        answer = pb.ModelStreamInferResponse.FromString(message)
    except DecodeError as error:
        raise ValueError(f"not a message of ModelStreamInfer: {error}") from None
    response = answer.infer_response
    is_final = response.parameters[_IS_FINAL].bool_param if _IS_FINAL in response.parameters else None
    return StreamAnswer(answer.error_message, is_final, bool(response.outputs or response.raw_output_contents))
