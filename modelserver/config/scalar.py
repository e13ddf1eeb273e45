"""The accepted values of scalar fields: kinds, ranges and their descriptions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from google.protobuf.descriptor import FieldDescriptor

from modelserver.config.fields import expected_enum

INTEGER_RANGES: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)

_NAMES: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_INT32: "an integer",
    FieldDescriptor.CPPTYPE_INT64: "an integer",
    FieldDescriptor.CPPTYPE_UINT32: "an integer >= 0",
    FieldDescriptor.CPPTYPE_UINT64: "an integer >= 0",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a string",
}


def expected(field: FieldDescriptor) -> str:
    """`expected …`: what one value of a scalar field may be."""
    if field.enum_type is not None:
        return expected_enum(field.enum_type)
    return f"expected {_NAMES[field.cpp_type]}"


def range_problem(field: FieldDescriptor, value: int) -> str | None:
    """Why an integer does not fit its field, None if it does."""
    low, high = INTEGER_RANGES[field.cpp_type]
    if low <= value <= high:
        return None
    if value < 0 and low == 0:
        return f"expected an integer >= 0, got {shorten(str(value))}"
    return f"expected an integer in [{low}, {high}], got {shorten(str(value))}"


def fits_float(field: FieldDescriptor, value: float) -> bool:
    """Whether a number stays finite in its field; infinities and NaN are their own values."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT and math.isfinite(value):
        return abs(value) <= 3.4028235677973366e38
    return True


def shorten(text: str) -> str:
    """At most 60 characters of a user's text, for an error message."""
    return text if len(text) <= 60 else text[:57] + "..."
