"""Repeated infer calls in JSON that differ in their elements: only the arrays of elements are parsed.

A text stays valid, and means the same around it, when one of its values is replaced by another one. So a call with the
same text as a known one before, between and after the tensors' `data`, and with arrays of the same datatypes and depths
as `data`, needs no further checks. Like all templates, they are made from calls that were decoded in full.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from modelserver.core import accelerator
from modelserver.core.datatype import Datatype
from modelserver.core.recognition import LearnThrottle, Memory
from modelserver.core.request import InFlightRequest, RequestForm
from modelserver.core.stream import ResponseStream
from modelserver.core.template import apply_settings, settings_of
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.codec import OutputForm
from modelserver.frontends.http.head import InputHead, RequestHead
from modelserver.frontends.http.json_tensor import array_kind, decoder, num_levels, struct_letter, tensor_from_values
from modelserver.frontends.http.templates import Known

# Templates per model and version; a client needs one for each form of request that it sends.
_MAX_TEMPLATES = 4
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

    def learn(self, request: InFlightRequest, form: OutputForm, head: RequestHead, body: bytes) -> None:
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
            del templates[_MAX_TEMPLATES:]
