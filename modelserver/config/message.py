"""Model configs to and from protobuf messages and JSON.

Conversion follows the table of `fields`: a new field of the proto needs a field in `schema` and nothing
here. JSON has names as in the proto and 64-bit integers as numbers, as Triton's config endpoint prints it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from modelserver.config import literal, schema
from modelserver.config.fields import DATATYPE_NUMBERS, DATATYPES, Field, expected_enum, fields_of
from modelserver.config.problem import Problem, error_of, key_path
from modelserver.core.documents import check_fields
from modelserver.core.spelling import did_you_mean, suggest_enum, suggest_field
from modelserver.pb import model_config_pb2 as pb


def config_from_message(message: pb.ModelConfig, *, source: str = "message") -> schema.ModelConfig:
    """The config of a message; raises ConfigError if an enum holds a number without a name."""
    problems: list[Problem] = []
    config: schema.ModelConfig = _read(message, schema.ModelConfig, "", source, problems)
    if problems:
        raise error_of(problems, source)
    return config


def _read(message: Any, cls: type[Any], prefix: str, source: str, problems: list[Problem]) -> Any:
    values: dict[str, Any] = {}
    for field in fields_of(cls):
        if field.has_presence and not message.HasField(field.name):
            continue
        path = prefix + field.name
        raw = getattr(message, field.name)
        if field.is_map:
            # Sorted, because protobuf keeps no order in a map.
            value: Any = {
                key: _read_value(field, raw[key], key_path(path, key), source, problems) for key in sorted(raw)
            }
        elif field.is_repeated:
            value = tuple(
                _read_value(field, item, f"{path}[{index}]", source, problems) for index, item in enumerate(raw)
            )
        else:
            value = _read_value(field, raw, path, source, problems)
        values[field.attribute] = value
    return cls(**values)


def _read_value(field: Field, raw: Any, path: str, source: str, problems: list[Problem]) -> Any:
    if field.cls is not None:
        return _read(raw, field.cls, path + ".", source, problems)
    if field.is_parameter:
        return raw.string_value
    numbers = field.value.enum_type
    if numbers is None:
        return raw
    if raw not in numbers.values_by_number:
        problems.append(Problem(source, None, None, path, f"{expected_enum(numbers)}, got {raw}"))
        raw = 0
    return DATATYPES[raw] if field.enum_type is None else field.enum_type(raw)


def config_to_message(config: schema.ModelConfig, *, source: str = "model config") -> pb.ModelConfig:
    """The message of a config; raises ConfigError for values that the proto cannot hold."""
    message = pb.ModelConfig()
    problems: list[Problem] = []
    _write(config, message, "", source, problems)
    if problems:
        raise error_of(problems, source)
    return message


def _write(config: Any, message: Any, prefix: str, source: str, problems: list[Problem]) -> None:
    for field in fields_of(type(config)):
        value = getattr(config, field.attribute)
        if value is None and not field.is_datatype:
            continue
        try:
            _write_field(field, value, message, prefix + field.name, source, problems)
        except (TypeError, ValueError) as error:
            problems.append(Problem(source, None, None, prefix + field.name, f"cannot hold {value!r}: {error}"))


def _write_field(field: Field, value: Any, message: Any, path: str, source: str, problems: list[Problem]) -> None:
    if field.is_map:
        entries = getattr(message, field.name)
        for key, item in value.items():
            if field.cls is not None:
                _write(item, _present(entries[key]), f"{key_path(path, key)}.", source, problems)
            elif field.is_parameter:
                entries[key].string_value = item
            else:
                entries[key] = item
    elif field.is_repeated:
        entries = getattr(message, field.name)
        for index, item in enumerate(value):
            if field.cls is not None:
                _write(item, entries.add(), f"{path}[{index}].", source, problems)
            else:
                entries.append(_scalar(field, item))
    elif field.cls is not None:
        _write(value, _present(getattr(message, field.name)), path + ".", source, problems)
    else:
        setattr(message, field.name, _scalar(field, value))


def _present(message: Message) -> Message:
    message.SetInParent()
    return message


def _scalar(field: Field, value: Any) -> Any:
    if field.is_datatype:
        return DATATYPE_NUMBERS[value]
    return value if field.enum_type is None else value.value


def config_to_json(config: schema.ModelConfig) -> dict[str, Any]:
    """The config as an object for `json.dumps`, as Triton's config endpoint prints it."""
    return _dump(config)


def _dump(config: Any) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for field in fields_of(type(config)):
        value = getattr(config, field.attribute)
        if value is None and not field.is_datatype:
            continue
        if field.is_map:
            document[field.name] = {str(key): _dump_value(field, item) for key, item in value.items()}
        elif field.is_repeated:
            document[field.name] = [_dump_value(field, item) for item in value]
        else:
            document[field.name] = _dump_value(field, value)
    return document


def _dump_value(field: Field, value: Any) -> Any:
    if field.cls is not None:
        return _dump(value)
    if field.is_parameter:
        return {"string_value": value}
    if field.is_datatype:
        return pb.DataType.Name(DATATYPE_NUMBERS[value])
    if field.enum_type is not None:
        return value.name
    return _dump_float(field.value, value) if field.value.cpp_type in literal.FLOATS else value


def _dump_float(field: FieldDescriptor, value: float) -> float | str:
    if not math.isfinite(value):
        return next(name for name, number in literal.NON_FINITE.items() if str(number) == str(value))
    # Shortest text of the 32-bit value: 0.1, not 0.10000000149011612.
    return float(str(np.float32(value))) if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT else float(value)


# Strings, names without quotes, and trailing commas.
_LOOSE = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?P<single>(?:[^'\\]|\\.)*)'|(?P<name>[A-Za-z_]\w*)(?=\s*:)|(?P<comma>,)(?=\s*[}\]])"""
)


def _loads(text: str | bytes) -> tuple[str | bytes, Any]:
    """Strict JSON and its value. As in protobuf, names and strings may have other quotes, and lists trailing commas.

    Raises JSONDecodeError with positions in the original text.
    """
    try:
        return text, orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            strict = _LOOSE.sub(_strict, text if isinstance(text, str) else text.decode())
            return strict, orjson.loads(strict)
        except ValueError:
            pass
        raise


def _strict(match: re.Match[str]) -> str:
    if match["name"]:
        return f'"{match["name"]}"'
    if match["single"] is not None:
        return '"' + match["single"].replace("\\'", "'").replace('"', '\\"') + '"'
    return "" if match["comma"] else match[0]


def config_from_json(
    document: str | bytes | Mapping[str, Any], *, source: str = "config override"
) -> schema.ModelConfig:
    """The config of a JSON object; raises ConfigError with every problem found."""
    if isinstance(document, str | bytes):
        try:
            text, document = _loads(document)
            check_fields(text, source)
        except orjson.JSONDecodeError as error:
            problem = Problem(source, error.lineno, error.colno, "", f"not valid JSON: {error.msg}")
            raise error_of([problem], source) from None
    message = pb.ModelConfig()
    problems = load(document, message, source)
    if problems:
        raise error_of(problems, source)
    return config_from_message(message, source=source)


# Reads a JSON document into a protobuf message, collecting every problem instead of stopping at the first.
#
# Accepts the same JSON as protobuf: names as in the proto or in camel case, 64-bit integers as numbers
# or strings, enums by name or number, null for absent. A parameter may also be a plain string.

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
