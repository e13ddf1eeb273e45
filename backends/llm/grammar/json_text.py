"""JSON as rules: white space, strings, and values of any kind; and JSON values as literals."""

from __future__ import annotations

import json
from typing import Any

from modelserver.backend import InvalidArgumentError

from .character_sets import JSON_CHARACTER
from .expression import Characters, Expression, Literal, Ref, Repeat, choice, concat, literal, normalized, optional
from .number_ranges import INTEGER, NUMBER

# Where a model may break a line it may indent, but not for ever: a small one wanders in blanks.
MAX_INDENT = 16
_INDENT = Characters(normalized([(0x09, 0x09), (0x20, 0x20)]))

SPACE = Ref("json space")
STRING = Ref("json string")
VALUE = Ref("json value")
OBJECT = Ref("json object")
_ARRAY = Ref("json array")
ANY_INTEGER = Ref("json integer")
ANY_NUMBER = Ref("json number")

COMMA = concat(literal(","), SPACE)
COLON = concat(literal(":"), SPACE)


def in_braces(members: Expression) -> Expression:
    return concat(literal("{"), SPACE, members, literal("}"))


def in_brackets(items: Expression) -> Expression:
    return concat(literal("["), SPACE, items, literal("]"))


def listed(entry: Expression, least: int, most: int | None) -> Expression:
    """From `least` to `most` entries with commas between them, and space after the last."""
    if most == 0:
        return literal("")
    more = Repeat(concat(COMMA, entry), max(0, least - 1), None if most is None else most - 1)
    some = concat(entry, more, SPACE)
    return some if least > 0 else optional(some)


def json_rules() -> dict[str, Expression]:
    """What the names above refer to."""
    member = concat(STRING, COLON, VALUE)
    return {
        SPACE.rule: optional(choice([literal(" "), concat(literal("\n"), Repeat(_INDENT, 0, MAX_INDENT))])),
        STRING.rule: string_of(Repeat(JSON_CHARACTER, 0, None)),
        OBJECT.rule: in_braces(listed(member, 0, None)),
        _ARRAY.rule: in_brackets(listed(VALUE, 0, None)),
        ANY_INTEGER.rule: INTEGER,
        ANY_NUMBER.rule: NUMBER,
        VALUE.rule: choice([OBJECT, _ARRAY, STRING, ANY_NUMBER, literal("true"), literal("false"), literal("null")]),
    }


def without_space(rules: dict[str, Expression]) -> dict[str, Expression]:
    """The same rules for JSON without blanks between its elements."""
    return rules | {SPACE.rule: literal("")} if SPACE.rule in rules else rules


def string_of(content: Expression) -> Expression:
    return concat(Literal(b'"'), content, Literal(b'"'))


def json_literal(value: Any, path: str) -> Literal:
    """A value written in one way, without white space."""
    try:
        return literal(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"structured output: JSON schema at {path}: {value!r} is no JSON: {error}"
        ) from error
