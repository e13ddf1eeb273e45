"""Parameters of inputs and outputs that give a tensor's place, or the form in which it is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.core.documents import beginning
from modelserver.core.transfer import RegionSlice
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.request_parameters import size_parameter

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
