"""Lists some entries of which must match a schema: `contains`, `minContains`, `maxContains`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .expression import EMPTY, NEVER, Expression, Repeat, choice, concat
from .json_text import COMMA, SPACE, in_brackets
from .schema_terms import Schema, count, wrong

if TYPE_CHECKING:
    from .schema_containers import InnerSchemas

# A rule for each number of entries and of matches among them.
_MAX_RULES = 1000


@dataclass(frozen=True, slots=True)
class ContainedItems:
    """From `least` to `most` entries match `schema`; None: as many as one likes."""

    schema: Any
    least: int
    most: int | None

    @classmethod
    def of(cls, schema: Schema, path: str) -> ContainedItems | None:
        """None if that says nothing."""
        if "contains" not in schema:
            return None
        least, most = count(schema, "minContains", path), count(schema, "maxContains", path)
        least = 1 if least is None else least
        return None if least == 0 and most is None else cls(schema["contains"], least, most)


@dataclass(frozen=True, slots=True)
class ListLayout:
    """Schemas of the first entries and of the `rest` (None: any), and how many entries there are."""

    first: list[Any]
    rest: Any
    least: int
    most: int | None


def counted_list(inner: InnerSchemas, layout: ListLayout, contains: ContainedItems, path: str) -> Expression:
    """A list, by how many entries it has so far and how many of them match."""
    if contains.most is not None and contains.most < contains.least:
        return NEVER
    return in_brackets(_CountedList(inner, layout, contains, path).expression())


class _CountedList:
    """Where `places` entries are there, all further ones are like each other, or there are none."""

    def __init__(self, inner: InnerSchemas, layout: ListLayout, contains: ContainedItems, path: str) -> None:
        self._inner = inner
        self._layout = layout
        self._contains = contains
        self._path = path
        self._num_places = layout.most if layout.most is not None else max(layout.least, len(layout.first), 1)
        self._num_matches = contains.least if contains.most is None else contains.most
        if (self._num_places + 1) * (self._num_matches + 1) > _MAX_RULES:
            raise wrong(path, f"counts of entries and of contained ones come to more than {_MAX_RULES} together")
        self._kinds: dict[tuple[int, str], Expression] = {}

    def expression(self) -> Expression:
        """From the last entry to the first: what may follow so many entries with so many matches."""
        following: list[Expression] = []
        for num_matches in range(self._num_matches, -1, -1):
            following.insert(0, self._after_all(num_matches, following[0] if following else NEVER))
        for place in range(self._num_places - 1, -1, -1):
            following = [self._after(place, num_matches, following) for num_matches in range(self._num_matches + 1)]
        return following[0]

    def _after(self, place: int, num_matches: int, following: list[Expression]) -> Expression:
        comma = COMMA if place else EMPTY
        options = [concat(comma, self._other(place), following[num_matches])]
        if num_matches < self._num_matches:
            options.append(concat(comma, self._match(place), following[num_matches + 1]))
        if place >= self._layout.least and num_matches >= self._contains.least:
            options.append(SPACE if place else EMPTY)
        return self._shared(choice(options))

    def _after_all(self, num_matches: int, after_match: Expression) -> Expression:
        is_enough = num_matches >= self._contains.least
        if self._layout.most is not None:
            return SPACE if is_enough else NEVER
        place = self._num_places
        others: Expression = EMPTY
        if (other := self._other(place)) != NEVER:
            others = Repeat(concat(COMMA, other), 0, None)
        options = [concat(others, SPACE)] if is_enough else []
        options.append(concat(others, COMMA, self._match(place), after_match))
        return self._shared(choice(options))

    def _shared(self, expression: Expression) -> Expression:
        return expression if expression in (NEVER, SPACE, EMPTY) else self._inner.share(self._path, expression)

    def _match(self, place: int) -> Expression:
        return self._kind(place, "matches", self._contains.schema)

    def _other(self, place: int) -> Expression:
        """An entry that is not counted: where there may be more than enough, any entry."""
        if self._contains.most is None:
            return self._kind(place, "any", True)
        return self._kind(place, "others", {"not": self._contains.schema})

    def _kind(self, place: int, kind: str, wanted: Any) -> Expression:
        first, rest = self._layout.first, True if self._layout.rest is None else self._layout.rest
        place = min(place, len(first))
        found = self._kinds.get((place, kind))
        if found is None:
            given = first[place] if place < len(first) else rest
            schema = given if wanted is True else wanted if given is True else {"allOf": [given, wanted]}
            found = self._kinds[place, kind] = self._inner.inner(schema, f"{self._path}/contains ({place} {kind})")
        return found
