"""Parameters of an infer request: the reserved ones set fields, the others travel to the model, and those of
a tensor say where its bytes are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.core.documents import beginning
from modelserver.core.request import InFlightRequest, RegionSlice
from modelserver.core.response import ParameterValue
from modelserver.errors import InvalidArgumentError

_MAX_UINT64 = 2**64 - 1
_MIN_INT64 = -(2**63)


def apply_parameters(request: InFlightRequest, parameters: Mapping[str, Any]) -> bool:
    """Set the request's fields from its JSON `parameters`; whether outputs are binary unless listed otherwise.

    Raises InvalidArgumentError for a value of the wrong type and for names that Triton reserves.
    """
    is_binary = False
    others: dict[str, ParameterValue] = {}
    for name, value in parameters.items():
        match name:
            case "binary_data_output":
                is_binary = _boolean(name, value)
            case "priority":
                request.priority = _unsigned(name, value)
            case "timeout":
                request.timeout_us = _unsigned(name, value)
            case "sequence_id":
                request.sequence_id = value if isinstance(value, str) else _unsigned(name, value)
            case "sequence_start":
                request.sequence_start = _boolean(name, value)
            case "sequence_end":
                request.sequence_end = _boolean(name, value)
            case _:
                others[name] = scalar_parameter(name, value)
    if others:
        request.parameters = others
    return is_binary


def size_parameter(owner: str, parameters: Mapping[str, Any], name: str) -> int | None:
    """A size in bytes among a tensor's parameters; None if it is absent."""
    value = parameters.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= _MAX_UINT64:
        raise InvalidArgumentError(
            f"{owner}: parameter '{name}' must be an unsigned integer, got {beginning(value, 40)}"
        )
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"parameter '{name}' must be a boolean, got {beginning(value, 40)}")
    return value


def _unsigned(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_UINT64:
        raise InvalidArgumentError(f"parameter '{name}' must be an unsigned 64-bit integer, got {beginning(value, 40)}")
    return value


def scalar_parameter(name: str, value: Any) -> ParameterValue:
    """The value of a parameter that travels to the model. Raises InvalidArgumentError for an invalid one."""
    if name.startswith("triton_"):
        raise InvalidArgumentError(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified. "
            f"Got '{name}'"
        )
    if not isinstance(value, bool | int | float | str):
        raise InvalidArgumentError(
            f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'. A 'float' may be, "
            f"too, but not {beginning(value, 40)}"
        )
    if type(value) is int and not _MIN_INT64 <= value <= _MAX_UINT64:
        raise InvalidArgumentError(f"parameter '{name}' does not fit 64 bits")
    return value


REGION = "shared_memory_region"
CLASSIFICATION = "classification"


def region_slice(owner: str, parameters: Mapping[str, Any]) -> RegionSlice | None:
    """The region that the tensor is in or goes to, if any. Raises InvalidArgumentError; `owner` names the tensor."""
    region = parameters.get(REGION)
    if region is None:
        return None
    if not isinstance(region, str):
        raise InvalidArgumentError(f"{owner}: parameter '{REGION}' must be a string, got {beginning(region, 40)}")
    num_bytes = size_parameter(owner, parameters, "shared_memory_byte_size")
    if num_bytes is None:
        raise InvalidArgumentError(f"{owner}: parameter 'shared_memory_byte_size' must come with '{REGION}'")
    return RegionSlice(region, size_parameter(owner, parameters, "shared_memory_offset") or 0, num_bytes)


def class_count(owner: str, parameters: Mapping[str, Any]) -> int:
    """How many classes are wanted; 0 if the tensor itself is."""
    return size_parameter(owner, parameters, CLASSIFICATION) or 0
