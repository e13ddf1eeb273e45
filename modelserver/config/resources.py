"""The flags about what instances share: `--rate-limit-resource`, `--model-load-gpu-limit` and `--host-policy`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelserver.core.numerals import parse_float
from modelserver.core.spelling import bad_format, nearest_hint
from modelserver.errors import InvalidArgumentError

# `--rate-limit-resource`: the available units of the resources that instances need to execute.
_RESOURCE_FLAG = "--rate-limit-resource"


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """`count` units of a resource on one device; if `device` is None, on each device, or in total if it is global."""

    name: str
    count: int
    device: int | None = None


def parse_resource_limits(texts: Sequence[str]) -> tuple[ResourceLimit, ...]:
    """The limits of repeated flags, `NAME:COUNT[:DEVICE]`. Raises InvalidArgumentError if invalid or given twice."""
    limits = tuple(map(_parse_resource, texts))
    places = [(limit.name, limit.device) for limit in limits]
    for text, place in zip(texts, places, strict=True):
        if places.count(place) > 1:
            raise InvalidArgumentError(f"{_RESOURCE_FLAG}={text}: this resource is given twice; leave one out")
    return limits


def _parse_resource(text: str) -> ResourceLimit:
    name, *numbers = text.split(":")
    if not name or not 1 <= len(numbers) <= 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise bad_format(
            _RESOURCE_FLAG, "<resource_name>:<count>:<device>' or '<resource_name>:<count>' with whole numbers", text
        )
    return ResourceLimit(name, *map(int, numbers))


# `--model-load-gpu-limit`: the use of a GPU's memory up to which models are loaded on it.
_GPU_FLAG = "--model-load-gpu-limit"


def parse_gpu_limits(texts: Sequence[str]) -> Mapping[int, float]:
    """The fraction of memory, 0 to 1, by device, from repeated `DEVICE:FRACTION`.

    Raises InvalidArgumentError for invalid text, or a device given twice.
    """
    limits: dict[int, float] = {}
    for text in texts:
        device, _, share = text.partition(":")
        try:
            fraction = parse_float(share)
        except ValueError:
            fraction = -1.0
        if not (device.isascii() and device.isdecimal() and 0 <= fraction <= 1):
            raise InvalidArgumentError(
                f"{_GPU_FLAG} expects DEVICE:FRACTION, as 0:0.8, with a share of 0 to 1, got '{text}'"
            )
        if int(device) in limits:
            raise InvalidArgumentError(f"{_GPU_FLAG}={text}: this device is given twice; leave one out")
        limits[int(device)] = fraction
    return limits


# `--host-policy`: the cores on which the instances of a group may run.
_POLICY_FLAG = "--host-policy"
_KEYS = ("numa-node", "cpu-cores")
_CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """Cores by number, the cores of a NUMA node, or the intersection of both."""

    name: str
    cores: frozenset[int] | None = None
    numa_node: int | None = None


def parse_host_policies(texts: Sequence[str]) -> tuple[HostPolicy, ...]:
    """The policies of repeated flags, `NAME,KEY=VALUE` each. Raises InvalidArgumentError for invalid text."""
    settings: dict[str, dict[str, str]] = {}
    for text in texts:
        name, comma, setting = text.partition(",")
        key, equals, value = setting.partition("=")
        if not name or not comma or not equals:
            raise bad_format(_POLICY_FLAG, "<policy name>,<setting>=<value>", text)
        if key not in _KEYS:
            raise InvalidArgumentError(
                f"{_POLICY_FLAG}={name}: expected one of {', '.join(_KEYS)}, got '{key}'{nearest_hint(key, _KEYS)}"
            )
        if key in settings.setdefault(name, {}):
            raise InvalidArgumentError(f"{_POLICY_FLAG}={name},{key} is given twice; leave one out")
        settings[name][key] = value
    return tuple(_policy(name, values) for name, values in settings.items())


def parse_cores(text: str) -> frozenset[int]:
    """The numbers of a list of cores, such as `0-3,8`, as Linux writes them too. Raises ValueError."""
    if not _CORES.fullmatch(text):
        raise ValueError(f"expected cores such as 0-3,8, got {text!r}")
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"the range {part} ends before it begins")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _policy(name: str, values: dict[str, str]) -> HostPolicy:
    cores, node = values.get("cpu-cores"), values.get("numa-node")
    if node is not None and not (node.isascii() and node.isdigit()):
        raise InvalidArgumentError(f"{_POLICY_FLAG}={name},numa-node expects the number of a node, got '{node}'")
    try:
        found = parse_cores(cores) if cores is not None else None
    except ValueError:
        raise InvalidArgumentError(
            f"{_POLICY_FLAG}={name},cpu-cores expects numbers and ranges such as 0-3,8, got '{cores}'"
        ) from None
    return HostPolicy(name, found, int(node) if node is not None else None)
