"""What the generated text must be, in OpenAI's words and those of other servers -> one object of constraints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.openai.sampling import unsupported

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_OPTIONS = ("disable_any_whitespace",)
_UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_additional_properties")
# Members of the request that are a constraint, or an option of one: vLLM's, then llama.cpp's and SGLang's.
_MEMBERS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_UNSUPPORTED_MEMBERS = ("guided_whitespace_pattern", "guided_json_object", "structural_tag", "grammar_triggers")
# TGI's `grammar` is an object of these types.
_GRAMMAR_TYPES = {"json": "json", "json_schema": "json", "json_object": "json", "regex": "regex"}
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_MAX_CHOICES = 4096


def read_structure(fields: Fields) -> dict[str, Any] | None:
    """The one constraint of a request, such as `{"json": schema}`; None for free text.

    Raises ParameterError for one that is malformed, and for more than one.
    """
    for name in _UNSUPPORTED_MEMBERS:
        if fields.document.get(name):
            raise unsupported(fields, name, f"use structured_outputs with one of {', '.join(_KINDS)}")
    structured = _read_structured(fields)
    found = [
        (name, structure)
        for name, structure in (
            ("response_format", _read_format(fields)),
            ("structured_outputs", structured.constraint),
            *((name, _read_member(fields, name)) for name in _MEMBERS),
        )
        if structure
    ]
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name, _ in found)
        raise ParameterError(f"{names} both constrain the answer: use one of them", found[1][0])
    if not found:
        if structured.is_given:
            raise _not_one_kind(0)
        return None
    # As in vLLM, the options of structured_outputs hold for a response_format beside it, too.
    return {**found[0][1], **structured.options}


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
        # llama.cpp's form has the schema beside the type.
        if not response_format.has("schema"):
            return {"json_object": True}
        check_schema(response_format, "schema", response_format.document["schema"])
        return {"json": response_format.document["schema"]}
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


@dataclass(frozen=True, slots=True)
class _Structured:
    """The member `structured_outputs`: its constraint, which may be empty, and its options."""

    is_given: bool = False
    constraint: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def _read_structured(fields: Fields) -> _Structured:
    structured = fields.fields("structured_outputs")
    if structured is None:
        return _Structured()
    for name in _UNSUPPORTED:
        if structured.document.get(name):
            raise unsupported(structured, name, f"use one of {', '.join(_KINDS)}")
    found = {kind: _read_kind(structured, kind, kind) for kind in _KINDS}
    given = {kind: value for kind, value in found.items() if value is not None}
    if len(given) > 1:
        raise _not_one_kind(len(given))
    options = {name: structured.flag(name) for name in _OPTIONS if structured.has(name)}
    return _Structured(is_given=True, constraint=given, options=options)


def _not_one_kind(num_given: int) -> ParameterError:
    return ParameterError(
        f"'structured_outputs' must have exactly one of {', '.join(_KINDS)}, got {num_given}", "structured_outputs"
    )


def _read_member(fields: Fields, name: str) -> dict[str, Any] | None:
    if name == "grammar" and isinstance(fields.document.get(name), dict):
        return _read_typed_grammar(fields, name)
    kind = _MEMBERS[name]
    # An empty text says nothing in llama.cpp's requests; vLLM's are never empty.
    if name in ("grammar", "json_schema", "regex", "ebnf") and fields.document.get(name) == "":
        return None
    value = _read_kind(fields, name, kind)
    return None if value is None else {kind: value}


def _read_typed_grammar(fields: Fields, name: str) -> dict[str, Any]:
    """TGI's `{"type": "json", "value": schema}`."""
    grammar = fields.fields(name)
    assert grammar is not None, "it is there"
    grammar.need("type", f"one of {', '.join(_GRAMMAR_TYPES)}")
    kind = _GRAMMAR_TYPES[grammar.word("type", tuple(_GRAMMAR_TYPES)) or ""]
    grammar.need("value", "the schema or the regular expression")
    return {kind: _read_kind(grammar, "value", kind)}


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
