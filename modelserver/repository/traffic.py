"""Chooses the version for a request without one: the highest, or by weight; and the versions that get copies of it.

A `Traffic` is an operator's setting for a model; `Split` applies it. Everything is pure except `TrafficTable`, which
the control plane changes and the data plane reads, on the event loop thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, log
from typing import Any

from modelserver.core.numerals import is_digits
from modelserver.core.request import InFlightRequest
from modelserver.errors import InvalidArgumentError
from modelserver.telemetry.counts import ShadowCounts

logger = logging.getLogger(__name__)

STICKY_CALLER = "caller"
STICKY_PARAMETER = "parameter:"
_FIELDS = ("weights", "sticky_by", "shadows", "tolerance")
_MOST_VERSIONS = 32
_MAX_WEIGHT = 1e9


@dataclass(frozen=True, slots=True)
class Traffic:
    """`weights` distribute requests over versions; without weights the highest version answers. `shadows` give the part
    of requests, 0 to 1, that is copied to a version. Its answers are compared with the given ones, then dropped.

    `sticky_by` keeps requests on one version that have the same "caller" (see `--callers-by`), or the same value
    of a parameter of the request ("parameter:<name>", also from a header that is forwarded); sequences always are.
    `tolerance` is how far numbers may be apart that count as equal, relatively and absolutely.
    """

    weights: Mapping[int, float] = field(default_factory=dict)
    sticky_by: str = ""
    shadows: Mapping[int, float] = field(default_factory=dict)
    tolerance: float = 1e-5

    @property
    def versions(self) -> set[int]:
        """The versions that it names."""
        return {*self.weights, *self.shadows}

    @property
    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "weights": {str(version): weight for version, weight in sorted(self.weights.items())},
            "sticky_by": self.sticky_by,
            "shadows": {str(version): part for version, part in sorted(self.shadows.items())},
            "tolerance": self.tolerance,
        }


def parse_traffic(document: Mapping[str, Any]) -> Traffic:
    """Parse an operator's document. Raises InvalidArgumentError."""
    unknown = next((name for name in document if name not in _FIELDS), None)
    if unknown is not None:
        raise InvalidArgumentError(f"traffic: unknown field '{unknown:.60}', expected some of {', '.join(_FIELDS)}")
    weights = _numbers("weights", document.get("weights", {}), _MAX_WEIGHT)
    shadows = _numbers("shadows", document.get("shadows", {}), 1.0)
    sticky_by = document.get("sticky_by", "")
    is_parameter = isinstance(sticky_by, str) and len(sticky_by) > len(STICKY_PARAMETER)
    if sticky_by not in ("", STICKY_CALLER) and not (is_parameter and sticky_by.startswith(STICKY_PARAMETER)):
        raise InvalidArgumentError(
            f"traffic: 'sticky_by' must be empty, {STICKY_CALLER} or {STICKY_PARAMETER}NAME, got '{sticky_by!s:.60}'"
        )
    tolerance = document.get("tolerance", 1e-5)
    if not _is_number(tolerance) or not 0 <= tolerance <= 1:
        raise InvalidArgumentError(f"traffic: 'tolerance' must be a number from 0 to 1, got '{tolerance!s:.40}'")
    if weights and not any(weights.values()):
        raise InvalidArgumentError("traffic: all weights are 0, so no version would answer")
    if not weights and not shadows:
        raise InvalidArgumentError("traffic: give 'weights' or 'shadows'; to undo them, delete the model's traffic")
    return Traffic(weights, sticky_by, shadows, float(tolerance))


def _numbers(name: str, value: Any, most: float) -> dict[int, float]:
    if not isinstance(value, Mapping) or len(value) > _MOST_VERSIONS:
        raise InvalidArgumentError(f"traffic: '{name}' must be an object of up to {_MOST_VERSIONS} versions")
    numbers: dict[int, float] = {}
    for key, number in value.items():
        text = str(key)
        if not (is_digits(text)):
            raise InvalidArgumentError(f"traffic: '{name}' must have version numbers as keys, got '{text:.40}'")
        if not _is_number(number) or not 0 <= number <= most:
            raise InvalidArgumentError(
                f"traffic: '{name}' of version {text} must be a number from 0 to {most:g}, got '{number!s:.40}'"
            )
        numbers[int(text)] = float(number)
    return numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


class Split:
    """Decides for the requests of one model. `shares` are the parts that its versions answer, those that are ready."""

    def __init__(self, name: str, traffic: Traffic) -> None:
        self.traffic = traffic
        self.shares: Mapping[int, float] = {}
        self._shares_before = self.shares
        self._name = name.encode()
        self._credits: dict[int, float] = {}
        self._parts: dict[int, float] = dict.fromkeys(traffic.shadows, 0.0)

    def choose(self, request: InFlightRequest, ready: Collection[int]) -> int | None:
        """The ready version that answers; None means the highest one.

        The shares of versions that are not ready go to the others.
        """
        weights = self._weights(ready)
        if not weights:
            return None
        key = self._key(request)
        if key is not None:
            return max(weights, key=lambda version: (self._score(key, version, weights[version]), version))
        return self._next(weights)

    def shadows(self, ready: Collection[int], answering: int) -> list[int]:
        """The versions that get a copy of this request."""
        chosen = []
        for version, part in self.traffic.shadows.items():
            self._parts[version] += part
            if self._parts[version] >= 1.0 - 1e-9:
                self._parts[version] -= 1.0
                if version in ready and version != answering:
                    chosen.append(version)
        return chosen

    def follow(self, ready: Collection[int]) -> bool:
        """Bring `shares` up to date; whether they are others than when some version was ready before."""
        weights = self._weights(ready) or dict.fromkeys(sorted(ready)[-1:], 1.0)
        total = sum(weights.values())
        self.shares = {version: weight / total for version, weight in weights.items()}
        if not self.shares or self.shares == self._shares_before:
            return False
        self._shares_before = self.shares
        return True

    def _weights(self, ready: Collection[int]) -> dict[int, float]:
        return {version: weight for version, weight in self.traffic.weights.items() if weight and version in ready}

    def _next(self, weights: Mapping[int, float]) -> int:
        """Smooth weighted rotation: in any run of requests each version has its part, as evenly as can be."""
        if self._credits.keys() != weights.keys():
            self._credits = dict.fromkeys(weights, 0.0)
        for version, weight in weights.items():
            self._credits[version] += weight
        chosen = max(self._credits, key=lambda version: (self._credits[version], -version))
        self._credits[chosen] -= sum(weights.values())
        return chosen

    def _key(self, request: InFlightRequest) -> bytes | None:
        """The key that keeps requests on the same version; None without one."""
        if request.sequence_id:
            return f"sequence {request.sequence_id}".encode(errors="replace")
        sticky_by = self.traffic.sticky_by
        if sticky_by == STICKY_CALLER:
            return request.caller.encode(errors="replace") or None
        if sticky_by:
            value = request.parameters.get(sticky_by.removeprefix(STICKY_PARAMETER))
            return None if value is None else str(value).encode(errors="replace")
        return None

    def _score(self, key: bytes, version: int, weight: float) -> float:
        """Rendezvous hashing with weights: when one version goes, only its own keys move."""
        digest = hashlib.blake2b(key + b"\0%d" % version, digest_size=8, key=self._name[:64]).digest()
        share = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
        return -inf if share <= 0 else weight / -log(share)


class TrafficTable:
    """The traffic of all models. `on_change` is called when a model's traffic is set or removed."""

    def __init__(self) -> None:
        self.splits: dict[str, Split] = {}
        self.counts = ShadowCounts()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def has_shadows(self) -> bool:
        return any(split.traffic.shadows for split in self.splits.values())

    def get(self, name: str) -> Traffic | None:
        split = self.splits.get(name)
        return split.traffic if split is not None else None

    def set(self, name: str, traffic: Traffic | None) -> None:
        """From the next request on; None: the highest version answers again."""
        if traffic is None:
            self.splits.pop(name, None)
        else:
            self.splits[name] = Split(name, traffic)
        self.counts.forget(name)
        self.on_change()

    def shares(self, name: str) -> Mapping[int, float]:
        """The part of each ready version in the model's requests; empty without traffic, and while none is ready."""
        split = self.splits.get(name)
        return split.shares if split is not None else {}

    def follow(self, name: str, ready: Collection[int]) -> None:
        """Set the ready versions: they take over the shares of the others, which is logged."""
        split = self.splits.get(name)
        if split is None or not split.follow(ready):
            return
        absent = sorted(split.traffic.versions.difference(ready))
        parts = ", ".join(f"version {version} {share:.4g}" for version, share in sorted(split.shares.items()))
        if absent:
            logger.warning("model '%s': versions %s of its traffic are not ready; who answers: %s", name, absent, parts)
        else:
            logger.info("model '%s': all versions of its traffic are ready; who answers: %s", name, parts)

    def weights(self) -> dict[str, Mapping[int, float]]:
        """The models whose versions share their requests."""
        return {name: split.traffic.weights for name, split in self.splits.items() if split.traffic.weights}

    def choose(self, request: InFlightRequest, ready: Iterable[int]) -> int | None:
        """As `Split.choose`, for the request's model."""
        split = self.splits.get(request.model_name)
        return None if split is None else split.choose(request, tuple(ready))
