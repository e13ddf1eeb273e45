"""Strings of JSON schemas: their length, patterns, formats, and what they must not be."""

from __future__ import annotations

import re
from typing import Any

from .patterns import library_pattern
from .schema_terms import Excluded, Schema, count, wrong

_YEAR_MONTH_DAY = (
    r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])))"
)
_DATE = _YEAR_MONTH_DAY.replace(r"\d{4}", r"(000[1-9]|00[1-9]\d|0[1-9]\d{2}|[1-9]\d{3})")
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_GROUP = r"[0-9a-fA-F]{1,4}"
# Each allows a part of its format, and nothing else. Formats that are not here have no effect, as the
# specification has it.
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": r"^P(\d{1,9}W|\d{1,9}D|\d{1,9}Y(\d{1,9}M(\d{1,9}D)?)?|T\d{1,9}(H|M|S))$",
    "uuid": r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "ipv6": rf"^({_GROUP}:){{7}}{_GROUP}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
    "email": rf"^[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,16}}){{0,1}}@{_LABEL}(\.{_LABEL}){{1,2}}$",
    "uri": rf"^https?://{_LABEL}(\.{_LABEL}){{0,3}}(:[1-9]\d{{0,3}})?(/[A-Za-z0-9._~-]*)*(\?[A-Za-z0-9._~=&-]*)?$",
}
# Characters by which a text is kept apart from one that is excluded; what begins like a longer one is excluded, too.
_MAX_PREFIX = 64
_ANYTHING = "(?s:.)"


def string_schema(schema: Schema, path: str) -> Any:
    """A string in llguidance's words; False if there is none."""
    least, most = count(schema, "minLength", path) or 0, count(schema, "maxLength", path)
    if most is not None and most < least:
        return False
    bounds = {word: value for word, value in (("minLength", least or None), ("maxLength", most)) if value is not None}
    patterns = _patterns(schema, path)
    excluded = schema.get("not")
    if isinstance(excluded, Excluded):
        patterns.append(none_of(excluded.values))
    if len(patterns) < 2:
        return {"type": "string", **bounds, **({"pattern": patterns[0]} if patterns else {})}
    return {"type": "string", **bounds, "allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}


def name_pattern(schema: Schema, path: str) -> str:
    """The condition of `propertyNames` on names, as one pattern."""
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return f"^(?:{'|'.join(re.escape(value) for value in values if isinstance(value, str))})$"
    found = string_schema({**schema, "type": "string"}, path)
    if found is False:
        raise wrong(path, "no text matches")
    least, most = found.get("minLength", 0), found.get("maxLength", "")
    has_bounds = "minLength" in found or "maxLength" in found
    if "allOf" in found or (has_bounds and "pattern" in found):
        raise wrong(path, "several patterns, or a pattern beside a length, are not supported here")
    return str(found.get("pattern", f"^{_ANYTHING}{{{least},{most}}}$" if has_bounds else ""))


def none_of(texts: tuple[str, ...]) -> str:
    """A pattern of all texts but these."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text[:_MAX_PREFIX]:
            node = node.setdefault(character, {})
        node[""] = len(text) > _MAX_PREFIX  # whether the text goes on
    return f"^(?:{_not_in(tree)})$"


def _not_in(tree: dict[str, Any]) -> str:
    """What is not a way through the tree; a text that is cut short takes with it all that begins like it."""
    characters = [character for character in tree if character]
    barred = "".join(f"\\x{{{ord(character):x}}}" for character in characters)
    options = [] if "" in tree else [""]
    options.append(f"[^{barred}]{_ANYTHING}*" if barred else f"{_ANYTHING}+")
    options += [
        f"\\x{{{ord(character):x}}}(?:{_not_in(tree[character])})"
        for character in characters
        if tree[character].get("") is not True
    ]
    return "|".join(options)


def _patterns(schema: Schema, path: str) -> list[str]:
    """All that a string must match: `pattern`, which merged schemas may have several of, and `format`."""
    pattern, form = schema.get("pattern", ()), schema.get("format", "")
    for keyword, value in (("pattern", pattern), ("format", form)):
        if not isinstance(value, str | tuple):
            raise wrong(path, f"{keyword} must be a string, it is {value!r}")
    forms = (form,) if isinstance(form, str) else form
    given = [*((pattern,) if isinstance(pattern, str) else pattern)]
    return [library_pattern(each) for each in [*given, *(FORMATS[each] for each in forms if each in FORMATS)]]
