"""Hypothesis strategies for model configs, made from the proto itself: every field, any value it can hold."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from modelserver.config.message import config_from_message
from modelserver.config.schema import ModelConfig
from modelserver.pb import model_config_pb2 as pb

_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 8),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 8),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, 8),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1) | st.integers(0, 8),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32, allow_nan=False),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: st.sampled_from(["", "a", "b", "INPUT0", 'q"\\\n', "é☃"]) | st.text(max_size=5),
}


@st.composite
def config_messages(draw: st.DrawFn) -> pb.ModelConfig:
    """A message with a few fields set, at every depth."""
    message = pb.ModelConfig()
    _fill(draw, message, message.DESCRIPTOR)
    return message


def configs() -> st.SearchStrategy[ModelConfig]:
    """A config with a few fields set, most of them nonsense."""
    return config_messages().map(config_from_message)


def _fill(draw: st.DrawFn, message: Any, descriptor: Descriptor) -> None:
    chosen = (
        draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=5, unique=True)) if descriptor.fields else []
    )
    for field in chosen:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            _fill_map(draw, getattr(message, field.name), entry)
        elif field.is_repeated:
            items = getattr(message, field.name)
            for _ in range(draw(st.integers(0, 2))):
                if entry is not None:
                    _fill(draw, items.add(), entry)
                else:
                    items.append(draw(_scalar(field)))
        elif entry is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            _fill(draw, inner, entry)
        else:
            setattr(message, field.name, draw(_scalar(field)))


def _fill_map(draw: st.DrawFn, entries: Any, entry: Descriptor) -> None:
    value = entry.fields_by_name["value"]
    for key in draw(st.lists(_scalar(entry.fields_by_name["key"]), max_size=2)):
        if value.message_type is not None:
            _fill(draw, entries[key], value.message_type)
        else:
            entries[key] = draw(_scalar(value))


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    return _SCALARS[field.cpp_type]
