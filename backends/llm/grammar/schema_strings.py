"""Strings of JSON schemas: their length, patterns, formats, and what they must not be."""

from __future__ import annotations

from collections.abc import Callable

from .character_automaton import CharacterAutomaton, combined
from .character_sets import JSON_CHARACTER, written_in_json, written_plainly
from .expression import LAST_CHARACTER, NEVER, Characters, Expression, Literal, Repeat, choice, length_bounds
from .json_text import STRING, string_of
from .pace import Pace
from .pattern import parse_search
from .schema_terms import Excluded, Schema, count, wrong

_YEAR_MONTH_DAY = (
    r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])))"
)
_DATE = _YEAR_MONTH_DAY.replace(r"\d{4}", r"(000[1-9]|00[1-9]\d|0[1-9]\d{2}|[1-9]\d{3})")
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_GROUP = r"[0-9a-fA-F]{1,4}"
# Some of what a format allows, and nothing that it does not. Formats that are not here say nothing, as the
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


def string_expression(
    schema: Schema, path: str, name: str, add_rule: Callable[[str, Expression], None], pace: Pace | None = None
) -> Expression:
    """A string with its quotes; rules that it needs are given to `add_rule`, their names begin with `name`."""
    least, most = count(schema, "minLength", path) or 0, count(schema, "maxLength", path)
    if most is not None and most < least:
        return NEVER
    patterns, excluded = _patterns(schema, path), schema.get("not")
    length: Expression = Repeat(Characters(((0, LAST_CHARACTER),)), least, most)
    if not patterns and excluded is None:
        return STRING if least == 0 and most is None else string_of(Repeat(JSON_CHARACTER, least, most))
    if len(patterns) == 1 and excluded is None and _keeps_length(patterns[0], least, most):
        return string_of(parse_search(patterns[0], written_in_json))
    required = [*(parse_search(pattern, written_plainly) for pattern in patterns), length]
    barred = [] if excluded is None else _barred(excluded)
    return string_of(combined(required, barred, written_in_json, name, add_rule, pace))


def is_string_valid(schema: Schema, text: str, path: str) -> bool:
    """Whether a string is what `string_expression` describes."""
    least, most = count(schema, "minLength", path) or 0, count(schema, "maxLength", path)
    if len(text) < least or (most is not None and len(text) > most):
        return False
    excluded = schema.get("not")
    barred = [] if excluded is None else _barred(excluded)
    patterns = (parse_search(pattern, written_plainly) for pattern in _patterns(schema, path))
    return all(CharacterAutomaton(pattern).matches(text) for pattern in patterns) and not any(
        CharacterAutomaton(each).matches(text) for each in barred
    )


def _patterns(schema: Schema, path: str) -> list[str]:
    """All that a string must match: `pattern`, which merged schemas may have several of, and `format`."""
    pattern, form = schema.get("pattern", ()), schema.get("format", "")
    for keyword, value in (("pattern", pattern), ("format", form)):
        if not isinstance(value, str | tuple):
            raise wrong(path, f"{keyword} must be a string, it is {value!r}")
    forms = (form,) if isinstance(form, str) else form
    known = [FORMATS[each] for each in forms if each in FORMATS]
    return [*((pattern,) if isinstance(pattern, str) else pattern), *known]


def _barred(excluded: Excluded) -> list[Expression]:
    values = [choice(Literal(value.encode()) for value in excluded.values)] if excluded.values else []
    return values + [parse_search(pattern, written_plainly) for pattern in excluded.patterns]


def _keeps_length(pattern: str, least: int, most: int | None) -> bool:
    """Whether a pattern itself sees to the length."""
    shortest, longest = length_bounds(parse_search(pattern, written_plainly))
    return shortest >= least and (most is None or (longest is not None and longest <= most))
