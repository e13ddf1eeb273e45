"""Preferences of clients of `generate` and of event streams, in the parameters of the `Accept` header.

`Accept: text/event-stream; events=named; end=done; tensors=nested`. Unknown parameters are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

_EVENTS = "text/event-stream"
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """`is_named`: events have names, `response` or `error`. `has_end`: the last one is `[DONE]`.

    `is_nested`: outputs of generate calls are nested by their shapes, instead of flat or a bare value.
    """

    is_named: bool = False
    has_end: bool = False
    is_nested: bool = False


PLAIN = AnswerForm()


def events_form(accept: str | None) -> AnswerForm:
    """The form of a stream of events."""
    return _read(accept, _EVENTS) if accept and ";" in accept else PLAIN


def document_form(accept: str | None) -> AnswerForm:
    """The form of a JSON document."""
    return _read(accept, _JSON) if accept and ";" in accept else PLAIN


@lru_cache(maxsize=64)
def _read(accept: str, media: str) -> AnswerForm:
    for item in accept.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if name == media:
            wishes = {parameter.replace(" ", "").replace('"', "") for parameter in parameters}
            return AnswerForm("events=named" in wishes, "end=done" in wishes, "tensors=nested" in wishes)
    return PLAIN
