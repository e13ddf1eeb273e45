"""The values of Go's templates in Python, their texts as fmt writes them, and the functions that templates call.

Texts are measured and cut by bytes of UTF-8, as in Go.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

_MAX_WIDTH = 1000
_VERB = re.compile(r"%(?P<flags>[-+# 0]*)(?P<width>\d{0,6})(?:\.(?P<precision>\d{0,6}))?(?P<verb>.?)", re.DOTALL)
_HTML = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


class FunctionError(Exception):
    """A function that cannot take its arguments."""


@dataclass(frozen=True, slots=True)
class Record:
    """A struct: reading another field than these is an error. As text it is `document`, in JSON."""

    kind: str
    fields: Mapping[str, Any]
    document: Any


class JsonMap(dict[str, Any]):
    """A map that is JSON where it is written as text."""


def is_true(value: Any) -> bool:
    """Go's truth: nothing, false, 0 and what is empty are false; a struct is true."""
    return isinstance(value, Record) or bool(value)


def text_of(value: Any) -> str:
    """As `fmt.Print` writes it."""
    if isinstance(value, str):
        return value
    if value is None:
        return "<nil>"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, Record | JsonMap):
        return json_of(value)
    if isinstance(value, list):
        if any(isinstance(item, Record) for item in value):
            return json_of(value)
        return f"[{' '.join(map(text_of, value))}]"
    if isinstance(value, dict):
        return f"map[{' '.join(f'{key}:{text_of(item)}' for key, item in sorted(value.items()))}]"
    return str(value)


def json_of(value: Any) -> str:
    """As `encoding/json` writes it: compact, maps by their keys, characters of HTML escaped."""
    return json.dumps(_document(value), ensure_ascii=False, separators=(",", ":")).translate(_HTML)


def _document(value: Any) -> Any:
    if isinstance(value, Record):
        return _document_in_order(value.document)
    if isinstance(value, dict):
        return {key: _document(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [_document(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return value


def _document_in_order(value: Any) -> Any:
    """The members of structs keep their order; those of maps in them do not."""
    if isinstance(value, JsonMap):
        return _document(value)
    if isinstance(value, dict):
        return {key: _document_in_order(item) for key, item in value.items()}
    return [_document_in_order(item) for item in value] if isinstance(value, list) else _document(value)


def _float_text(value: float) -> str:
    """The shortest digits, with an exponent below 1e-4 and from 1e6 on."""
    if math.isnan(value) or math.isinf(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else '+'}Inf"
    number = Decimal(repr(value)).normalize()
    if value and not 1e-4 <= abs(value) < 1e6:
        exponent = number.adjusted()
        return f"{number.scaleb(-exponent):f}e{exponent:+03d}"
    return f"{number:f}"


# Functions. What they raise is a FunctionError.


def _eq(first: Any, *others: Any) -> bool:
    if not others:
        raise FunctionError("missing argument for comparison")
    return any(_are_equal(first, other) for other in others)


def _are_equal(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    if _basic_kind(first) != _basic_kind(second):
        raise FunctionError("incompatible types for comparison")
    if not _basic_kind(first):
        raise FunctionError("non-comparable type")
    return bool(first == second)


def _basic_kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else ""


def _is_less(first: Any, second: Any) -> bool:
    kind = _basic_kind(first)
    if kind != _basic_kind(second):
        raise FunctionError("incompatible types for comparison")
    if kind not in ("number", "string"):
        raise FunctionError("invalid type for comparison")
    return bool(first < second)


def _ne(first: Any, second: Any) -> bool:
    return not _are_equal(first, second)


def _le(first: Any, second: Any) -> bool:
    return not _is_less(second, first)


def _gt(first: Any, second: Any) -> bool:
    return _is_less(second, first)


def _ge(first: Any, second: Any) -> bool:
    return not _is_less(first, second)


def _not(value: Any) -> bool:
    return not is_true(value)


def _len(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, list | dict):
        return len(value)
    raise FunctionError(f"len of {'nil pointer' if value is None else f'type {type(value).__name__}'}")


def _index(value: Any, *places: Any) -> Any:
    for place in places:
        if isinstance(value, dict):
            if not isinstance(place, str):
                raise FunctionError("value has type int; should be string")
            value = value.get(place)
        elif isinstance(value, list | str):
            items = value.encode(errors="replace") if isinstance(value, str) else value
            value = items[_place(place, len(items) - 1)]
        else:
            raise FunctionError("index of untyped nil" if value is None else f"can't index {text_of(value):.60}")
    return value


def _place(place: Any, last: int) -> int:
    if isinstance(place, bool) or not isinstance(place, int):
        raise FunctionError("cannot index slice/array with " + ("nil" if place is None else type(place).__name__))
    if not 0 <= place <= last:
        raise FunctionError(f"index out of range: {place}")
    return place


def _slice(value: Any, *places: Any) -> Any:
    if not isinstance(value, list | str):
        raise FunctionError("slice of untyped nil" if value is None else f"can't slice {text_of(value):.60}")
    items = value.encode(errors="replace") if isinstance(value, str) else value
    if len(places) > (2 if isinstance(value, str) else 3):
        raise FunctionError(f"too many slice indexes: {len(places)}")
    checked = [_place(place, len(items)) for place in places]
    start, end = (*checked[:2], *(0, len(items))[len(checked[:2]) :])
    if start > end:
        raise FunctionError(f"invalid slice index: {start} > {end}")
    cut = items[start:end]
    return cut.decode(errors="replace") if isinstance(cut, bytes) else cut


def _print(*values: Any) -> str:
    """Blanks stand between two values of which neither is a text."""
    text = ""
    for number, value in enumerate(values):
        if number and not isinstance(value, str) and not isinstance(values[number - 1], str):
            text += " "
        text += text_of(value)
    return text


def _println(*values: Any) -> str:
    return " ".join(map(text_of, values)) + "\n"


def _printf(form: Any, *values: Any) -> str:
    if not isinstance(form, str):
        raise FunctionError("the format must be a string")
    waiting = list(values)

    def written(found: re.Match[str]) -> str:
        verb = found["verb"]
        if verb == "%":
            return "%"
        if not verb:
            return "%!(NOVERB)"
        if not waiting:
            return f"%!{verb}(MISSING)"
        if max(int(found["width"] or 0), int(found["precision"] or 0)) > _MAX_WIDTH:
            raise FunctionError(f"a width is larger than {_MAX_WIDTH}")
        return _formatted(found, verb, waiting.pop(0))

    text = _VERB.sub(written, form)
    if waiting:
        text += f"%!(EXTRA {', '.join(f'{_go_type(value)}={text_of(value)}' for value in waiting)})"
    return text


def _formatted(found: re.Match[str], verb: str, value: Any) -> str:
    flags, precision = found["flags"], found["precision"]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if verb in "vs":
        text = text_of(value)
        if verb == "s" and not isinstance(value, str | Record | dict | list):
            text = f"%!s({_go_type(value)}={text})" if value is not None else "%!s(<nil>)"
        text = text if precision is None or is_number else text[: int(precision or 0)]
    elif verb == "q" and isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif verb == "t" and isinstance(value, bool):
        text = text_of(value)
    elif verb in "dxXobc" and is_number and isinstance(value, int):
        text = chr(value) if verb == "c" and 0 <= value < 0xD800 else format(value, verb if verb != "c" else "d")
    elif verb in "xX" and isinstance(value, str):
        text = value.encode(errors="replace").hex()
        text = text.upper() if verb == "X" else text
    elif verb in "feEgG" and isinstance(value, float):
        text = (
            format(value, f".{6 if precision is None else int(precision or 0)}{verb}")
            if verb in "feE"
            else text_of(value)
        )
    else:
        return f"%!{verb}({_go_type(value)}={text_of(value)})" if value is not None else f"%!{verb}(<nil>)"
    if "+" in flags and is_number and not text.startswith("-"):
        text = f"+{text}"
    width = int(found["width"] or 0)
    if "-" in flags:
        return text.ljust(width)
    if "0" in flags and is_number:
        return text.zfill(width)
    return text.rjust(width)


def _go_type(value: Any) -> str:
    names = {str: "string", bool: "bool", int: "int", float: "float64", type(None): "<nil>"}
    return names.get(type(value), "value")


def _current_date(*_form: Any) -> str:
    return datetime.datetime.now().date().isoformat()


def _yesterday(*_form: Any) -> str:
    return (datetime.datetime.now().date() - datetime.timedelta(days=1)).isoformat()


_TYPESCRIPT = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "array": "any[]",
    "object": "Record<string, any>",
    "null": "null",
}


def _typescript(value: Any) -> str:
    """The type of a tool's property in TypeScript."""
    schema = value.document if isinstance(value, Record) else value
    if not isinstance(schema, dict):
        return "any"
    if schema.get("anyOf"):
        return " | ".join(map(_typescript, schema["anyOf"]))
    kinds = schema.get("type") or []
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " | ".join(_TYPESCRIPT.get(kind, "any") for kind in kinds) or "any"


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "eq": _eq,
    "ne": _ne,
    "lt": _is_less,
    "le": _le,
    "gt": _gt,
    "ge": _ge,
    "not": _not,
    "len": _len,
    "index": _index,
    "slice": _slice,
    "print": _print,
    "println": _println,
    "printf": _printf,
    "json": json_of,
    "currentDate": _current_date,
    "yesterdayDate": _yesterday,
    "toTypeScriptType": _typescript,
}
