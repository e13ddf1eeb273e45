"""What the generated text must be: `response_format` and vLLM's `structured_outputs` -> one object of constraints."""

from __future__ import annotations

from typing import Any

from modelserver.frontends.openai.errors import ParameterError
from modelserver.frontends.openai.fields import Fields
from modelserver.frontends.openai.sampling import unsupported

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_MAX_CHOICES = 4096


def read_structure(fields: Fields) -> dict[str, Any] | None:
    """The one constraint of a request, such as `{"json": schema}`; None for free text.

    Raises ParameterError for one that is malformed, and for more than one.
    """
    found = [
        (name, structure)
        for name, structure in (
            ("response_format", _read_format(fields)),
            ("structured_outputs", _read_structured(fields)),
            *((name, _read_guided(fields, name)) for name in _GUIDED),
        )
        if structure is not None
    ]
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name, _ in found)
        raise ParameterError(f"{names} both constrain the answer: use one of them", found[1][0])
    return found[0][1] if found else None


def check_schema(fields: Fields, name: str, schema: Any) -> None:
    """Raise ParameterError unless a JSON schema is an object (or true), as far as can be told without compiling it."""
    if not isinstance(schema, dict) and schema is not True:
        raise fields.wrong(name, "a JSON schema, which is an object", schema)
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is not None and not isinstance(kind, str | list):
        raise fields.wrong(f"{name}.type", "a string or an array of strings", kind)


def _read_format(fields: Fields) -> dict[str, Any] | None:
    response_format = fields.fields("response_format")
    if response_format is None:
        return None
    response_format.need("type", f"one of {', '.join(_FORMATS)}")
    kind = response_format.word("type", _FORMATS)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        raise unsupported(response_format, "type", "use json_schema, or structured_outputs")
    response_format.need("json_schema", "an object with the schema")
    described = response_format.fields("json_schema")
    assert described is not None, "it is there"
    described.need("name", "a string")
    if not described.text("name"):
        raise described.wrong("name", "a string that is not empty", "")
    described.text("description")
    described.flag("strict")
    described.need("schema", "a JSON schema")
    schema = described.document["schema"]
    check_schema(described, "schema", schema)
    return {"json": schema}


def _read_structured(fields: Fields) -> dict[str, Any] | None:
    structured = fields.fields("structured_outputs")
    if structured is None:
        return None
    for name in _UNSUPPORTED:
        if structured.document.get(name):
            raise unsupported(structured, name, f"use one of {', '.join(_KINDS)}")
    found = {kind: _read_kind(structured, kind, kind) for kind in _KINDS}
    given = {kind: value for kind, value in found.items() if value is not None}
    if len(given) != 1:
        raise ParameterError(
            f"'structured_outputs' must have exactly one of {', '.join(_KINDS)}, got {len(given)}",
            "structured_outputs",
        )
    return given


def _read_guided(fields: Fields, name: str) -> dict[str, Any] | None:
    value = _read_kind(fields, name, _GUIDED[name])
    return None if value is None else {_GUIDED[name]: value}


def _read_kind(fields: Fields, name: str, kind: str) -> Any:
    """The value of member `name`, checked as a constraint of `kind`; None when it is not there."""
    if not fields.has(name):
        return None
    if kind == "json":
        schema = fields.document[name]
        if not isinstance(schema, str):
            check_schema(fields, name, schema)
        return schema
    if kind == "json_object":
        return fields.flag(name) or None
    if kind == "choice":
        choices = fields.texts(name, _MAX_CHOICES)
        if not choices:
            raise fields.wrong(name, "an array of at least one string", choices)
        return choices
    text = fields.text(name)
    if not text:
        raise fields.wrong(name, "a string that is not empty", text)
    return text
