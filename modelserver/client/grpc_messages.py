"""gRPC messages as a load generator reads and writes them: framed, and scanned without being parsed."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

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

# Fields of ModelStreamInferResponse and ModelInferResponse.
_ERROR_MESSAGE = 1
_INFER_RESPONSE = 2
_PARAMETERS = 4
_RAW_OUTPUT_CONTENTS = 6

_IS_FINAL = b"triton_final_response"


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
    """What one message of ModelStreamInfer says. `is_final` is None where the server does not tell."""

    error: str
    is_final: bool | None
    has_outputs: bool


def read_stream_answer(message: bytes) -> StreamAnswer:
    """Raises ValueError for what is no ModelStreamInferResponse."""
    error, is_final, has_outputs = "", None, False
    for number, content in _fields(message):
        if number == _ERROR_MESSAGE:
            error = content.decode(errors="replace")
        elif number == _INFER_RESPONSE:
            for inner, value in _fields(content):
                if inner == _PARAMETERS and _IS_FINAL in value:
                    is_final = pb.ModelInferResponse.FromString(_whole(value)).parameters[_IS_FINAL.decode()].bool_param
                elif inner == _RAW_OUTPUT_CONTENTS or inner == _RAW_OUTPUT_CONTENTS - 1:
                    has_outputs = True
    return StreamAnswer(error, is_final, has_outputs)


def _whole(parameter: bytes) -> bytes:
    """A ModelInferResponse that has nothing but this entry of its parameters."""
    return bytes([_PARAMETERS << 3 | 2]) + _varint(len(parameter)) + parameter


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a message that are made of bytes, with their numbers; others are passed over."""
    offset, size = 0, len(message)
    while offset < size:
        key, offset = _read_varint(message, offset)
        kind = key & 7
        if kind == 2:
            length, offset = _read_varint(message, offset)
            if offset + length > size:
                raise ValueError("a field is longer than its message")
            yield key >> 3, message[offset : offset + length]
            offset += length
        elif kind == 0:
            _, offset = _read_varint(message, offset)
        elif kind in (1, 5):
            offset += 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of wire type {kind}")


def _read_varint(message: bytes, offset: int) -> tuple[int, int]:
    number, shift = 0, 0
    while shift < 64:
        if offset >= len(message):
            break
        octet = message[offset]
        offset += 1
        number |= (octet & 0x7F) << shift
        if octet < 0x80:
            return number, offset
        shift += 7
    raise ValueError("a number is cut short")


def _varint(number: int) -> bytes:
    octets = []
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])
