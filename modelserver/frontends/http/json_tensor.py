"""Tensor elements as JSON: nested or flat `data` of a request, flat `data` of a response. NaN and Infinity are
bare tokens, as Triton writes them."""

from __future__ import annotations

import json
import re
import struct
from functools import lru_cache
from itertools import islice
from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson

from modelserver.core import accelerator
from modelserver.core.datatype import Datatype
from modelserver.core.element_arrays import SLICE_ELEMENTS, empty_array
from modelserver.core.json_pieces import STRING
from modelserver.core.large_buffers import scratch
from modelserver.core.long_work import Slices
from modelserver.core.tensor import Tensor, element_count_error
from modelserver.errors import InvalidArgumentError

Shape = tuple[int, ...]
_INT64 = np.iinfo(np.int64)
_LEADING_BRACKETS = re.compile(rb"[\[\s]*")
_BINARY_ONLY = (Datatype.FP16, Datatype.BF16)
_BYTES = Datatype.BYTES  # looking a member up in its class is a call in Python 3.11
_MAX_PACKED = 1024
# Bytes of a long `data` that are parsed at a time: some 3 ms at worst.
_PIECE_BYTES = 16 * 1024
_WITH_NUMPY = orjson.OPT_SERIALIZE_NUMPY
# Triton's words for the elements of a NumPy kind, in a refusal.
_TRITONS_KINDS = {
    "b": ("boolean", "boolean"),
    "f": ("number", "double"),
    "i": ("signed-integer", "signed-integer"),
    "u": ("unsigned-integer", "unsigned-integer"),
}
_N = ord("n")  # as a number: searching for it then takes a tenth of the time
# `struct`'s letters, by dtype's kind and size: NumPy's own depend on the system.
_LETTERS = {"b1": "?", "u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i1": "b", "i2": "h", "i4": "i", "i8": "q"}
_LETTERS |= {"f4": "f", "f8": "d"}


def tensor_from_json(name: str, datatype: Datatype, shape: Shape, count: int, data: msgspec.Raw | list[Any]) -> Tensor:
    """The tensor of an input's `data`: JSON text, or the list it was parsed to.

    `data` holds the elements in row-major order. As in Triton it may nest in any way: only the elements count, and
    `count`, the product of `shape`, is their number. Raises InvalidArgumentError, naming the tensor, for anything else.
    """
    check_has_json(name, datatype)
    depth = num_levels(data)
    if accelerator.read_array is not None and isinstance(data, msgspec.Raw):
        kind = array_kind(datatype, shape, count, depth)
        raw = None if kind is None else accelerator.read_array(data, kind)
        if raw is not None:
            return Tensor(name, datatype, np.ndarray(shape, datatype.numpy, raw))
    depth, values = _decode(name, datatype, depth, data)
    return tensor_from_values(name, datatype, shape, count, depth, values)


def tensor_slices(name: str, datatype: Datatype, shape: Shape, count: int, data: memoryview) -> Slices[Tensor]:
    """As `tensor_from_json`, in slices, of a long `data`."""
    check_has_json(name, datatype)
    if accelerator.flat_array is None:
        yield
        return tensor_from_json(name, datatype, shape, count, msgspec.Raw(data))
    text = scratch(len(data))
    found = accelerator.flat_array(data, _PIECE_BYTES, text)
    yield
    if isinstance(found, int):
        near = bytes(data[max(0, found - 20) : found + 20]).decode("utf-8", "replace")
        raise InvalidArgumentError(
            f"{_unparsable(datatype)}: input '{name}': 'data' is not an array of {datatype.value}, near byte {found}: "
            f"'{near}'"
        )
    sizes, ends = found
    _check_count(name, datatype, shape, count, prod(np.frombuffer(sizes, np.int64).tolist()))
    array = empty_array(count, datatype.numpy)
    start = done = 0
    for end, total in np.frombuffer(ends, np.int64).reshape(-1, 2).tolist() if count else ():
        piece = msgspec.Raw(b"".join((b"[", text[start:end], b"]")))
        array[done:total] = tensor_from_json(name, datatype, (total - done,), total - done, piece).data
        start, done = end + 1, total
        yield
    return Tensor(name, datatype, array.reshape(shape))


def check_has_json(name: str, datatype: Datatype) -> None:
    """Raises InvalidArgumentError for FP16 and BF16, whose elements only binary data can hold."""
    if datatype in _BINARY_ONLY:
        raise InvalidArgumentError(
            f"receiving {datatype.value} data via JSON is not supported. Please use the binary data format for input "
            f"{name} (parameter 'binary_data_size' and header Inference-Header-Content-Length)"
        )


def _check_count(name: str, datatype: Datatype, shape: Shape, count: int, found: int) -> None:
    """Raises InvalidArgumentError, in Triton's words, unless `data` has as many elements as the tensor's shape."""
    if found == count:
        return
    if datatype is _BYTES:
        raise element_count_error(name, shape, count, found)
    failure = "Unable to parse 'data': Shape does not match true shape of 'data' field"
    if found < count:
        failure = "Failed to parse 'data' field: shape does not match true shape"
    raise InvalidArgumentError(
        f"{failure}: input '{name}': expected {count} elements for shape {list(shape)}, got {found}"
    )


def tensor_from_values(
    name: str, datatype: Datatype, shape: Shape, count: int, depth: int, values: list[Any]
) -> Tensor:
    """As `tensor_from_json`, of a list that was parsed by `decoder` with the same datatype and depth."""
    array = _to_array(name, datatype, depth, values)
    if array is None or array.ndim != depth:
        array = _to_array(name, datatype, 1, flat_values(values))
        assert array is not None, "a flat list has no rows"
    _check_count(name, datatype, shape, count, array.size)
    return Tensor(name, datatype, _encode_strings(array, shape) if datatype is Datatype.BYTES else array.reshape(shape))


def tensor_to_json(tensor: Tensor, *, is_nested: bool = False) -> bytes:
    """The `data` of an output, as JSON: flat, or nested by its shape.

    Raises InvalidArgumentError for elements without a JSON form: FP16, BF16, and BYTES that are not UTF-8.
    """
    if tensor.data.size <= SLICE_ELEMENTS:
        return _flat_json(tensor, is_nested=is_nested)
    if not is_nested:
        tensor = Tensor(tensor.name, tensor.datatype, tensor.data.ravel())
    return _long_json(tensor, 0)


def _long_json(tensor: Tensor, start: int) -> bytes:
    """Nested JSON of many elements from `start` of the output on: some rows at a time, or a long row by itself.

    Other threads get their turn between two pieces, and while they are joined.
    """
    data = tensor.data
    row_size = data.size // len(data)
    num_rows = max(1, SLICE_ELEMENTS // row_size)
    pieces = []
    for place in range(0, len(data), num_rows):
        if row_size > SLICE_ELEMENTS:
            row = Tensor(tensor.name, tensor.datatype, data[place])
            pieces.append(_long_json(row, start + place * row_size))
        else:
            rows = Tensor(tensor.name, tensor.datatype, data[place : place + num_rows])
            pieces.append(_flat_json(rows, start + place * row_size, is_nested=data.ndim > 1)[1:-1])
    pieces[0] = b"[" + pieces[0]
    pieces[-1] += b"]"
    return b",".join(pieces)


def _flat_json(tensor: Tensor, start: int = 0, *, is_nested: bool = False) -> bytes:
    """As `tensor_to_json`, for elements from element `start` of the output on."""
    data, datatype = tensor.data, tensor.datatype
    if datatype is _BYTES:
        texts = _decode_strings(tensor, start)
        return orjson.dumps(np.array(texts, object).reshape(data.shape).tolist() if is_nested else texts)
    if datatype in _BINARY_ONLY:
        raise InvalidArgumentError(
            f"output '{tensor.name}': {datatype.value} has no JSON form; request it with 'binary_data': true, "
            "or all outputs with the request parameter 'binary_data_output': true"
        )
    if accelerator.write_array is not None and not is_nested:
        written = accelerator.write_array(data)
        if written is not None:
            return written
    data = np.ascontiguousarray(data).reshape(data.shape) if is_nested else data.ravel()
    text = orjson.dumps(data, None, _WITH_NUMPY)
    # Only numbers that are not finite become null, with an n: searching for that costs less than checking each number.
    if _N in text and data.dtype.kind == "f":
        return with_non_finite(text, data.reshape(-1))
    return text


def struct_letter(datatype: Datatype) -> str | None:
    """`struct`'s letter of the datatype's elements; None if `struct` and JSON have no such type."""
    return None if datatype in _BINARY_ONLY else _LETTERS.get(datatype.numpy.str[1:])


def array_kind(datatype: Datatype, shape: Shape, count: int, depth: int) -> bytes | None:
    """The accelerator's word for `data` with that many levels; None if it does not read such arrays."""
    letter = struct_letter(datatype)
    return None if letter is None else accelerator.array_kind(letter, (count,) if depth == 1 else shape)


@lru_cache(maxsize=256)
def decoder(datatype: Datatype, depth: int) -> msgspec.json.Decoder[Any]:
    """A parser that accepts only that many levels of arrays around elements of that datatype."""
    return msgspec.json.Decoder(_list_type(datatype, depth))


def _list_type(datatype: Datatype, depth: int) -> Any:
    element = _element_type(datatype)
    for _ in range(depth):
        element = list.__class_getitem__(element)  # a type that is only known here
    return element


def _element_type(datatype: Datatype) -> Any:
    """The type that the parser checks elements against, ranges included."""
    match datatype.numpy.kind:
        case "b":
            return bool
        case "f":
            return float
        case "O":
            return str
    info = np.iinfo(datatype.numpy)
    # The parser's bounds end at 64 bits with a sign; NumPy checks what is above them.
    highest = int(info.max) if info.max < _INT64.max else None
    lowest = int(info.min) if info.min > _INT64.min else None
    return Annotated[int, msgspec.Meta(ge=lowest, le=highest)]


def num_levels(data: msgspec.Raw | list[Any]) -> int:
    """Levels of arrays down to the first element; at least 1, so that a bare value fails as "not an array"."""
    if isinstance(data, msgspec.Raw):
        leading = _LEADING_BRACKETS.match(memoryview(data))
        return max(1, leading.group().count(b"[")) if leading else 1
    depth, value = 1, data[0] if isinstance(data, list) and data else None
    while isinstance(value, list):
        depth, value = depth + 1, value[0] if value else None
    return depth


def flat_values(values: list[Any]) -> list[Any]:
    """The elements of lists with any nesting, in their order."""
    elements: list[Any] = []
    open_lists = [iter(values)]
    while open_lists:
        for value in open_lists[-1]:
            if isinstance(value, list):
                open_lists.append(iter(value))
                break
            elements.append(value)
        else:
            open_lists.pop()
    return elements


def _decode(name: str, datatype: Datatype, depth: int, data: msgspec.Raw | list[Any]) -> tuple[int, list[Any]]:
    """The elements and the levels of lists around them: one where `data` does not nest evenly."""
    try:
        if isinstance(data, msgspec.Raw):
            try:
                return depth, decoder(datatype, depth).decode(data)
            except msgspec.DecodeError:
                text = bytes(data)
                data = parse_non_finite(text) if has_non_finite(text) else msgspec.json.decode(text)
        if not isinstance(data, list):
            raise InvalidArgumentError(
                f"Unable to parse 'data': attempt to access JSON non-array as array: input '{name}'"
            )
        try:
            return depth, msgspec.convert(data, _list_type(datatype, depth))
        except msgspec.ValidationError:
            return 1, msgspec.convert(flat_values(data), _list_type(datatype, 1))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{_unparsable(datatype)}: input '{name}': 'data' does not hold {datatype.value}: {error}"
        ) from error


def _unparsable(datatype: Datatype) -> str:
    """Triton's sentence for elements of another kind than the datatype's."""
    if datatype is _BYTES:
        return "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
    there, wanted = _TRITONS_KINDS[datatype.numpy.kind]
    return f"Unable to parse 'data': attempt to access JSON non-{there} as {wanted}"


def _to_array(name: str, datatype: Datatype, depth: int, values: list[Any]) -> np.ndarray[Any, Any] | None:
    """None where rows have different lengths."""
    try:
        if datatype is Datatype.FP32 and depth == 1 and 0 < len(values) <= _MAX_PACKED:
            # A third of the time of NumPy's checked conversion; the same numbers are too large.
            return np.frombuffer(struct.pack(f"<{len(values)}f", *values), datatype.numpy)
        with np.errstate(over="raise"):
            return np.array(values, datatype.numpy)
    except (OverflowError, FloatingPointError) as error:
        raise InvalidArgumentError(f"input '{name}': a value in 'data' is out of range for {datatype.value}") from error
    except ValueError:
        return None


def _encode_strings(array: np.ndarray[Any, Any], shape: Shape) -> np.ndarray[Any, Any]:
    elements = np.empty(array.size, dtype=object)
    elements[:] = [text.encode() for text in array.ravel().tolist()]
    return elements.reshape(shape)


def _decode_strings(tensor: Tensor, start: int) -> list[str]:
    texts = []
    for index, element in enumerate(tensor.data.ravel().tolist(), start):
        try:
            texts.append(element.decode() if isinstance(element, bytes) else str(element))
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"output '{tensor.name}': element {index} is not valid UTF-8 and has no JSON form; "
                "request it with 'binary_data': true"
            ) from error
    return texts


# JSON text around its parsers: members that are counted first, NaN and Infinity, which strict parsers refuse.

_STRING_OR_COMMA = re.compile(STRING.pattern + rb"|,", re.DOTALL)
_NON_FINITE = re.compile(rb"NaN|Infinity")
_STRING_OR_NON_FINITE = re.compile(STRING.pattern + rb"|NaN|Infinity", re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_WORDS = {float("inf"): b"Infinity", float("-inf"): b"-Infinity"}


def has_more_members(text: bytes, limit: int) -> bool:
    """Whether a flat object in valid JSON has more than `limit` members; what they nest counts, too. Parses nothing."""
    # There is a comma between two members, and commas may be in strings: almost every object ends with the first count.
    if text.count(b",") < limit:
        return False
    commas = (match for match in _STRING_OR_COMMA.finditer(text) if match[0] == b",")
    return sum(1 for _ in islice(commas, limit)) == limit


def has_non_finite(text: bytes | bytearray) -> bool:
    """Whether NaN or Infinity occurs in the text at all, as a token or inside a string."""
    return _NON_FINITE.search(text) is not None


def as_finite(text: bytes) -> bytearray:
    """As long a text, with zeros in place of the tokens NaN and Infinity: what strict parsers take to count in it."""
    finite = bytearray(text)
    for match in _STRING_OR_NON_FINITE.finditer(text):
        if not match[0].startswith(b'"'):
            finite[match.start() : match.end()] = b"0".ljust(len(match[0]))
    return finite


def parse_non_finite(text: bytes | bytearray) -> Any:
    """Parse JSON that may hold the bare tokens NaN, Infinity and -Infinity. Slow: for text that needs it.

    Raises InvalidArgumentError. All strings in the result have a UTF-8 form.
    """
    try:
        document = json.loads(text.decode())
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the request's JSON is malformed: {error}") from error
    return document


def with_non_finite(text: bytes, values: np.ndarray[Any, Any]) -> bytes:
    """The JSON of numbers with NaN, Infinity and -Infinity as bare tokens, like Triton's, in place of its nulls."""
    words = [_WORDS.get(value, b"NaN") for value in values[~np.isfinite(values)].tolist()]
    parts = text.split(b"null")
    return b"".join([piece for pair in zip(parts, [*words, b""], strict=True) for piece in pair])
