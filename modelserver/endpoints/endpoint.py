"""One server of several that do the same: its address, its state, and what its requests have told of it."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field


class EndpointState(enum.Enum):
    """Only READY endpoints get new work; a DRAINING one keeps its streams and sequences.

    A DEGRADED one works but for some of its models; it gets new work while none is READY.
    """

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    DOWN = "down"


class Outcome(enum.Enum):
    """How a request to an endpoint ended. The values are labels of metrics."""

    DONE = "done"
    # The endpoint did not accept a connection: the request was not processed.
    CONNECT_FAILED = "connect"
    # The connection broke while the request was in flight.
    LOST = "lost"
    TIMED_OUT = "timeout"
    SERVER_ERROR = "server"
    # The request is at fault: the endpoint works.
    CLIENT_ERROR = "client"
    # The endpoint asks for a pause (Retry-After): it works, and has too much to do.
    OVERLOADED = "overloaded"
    # The caller has left before the answer: says nothing about the endpoint.
    ABANDONED = "cancelled"

    # They are compared by identity; that of Enum is computed in Python for each request.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Member:
    """An endpoint as a source of members lists it. `address` is its identity: HOST:PORT, or a URL."""

    address: str
    state: EndpointState = EndpointState.READY
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


class Endpoint:
    """Owned by an `EndpointSet`, which alone changes it. Times are of the monotonic clock, in ns.

    `outstanding` counts this process's requests that have no outcome yet. `latency_s` is the moving average of those
    that are done, 0 before the first. `problem` says how the last request or probe failed.
    """

    __slots__ = (
        "connection_failures",
        "ejected_until_ns",
        "excess",
        "is_member",
        "last_answer_ns",
        "latency_s",
        "member",
        "num_ejections",
        "num_retries",
        "outcomes",
        "outstanding",
        "paused_until_ns",
        "probed",
        "problem",
        "recent_ejections",
        "seed",
        "server_failures",
        "window_done",
        "window_failed",
        "window_start_ns",
    )

    def __init__(self, member: Member, now_ns: int) -> None:
        self.member = member
        self.is_member = True
        # The state that the last probe found; None before the first.
        self.probed: EndpointState | None = None
        self.problem = ""
        self.outstanding = 0
        # What the endpoint reported to have in hand beyond our own requests.
        self.excess = 0.0
        self.latency_s = 0.0
        self.last_answer_ns = now_ns
        self.paused_until_ns = 0
        self.ejected_until_ns = 0
        # Consecutive ones.
        self.connection_failures = 0
        self.server_failures = 0
        # Since the first failure of a window.
        self.window_start_ns = 0
        self.window_done = 0
        self.window_failed = 0
        self.recent_ejections = 0
        self.num_ejections = 0
        self.num_retries = 0
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.seed = hash64(member.address.encode())

    def __repr__(self) -> str:
        return f"Endpoint({self.member.address}, {self.state.value}, outstanding={self.outstanding})"

    @property
    def address(self) -> str:
        return self.member.address

    @property
    def state(self) -> EndpointState:
        """The state that its source declares, or a worse one that the last probe found."""
        if not self.is_member:
            return EndpointState.DRAINING
        if self.member.state is not EndpointState.READY or self.probed is None:
            return self.member.state
        return self.probed

    @property
    def load(self) -> float:
        """Requests in hand: ours, and what is known of others'."""
        return self.outstanding + self.excess

    def news(self, now_ns: int) -> str:
        """Its state, for logs: `http://a:8000 is ready`."""
        if not self.is_member:
            return f"{self.address} has left"
        if self.is_available(now_ns):
            return f"{self.address} is ready"
        return self.describe(now_ns)

    def is_available(self, now_ns: int) -> bool:
        """Whether it gets new work."""
        return self.state is EndpointState.READY and max(self.paused_until_ns, self.ejected_until_ns) <= now_ns

    def describe(self, now_ns: int) -> str:
        """Why the endpoint gets no work, for errors: `grpc://a:8001 is down (connection refused)`."""
        state = self.state
        if state is not EndpointState.READY:
            text = f"{self.address} is {state.value}"
        elif self.paused_until_ns > now_ns:
            text = f"{self.address} asked for a pause of {(self.paused_until_ns - now_ns) / 1e9:.3g} s more"
        elif self.ejected_until_ns > now_ns:
            text = f"{self.address} failed too often"
        else:
            text = f"{self.address} was tried"
        return f"{text} ({self.problem})" if self.problem else text


def hash64(data: bytes) -> int:
    """64 bits that every process computes alike."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
