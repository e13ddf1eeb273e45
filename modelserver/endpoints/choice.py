"""Which of several endpoints gets a request: by load, in turn, or by the hash of a key. Pure decisions."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from modelserver.endpoints.endpoint import Endpoint, hash64

# A preferred endpoint is passed over when it has more than this share of the mean load, and one request.
LOAD_BOUND = 1.25

Hashes = NDArray[np.uint64]


def load_bound(total_load: float, num_endpoints: int) -> float:
    """The load up to which an endpoint may be preferred to others."""
    return LOAD_BOUND * total_load / max(num_endpoints, 1) + 1


class Policy(enum.Enum):
    """How requests without a key are spread. The values are those of configs and flags."""

    LEAST_OUTSTANDING = "least_outstanding"
    ROUND_ROBIN = "round_robin"


class Candidates:
    """Endpoints that may get work; made anew when one of them changes its state."""

    __slots__ = ("_seeds", "endpoints")

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = endpoints
        self._seeds = np.fromiter((each.seed for each in endpoints), dtype=np.uint64, count=len(endpoints))

    def least_loaded(self, random: Random) -> Endpoint:
        """The less loaded of two that chance picks.

        Of equals, the one that answers in half the time gets twice as many, so that one that was slow once is asked
        again.
        """
        endpoints = self.endpoints
        count = len(endpoints)
        if count == 1:
            return endpoints[0]
        first = int(random.random() * count)
        second = int(random.random() * (count - 1))
        if second >= first:
            second += 1
        one, other = endpoints[first], endpoints[second]
        if one.load != other.load:
            return one if one.load < other.load else other
        return one if random.random() * (one.latency_s + other.latency_s) < other.latency_s else other

    def by_key(self, key: bytes, *, total_load: float | None, excluded: Collection[Endpoint] = ()) -> Endpoint:
        """The endpoint that a rendezvous hash prefers for `key`, among those whose load is near the mean.

        `total_load` is that of all; None prefers it whatever its load is.
        Every process prefers the same one, and an endpoint that comes or goes moves only its own keys.
        """
        scores = _mixed(self._seeds ^ np.uint64(hash64(key)))
        bound = math.inf if total_load is None else load_bound(total_load, len(self.endpoints))
        preferred: Endpoint | None = None
        for _ in self.endpoints:
            best = int(scores.argmax())
            scores[best] = 0
            endpoint = self.endpoints[best]
            if endpoint in excluded:
                continue
            if endpoint.load <= bound:
                return endpoint
            preferred = preferred or endpoint
        assert preferred is not None, "the caller leaves one endpoint"
        return preferred


def _mixed(values: Hashes) -> Hashes:
    """A score for each value, whose bits all depend on all bits of the value; wraps at 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
