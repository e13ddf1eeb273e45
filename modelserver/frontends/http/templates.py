"""Infer calls that a client repeats with other tensors: recognised by their bytes, decoded without a parser.

A template is made of a call that `codec.decode_infer` has decoded. So whatever is wrong with a call is found
there; here it is either known to be right, or not known.
"""

from __future__ import annotations

import re

from modelserver.core.request import InFlightRequest
from modelserver.core.stream import ResponseStream
from modelserver.core.template import LearnThrottle, RequestTemplate, TensorPlace, settings_of
from modelserver.core.tensor import Buffer
from modelserver.frontends.http.codec import OutputForm
from modelserver.frontends.http.head import RequestHead

_MAX_TEMPLATES = 512
_MAX_HEAD_BYTES = 1024

# An id that stands first, of characters that mean themselves in JSON: what follows it repeats, it does not.
LEADING_ID = re.compile(rb'\{"id": ?"([ !#-\[\]-~]+)",')
# What would make a second "id" of the rest possible, which then would count.
_OTHER_ID = re.compile(rb'"id"|\\')

_Key = tuple[str, int | None, bytes]
# A template, the outputs' form, and the id where it is part of the key.
_Remembered = tuple[RequestTemplate, OutputForm, str]
Known = tuple[InFlightRequest, OutputForm]


class RecentCall:
    """The last known call with some HTTP head: mostly the next one differs in its tensors only.

    `size` is that of its body, which began with `text`; -1 before there was one. What a body that is so long and
    begins so is, `template`, `form` and `id` say.
    """

    __slots__ = ("form", "id", "size", "template", "text")

    def __init__(self) -> None:
        self.size = -1
        self.text = b""
        self.template: RequestTemplate
        self.form: OutputForm
        self.id = ""


class BinaryTemplates:
    """Calls whose tensors follow a JSON head. So many heads, none longer than so much, are remembered."""

    def __init__(self) -> None:
        self._plain: dict[_Key, _Remembered] = {}
        # By what follows a leading id.
        self._with_id: dict[_Key, _Remembered] = {}
        self._learn_throttle = LearnThrottle()

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
            found = self._with_id.get((name, version, text[match.end() :]))
        else:
            match = None
            found = self._plain.get((name, version, text))
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
        """Remember a call that was not known and has been decoded, if that is of use; `text` is its JSON."""
        if len(text) > _MAX_HEAD_BYTES or not self._learn_throttle.wants():
            return
        places: list[TensorPlace] = []
        end = 0
        for item in head.inputs:
            # BYTES can be wrong inside, and NumPy makes no views of nothing.
            if not item.num_bytes or item.datatype.itemsize is None:
                return
            places.append(TensorPlace(item.name, item.datatype, item.shape, end, end + item.num_bytes))
            end += item.num_bytes
        match = LEADING_ID.match(text)
        if match is not None and _OTHER_ID.search(text, match.end()) is not None:
            return
        templates, rest = (self._plain, text) if match is None else (self._with_id, text[match.end() :])
        if len(templates) >= _MAX_TEMPLATES:
            templates.clear()
        template = RequestTemplate(places, end, request.outputs, settings_of(request))
        templates[request.model_name, request.version, rest] = (template, form, request.id)
