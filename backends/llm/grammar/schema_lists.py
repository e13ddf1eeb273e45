"""JSON schemas of lists: their entries, length, `contains`, and `uniqueItems`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .schema_terms import Schema, count, has_type, identity, types_of, wrong

# Makes the schema of an entry; its place is for errors.
Inner = Callable[[Any, str], Any]

# Alternatives that a list may come to: places of the entries that match `contains`, or sets of an enum.
_MAX_WAYS = 1024
# Entries among which those that match `contains` are.
_NUM_PLACES = 8


@dataclass(frozen=True, slots=True)
class _Layout:
    """Schemas of the first entries and of the `rest` (None: any), and how many entries there are."""

    first: list[Any]
    rest: Any
    least: int
    most: int | None

    def at(self, place: int) -> Any:
        rest = True if self.rest is None else self.rest
        return self.first[place] if place < len(self.first) else rest


def list_schemas(inner: Inner, schema: Schema, path: str) -> list[Any]:
    """Schemas of llguidance, one of which must hold; [] if no list is valid."""
    least, most = count(schema, "minItems", path) or 0, count(schema, "maxItems", path)
    items = schema.get("items")
    first, rest = schema.get("prefixItems", []), items
    if isinstance(items, list):  # before 2020-12
        first, rest = items, schema.get("additionalItems")
    if most is not None and most < least:
        return []
    if schema.get("uniqueItems") and (most is None or most > 1):
        if "contains" in schema:
            raise wrong(path, "uniqueItems beside contains is not supported")
        return _distinct(items, least, most, path)
    layout = _Layout(first[:most], rest, least, most)
    fewest, largest = count(schema, "minContains", path), count(schema, "maxContains", path)
    if "contains" in schema and (fewest != 0 or largest is not None):
        contained = _Contained(schema["contains"], 1 if fewest is None else fewest, largest)
        return list(_containing(inner, layout, contained, path))
    if rest is None and layout.first and least <= len(layout.first):
        layout = _Layout(layout.first, False, least, most)  # more may follow, and need not
    entries = [inner(one, f"{path}/prefixItems/{place}") for place, one in enumerate(layout.first)]
    return _list(entries, inner(layout.at(len(entries)), f"{path}/items"), max(least, len(entries)), most)


def _list(entries: list[Any], rest: Any, least: int, most: int | None) -> list[Any]:
    """One list, or none if an entry that it must have cannot be."""
    if any(entry is False for entry in entries[:least]) or (rest is False and least > len(entries)):
        return []
    bounds = {"minItems": least} | ({} if most is None else {"maxItems": most})
    return [{"type": "array", "prefixItems": entries, "items": rest, **bounds}]


@dataclass(frozen=True, slots=True)
class _Contained:
    """A schema of `least` to `most` entries."""

    schema: Any
    least: int
    most: int | None

    def numbers(self) -> range:
        """How many entries are made to match. Where there may be more than enough, all others are free."""
        return range(self.least, (self.least if self.most is None else min(self.most, self.least + _NUM_PLACES)) + 1)


def _containing(inner: Inner, layout: _Layout, contained: _Contained, path: str) -> Iterator[Any]:
    """A list for each way to place the entries that match among the first."""
    kinds: dict[tuple[int, bool], Any] = {}

    def entry(place: int, is_match: bool) -> Any:
        key = min(place, len(layout.first)), is_match
        if key not in kinds:
            wanted = contained.schema if is_match else contained.most is None or {"not": contained.schema}
            given = layout.at(place)
            both = given if wanted is True else wanted if given is True else {"allOf": [given, wanted]}
            kinds[key] = inner(both, f"{path}/contains")
        return kinds[key]

    numbers = contained.numbers()
    for number in numbers:
        for places in _ways(number, layout, _MAX_WAYS // len(numbers)):
            needed = places[-1] + 1 if places else 0
            entries = [entry(place, place in places) for place in range(max(needed, len(layout.first)))]
            rest = entry(len(entries), False)
            yield from _list(entries, rest, max(layout.least, needed), layout.most)


def _ways(number: int, layout: _Layout, max_ways: int) -> Iterator[tuple[int, ...]]:
    num_places = max(number, layout.least, len(layout.first) + 1, _NUM_PLACES)
    if layout.most is not None:
        num_places = min(num_places, layout.most)
    while num_places > number and math.comb(num_places, number) > max_ways:
        num_places -= 1
    return itertools.combinations(range(num_places), number)


def _distinct(items: Any, least: int, most: int | None, path: str) -> list[Any]:
    """Lists without an entry twice: some of an `enum`, in its order. Of a long one only short lists."""
    values = items.get("enum") if isinstance(items, Mapping) and items.keys() <= {"enum", "type"} else None
    if not isinstance(values, list):
        raise wrong(path, "keyword 'uniqueItems' is not supported, but for items that are an enum")
    distinct: dict[Hashable, Any] = {}
    for value in values:
        if has_type(value, types_of(items)):
            distinct.setdefault(identity(value), value)
    longest = len(distinct) if most is None else min(most, len(distinct))
    kept: list[Any] = []
    for length in range(least, longest + 1):
        if len(kept) + math.comb(len(distinct), length) > _MAX_WAYS:
            if length == least:
                raise wrong(path, f"uniqueItems with minItems {least} of {len(distinct)} values is not supported")
            break
        kept += [
            {"type": "array", "prefixItems": [{"const": value} for value in some], "items": False, "minItems": length}
            for some in itertools.combinations(distinct.values(), length)
        ]
    return kept
