"""The outermost protobuf layer of inference messages, by hand, so that big tensors are not copied through protobuf.

Knows tags, varints and the numbers of the few fields it writes; the content of a message stays with
the generated classes.
"""

from __future__ import annotations

from functools import lru_cache

from modelserver.core.tensor import Buffer
from modelserver.pb import grpc_service_pb2 as pb

_RAW_INPUT_CONTENTS = 7
# Wire types: what follows a tag.
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


class MalformedError(Exception):
    """The bytes are not a protobuf message that can be split here; the generated parser decides what they are."""


def varint(value: int) -> bytes:
    """The protobuf encoding of an unsigned number."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def split_raw_contents(message: Buffer) -> tuple[bytes, list[memoryview]]:
    """Take raw_input_contents out of a serialized ModelInferRequest, as views of `message`.

    Returns what is left, still a serialized ModelInferRequest, and the raw contents in order.
    Raises MalformedError where the message cannot be walked.
    """
    view = memoryview(message).cast("B")
    end = len(view)
    rest: list[memoryview] = []
    raws: list[memoryview] = []
    offset = 0
    while offset < end:
        start = offset
        tag, offset = _read_varint(view, offset)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            size, offset = _read_varint(view, offset)
            body, offset = offset, offset + size
            if offset > end:
                raise MalformedError
            if tag >> 3 == _RAW_INPUT_CONTENTS:
                raws.append(view[body:offset])
                continue
        elif wire_type == _VARINT:
            _, offset = _read_varint(view, offset)
        elif wire_type in (_FIXED64, _FIXED32):
            offset += 8 if wire_type == _FIXED64 else 4
        else:
            raise MalformedError
        rest.append(view[start:offset])
    return b"".join(rest), raws


def _read_varint(view: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    while offset < len(view) and shift < 64:
        byte = view[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
    raise MalformedError


@lru_cache(maxsize=256)
def model_fields(name: str, version: str) -> bytes:
    """The model_name and model_version fields of a ModelInferResponse."""
    return pb.ModelInferResponse(model_name=name, model_version=version).SerializeToString()


@lru_cache(maxsize=1024)
def output_field(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """One entry of `outputs` of a ModelInferResponse; the data follows in raw_output_contents."""
    output = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    return pb.ModelInferResponse(outputs=[output]).SerializeToString()


def raw_output_head(size: int) -> bytes:
    """What precedes one entry of raw_output_contents that is `size` bytes long."""
    return b"\x32" + varint(size)


def infer_response_head(size: int) -> bytes:
    """What precedes the infer_response, `size` bytes long, in a ModelStreamInferResponse."""
    return b"\x12" + varint(size)
