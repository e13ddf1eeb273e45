"""Strings of JSON schemas: their length, a pattern, or a format."""

from __future__ import annotations

from .character_sets import JSON_CHARACTER, written_in_json, written_plainly
from .expression import NEVER, Expression, Repeat, length_bounds
from .json_text import STRING, string_of
from .pattern import parse_search
from .schema_terms import Schema, count, wrong

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


def string_expression(schema: Schema, path: str) -> Expression:
    """A string with its quotes."""
    least, most = count(schema, "minLength", path) or 0, count(schema, "maxLength", path)
    pattern, form = schema.get("pattern"), schema.get("format")
    for keyword, value in (("pattern", pattern), ("format", form)):
        if value is not None and not isinstance(value, str):
            raise wrong(path, f"{keyword} must be a string, it is {value!r}")
    known = FORMATS.get(form) if isinstance(form, str) else None
    if pattern is not None and known is not None:
        raise wrong(path, f"pattern beside format {form!r} is not supported")
    if most is not None and most < least:
        return NEVER
    regex = pattern if pattern is not None else known
    if regex is not None:
        _check_length(regex, least, most, "pattern" if pattern is not None else f"format {form!r}", path)
        return string_of(parse_search(regex, written_in_json))
    if least == 0 and most is None:
        return STRING
    return string_of(Repeat(JSON_CHARACTER, least, most))


def _check_length(regex: str, least: int, most: int | None, what: str, path: str) -> None:
    """A pattern and a length are two automata, unless the pattern itself sees to the length."""
    if least == 0 and most is None:
        return
    shortest, longest = length_bounds(parse_search(regex, written_plainly))
    if shortest < least:
        raise wrong(
            path, f"minLength {least} beside a {what} that can be shorter is not supported; say it in the pattern"
        )
    if most is not None and (longest is None or longest > most):
        raise wrong(
            path, f"maxLength {most} beside a {what} that can be longer is not supported; say it in the pattern"
        )
