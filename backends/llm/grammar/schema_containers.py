"""Objects and lists of JSON schemas."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from .character_sets import JSON_PLAIN, written_in_json
from .expression import (
    EMPTY,
    NEVER,
    Characters,
    Expression,
    Repeat,
    choice,
    complement,
    concat,
    intersection,
    optional,
)
from .json_text import COLON, COMMA, SPACE, STRING, VALUE, in_braces, in_brackets, json_literal, listed, string_of
from .pattern import parse_search
from .schema_contains import ContainedItems, ListLayout, counted_list
from .schema_terms import Schema, count, has_type, identity, pointer_step, types_of, wrong

# Characters of a name that keys of other properties are kept apart from it by.
_MAX_PREFIX = 64


class InnerSchemas(Protocol):
    """Who compiles the schemas inside."""

    def inner(self, schema: Any, path: str) -> Expression: ...

    def share(self, path: str, expression: Expression) -> Expression: ...


def object_expression(inner: InnerSchemas, schema: Schema, path: str) -> Expression:
    """An object: properties in order, then others where they are allowed."""
    properties, required = _properties(schema, path)
    other = _other_member(inner, schema, properties, path)
    least, most = count(schema, "minProperties", path) or 0, count(schema, "maxProperties", path)
    if not properties:
        if least > 1:
            raise wrong(path, "minProperties above 1 is not supported: keys could repeat")
        if other is None:
            return NEVER if least else in_braces(EMPTY)
        return in_braces(listed(other, least, most))
    if least > max(1, len(required)):
        raise wrong(path, "minProperties above 1 and the number of required properties is not supported")
    if most is not None and (other is not None or most < len(properties)):
        raise wrong(path, "maxProperties below the number of properties is not supported")
    members: list[tuple[Expression, bool]] = []
    for name, value in properties.items():
        member = concat(json_literal(name, path), COLON, inner.inner(value, f"{path}/properties/{pointer_step(name)}"))
        if member != NEVER:
            members.append((member, name in required))
        elif name in required:
            return NEVER
    return in_braces(_members(inner, members, other, path, is_empty_allowed=least == 0))


def _properties(schema: Schema, path: str) -> tuple[dict[str, Any], set[str]]:
    """All named properties, those that are only required too; and the names of those that are required."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise wrong(path, f"properties must be an object, it is {properties!r}")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise wrong(path, f"required must be a list of names, it is {required!r}")
    additional = schema.get("additionalProperties", True)
    return {**properties, **{name: additional for name in required if name not in properties}}, set(required)


def _other_member(inner: InnerSchemas, schema: Schema, named: Mapping[str, Any], path: str) -> Expression | None:
    """A member that is not named; None if there is to be none."""
    patterns, additional = schema.get("patternProperties"), schema.get("additionalProperties")
    keys = _key(inner, schema, named, path)
    if patterns:
        is_alone = not named and not keys and additional in (None, False)
        if not isinstance(patterns, Mapping) or len(patterns) > 1 or not is_alone:
            raise wrong(path, "patternProperties is supported only alone, and with one pattern")
        ((pattern, value),) = patterns.items()
        key = string_of(parse_search(pattern, written_in_json))
        return _present(concat(key, COLON, inner.inner(value, f"{path}/patternProperties/{pointer_step(pattern)}")))
    if additional is False or (additional is None and named):
        return None
    if additional is None or additional is True:
        value = VALUE
    else:
        value = inner.inner(additional, f"{path}/additionalProperties")
    return _present(concat(keys or (string_of(_not_named(named)) if named else STRING), COLON, value))


def _key(inner: InnerSchemas, schema: Schema, named: Mapping[str, Any], path: str) -> Expression | None:
    """What `propertyNames` says of keys; None if nothing."""
    names = schema.get("propertyNames", True)
    if names is True or names == {}:
        return None
    if named or not isinstance(names, Mapping):
        raise wrong(path, "propertyNames beside properties, or that is no object, is not supported")
    return inner.inner({"type": "string", **names}, f"{path}/propertyNames")


def _present(member: Expression) -> Expression | None:
    return None if member == NEVER else member


def _members(
    inner: InnerSchemas,
    members: list[tuple[Expression, bool]],
    other: Expression | None,
    path: str,
    *,
    is_empty_allowed: bool,
) -> Expression:
    """Those that are not required may be left out; commas stand between those that are there."""
    others = EMPTY if other is None else Repeat(concat(COMMA, other), 0, None)
    # What may follow a member that is there, from the last member to the first.
    following = concat(others, SPACE)
    options: list[Expression] = []
    has_required = any(is_required for _, is_required in members)
    first_required = next((place for place, (_, is_required) in enumerate(members) if is_required), len(members))
    for place in range(len(members) - 1, -1, -1):
        member, is_required = members[place]
        if place <= first_required:
            options.append(concat(member, following))
        after_comma = concat(COMMA, member)
        following = concat(after_comma if is_required else optional(after_comma), following)
        if 0 < place <= first_required:
            # Every member that may be the first goes on with it.
            following = inner.share(path, following)
    if not has_required:
        if other is not None:
            options.append(concat(other, others, SPACE))
        if is_empty_allowed:
            options.append(EMPTY)
    return choice(reversed(options))


def _not_named(names: Mapping[str, Any]) -> Expression:
    """Keys that are none of these, of characters that need no escape."""
    anything = Repeat(Characters(JSON_PLAIN), 0, None)
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for character in name[:_MAX_PREFIX]:
            node = node.setdefault(character, {})
        node[""] = len(name) > _MAX_PREFIX  # whether the name goes on
    return _not_in_tree(tree, anything)


def _not_in_tree(tree: dict[str, Any], anything: Expression) -> Expression:
    """What is not a way through the tree; a name that is cut short takes with it all that begins like it."""
    if tree.get("") is True:
        return NEVER
    characters = [character for character in tree if character]
    codes = [(ord(character), ord(character)) for character in characters]
    others = intersection(JSON_PLAIN, complement(codes))
    options = [concat(Characters(others), anything)]
    options += [
        concat(Characters(((ord(character), ord(character)),)), _not_in_tree(tree[character], anything))
        for character in characters
        if intersection(JSON_PLAIN, ((ord(character), ord(character)),))
    ]
    return choice(options if "" in tree else [EMPTY, *options])


def array_expression(inner: InnerSchemas, schema: Schema, path: str) -> Expression:
    """A list: what `prefixItems` says one after the other, then `items`."""
    least, most = count(schema, "minItems", path) or 0, count(schema, "maxItems", path)
    items = schema.get("items")
    first, rest = schema.get("prefixItems", []), items
    if isinstance(items, list):  # before 2020-12
        first, rest = items, schema.get("additionalItems")
    if not isinstance(first, list):
        raise wrong(path, f"prefixItems must be a list of schemas, it is {first!r}")
    if most is not None and most < least:
        return NEVER
    contains = ContainedItems.of(schema, path)
    if schema.get("uniqueItems") and (most is None or most > 1):
        if contains is not None:
            raise wrong(path, "uniqueItems beside contains is not supported")
        return _distinct(inner, items, least, most, path)
    first = first[:most]
    if contains is not None:
        return counted_list(inner, ListLayout(first, rest, least, most), contains, path)
    if rest is None and first and least <= len(first):
        rest = False  # more may follow, and need not
    item = VALUE if rest is None else inner.inner(rest, f"{path}/items")
    if not first:
        if item == NEVER:
            return NEVER if least else in_brackets(EMPTY)
        return in_brackets(listed(item, least, most))
    entries = [inner.inner(one, f"{path}/prefixItems/{place}") for place, one in enumerate(first)]
    parts = [entries[0], *(concat(COMMA, entry) for entry in entries[1:])]
    if item != NEVER:
        room = None if most is None else most - len(first)
        parts.append(Repeat(concat(COMMA, item), max(0, least - len(first)), room))
    elif least > len(first):
        return NEVER
    return in_brackets(concat(*parts, SPACE))


def _distinct(inner: InnerSchemas, items: Any, least: int, most: int | None, path: str) -> Expression:
    """A list without an entry twice: some of an `enum`, in its order."""
    values = items.get("enum") if isinstance(items, Mapping) and items.keys() <= {"enum", "type"} else None
    if not isinstance(values, list) or least > 1 or (most is not None and most < len(values)):
        raise wrong(
            path,
            "keyword 'uniqueItems' is not supported, but for items that are an enum, minItems of at most 1 and no "
            "maxItems below the number of its values",
        )
    kept = [value for value in values if has_type(value, types_of(items))]
    distinct: dict[Hashable, Any] = {}
    for value in kept:
        distinct.setdefault(identity(value), value)
    entries: list[tuple[Expression, bool]] = [(json_literal(value, path), False) for value in distinct.values()]
    return in_brackets(_members(inner, entries, None, path, is_empty_allowed=least == 0))
