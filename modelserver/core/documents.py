"""YAML and JSON that an operator writes: a repeated field is an error, never merged or ignored.

Readers of both formats silently keep the last of two equal fields. If a removed line has merged two entries of a file,
an entry that the operator meant to remove would stay valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from modelserver.errors import InvalidArgumentError

if TYPE_CHECKING:
    import yaml

# A string or a structural character; numbers and words between them do not matter.
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:\n]')
_MAX_NAME_LEN = 100


class RepeatedFieldError(InvalidArgumentError):
    """A mapping has a field twice. `line` and `first_line` say where, counted from 1."""

    def __init__(self, where: str, name: str, line: int, first_line: int) -> None:
        super().__init__(
            f"{where}: line {line}: the field '{name:.{_MAX_NAME_LEN}}' is there twice, first in line {first_line}; "
            "keep one of them"
        )
        self.line = line
        self.first_line = first_line


class _RepeatedNameError(Exception):
    """An object of JSON has a field twice; where is not known here."""


def parse_json(text: str | bytes, where: str) -> Any:
    """The document. Raises RepeatedFieldError, which begins with `where`, and ValueError if it is not JSON."""
    return _parse_json(text, where, None)


def check_fields(text: str | bytes, where: str) -> None:
    """Look for repeated fields in JSON that another reader parses. Raises as `parse_json` does."""
    _parse_json(text, where, str)


def _parse_json(text: str | bytes, where: str, parse_number: Callable[[str], Any] | None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_fields, parse_int=parse_number, parse_float=parse_number)
    except _RepeatedNameError:
        decoded = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
        raise _repeated(decoded, where) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: str | bytes, where: str) -> Any:
    """The document. Raises RepeatedFieldError, which begins with `where`, and yaml.YAMLError if it is not YAML."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Looks at the fields as written: fields that a merge (`<<`) brings may be replaced."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            _check_mapping(node, where)
            return node

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Keep each field once, the last one: PyYAML 6.0.4 merges the first of two fields with short names."""
            super().flatten_mapping(node)
            node.value = list({(key.tag, str(key.value)): (key, value) for key, value in node.value}.values())

    loader = Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _check_mapping(node: yaml.MappingNode, where: str) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        first_line = lines.get((key.tag, str(key.value)))
        if first_line is not None:
            raise RepeatedFieldError(where, str(key.value), line, first_line)
        lines[key.tag, str(key.value)] = line


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _RepeatedNameError
    return fields


def _repeated(text: str, where: str) -> RepeatedFieldError:
    """Find the repeated field in a text that is valid JSON so far."""
    # For each open level: the lines of an object's fields by name, or None for an array.
    levels: list[dict[str, int] | None] = []
    last, last_line = "", 0
    for part, line in _parts(text):
        if part == "{":
            levels.append({})
        elif part == "[":
            levels.append(None)
        elif part in "}]":
            levels.pop()
        elif part != ":":
            last, last_line = part, line
        elif (names := levels[-1]) is not None:
            name = json.loads(last)
            if name in names:
                return RepeatedFieldError(where, name, last_line, names[name])
            names[name] = last_line
    raise AssertionError("a field is repeated")


def _parts(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for match in _PART.finditer(text):
        part = match[0]
        if part == "\n":
            line += 1
        else:
            yield part, line


def shortened(value: Any, room: int) -> Any:
    """A JSON value with at most `room` values and keys in it, and strings of at most `room` characters.

    The first `room` characters of its text are those of the whole value: all of a long one would take long to write.
    """
    return _shortened(value, room, [room])


def _shortened(value: Any, longest: int, left: list[int]) -> Any:
    left[0] -= 1
    if isinstance(value, str | bytes):
        return value[:longest]
    if isinstance(value, list | tuple):
        items = []
        for item in value:
            if left[0] <= 0:
                break
            items.append(_shortened(item, longest, left))
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        members = {}
        for key, item in value.items():
            if left[0] <= 0:
                break
            left[0] -= 1
            members[key[:longest] if isinstance(key, str) else key] = _shortened(item, longest, left)
        return members
    return value


def beginning(value: Any, room: int) -> str:
    """The first `room` characters of a JSON value as Python writes it."""
    return repr(shortened(value, room))[:room]
