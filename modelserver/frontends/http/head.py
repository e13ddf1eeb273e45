"""The JSON part of an infer call, parsed and checked as far as possible without the tensors' bytes.

Clients send the same head in request after request: `HeadReader` remembers the small ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import msgspec
import numpy as np

from modelserver.core import accelerator
from modelserver.core.datatype import Datatype
from modelserver.core.json_pieces import check_depth, document_slices
from modelserver.core.long_work import Slices
from modelserver.core.recognition import Memory
from modelserver.core.request import RegionInput, RegionSlice, Transfer
from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError
from modelserver.frontends.http.json_tensor import (
    as_finite,
    has_more_members,
    has_non_finite,
    parse_non_finite,
)
from modelserver.frontends.http.request_parameters import (
    CLASSIFICATION,
    REGION,
    class_count,
    region_slice,
    size_parameter,
)
from modelserver.protocol.limits import HttpLimits

_DATATYPES = {datatype.value: datatype for datatype in Datatype}
_MAX_TENSOR_BYTES = 2**63 - 1
_ABSENT = msgspec.Raw(b"")
_MAX_REMEMBERED = 512
_MAX_REMEMBERED_BYTES = 1024
# Parsed parameters take some ten times the memory of their text: in a longer text they are counted before parsing.
_MAX_UNCOUNTED_BYTES = 16 * 1024
# The most bytes of a long request, besides the inputs' data, that are parsed at once.
_MAX_VALUES = 1 << 16
_MAX_OUTLINE_BYTES = 4 * 1024 * 1024
_MAX_NON_FINITE_BYTES = 32 * 1024


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Any] | None = None
    data: msgspec.Raw = _ABSENT


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    inputs: Sequence[_Input]
    outputs: list[_Output] | None = None
    parameters: dict[str, Any] | None = None
    id: str | None = None


class _ParsedInput(_Input):
    """An input whose `data` was parsed already, because of its NaN or Infinity tokens."""

    data: Any = None


class _ParsedRequest(_Request):
    inputs: Sequence[_ParsedInput]


class _Owner(msgspec.Struct):
    parameters: msgspec.Raw = _ABSENT


class _Outline(_Owner):
    """A request of which only the places of its parameters are parsed."""

    inputs: Sequence[_Owner] = ()
    outputs: Sequence[_Owner] | None = None


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_outline = msgspec.json.Decoder(_Outline).decode


@dataclass(frozen=True, slots=True)
class InputHead:
    """An input without its bytes: `num_bytes` of them follow the head; None when `data` holds its JSON."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    count: int
    num_bytes: int | None
    data: Any


@dataclass(frozen=True, slots=True)
class InferCallHead:
    """The JSON of an infer call. `listed` says of each requested output whether it is binary; None when none is named.

    `inputs` are those with data in the request.
    """

    inputs: tuple[InputHead, ...]
    id: str
    parameters: Mapping[str, Any] | None
    outputs: tuple[str, ...] | None
    listed: Mapping[str, bool] | None
    transfer: Transfer | None = None

    @property
    def num_element_bytes(self) -> int:
        """Bytes behind the head that are split into elements."""
        return sum(item.num_bytes or 0 for item in self.inputs if item.datatype.itemsize is None)


class HeadReader:
    """Reads heads within `limits`."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        # It pays because parsing and checking a head takes longer than all else in decoding a small request.
        self._remembered = Memory[bytes, InferCallHead](_MAX_REMEMBERED, is_on=limits.recognizes)

    def recall(self, text: bytes) -> InferCallHead:
        """As `read`, for heads that are followed by binary data: they repeat, while JSON data differs."""
        head = self._remembered.known.get(text)
        if head is None:
            head = self.read(text)
            if len(text) <= _MAX_REMEMBERED_BYTES:
                self._remembered.remember(text, head)
        return head

    def read(self, text: bytes) -> InferCallHead:
        """Raises InvalidArgumentError, PayloadTooLargeError or UnsupportedError, saying where."""
        return self._head(_parse(text, self.limits))

    def read_long(self, text: Buffer) -> Slices[InferCallHead]:
        """As `read`, in slices; the `data` of an input is then a view of the text, or its placeholder."""
        yield
        if accelerator.cut_data is None:
            return self.read(bytes(text))
        limits = self.limits
        state, outline, cuts = accelerator.cut_data(text, limits.max_json_depth, _MAX_VALUES, _MAX_OUTLINE_BYTES)
        yield
        if state == accelerator.TOO_DEEP:
            raise InvalidArgumentError(f"JSON nesting depth exceeds maximum allowed limit ({limits.max_json_depth})")
        if state == accelerator.NOT_WHOLE:
            raise InvalidArgumentError("the request's JSON is malformed: a string, an array or an object has no end")
        if state == accelerator.ESCAPED:
            raise InvalidArgumentError("the members of an input are named without escapes in a request of this size")
        if state == accelerator.TOO_MANY or len(outline) > _MAX_OUTLINE_BYTES:
            raise PayloadTooLargeError(
                f"the request's JSON has more than {_MAX_VALUES} values or {_MAX_OUTLINE_BYTES} bytes besides the "
                "inputs' data"
            )
        if len(outline) > _MAX_NON_FINITE_BYTES and has_non_finite(outline):
            raise InvalidArgumentError("NaN and Infinity are for the inputs' data only in a request of this size")
        head = self._head(_parse(outline, limits))
        yield
        unused = dict(enumerate(np.frombuffer(cuts, np.int64).reshape(-1, 2).tolist()))
        view = memoryview(text)
        inputs = []
        for item in head.inputs:
            data = item.data
            if isinstance(data, msgspec.Raw) and bytes(memoryview(data)[:1]) == b"[":
                start, end = unused.pop(int(bytes(data)[1:-1]))
                data = view[start:end]
            inputs.append(replace(item, data=data))
        for start, end in unused.values():  # it belongs to no input, but must be JSON
            yield from document_slices(view[start:end])
        return replace(head, inputs=tuple(inputs))

    def _head(self, parsed: _Request) -> InferCallHead:
        limits = self.limits
        listed = parsed.outputs
        if len(parsed.inputs) > limits.max_tensors or (listed and len(listed) > limits.max_tensors):
            raise PayloadTooLargeError(f"the request has more than {limits.max_tensors} inputs or outputs")
        if parsed.parameters and len(parsed.parameters) > limits.max_parameters:
            raise _too_many_parameters("the request", limits)
        outputs: dict[str, _Output] = {}
        for output in listed or ():
            if output.name in outputs:
                raise InvalidArgumentError(f"output '{output.name:.100}' already exists in request")
            if output.parameters and len(output.parameters) > limits.max_parameters:
                raise _too_many_parameters(f"output '{output.name:.100}'", limits)
            outputs[output.name] = output
        names: set[str] = set()
        inputs: list[InputHead] = []
        elsewhere: list[RegionInput] = []
        for item in parsed.inputs:
            if item.name in names:
                raise InvalidArgumentError(f"input '{item.name}' already exists in request")
            names.add(item.name)
            if item.parameters and len(item.parameters) > limits.max_parameters:
                raise _too_many_parameters(f"input '{item.name:.100}'", limits)
            place = _place(item) if item.parameters else None
            if place is None:
                inputs.append(_input_head(item, limits))
            else:
                datatype, _ = _datatype_and_count(item, limits)
                elsewhere.append(RegionInput(item.name, datatype, item.shape, place))
        return InferCallHead(
            tuple(inputs),
            parsed.id or "",
            parsed.parameters,
            tuple(outputs) if outputs else None,
            {name: _output_is_binary(output) for name, output in outputs.items()} if outputs else None,
            _transfer(elsewhere, outputs.values()),
        )


def _input_head(item: _Input, limits: HttpLimits) -> InputHead:
    num_bytes = None if not item.parameters else _binary_size(item)
    datatype, count = _datatype_and_count(item, limits)
    if num_bytes is None:
        _check_json_size(item, count * (datatype.itemsize or 4), limits)
    elif datatype.itemsize is not None and count * datatype.itemsize != num_bytes:
        raise InvalidArgumentError(
            f"input byte size mismatch for input '{item.name}' for the model. Expected "
            f"{count * datatype.itemsize}, got {num_bytes}: its shape is {list(item.shape)} of {datatype.value}"
        )
    return InputHead(item.name, datatype, item.shape, count, num_bytes, item.data)


def _check_json_size(item: _Input, num_bytes: int, limits: HttpLimits) -> None:
    if not _has_data(item):
        raise InvalidArgumentError(
            f"input '{item.name}' has no data: set 'data', or the parameter 'binary_data_size' and append the bytes"
        )
    if num_bytes > limits.max_body_bytes:
        raise PayloadTooLargeError(
            f"JSON input '{item.name}' has a byte_size ({num_bytes} bytes) that exceeds the maximum allowed value of "
            f"{limits.max_body_bytes} bytes. Use --http-max-input-size to increase the limit."
        )


def _parse(text: bytes, limits: HttpLimits) -> _Request:
    """Parse the JSON part. Raises InvalidArgumentError, saying where."""
    check_depth(text, limits.max_json_depth)
    try:
        _check_outline(text, limits)
        return _decode_request(text)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(f"the inference request is not valid: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not has_non_finite(text):
            raise InvalidArgumentError(f"the request's JSON is malformed: {error}") from error
    try:
        _check_outline(as_finite(text), limits)
        return msgspec.convert(parse_non_finite(text), _ParsedRequest)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(f"the inference request is not valid: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"the request's JSON is malformed: {error}") from error


def _check_outline(text: bytes | bytearray, limits: HttpLimits) -> None:
    """Count parameters before they take memory; those of a short text take little."""
    if len(text) <= _MAX_UNCOUNTED_BYTES:
        return
    outline = _decode_outline(text)
    places = (("the request", (outline,)), ("an input", outline.inputs), ("an output", outline.outputs or ()))
    for what, owners in places:
        for owner in owners:
            if has_more_members(bytes(owner.parameters), limits.max_parameters):
                raise _too_many_parameters(what, limits)


def _too_many_parameters(what: str, limits: HttpLimits) -> InvalidArgumentError:
    return InvalidArgumentError(f"{what} has more than {limits.max_parameters} parameters")


def _place(item: _Input) -> RegionSlice | None:
    """The place of the input's data, if it is in a region and only there."""
    parameters = item.parameters or {}
    place = region_slice(f"input '{item.name}'", parameters)
    if place is not None:
        others = ["'data'"] * _has_data(item) + ["'binary_data_size'"] * ("binary_data_size" in parameters)
        if others:
            raise InvalidArgumentError(
                f"input '{item.name}' must set only one of the following fields: 'data', 'binary_data_size' in "
                f"'parameters', '{REGION}' in 'parameters'. But set {' '.join(others)} '{REGION}'"
            )
    return place


def _transfer(inputs: Sequence[RegionInput], outputs: Collection[_Output]) -> Transfer | None:
    """The tensors that do not travel in the body."""
    placed: dict[str, RegionSlice] = {}
    class_counts: dict[str, int] = {}
    for output in outputs:
        if not output.parameters:
            continue
        owner = f"output '{output.name}'"
        count = class_count(owner, output.parameters)
        place = region_slice(owner, output.parameters)
        if count:
            class_counts[output.name] = count
        if place is not None:
            _check_placed(owner, output.parameters, count)
            placed[output.name] = place
    return Transfer(tuple(inputs), placed, class_counts) if inputs or placed or class_counts else None


def _check_placed(owner: str, parameters: Mapping[str, Any], count: int) -> None:
    if count:
        raise InvalidArgumentError(f"Output can't set both '{REGION}' and '{CLASSIFICATION}': {owner}")
    if parameters.get("binary_data"):
        raise InvalidArgumentError(f"Output can't set both '{REGION}' and 'binary_data': {owner}")


def _binary_size(item: _Input) -> int | None:
    """The number of bytes that the input has after the header; None when its data is JSON."""
    parameters = item.parameters or {}
    size = size_parameter(f"input '{item.name}'", parameters, "binary_data_size")
    if size is not None and _has_data(item):
        raise InvalidArgumentError(f"input '{item.name}': only one of 'data' and 'binary_data_size' may be set")
    return size


def _has_data(item: _Input) -> bool:
    data = item.data
    if data is _ABSENT or data is None:
        return False
    return not isinstance(data, msgspec.Raw) or bytes(memoryview(data)[:5]) != b"null"


def _datatype_and_count(item: _Input, limits: HttpLimits) -> tuple[Datatype, int]:
    """Check what an input says about itself; its datatype and its number of elements."""
    name, shape = item.name, item.shape
    datatype = _DATATYPES.get(item.datatype)
    if datatype is None:
        raise InvalidArgumentError(
            f"invalid datatype for input {name:.100}: '{item.datatype:.40}', expected one of {', '.join(_DATATYPES)}"
        )
    if len(name) > limits.max_name_len:
        raise InvalidArgumentError(f"an input's name is longer than {limits.max_name_len} characters: '{name[:40]}...'")
    if len(shape) > limits.max_rank:
        raise InvalidArgumentError(
            f"input '{name}': a shape has at most {limits.max_rank} dimensions, got {len(shape)}"
        )
    if shape and min(shape) < 0:
        raise InvalidArgumentError(
            f"invalid shape for input '{name}': shape {_written(shape)} contains one or more invalid dimensions; a "
            "dimension is at least 0"
        )
    count = prod(shape)
    # Zeros are left out: NumPy computes strides of an empty array from its other dimensions.
    _check_size(name, shape, count or prod(filter(None, shape)))
    return datatype, count


def _check_size(name: str, shape: Sequence[int], count: int) -> None:
    """Refuse a shape of `count` elements that no array can have."""
    if count > _MAX_TENSOR_BYTES:
        raise InvalidArgumentError(
            f"invalid shape for input '{name}': shape {_written(shape)} causes total element count to exceed maximum "
            f"size of {_MAX_TENSOR_BYTES}"
        )
    if count * 8 > _MAX_TENSOR_BYTES:
        raise InvalidArgumentError(
            f"byte size overflow for input '{name}': element count ({count}) * 8 bytes, the size of the largest "
            f"datatype, exceeds maximum allowed size ({_MAX_TENSOR_BYTES})"
        )


def _output_is_binary(output: _Output) -> bool:
    parameters = output.parameters
    if not parameters:
        return False
    is_binary = parameters.get("binary_data", False)
    if not isinstance(is_binary, bool):
        raise InvalidArgumentError(f"output '{output.name}': parameter 'binary_data' must be a boolean")
    return is_binary


def _written(shape: Sequence[int]) -> str:
    """A shape as Triton writes it."""
    return f"[{','.join(map(str, shape))}]"
