"""Model configs to and from protobuf messages and JSON.

Conversion follows the table of `fields`: a new field of the proto needs a field in `schema` and nothing
here. JSON has names as in the proto and 64-bit integers as numbers, as Triton's config endpoint prints it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from modelserver.config import literal, schema
from modelserver.config.fields import DATATYPE_NUMBERS, DATATYPES, Field, expected_enum, fields_of
from modelserver.config.json_loader import load
from modelserver.config.problem import Problem, error_of, key_path
from modelserver.core.documents import check_fields
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
