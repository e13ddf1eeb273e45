"""`--rate-limit-resource`: the available units of the resources that instances need to execute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.errors import InvalidArgumentError

_FLAG = "--rate-limit-resource"


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """`count` units of a resource on one device; if `device` is None, on each device, or in total if it is global."""

    name: str
    count: int
    device: int | None = None


def parse_resource_limits(texts: Sequence[str]) -> tuple[ResourceLimit, ...]:
    """The limits of repeated flags, `NAME:COUNT[:DEVICE]`. Raises InvalidArgumentError if invalid or given twice."""
    limits = tuple(map(_parse, texts))
    places = [(limit.name, limit.device) for limit in limits]
    for text, place in zip(texts, places, strict=True):
        if places.count(place) > 1:
            raise InvalidArgumentError(f"{_FLAG}={text}: this resource is given twice; leave one out")
    return limits


def _parse(text: str) -> ResourceLimit:
    name, *numbers = text.split(":")
    if not name or not 1 <= len(numbers) <= 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise InvalidArgumentError(f"{_FLAG} expects NAME:COUNT[:DEVICE] with whole numbers, got '{text}'")
    return ResourceLimit(name, *map(int, numbers))
