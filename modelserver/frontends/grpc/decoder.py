"""From a ModelInferRequest to a request: by a template if it is known, in full otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from modelserver.core.long_work import Slices, finish
from modelserver.core.recognition import LearnThrottle
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ResponseStream
from modelserver.core.template import RequestTemplate, TensorPlace
from modelserver.core.tensor import Buffer
from modelserver.errors import ServerError
from modelserver.frontends.grpc.codec import (
    LongRequest,
    Outline,
    decode_on_loop,
    element_slices,
    known_id,
    outline_slices,
    request_names,
)
from modelserver.frontends.grpc.envelope import raw_input_head
from modelserver.frontends.grpc.head import InferCallHead
from modelserver.protocol.limits import GrpcLimits

# Repeated requests that differ in their tensors: recognised by their bytes, decoded without a parser.
#
# Protobuf writes fields in the order of their numbers: names, version, id, inputs, outputs, and the raw contents at the
# end. So messages of the same size and beginning have their tensors at the same places. A template is made from a
# request that `codec` has decoded; errors in a request are found there.

_MAX_TEMPLATES = 512
_MAX_HEAD_BYTES = 1024
# How many sizes of tensors are tried for messages of one size.
_MAX_SPLITS = 4

_MODEL_NAME, _MODEL_VERSION, _ID = 0x0A, 0x12, 0x1A


class _GrpcTemplate(RequestTemplate):
    """`gaps` are the bytes between tensors, with their positions relative to the first tensor."""

    __slots__ = ("gaps", "model_name", "version")

    def __init__(
        self,
        head: InferCallHead,
        places: Sequence[TensorPlace],
        data_len: int,
        gaps: Sequence[tuple[int, bytes]],
    ) -> None:
        super().__init__(places, data_len, head.outputs)
        self.model_name = head.model_name
        self.version = head.version
        self.gaps = tuple(gaps)


class Templates:
    """Remembers a bounded number of requests with heads of bounded length. Event loop thread only."""

    def __init__(self, *, is_on: bool) -> None:
        self._plain: dict[bytes, _GrpcTemplate] = {}
        # The key is the bytes before the first tensor without the id, which varies.
        self._with_id: dict[bytes, _GrpcTemplate] = {}
        # Size of a message without its id -> how many bytes follow the beginning of the first tensor.
        self._data_lens: dict[int, tuple[int, ...]] = {}
        self._learn_throttle = LearnThrottle(is_on=is_on)

    def find(self, message: Buffer, stream: ResponseStream) -> InFlightRequest | None:
        """The request in `message`, if it is known."""
        size = len(message)
        for data_len in self._data_lens.get(size, ()):
            offset = size - data_len
            template = self._plain.get(bytes(message[:offset]))
            if template is None or template.data_len != data_len:
                continue
            if not template.gaps or _has_gaps(template.gaps, message, offset):
                self._learn_throttle.num_in_vain = 0
                return template.fill(template.model_name, template.version, "", message, offset, stream)
        return self._find_with_id(message, stream) if self._with_id else None

    def _find_with_id(self, message: Buffer, stream: ResponseStream) -> InFlightRequest | None:
        size = len(message)
        start, end = _id_field(message)
        for data_len in self._data_lens.get(size - (end - start), ()) if end else ():
            offset = size - data_len
            template = self._with_id.get(bytes(message[:start]) + bytes(message[end:offset]))
            if template is not None and template.data_len == data_len and _has_gaps(template.gaps, message, offset):
                try:
                    request_id = str(message[start + 2 : end], "utf-8")
                except UnicodeDecodeError:
                    return None
                self._learn_throttle.num_in_vain = 0
                return template.fill(template.model_name, template.version, request_id, message, offset, stream)
        return None

    def learn(self, message: Buffer, serialized_head: bytes, head: InferCallHead) -> None:
        """Remember an unknown request that was decoded, if that is useful.

        It has raw contents and no parameters; `serialized_head` is the message without its id and contents.
        """
        if len(serialized_head) > _MAX_HEAD_BYTES or not self._learn_throttle.wants():
            return
        places: list[TensorPlace] = []
        gaps: list[tuple[int, bytes]] = []
        at = 0
        for tensor in head.inputs:
            if not tensor.num_bytes:  # BYTES can have errors inside, and NumPy makes no views of empty buffers
                return
            raw_head = raw_input_head(tensor.num_bytes)
            gaps.append((at, raw_head))
            at += len(raw_head)
            places.append(TensorPlace(tensor.name, tensor.datatype, tensor.shape, at, at + tensor.num_bytes))
            at += tensor.num_bytes
        start, end = _id_field(message)
        tail = len(message) - at
        # Only for messages in the expected order: everything but the tensors comes before them.
        if bytes(message[:start]) + bytes(message[end:tail]) != serialized_head:
            return
        if any(message[tail + where : tail + where + len(raw_head)] != raw_head for where, raw_head in gaps):
            return
        self._add(message, start, end, head, places, gaps)

    def _add(
        self,
        message: Buffer,
        start: int,
        end: int,
        head: InferCallHead,
        places: Sequence[TensorPlace],
        gaps: Sequence[tuple[int, bytes]],
    ) -> None:
        templates = self._with_id if end else self._plain
        if len(templates) >= _MAX_TEMPLATES or len(self._data_lens) >= _MAX_TEMPLATES:
            self._plain.clear()
            self._with_id.clear()
            self._data_lens.clear()
        first = places[0].start
        data_len = places[-1].end - first
        places = [
            TensorPlace(place.name, place.datatype, place.shape, place.start - first, place.end - first)
            for place in places
        ]
        template = _GrpcTemplate(head, places, data_len, [(where - first, gap) for where, gap in gaps[1:]])
        offset = len(message) - data_len
        templates[bytes(message[:start]) + bytes(message[end:offset])] = template
        size = len(message) - (end - start)
        data_lens = self._data_lens.get(size, ())
        if data_len not in data_lens:
            self._data_lens[size] = (data_len, *data_lens[: _MAX_SPLITS - 1])


def _has_gaps(gaps: Sequence[tuple[int, bytes]], message: Buffer, offset: int) -> bool:
    return all(message[offset + where : offset + where + len(gap)] == gap for where, gap in gaps)


def _id_field(message: Buffer) -> tuple[int, int]:
    """The place of the id, tag and length included, if it is short and follows the model's name and version.

    (0, 0) otherwise.
    """
    at = 0
    try:
        for tag in (_MODEL_NAME, _MODEL_VERSION, _ID):
            if message[at] != tag:
                continue
            size = message[at + 1]
            if size >= 0x80:
                break
            if tag == _ID:
                return at, at + 2 + size
            at += 2 + size
    except IndexError:
        pass
    return 0, 0


class InferDecoder:
    """Decodes requests within `limits`. Event loop thread only."""

    def __init__(self, limits: GrpcLimits) -> None:
        self._limits = limits
        self._templates = Templates(is_on=limits.recognizes)

    def decode(self, message: Buffer, stream: ResponseStream) -> InFlightRequest:
        """The request, whose responses go to `stream`. Raises ServerError for every fault in it."""
        decoded = self.decode_on_loop(message, stream)
        if isinstance(decoded, LongRequest):
            decoded = finish(self.outline_slices(decoded, stream))
        return finish(self.element_slices(decoded)) if isinstance(decoded, Outline) else decoded

    def decode_on_loop(self, message: Buffer, stream: ResponseStream) -> InFlightRequest | Outline | LongRequest:
        """As `decode`, as far as that is quick: `outline_slices` and `element_slices` do the rest beside the loop."""
        request = self._templates.find(message, stream)
        if request is not None:
            return request
        try:
            decoded = decode_on_loop(message, self._limits, learn=self._templates.learn)
        except ServerError as error:
            error.name_request(*request_names(message, self._limits))
            raise
        if not isinstance(decoded, LongRequest):
            (decoded.request if isinstance(decoded, Outline) else decoded).stream = stream
        return decoded

    def outline_slices(self, long: LongRequest, stream: ResponseStream) -> Slices[Outline]:
        """The outline of a request with a long head, in slices. Raises as `decode`."""
        try:
            outline = yield from outline_slices(long, self._limits)
        except ServerError as error:
            error.name_request("", known_id(long.split))
            raise
        outline.request.stream = stream
        return outline

    def element_slices(self, outline: Outline) -> Slices[InFlightRequest]:
        """The rest of a request, in slices. Raises as `decode`."""
        try:
            return (yield from element_slices(outline))
        except ServerError as error:
            error.name_request(outline.request.model_name, outline.request.id)
            raise
