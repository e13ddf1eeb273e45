"""The members of a JSON object, each checked as it is read. `null` is the same as not there, as for OpenAI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelserver.core.documents import beginning
from modelserver.frontends.llm.errors import Fault, ParameterError

MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a parameter may have; with `is_open` all above `low` without itself."""

    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        return (value > self.low if self.is_open else value >= self.low) and value <= self.high

    def told(self, value: float = 0) -> str:
        """The range in words, for someone who gave `value`: a bound far from any real value is left out."""
        begin = f"{'greater than' if self.is_open else 'at least'} {_exact(self.low)}"
        return begin if value <= self.high >= MAX_INT64 else f"{begin} and at most {_exact(self.high)}"

    def schema(self, kind: str) -> dict[str, Any]:
        """The JSON Schema of such a number, "number" or "integer", or null."""
        found: dict[str, Any] = {"type": [kind, "null"]}
        if self.low > -MAX_INT64:
            found["exclusiveMinimum" if self.is_open else "minimum"] = self.low
        if self.high < MAX_INT64:
            found["maximum"] = self.high
        return found


def _exact(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


class Fields:
    """Reads the members of `document`, whose path in the request is `path` ("" for the request itself).

    Every method raises ParameterError, naming the member, for a value of the wrong type or out of its range.
    """

    __slots__ = ("_path", "document")

    def __init__(self, document: Mapping[str, Any], path: str = "") -> None:
        self.document = document
        self._path = path

    def path(self, name: str) -> str:
        """The path of a member in the request."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        return self.document.get(name) is not None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.document.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def integer(self, name: str, bounds: Range) -> int | None:
        value = self.document.get(name)
        if value is None:
            return None
        # Some clients have only one type of number.
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise self.wrong(name, "an integer", value)
        if not bounds.holds(value):
            raise self.wrong(name, bounds.told(value), value)
        return value

    def number(self, name: str, bounds: Range) -> float | None:
        value = self.document.get(name)
        if value is None:
            return None
        if type(value) is not int and type(value) is not float:
            raise self.wrong(name, "a number", value)
        if not bounds.holds(value):
            raise self.wrong(name, bounds.told(value), value)
        return value

    def text(self, name: str) -> str | None:
        value = self.document.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def word(self, name: str, words: tuple[str, ...]) -> str | None:
        """One of a few strings."""
        value = self.text(name)
        if value is not None and value not in words:
            raise self.wrong(name, f"one of {', '.join(words)}", value)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.document.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return value

    def fields(self, name: str) -> Fields | None:
        """A member that is an object, to be read likewise."""
        value = self.mapping(name)
        return None if value is None else Fields(value, self.path(name))

    def items(self, name: str, max_len: int) -> list[Any] | None:
        value = self.document.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "an array", value)
        if len(value) > max_len:
            raise ParameterError(
                f"'{self.path(name)}' has {len(value)} items, at most {max_len} are allowed", self.path(name)
            )
        return value

    def objects(self, name: str, max_len: int) -> list[Fields] | None:
        """A member that is an array of objects."""
        items = self.items(name, max_len)
        if items is None:
            return None
        found = []
        for index, item in enumerate(items):
            member = f"{name}[{index}]"
            if not isinstance(item, dict):
                raise self.wrong(member, "an object", item)
            found.append(Fields(item, self.path(member)))
        return found

    def integers(self, name: str, max_len: int, bounds: Range) -> list[int] | None:
        items = self.items(name, max_len)
        if items is None:
            return None
        for index, item in enumerate(items):
            if type(item) is not int or not bounds.holds(item):
                raise self.wrong(f"{name}[{index}]", f"an integer, {bounds.told()}", item)
        return items

    def texts(self, name: str, max_len: int) -> list[str] | None:
        items = self.items(name, max_len)
        if items is None:
            return None
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise self.wrong(f"{name}[{index}]", "a string", item)
        return items

    def need(self, name: str, what: str) -> None:
        """Raise for a member that is not there; `what` it should be."""
        if self.document.get(name) is None:
            raise ParameterError(f"'{self.path(name)}' is missing: it must be {what}", self.path(name), Fault.MISSING)

    def wrong(self, name: str, expected: str, value: Any) -> ParameterError:
        """The error for a member that is not what it should be."""
        path = self.path(name)
        return ParameterError(f"'{path}' must be {expected}, got {beginning(value, 60)}", path, Fault.INVALID_VALUE)
