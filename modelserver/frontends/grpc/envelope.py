"""The outermost protobuf layer of inference messages, by hand, so that big tensors are not copied through protobuf.

Knows tags, varints and the numbers of the few fields it writes; the content of a message stays with
the generated classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from modelserver.core.datatype import Datatype
from modelserver.core.long_work import Slices, finish
from modelserver.core.tensor import Buffer
from modelserver.pb import grpc_service_pb2 as pb

# Tags of ModelInferRequest: field number and wire type in one.
_ID, _PARAMETERS, _RAW_INPUT_CONTENTS = 0x1A, 0x22, 0x3A
_INPUTS = _CONTENTS = 0x2A
# The tags of parameters in its tensors.
_PARAMETERS_OF = {0x2A: 0x22, 0x32: 0x12}
# Wire types: what follows a tag.
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
# Fields of a tensor besides its parameters: name, datatype, contents, and one per dimension if the shape is unpacked.
_MAX_OTHER_FIELDS = 64
# Smaller data is copied: cheaper than a view, and aligned.
_VIEW_BYTES = 4096
# A longer head stays in pieces, which are views of the message: a copy of it would block the event loop.
_MAX_JOINED_BYTES = 16 * 1024
# Fields that are read before other threads get a turn: about a millisecond.
_FIELDS_AT_ONCE = 1024


class MalformedError(Exception):
    """The bytes are not a protobuf message that can be walked here."""


class TooManyFieldsError(Exception):
    """A message has more fields than its limits allow; `num_parameters` of the fields read are parameters."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__(num_parameters)
        self.num_parameters = num_parameters


@dataclass(slots=True)
class SplitRequest:
    """A ModelInferRequest in pieces: `head` is a serialized one without the fields that the other attributes hold.

    A long head is in `pieces` of whole fields instead, and `head` is empty. Large entries of `raws` and `pieces` are
    views of the message. `num_parameters` are those of the request itself.
    """

    head: bytes
    id: Buffer
    raws: list[Buffer]
    num_parameters: int
    pieces: Sequence[Buffer] = ()


def split_request(message: Buffer, max_fields: int = 1 << 16) -> SplitRequest:
    """Take id and raw_input_contents out of a serialized ModelInferRequest.

    Raises MalformedError if the message cannot be walked; otherwise the head may still be malformed. Raises
    TooManyFieldsError for one with more than `max_fields`.
    """
    data = message if isinstance(message, bytes) else memoryview(message).cast("B")
    end = len(data)
    head: list[Buffer] = []
    raws: list[Buffer] = []
    request_id: Buffer = b""
    num_parameters = 0
    offset = kept_from = 0
    try:
        for _ in range(max_fields):
            if offset >= end:
                break
            start = offset
            tag = data[offset]
            size = data[offset + 1]
            # One byte each for tag and length is the rule in heads.
            if tag & 7 == _LENGTH_DELIMITED and tag < 0x80 and size < 0x80:
                body = offset + 2
                offset = body + size
            else:
                tag, body, offset = read_field(data, offset)
            if offset > end:
                raise MalformedError
            if tag == _RAW_INPUT_CONTENTS:
                raws.append(data[body:offset] if offset - body < _VIEW_BYTES else memoryview(data)[body:offset])
            elif tag == _ID:
                request_id = data[body:offset] if offset - body < _VIEW_BYTES else memoryview(data)[body:offset]
            else:
                num_parameters += tag == _PARAMETERS
                continue
            if start > kept_from:
                is_short = start - kept_from < _VIEW_BYTES
                head.append(data[kept_from:start] if is_short else memoryview(data)[kept_from:start])
            kept_from = offset
    except IndexError:
        raise MalformedError from None
    if offset < end:
        raise TooManyFieldsError(num_parameters)
    if kept_from < end:
        head.append(data[kept_from:end] if end - kept_from < _VIEW_BYTES else memoryview(data)[kept_from:end])
    if end > _MAX_JOINED_BYTES and sum(map(len, head)) > _MAX_JOINED_BYTES:
        return SplitRequest(b"", request_id, raws, num_parameters, head)
    return SplitRequest(b"".join(head), request_id, raws, num_parameters)


def check_tensor_fields(head: bytes, max_parameters: int) -> None:
    """Count the fields of each input and output in a SplitRequest's `head`; parses none of them.

    Raises MalformedError, and TooManyFieldsError for a tensor with more fields than it can need.
    """
    finish(tensor_field_slices((head,), max_parameters, len(head)))


def tensor_field_slices(pieces: Sequence[Buffer], max_parameters: int, max_fields: int) -> Slices[None]:
    """As `check_tensor_fields`, in slices, for the `pieces` of a long head.

    Raises TooManyFieldsError, too, if all inputs and outputs together have more than `max_fields`.
    """
    most = max_parameters + _MAX_OTHER_FIELDS
    num_fields = 0
    for piece in pieces:
        for tag, body, end in _fields(piece, 0, len(piece)):
            wanted = _PARAMETERS_OF.get(tag)
            if wanted is None:
                continue
            num_parameters = num_others = 0
            for inner, _, _ in _fields(piece, body, end):
                num_parameters += inner == wanted
                num_others += inner != wanted
                num_fields += 1
                if num_parameters > max_parameters or num_parameters + num_others > most or num_fields > max_fields:
                    raise TooManyFieldsError(num_parameters)
                if num_fields % _FIELDS_AT_ONCE == 0:
                    yield


def _fields(data: Buffer, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """For each field between `offset` and `end`: its tag, and where its body begins and ends."""
    try:
        while offset < end:
            tag, body, offset = read_field(data, offset)
            yield tag, body, offset
    except IndexError:
        raise MalformedError from None
    if offset > end:
        raise MalformedError


def cut_contents(pieces: Sequence[Buffer]) -> Slices[tuple[list[Buffer], list[list[memoryview]]]]:
    """The parts of a long head with empty `contents` in its inputs, and the serialized contents of each of these.

    The fields of its tensors were counted before. Raises MalformedError.
    """
    kept: list[Buffer] = []
    contents: list[list[memoryview]] = []
    for piece in pieces:
        view = memoryview(piece)
        start = 0
        for tag, body, end in _fields(piece, 0, len(piece)):
            if tag != _INPUTS:
                kept.append(view[start:end])
                start = end
                continue
            views: list[memoryview] = []
            rest: list[Buffer] = []
            at = body
            for inner, inner_body, inner_end in _fields(piece, body, end):
                if inner == _CONTENTS:
                    views.append(view[inner_body:inner_end])
                else:
                    rest.append(view[at:inner_end])
                at = inner_end
            size = sum(map(len, rest)) + 2 * bool(views)
            kept += (b"\x2a", varint(size), *rest, b"\x2a\0" * bool(views))
            start = end
            contents.append(views)
            yield
    return kept, contents


def read_field(data: Buffer, offset: int) -> tuple[int, int, int]:
    """The tag of the field at `offset`, where its body begins, and where the next field begins.

    Raises IndexError where the data ends within its tag or number.
    """
    tag, offset = _read_varint(data, offset)
    wire_type = tag & 7
    if wire_type == _LENGTH_DELIMITED:
        size, body = _read_varint(data, offset)
        return tag, body, body + size
    if wire_type == _VARINT:
        return tag, offset, _read_varint(data, offset)[1]
    if wire_type in (_FIXED64, _FIXED32):
        return tag, offset, offset + (8 if wire_type == _FIXED64 else 4)
    raise MalformedError


def _read_varint(data: Buffer, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise MalformedError


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


@lru_cache(maxsize=256)
def model_fields(name: str, version: str) -> bytes:
    """The model_name and model_version fields of a ModelInferResponse."""
    return pb.ModelInferResponse(model_name=name, model_version=version).SerializeToString()


@lru_cache(maxsize=1024)
def output_field(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """One entry of `outputs` of a ModelInferResponse; the data follows in raw_output_contents."""
    output = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    return pb.ModelInferResponse(outputs=[output]).SerializeToString()


@lru_cache(maxsize=1024)
def lone_output_fields(
    model_name: str, version: int | None, name: str, datatype: Datatype, shape: tuple[int, ...], size: int
) -> bytes:
    """All of a ModelInferResponse with one output, no id and no parameters, but for the `size` bytes of its data."""
    return (
        model_fields(model_name, "" if version is None else str(version))
        + output_field(name, datatype.value, shape)
        + raw_output_head(size)
    )


def raw_input_head(size: int) -> bytes:
    """The bytes before an entry of raw_input_contents that is `size` bytes long."""
    return b"\x3a" + varint(size)


def raw_output_head(size: int) -> bytes:
    """The bytes before an entry of raw_output_contents that is `size` bytes long."""
    return b"\x32" + varint(size)


def infer_response_head(size: int) -> bytes:
    """The bytes before an infer_response of `size` bytes in a ModelStreamInferResponse."""
    return b"\x12" + varint(size)
