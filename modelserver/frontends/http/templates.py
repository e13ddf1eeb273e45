"""Repeated infer calls that differ in their tensors: recognised by their bytes, decoded without a parser.

A template is made from a call that `codec.decode_infer` has decoded. So errors in a call are found there; here a call
is either known to be valid, or not known.
"""

from __future__ import annotations

import re

from modelserver.core.recognition import LearnThrottle, Memory
from modelserver.core.request import InFlightRequest
from modelserver.core.stream import ResponseStream
from modelserver.core.template import RequestTemplate, TensorPlace, settings_of
from modelserver.core.tensor import Buffer
from modelserver.frontends.http.codec import OutputForm
from modelserver.frontends.http.head import RequestHead

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

    def learn(self, request: InFlightRequest, form: OutputForm, head: RequestHead, text: bytes) -> None:
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
