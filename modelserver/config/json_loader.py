"""Reads a JSON document into a protobuf message, collecting every problem instead of stopping at the first.

Accepts the same JSON as protobuf: names as in the proto or in camel case, 64-bit integers as numbers
or strings, enums by name or number, null for absent. A parameter may also be a plain string.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from modelserver.config import literal
from modelserver.config.fields import expected_enum
from modelserver.config.problem import Problem, key_path
from modelserver.config.suggestion import did_you_mean, suggest_enum, suggest_field

MAX_PROBLEMS = 100


def load(document: object, message: Any, source: str) -> list[Problem]:
    """Fill `message` from `document`; invalid values are left out and reported."""
    problems: list[Problem] = []
    _Loader(source, problems).fill(message, document, "")
    return problems


class _Loader:
    """Walks a JSON document along the descriptors, filling a message and collecting problems."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self._source = source
        self._problems = problems

    def fill(self, message: Any, document: object, path: str) -> None:
        descriptor: Descriptor = message.DESCRIPTOR
        if descriptor.name == "ModelParameter" and isinstance(document, str):
            document = {"string_value": document}
        if not isinstance(document, Mapping):
            self._report(path, f"expected an object, got {_shown(document)}")
            return
        message.SetInParent()
        oneofs: dict[str, str] = {}
        for name, value in document.items():
            if len(self._problems) >= MAX_PROBLEMS:
                return
            field = _find(descriptor, name)
            inner = f"{path}.{name}" if path else str(name)
            if field is None:
                names = [known.name for known in descriptor.fields]
                hint = did_you_mean(suggest_field(str(name), names))
                self._report(inner, f"unknown field of {_title(descriptor)}", hint)
            elif value is not None:  # null means absent
                inner = f"{path}.{field.name}" if path else field.name
                oneof = field.containing_oneof
                if oneof is not None and oneofs.setdefault(oneof.name, field.name) != field.name:
                    self._report(
                        inner, f"cannot be set beside {oneofs[oneof.name]}: only one of {_names(oneof.fields)} may be"
                    )
                self._set(message, field, value, inner)

    def _set(self, message: Any, field: FieldDescriptor, value: object, path: str) -> None:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            self._set_map(getattr(message, field.name), entry, value, path)
        elif field.is_repeated:
            self._set_list(getattr(message, field.name), field, value, path)
        elif entry is not None:
            self.fill(getattr(message, field.name), value, path)
        else:
            self._take(field, value, path, lambda scalar_value: setattr(message, field.name, scalar_value))

    def _set_map(self, entries: Any, entry: Descriptor, value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            self._report(path, f"expected an object, got {_shown(value)}")
            return
        key_field, value_field = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for raw_key, item in value.items():
            inner = key_path(path, raw_key)
            key = self._scalar(key_field, raw_key, inner)
            if key is None:
                continue
            if value_field.message_type is not None:
                self.fill(entries[key], item, key_path(path, key))
            else:
                self._take(value_field, item, inner, functools.partial(entries.__setitem__, key))

    def _set_list(self, entries: Any, field: FieldDescriptor, value: object, path: str) -> None:
        if isinstance(value, Mapping) and field.message_type is not None:
            value = [value]  # protobuf's parser, and so Triton, accepts one message as a list of one
        if not isinstance(value, list | tuple):
            self._report(path, f"expected a list, got {_shown(value)}")
            return
        for index, item in enumerate(value):
            inner = f"{path}[{index}]"
            if field.message_type is not None:
                self.fill(entries.add(), item, inner)
            else:
                self._take(field, item, inner, entries.append)

    def _take(self, field: FieldDescriptor, value: object, path: str, store: Callable[[Any], object]) -> None:
        converted = self._scalar(field, value, path)
        if converted is not None:
            store(converted)

    def _scalar(self, field: FieldDescriptor, value: object, path: str) -> int | float | str | bool | None:
        """The value as the field holds it; None after reporting that it cannot."""
        if field.enum_type is not None:
            return self._enum(field.enum_type, value, path)
        if field.cpp_type in literal.INTEGER_RANGES:
            return self._integer(field, value, path)
        if field.cpp_type in literal.FLOATS:
            number = _number(value)
            if number is not None and literal.fits_float(field, number):
                return number
        elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            if isinstance(value, bool):
                return value
        elif isinstance(value, str) and _is_text(value):
            return value
        self._report(path, f"{literal.expected(field)}, got {_shown(value)}")
        return None

    def _integer(self, field: FieldDescriptor, value: object, path: str) -> int | None:
        number = _whole(value)
        if number is None:
            self._report(path, f"{literal.expected(field)}, got {_shown(value)}")
            return None
        wrong = literal.range_problem(field, number)
        if wrong:
            self._report(path, wrong)
            return None
        return number

    def _enum(self, values: EnumDescriptor, value: object, path: str) -> int | None:
        if isinstance(value, str) and value in values.values_by_name:
            return int(values.values_by_name[value].number)
        if isinstance(value, int) and not isinstance(value, bool) and value in values.values_by_number:
            return value
        hint = did_you_mean(suggest_enum(value, values.values_by_name)) if isinstance(value, str) else None
        self._report(path, f"{expected_enum(values)}, got {_shown(value)}", hint)
        return None

    def _report(self, path: str, message: str, hint: str | None = None) -> None:
        self._problems.append(Problem(self._source, None, None, path, message, hint))


def _find(descriptor: Descriptor, name: object) -> FieldDescriptor | None:
    if not isinstance(name, str) or not _is_text(name):
        return None
    return descriptor.fields_by_name.get(name) or descriptor.fields_by_camelcase_name.get(name)


def _whole(value: object) -> int | None:
    """The integer that JSON writes as 3, 3.0 or "3"."""
    if isinstance(value, str):
        digits = value.removeprefix("-")
        return int(value) if digits.isascii() and digits.isdigit() and len(digits) <= 30 else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return literal.NON_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _is_text(value: str) -> bool:
    """Whether protobuf can hold the string: lone surrogates have no UTF-8 form."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _names(fields: Sequence[FieldDescriptor]) -> str:
    return ", ".join(field.name for field in fields)


def _title(descriptor: Descriptor) -> str:
    return str(descriptor.full_name.removeprefix("inference."))


def _shown(value: object) -> str:
    """The user's value as shortened JSON."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return literal.shorten(json.dumps(value, default=repr))
