"""The short form of JSON Schemas.

    {name: string, n?: integer 1..128, stop?: string | [string], format?: 'json' | Format, *: any}

`name?` may be missing or null. Capitalized names are types of the API, `'words'` are constants, `*` are further
members, and `A & B` is both. A range bounds a number, the length of a string, or that of an array; `<..` leaves the
lower bound itself out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modelserver.protocol.api import Schema

Json = dict[str, Any]

_TOKEN = re.compile(r"\s*(?:'([^']*)'|(-?\d+(?:\.\d+)?)|([A-Za-z_][\w./-]*)|(<?\.\.|[{}\[\](),:?|&*]))")
_SIMPLE = frozenset({"string", "integer", "number", "boolean", "null", "object"})
# What a range bounds, by type.
_BOUNDS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}


def json_schema(schema: Schema, prefix: str = "#/components/schemas/") -> Json:
    """The JSON Schema. Names of types follow `prefix` in its references. Raises ValueError for a malformed text."""
    return _Parser(schema, prefix).whole() if isinstance(schema, str) else dict(schema)


class _Parser:
    def __init__(self, text: str, prefix: str) -> None:
        self._text = text
        self._prefix = prefix
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"malformed schema at '{text[at : at + 30].strip()}' in '{text:.200}'")
            kind = ("word", "number", "name", "mark")[(match.lastindex or 1) - 1]
            self._tokens.append((kind, match[match.lastindex or 1]))
            at = match.end()
        self._tokens.reverse()

    def whole(self) -> Json:
        schema = self._union()
        if self._tokens:
            raise self._error()
        return schema

    def _union(self) -> Json:
        found = [self._both()]
        while self._takes("|"):
            found.append(self._both())
        if len(found) == 1:
            return found[0]
        if all(each.keys() == {"const"} for each in found):
            return {"enum": [each["const"] for each in found]}
        if all(each.keys() == {"type"} for each in found):
            return {"type": [each["type"] for each in found]}
        return {"anyOf": found}

    def _both(self) -> Json:
        found = [self._bounded()]
        while self._takes("&"):
            found.append(self._bounded())
        return found[0] if len(found) == 1 else {"allOf": found}

    def _bounded(self) -> Json:
        schema = self._one()
        if not self._tokens or (self._tokens[-1][0] != "number" and self._tokens[-1][1] not in ("..", "<..")):
            return schema
        low, high = _BOUNDS[schema["type"]]
        bound = self._number()
        is_open = self._tokens.pop()[1] == "<.."
        if bound is not None:
            schema["exclusiveMinimum" if is_open else low] = bound
        if (bound := self._number()) is not None:
            schema[high] = bound
        return schema

    def _number(self) -> float | None:
        if not self._tokens or self._tokens[-1][0] != "number":
            return None
        text = self._tokens.pop()[1]
        return float(text) if "." in text else int(text)

    def _one(self) -> Json:
        kind, text = self._tokens.pop() if self._tokens else ("", "")
        if kind == "word":
            return {"const": text}
        if kind == "name":
            if text == "any":
                return {}
            return {"type": text} if text in _SIMPLE else {"$ref": f"{self._prefix}{text}"}
        if text == "[":
            schema: Json = {"type": "array", "items": self._union()}
            self._need("]")
            return schema
        if text == "(":
            schema = self._union()
            self._need(")")
            return schema
        if text != "{":
            raise self._error()
        return self._object()

    def _object(self) -> Json:
        schema: Json = {"type": "object", "properties": {}}
        required = []
        while not self._takes("}"):
            if self._takes("*"):
                self._need(":")
                schema["additionalProperties"] = self._union()
            else:
                kind, name = self._tokens.pop() if self._tokens else ("", "")
                if kind not in ("name", "word"):
                    raise self._error()
                is_optional = self._takes("?")
                self._need(":")
                member = self._union()
                schema["properties"][name] = _or_null(member) if is_optional else member
                if not is_optional:
                    required.append(name)
            if not self._takes(","):
                self._need("}")
                break
        return {**schema, "required": required} if required else schema

    def _takes(self, mark: str) -> bool:
        if self._tokens and self._tokens[-1] == ("mark", mark):
            self._tokens.pop()
            return True
        return False

    def _need(self, mark: str) -> None:
        if not self._takes(mark):
            raise self._error()

    def _error(self) -> ValueError:
        rest = " ".join(text for _, text in self._tokens[:-6:-1])
        return ValueError(f"malformed schema before '{rest}' in '{self._text:.200}'")


def _or_null(schema: Mapping[str, Any]) -> Json:
    kind = schema.get("type")
    if not schema:
        return {}
    if isinstance(kind, str | list):
        kinds = [kind] if isinstance(kind, str) else kind
        return {**schema, "type": list(dict.fromkeys([*kinds, "null"]))}
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]}
