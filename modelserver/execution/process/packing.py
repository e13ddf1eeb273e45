"""Packs tensors, requests and responses for a hop between processes, and unpacks them: one copy out, views in.

Numeric tensors are their memory. A BYTES tensor is its elements' lengths (uint32 each), then the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from modelserver.backend import InferResponse, ServerError
from modelserver.core.datatype import Datatype
from modelserver.core.element_arrays import SLICE_ELEMENTS, empty_elements
from modelserver.core.large_buffers import joined
from modelserver.core.long_work import Slices, finish
from modelserver.core.request import InferRequest
from modelserver.core.response import RESCHEDULE, ParameterValue, RowResponse
from modelserver.core.tensor import MAX_BYTES_IN_TURN, Tensor, placeholder
from modelserver.errors import InvalidArgumentError
from modelserver.execution.process.messages import ErrorRecord, RequestRecord, ResponseRecord, RowsRecord, TensorRecord
from modelserver.execution.process.shared_buffer import ALIGNMENT, ByteView, align

_MAX_ELEMENT_BYTES = (1 << 32) - 1
# Elements that are longer on average are copied one by one.
_LONG_ELEMENT_BYTES = 1 << 10
# Bytes that are copied in a slice: their pages may have to be found first.
_COPIED_BYTES = 512 << 10
# Packed BYTES elements.
Elements = bytes | memoryview
# Attributes of enum members are slow to read.
_WIRE_NAMES = {datatype: datatype.value for datatype in Datatype}
_DATATYPES = {datatype.value: (datatype, datatype.numpy) for datatype in Datatype}


class Payload:
    """The tensors of one message, one behind the other; numbers are not copied before `write` or `join`.

    `place` is where they lie in the sender's arena, once `Channel.placing` has copied them there.
    """

    __slots__ = ("_packed", "_parts", "nbytes", "place")

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, np.ndarray[Any, Any] | Elements]] = []
        self._packed: dict[int, Elements] = {}  # by the id of the tensor
        self.nbytes = 0
        self.place: int | None = None

    def prepare(self, tensor: Tensor) -> Slices[None]:
        """Pack a tensor that is added afterwards, in slices. Raises as `add`."""
        if tensor.datatype is Datatype.BYTES:
            self._packed[id(tensor)] = yield from _packing(tensor.name, tensor.data)

    def add(self, tensor: Tensor) -> TensorRecord:
        """Add a tensor. Raises InvalidArgumentError for a BYTES element that is neither bytes nor str."""
        name, datatype, data = tensor.name, tensor.datatype, tensor.data
        part: np.ndarray[Any, Any] | Elements = data
        if datatype is Datatype.BYTES:
            packed = self._packed.pop(id(tensor), None) if self._packed else None
            part = pack_elements(name, data) if packed is None else packed
            nbytes = len(part)
        else:
            nbytes = data.nbytes
        offset = self.nbytes
        self._parts.append((offset, nbytes, part))
        self.nbytes = align(offset + nbytes)
        return TensorRecord(name, _WIRE_NAMES[datatype], data.shape, offset, nbytes)

    def append_to(self, chunks: list[bytes]) -> None:
        """Append all tensors, `nbytes` in all, as bytes objects to join."""
        for _offset, nbytes, part in self._parts:
            chunks.append(part.tobytes() if isinstance(part, np.ndarray) else bytes(part))
            if padding := -nbytes % ALIGNMENT:
                chunks.append(bytes(padding))

    def join(self) -> bytes:
        """All tensors as one bytes object of `nbytes`."""
        chunks: list[bytes] = []
        self.append_to(chunks)
        return b"".join(chunks)

    def clear(self) -> None:
        """Let go of the tensors."""
        self._parts.clear()

    def write(self, target: ByteView) -> None:
        """Copy every tensor to its place in `target`, which has `nbytes`."""
        finish(self.writing(target))

    def writing(self, target: ByteView) -> Slices[None]:
        """As `write`, in slices."""
        for offset, nbytes, part in self._parts:
            place = target[offset : offset + nbytes]
            if isinstance(part, np.ndarray):
                if not part.flags.c_contiguous or nbytes <= _COPIED_BYTES:
                    np.copyto(place.view(part.dtype).reshape(part.shape), part)
                    continue
                source = part.reshape(-1).view(np.uint8)
            else:
                source = np.frombuffer(part, np.uint8)
            for start in range(0, nbytes, _COPIED_BYTES):
                np.copyto(place[start : start + _COPIED_BYTES], source[start : start + _COPIED_BYTES])
                yield


class Unpacker:
    """Makes the tensors that one record describes, out of any number of payloads."""

    __slots__ = ("_datatype", "_dtype", "_nbytes", "_offset", "_shape", "is_long", "name")

    def __init__(self, record: TensorRecord) -> None:
        self.name = record.name
        self._datatype, self._dtype = _DATATYPES[record.datatype]
        self._shape = record.shape
        self._offset = record.offset
        self._nbytes = record.nbytes
        # Whether the elements are unpacked in slices, because they are many or large.
        self.is_long = self._datatype is Datatype.BYTES and (
            prod(record.shape) > SLICE_ELEMENTS or record.nbytes > MAX_BYTES_IN_TURN
        )

    def placeholder(self) -> Tensor:
        """The tensor without its content."""
        return placeholder(self.name, self._datatype, self._shape)

    def slices(self, payload: bytes | bytearray | ByteView) -> Slices[Tensor]:
        """As `__call__`, in slices."""
        if not self.is_long:
            return self(payload)
        raw = np.frombuffer(payload, np.uint8, self._nbytes, self._offset)
        return Tensor(self.name, self._datatype, (yield from unpacking_slices(raw, self._shape)))

    def __call__(self, payload: bytes | bytearray | ByteView) -> Tensor:
        """A view of `payload`, or an object array for BYTES."""
        return _view(self.name, self._datatype, self._dtype, self._shape, self._offset, self._nbytes, payload)


def unpack(record: TensorRecord, payload: bytes | bytearray | ByteView) -> Tensor:
    """The tensor that `record` describes: a view of `payload`, or an object array for BYTES."""
    datatype, dtype = _DATATYPES[record.datatype]
    return _view(record.name, datatype, dtype, record.shape, record.offset, record.nbytes, payload)


def _view(
    name: str,
    datatype: Datatype,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    offset: int,
    nbytes: int,
    payload: bytes | bytearray | ByteView,
) -> Tensor:
    if datatype is Datatype.BYTES:
        return Tensor(name, datatype, unpack_elements(np.frombuffer(payload, np.uint8, nbytes, offset), shape))
    return Tensor(name, datatype, np.ndarray(shape, dtype, payload, offset))


def pack_elements(name: str, elements: np.ndarray[Any, Any]) -> Elements:
    """The lengths and contents of BYTES elements; str elements become UTF-8.

    Raises InvalidArgumentError for an element of another type.
    """
    return finish(_packing(name, elements))


def _packing(name: str, elements: np.ndarray[Any, Any]) -> Slices[Elements]:
    flat = elements.reshape(-1)
    lengths: list[bytes] = []
    contents: list[bytes] = []
    for start in range(0, flat.size, SLICE_ELEMENTS):
        part = flat[start : start + SLICE_ELEMENTS].tolist()
        if set(map(type, part)) - {bytes}:
            part = [_encode_element(name, index, element) for index, element in enumerate(part, start)]
        sizes = np.fromiter(map(len, part), np.int64, len(part))
        longest = int(sizes.max())
        if longest > _MAX_ELEMENT_BYTES:
            raise InvalidArgumentError(f"tensor '{name}': a BYTES element has {longest} bytes; at most 4 GiB fit")
        lengths.append(sizes.astype("<u4").tobytes())
        if longest > _LONG_ELEMENT_BYTES and int(sizes.sum()) > _LONG_ELEMENT_BYTES * len(part):
            contents += part
        else:
            contents.append(b"".join(part))
        if flat.size > SLICE_ELEMENTS:
            yield
    return joined(lengths + contents)


def unpack_elements(raw: ByteView, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The object array of bytes that `pack_elements` described."""
    return finish(unpacking_slices(raw, shape))


def unpacking_slices(raw: ByteView, shape: tuple[int, ...]) -> Slices[np.ndarray[Any, Any]]:
    """As `unpack_elements`, in slices."""
    elements = empty_elements(prod(shape))
    count = elements.size
    ends = np.cumsum(raw[: 4 * count].view("<u4"), dtype=np.int64) + 4 * count
    begin = 4 * count
    yield
    for start in range(0, count, SLICE_ELEMENTS):
        stops = ends[start : start + SLICE_ELEMENTS] - begin
        content = yield from _copying(raw[begin : begin + int(stops[-1])])
        places = [0, *stops.tolist()]
        elements[start : start + len(stops)] = [content[a:b] for a, b in pairwise(places)]
        begin += len(content)
        yield
    return elements.reshape(shape)


def _copying(raw: ByteView) -> Slices[bytes]:
    """A copy; the interpreter's lock is not held for all of a large one."""
    if raw.size <= _COPIED_BYTES:
        return raw.tobytes()
    pieces: list[bytes] = []
    for start in range(0, raw.size, _COPIED_BYTES):
        pieces.append(raw[start : start + _COPIED_BYTES].tobytes())
        yield
    return b"".join(pieces)


def _encode_element(name: str, index: int, element: object) -> bytes:
    if isinstance(element, bytes | bytearray | memoryview):
        return bytes(element)
    if isinstance(element, str):
        return element.encode()
    raise InvalidArgumentError(
        f"tensor '{name}': element {index} of a BYTES tensor must be bytes or str, got {type(element).__name__}"
    )


def request_record(request: InferRequest, payload: Payload, number: int = 0) -> RequestRecord:
    """The record of a request; its tensors join `payload`. Raises InvalidArgumentError if it cannot be packed."""
    parameters = _plain(request.parameters) if request.parameters else {}
    # By position, because keywords double the cost.
    return RequestRecord(
        request.model_name,
        request.version,
        [payload.add(tensor) for tensor in request.inputs.values()],
        request.id,
        request.outputs,
        parameters,
        request.priority,
        request.timeout_us,
        request.deadline_ns,
        request.sequence_id,
        request.sequence_start,
        request.sequence_end,
        request.rows,
        number,
        request.is_decoupled,
        None,
        request.trace_parent,
        request.arrival_ns,
        request.adapters,
    )


def response_of(record: ResponseRecord, payload: bytearray | ByteView) -> InferResponse | ServerError:
    """The response or error of a record, with tensors that are views of `payload`."""
    if record.error is not None:
        return record.error.error()
    if record.is_reschedule:
        return RESCHEDULE
    outputs = [unpack(tensor, payload) for tensor in record.outputs]
    return InferResponse(outputs, parameters=record.parameters)


def has_elements(record: ResponseRecord) -> bool:
    """Whether it has BYTES tensors."""
    return any(output.datatype == _WIRE_NAMES[Datatype.BYTES] for output in record.outputs)


def response_slices(record: ResponseRecord, payload: bytearray | ByteView) -> Slices[InferResponse | ServerError]:
    """As `response_of`, for a record with BYTES tensors, in slices."""
    outputs: list[Tensor] = []
    for output in record.outputs:
        outputs += [(yield from Unpacker(output).slices(payload))]
    return InferResponse(outputs, parameters=record.parameters)


def rows_of(record: RowsRecord) -> Iterator[tuple[int, RowResponse]]:
    """The responses of a record, with the numbers of their requests."""
    names, datatypes = record.names, _row_datatypes(record.names, record.datatypes)
    for number, row in zip(record.numbers, record.rows, strict=True):
        yield number, RowResponse(values=dict(zip(names, row, strict=True)), datatypes=datatypes)


@lru_cache(maxsize=256)
def _row_datatypes(names: tuple[str, ...], datatypes: tuple[str, ...]) -> dict[str, Datatype]:
    """One mapping for all rows of a kind, so that they are known to be alike."""
    return {name: _DATATYPES[datatype][0] for name, datatype in zip(names, datatypes, strict=True)}


class RowRecords:
    """Gathers the rows that are sent in one message.

    They are handed on before the message's other responses, and rows of one kind before those of another. So a request
    that has sent something else before gets no further row in the message.
    """

    __slots__ = ("_kinds", "_others", "records")

    def __init__(self, records: list[RowsRecord]) -> None:
        self.records = records
        self._kinds: dict[tuple[str, ...], RowsRecord] = {}
        # By the number of a request: what it has sent in this message, where that was not the first kind of row.
        self._others: dict[int, RowsRecord | None] = {}

    def take(self, number: int, response: InferResponse | ServerError | None) -> bool:
        """Add the response of a request, unless it is to travel as a record of its own."""
        if type(response) is not RowResponse or response.parameters or not response.values:
            self._others[number] = None
            return False
        names = tuple(response.values)
        kind = self._kinds.get(names)
        if kind is None:
            datatypes = tuple([_WIRE_NAMES[response.datatypes[name]] for name in names])
            kind = self._kinds[names] = RowsRecord(names, datatypes, [], [])
            self.records.append(kind)
        if self._others.setdefault(number, kind) is not kind:
            self._others[number] = None
            return False
        kind.numbers.append(number)
        kind.rows.append(list(response.values.values()))
        return True


def response_record(response: InferResponse | ServerError, payload: Payload) -> ResponseRecord:
    """The record of a response; its tensors join `payload`."""
    if isinstance(response, ServerError):
        return ResponseRecord([], ErrorRecord.of(response), None)
    if response is RESCHEDULE:
        return ResponseRecord([], None, None, is_reschedule=True)
    if response.error is not None:
        return ResponseRecord([], ErrorRecord.of(response.error), None)
    parameters = _plain(response.parameters) if response.parameters is not None else None
    return ResponseRecord([payload.add(tensor) for tensor in response.outputs], None, parameters)


def _plain(parameters: Mapping[str, ParameterValue]) -> dict[str, ParameterValue]:
    """Parameters converted to the plain types that msgpack can write, also from NumPy's subclasses of float and str.

    Raises InvalidArgumentError for other types.
    """
    return {_plain_text(key, key): _plain_value(key, value) for key, value in parameters.items()}


def _plain_value(key: str, value: object) -> ParameterValue:
    if isinstance(value, str):
        return _plain_text(key, value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise InvalidArgumentError(f"parameter '{key}': {value} does not fit 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    found = type(value).__name__
    raise InvalidArgumentError(f"parameter '{key}' must be bool, int, float or str, got {found}")


def _plain_text(key: str, text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"parameter {key!a} is not valid UTF-8: {error}") from None
    return text if type(text) is str else str(text)
