"""`--host-policy`: the cores on which the instances of a group may run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.errors import InvalidArgumentError
from modelserver.options.flags import nearest_hint

_FLAG = "--host-policy"
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
            raise InvalidArgumentError(f"{_FLAG} expects NAME,KEY=VALUE, got '{text}'")
        if key not in _KEYS:
            raise InvalidArgumentError(
                f"{_FLAG}={name}: expected one of {', '.join(_KEYS)}, got '{key}'{nearest_hint(key, _KEYS)}"
            )
        if key in settings.setdefault(name, {}):
            raise InvalidArgumentError(f"{_FLAG}={name},{key} is given twice; leave one out")
        settings[name][key] = value
    return tuple(_policy(name, values) for name, values in settings.items())


def parse_cores(text: str) -> frozenset[int]:
    """The numbers of a list of cores, such as `0-3,8`, as Linux writes them too. Raises ValueError."""
    if not _CORES.fullmatch(text):
        raise ValueError(f"no list of cores: {text!r}")
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
        raise InvalidArgumentError(f"{_FLAG}={name},numa-node expects the number of a node, got '{node}'")
    try:
        found = parse_cores(cores) if cores is not None else None
    except ValueError:
        raise InvalidArgumentError(
            f"{_FLAG}={name},cpu-cores expects numbers and ranges such as 0-3,8, got '{cores}'"
        ) from None
    return HostPolicy(name, found, int(node) if node is not None else None)
