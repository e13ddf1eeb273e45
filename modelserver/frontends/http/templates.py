"""Repeated infer calls that differ in their tensors: recognised by their bytes, decoded without a parser.

A template is made from a call that `codec.decode_infer` has decoded. So errors in a call are found there; here a call
is either known to be valid, or not known.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from modelserver.core import accelerator
from modelserver.core.datatype import Datatype
from modelserver.core.recognition import LearnThrottle, Memory
from modelserver.core.request import InFlightRequest, RequestForm
from modelserver.core.response import ResponseStream
from modelserver.core.template import RequestTemplate, TensorPlace, apply_settings, settings_of
from modelserver.core.tensor import Buffer, Tensor
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.codec import OutputForm
from modelserver.frontends.http.head import InferCallHead, InputHead
from modelserver.frontends.http.json_tensor import array_kind, decoder, num_levels, struct_letter, tensor_from_values

_MAX_TEMPLATES = 512
_MAX_HEAD_BYTES = 1024

# An id at the start, of characters that JSON does not escape: the id changes, and the text after it repeats.
LEADING_ID = re.compile(rb'\{"id": ?"([ !#-\[\]-~]+)",')
# Bytes that would allow a second "id" in the rest, which would then win.
_OTHER_ID = re.compile(rb'"id"|\\')

_Key = tuple[str, int | None, bytes]
# A template, the outputs' form, and the id where it is part of the key.
_Remembered = tuple[RequestTemplate, OutputForm, str]
Known = tuple[InFlightRequest, OutputForm]


class RecentCall:
    """The last known call with a given HTTP head: usually the next one differs only in its tensors.

    `size` is that of its body, which began with `text`; -1 before the first call. A body with the same size and
    beginning has this `template`, `form` and `id`.
    """

    __slots__ = ("form", "id", "size", "template", "text")

    def __init__(self) -> None:
        self.size = -1
        self.text = b""
        self.template: RequestTemplate
        self.form: OutputForm
        self.id = ""


class BinaryTemplates:
    """Calls whose tensors follow a JSON head. Remembers a bounded number of heads of bounded length."""

    def __init__(self, *, is_on: bool) -> None:
        self._plain = Memory[_Key, _Remembered](_MAX_TEMPLATES, is_on=is_on)
        # The key is the text after a leading id.
        self._with_id = Memory[_Key, _Remembered](_MAX_TEMPLATES, is_on=is_on)
        self._learn_throttle = LearnThrottle(is_on=is_on)

    def find(
        self,
        name: str,
        version: int | None,
        body: Buffer,
        head_len: int,
        stream: ResponseStream,
        recent: RecentCall | None = None,
    ) -> Known | None:
        """The call in `body`, if it is known; then `recent` is that one."""
        text = body[:head_len] if type(body) is bytes else bytes(body[:head_len])
        if text.startswith(b'{"id"') and (match := LEADING_ID.match(text)) is not None:
            found = self._with_id.known.get((name, version, text[match.end() :]))
        else:
            match = None
            found = self._plain.known.get((name, version, text))
        if found is None or head_len + found[0].data_len != len(body):
            return None
        self._learn_throttle.num_in_vain = 0
        template, form, request_id = found
        if match is not None:
            request_id = match[1].decode()
        if recent is not None:
            recent.size, recent.text = len(body), text
            recent.template, recent.form, recent.id = template, form, request_id
        return template.fill(name, version, request_id, body, head_len, stream), form

    def learn(self, request: InFlightRequest, form: OutputForm, head: InferCallHead, text: bytes) -> None:
        """Remember an unknown call that was decoded, if that is useful; `text` is its JSON."""
        if len(text) > _MAX_HEAD_BYTES or not self._learn_throttle.wants():
            return
        places: list[TensorPlace] = []
        end = 0
        for item in head.inputs:
            # BYTES can have errors inside, and NumPy makes no views of empty buffers.
            if not item.num_bytes or item.datatype.itemsize is None:
                return
            places.append(TensorPlace(item.name, item.datatype, item.shape, end, end + item.num_bytes))
            end += item.num_bytes
        match = LEADING_ID.match(text)
        if match is not None and _OTHER_ID.search(text, match.end()) is not None:
            return
        templates, rest = (self._plain, text) if match is None else (self._with_id, text[match.end() :])
        template = RequestTemplate(places, end, request.outputs, settings_of(request))
        templates.remember((request.model_name, request.version, rest), (template, form, request.id))


# Repeated infer calls in JSON that differ in their elements: only the arrays of elements are parsed.
#
# A text stays valid, and means the same around it, when one of its values is replaced by another one. So a call with
# the same text as a known one before, between and after the tensors' `data`, and with arrays of the same datatypes and
# depths as `data`, needs no further checks. Like all templates, they are made from calls that were decoded in full.

# Templates per model and version; a client needs one for each form of request that it sends.
_MAX_JSON_TEMPLATES = 4
_MAX_MODELS = 256
_MAX_TEXT_BYTES = 1024
_NOT_ALIKE = (
    msgspec.MsgspecError,
    InvalidArgumentError,
    OverflowError,
    RecursionError,
    UnicodeDecodeError,
    struct.error,
)
# Up to this many elements, packing them as arguments of a call is faster than NumPy's checked conversion.
_MAX_PACKED = 1024


class _Elements:
    """The required form of an input's `data`.

    `pack` makes the tensor's bytes from a flat list, if that is worth it; `kind` is the accelerator's word for it.
    """

    __slots__ = ("count", "datatype", "decode", "depth", "dtype", "kind", "name", "pack", "shape")

    def __init__(self, head: InputHead, depth: int) -> None:
        self.name = head.name
        self.datatype: Datatype = head.datatype
        self.shape = head.shape
        self.count = head.count
        self.depth = depth
        self.decode = decoder(head.datatype, depth).decode
        self.dtype = head.datatype.numpy
        self.pack: Callable[..., bytes] | None = None
        self.kind = array_kind(head.datatype, head.shape, head.count, depth)
        letter = struct_letter(head.datatype)
        if depth == 1 and 0 < head.count <= _MAX_PACKED and letter is not None:
            self.pack = struct.Struct(f"={head.count}{letter}").pack


class _JsonTemplate(RequestForm):
    """`first` is before the first `data`, and `last` after the last one; `elements` describe the parts between.

    `texts` and `kinds` say the same to the accelerator, if it reads all of the arrays.
    """

    __slots__ = (
        "elements",
        "first",
        "first_len",
        "form",
        "id",
        "items",
        "kinds",
        "last",
        "last_len",
        "outputs",
        "settings",
        "texts",
    )

    def __init__(
        self, texts: Sequence[bytes], elements: Sequence[_Elements], request: InFlightRequest, form: OutputForm
    ) -> None:
        super().__init__()
        self.first, self.last = texts[0], texts[-1]
        self.first_len, self.last_len = len(self.first), len(self.last)
        self.elements = tuple(zip(elements, (*texts[1:-1], None), strict=True))
        kinds = tuple([item.kind for item in elements if item.kind is not None])
        self.texts = tuple(texts)
        self.kinds = kinds if accelerator.read_call is not None and len(kinds) == len(elements) else None
        self.items = tuple(
            [(item.name, item.datatype, item.shape, item.dtype, place) for place, item in enumerate(elements)]
        )
        self.form = form
        self.id = request.id
        self.outputs = request.outputs
        self.settings: Mapping[str, Any] | None = settings_of(request)

    def inputs(self, body: bytes) -> dict[str, Tensor] | None:
        """The tensors in `body`; None when it is a different call, or an invalid one."""
        inputs: dict[str, Tensor] = {}
        if self.kinds is not None and accelerator.read_call is not None:
            raws = accelerator.read_call(body, self.texts, self.kinds)
            if raws is not None:
                for name, datatype, shape, dtype, place in self.items:
                    inputs[name] = Tensor(name, datatype, np.ndarray(shape, dtype, raws[place]))
                return inputs
        at = self.first_len
        end = len(body) - self.last_len
        if at > end or not body.startswith(self.first) or not body.endswith(self.last):
            return None
        for item, text in self.elements:
            stop = end if text is None else body.find(text, at, end)
            if stop < 0:
                return None
            try:
                values = item.decode(body[at:stop])
                if item.pack is not None:
                    array = np.ndarray(item.shape, item.dtype, item.pack(*values))
                    inputs[item.name] = Tensor(item.name, item.datatype, array)
                else:
                    inputs[item.name] = tensor_from_values(
                        item.name, item.datatype, item.shape, item.count, item.depth, values
                    )
            except _NOT_ALIKE:
                return None  # decoding it in full finds the error
            if text is not None:
                at = stop + len(text)
        return inputs


class JsonTemplates:
    """Calls that are JSON only: bounded in number per model and version, and short except for their data."""

    def __init__(self, *, is_on: bool) -> None:
        self._templates = Memory[tuple[str, int | None], list[_JsonTemplate]](_MAX_MODELS, is_on=is_on)
        self._learn_throttle = LearnThrottle(is_on=is_on)

    def find(self, name: str, version: int | None, body: bytes, stream: ResponseStream) -> Known | None:
        """The call in `body`, if it is known."""
        for template in self._templates.known.get((name, version), ()):
            inputs = template.inputs(body)
            if inputs is None:
                continue
            self._learn_throttle.num_in_vain = 0
            request = InFlightRequest(
                model_name=name,
                version=version,
                inputs=inputs,
                id=template.id,
                outputs=template.outputs,
                form=template,
                stream=stream,
            )
            if template.settings is not None:
                apply_settings(request, template.settings)
            return request, template.form
        return None

    def learn(self, request: InFlightRequest, form: OutputForm, head: InferCallHead, body: bytes) -> None:
        """Remember an unknown call that was decoded, if that is useful."""
        if not head.inputs or not self._learn_throttle.wants():
            return
        texts: list[bytes] = []
        elements: list[_Elements] = []
        at = 0
        for item in head.inputs:
            data = item.data
            if not isinstance(data, msgspec.Raw):
                return  # parsed otherwise, because of its NaN or Infinity
            raw = bytes(data)
            start = body.find(raw)
            if start < at or body.find(raw, start + 1) >= 0:
                return  # in another order than the inputs, or not the only place
            texts.append(body[at:start])
            elements.append(_Elements(item, num_levels(data)))
            at = start + len(raw)
        texts.append(body[at:])
        if sum(map(len, texts)) > _MAX_TEXT_BYTES:
            return
        template = _JsonTemplate(texts, elements, request, form)
        key = request.model_name, request.version
        templates = self._templates.known.get(key)
        if templates is None:
            self._templates.remember(key, [template])
        else:
            templates.insert(0, template)
            del templates[_MAX_JSON_TEMPLATES:]
