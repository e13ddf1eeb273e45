"""The replicas behind a router: which one gets a request, the connections to each, and the requests that wait."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from modelserver.client.address import Address, Tls, parse_address
from modelserver.client.grpc_pool import SETTINGS_TIMEOUT_S, GrpcPool
from modelserver.client.http_pool import HttpPool
from modelserver.endpoints.endpoint import Endpoint, EndpointState
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.endpoints.learned_prefixes import LearnedPrefixes
from modelserver.errors import SHUTTING_DOWN, InvalidArgumentError, UnavailableError
from modelserver.router.affinity import PinnedSessions, Prompt
from modelserver.wire.context import Arena
from modelserver.wire.http2.frame import MAX_31_BITS
from modelserver.wire.sockets.poller import Poller

logger = logging.getLogger(__name__)

DEFAULT_PORT: Final = 8000
_SWEEP_S: Final = 1.0
_MAX_DESCRIBED: Final = 5
# What a replica may send on a gRPC call before its client has taken it, and in one frame.
_WINDOW_BYTES: Final = 1 << 20
_FRAME_BYTES: Final = 1 << 18


class Waiting(abc.ABC):
    """A request that waits for a replica."""

    __slots__ = ()

    @abc.abstractmethod
    def choose(self) -> None:
        """There may be a replica now."""

    @abc.abstractmethod
    def unserved(self, error: UnavailableError) -> None:
        """No replica came in time."""


@dataclass(slots=True)
class RouterCounts:
    """What the router did since its start."""

    num_requests: int = 0
    num_active: int = 0
    # Requests that were sent again to another replica.
    num_retries: int = 0
    # Requests that a replica had when it was lost, and that could not be sent again.
    num_lost: int = 0
    # Answers that had begun when their replica was lost.
    num_broken_streams: int = 0
    # Requests for which there was no replica.
    num_unserved: int = 0
    # Choices by a sequence or session, by a prompt's hash, by what was learned of prompts.
    num_by_session: int = 0
    num_by_prompt: int = 0
    num_by_learned: int = 0

    def begin(self) -> None:
        self.num_requests += 1
        self.num_active += 1

    def end(self) -> None:
        self.num_active -= 1


class Replica:
    """The connections to one endpoint."""

    __slots__ = ("grpc", "http")

    def __init__(self, address: Address, poller: Poller, arena: Arena) -> None:
        self.http = HttpPool(address, poller=poller, arena=arena)
        self.grpc = GrpcPool(
            address,
            fields=(),
            frame_bytes=_FRAME_BYTES,
            window_bytes=_WINDOW_BYTES,
            # The fewest connections that a replica's limit of calls allows.
            calls_per_connection=MAX_31_BITS,
            settings_timeout_s=SETTINGS_TIMEOUT_S,
            poller=poller,
            arena=arena,
        )

    def close(self) -> None:
        """Close idle connections, and the others when they are."""
        self.http.close()
        self.grpc.close()


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """`affinity` is prefix, session or none. `max_wait_s` says how long a request waits while no replica is ready, and
    `max_waiting` how many do. `tls` is for https replicas."""

    affinity: str = "prefix"
    max_wait_s: float = 0.0
    max_waiting: int = 1000
    logs_access: bool = False
    tls: Tls = field(default_factory=Tls)


class Replicas:
    """Chooses, and keeps connections. Event loop thread only."""

    def __init__(self, endpoints: EndpointSet, rules: RoutingRules) -> None:
        self.endpoints = endpoints
        self.rules = rules
        self.counts = RouterCounts()
        self.uses_prompts = rules.affinity == "prefix"
        self.uses_sessions = rules.affinity != "none"
        self.is_stopping = False
        self.logs_access = rules.logs_access
        self._loop = asyncio.get_running_loop()
        self._poller = Poller(self._loop)
        self._arena = Arena()
        self._replicas: dict[Endpoint, Replica] = {}
        self._learned: LearnedPrefixes[Endpoint] = LearnedPrefixes()
        self._sessions = PinnedSessions()
        self._waiting: dict[Waiting, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Follow the endpoints."""
        self.endpoints.observers.append(self._changed)
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    async def stop(self) -> None:
        """Close all connections."""
        self.endpoints.observers.remove(self._changed)
        if self._sweeper is not None:
            self._sweeper.cancel()
        for waiting in list(self._waiting):
            self._give_up(waiting)
        for replica in self._replicas.values():
            await replica.http.stop()
            await replica.grpc.stop()
        await asyncio.sleep(0)  # those closed learn of it
        self._poller.close()

    @property
    def num_waiting(self) -> int:
        """Requests that wait because there is no replica."""
        return len(self._waiting)

    @property
    def is_ready(self) -> bool:
        """Whether the router takes requests, and one would find a replica."""
        return not self.is_stopping and self.endpoints.can_serve

    @property
    def has_ready(self) -> bool:
        """Whether a replica is ready with all its models."""
        return not self.is_stopping and any(each.state is EndpointState.READY for each in self.endpoints.endpoints)

    def why_not_ready(self) -> str:
        """The reason in words."""
        if self.is_stopping:
            return SHUTTING_DOWN
        now_ns = self.endpoints.clock.now_ns()
        states = [each.describe(now_ns) for each in list(self.endpoints.endpoints)[:_MAX_DESCRIBED]]
        return f"no replica is ready: {'; '.join(states) or 'none is known'}"

    def describe(self) -> dict[str, object]:
        """The replicas and their states, for operators."""
        return {
            "endpoints": [
                {
                    "address": each.address,
                    "name": each.member.name,
                    "state": each.state.value,
                    "outstanding": each.outstanding,
                    "from_others": round(each.excess, 1),
                    "latency_ms": round(each.latency_s * 1000, 3),
                    "problem": each.problem,
                }
                for each in self.endpoints.endpoints
            ],
            "waiting": self.num_waiting,
        }

    def replica(self, endpoint: Endpoint) -> Replica:
        """The connections to an endpoint."""
        replica = self._replicas.get(endpoint)
        if replica is None:
            address = self._address(endpoint.address, DEFAULT_PORT)
            replica = self._replicas[endpoint] = Replica(address, self._poller, self._arena)
        return replica

    def pool(self, url: str, *, default_port: int) -> HttpPool:
        """Connections to another server than a replica."""
        return HttpPool(self._address(url, default_port), poller=self._poller, arena=self._arena)

    def _address(self, url: str, default_port: int) -> Address:
        is_secure = url.startswith(("https://", "grpcs://"))
        return parse_address(url, default_port=default_port, tls=self.rules.tls if is_secure else None)

    # The choice.

    def choose(self, session: bytes, prompt: Prompt | None, tried: Sequence[Endpoint]) -> Endpoint:
        """The endpoint for a request. Raises UnavailableError, with the reasons, where there is none."""
        endpoints = self.endpoints
        if session and self.uses_sessions:
            self.counts.num_by_session += 1
            pinned = self._sessions.find(session)
            if pinned is not None and _serves_sessions(pinned) and pinned not in tried:
                return pinned
            chosen = endpoints.choose(key=session, excluded=tried, is_bounded=False)
            self._sessions.pin(session, chosen)
            return chosen
        if prompt is None:
            return endpoints.choose(excluded=tried)
        self.counts.num_by_prompt += 1
        chosen = endpoints.choose(key=prompt.key, excluded=tried)
        bound = endpoints.load_bound
        allowed = [each for each in endpoints.candidates(tried) if each.load <= bound]
        better = self._learned.better(prompt.blocks, chosen, allowed)
        if better is not None:
            self.counts.num_by_learned += 1
            chosen = better
        self._learned.learn(prompt.blocks, chosen)
        return chosen

    def has_other(self, tried: Sequence[Endpoint]) -> bool:
        """Whether a replica is left that was not tried."""
        return bool(self.endpoints.candidates(tried))

    # Requests that wait.

    def wait(self, waiting: Waiting) -> bool:
        """Have the request choose again when there is a replica; False where requests do not wait, or too many do."""
        rules = self.rules
        if not rules.max_wait_s or len(self._waiting) >= rules.max_waiting or self.endpoints.can_serve:
            return False
        self._waiting[waiting] = self._loop.call_later(rules.max_wait_s, self._give_up, waiting)
        return True

    def stop_waiting(self, waiting: Waiting) -> None:
        """The request's client has left."""
        timer = self._waiting.pop(waiting, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, waiting: Waiting) -> None:
        self.stop_waiting(waiting)
        error = UnavailableError(f"no replica was ready within {self.rules.max_wait_s:g} s")
        error.retry_after_s = 1.0
        waiting.unserved(error)

    # Changes.

    def _changed(self, endpoint: Endpoint) -> None:
        now_ns = self.endpoints.clock.now_ns()
        logger.log(logging.INFO if endpoint.is_available(now_ns) else logging.WARNING, "%s", endpoint.news(now_ns))
        state = endpoint.state
        if state in (EndpointState.READY, EndpointState.DEGRADED):
            if self._waiting:
                self._loop.call_soon(self._wake)
            return
        replica = self._replicas.get(endpoint)
        if replica is not None:
            replica.http.close()
        if not endpoint.is_member:
            replica = self._replicas.pop(endpoint, None)
            if replica is not None:
                replica.close()

    def _wake(self) -> None:
        waiting = list(self._waiting)
        for each in waiting:
            self.stop_waiting(each)
            each.choose()

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)
        for replica in self._replicas.values():
            replica.http.sweep()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, beside the loop's other work."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _serves_sessions(endpoint: Endpoint) -> bool:
    return endpoint.is_member and endpoint.state not in (EndpointState.STARTING, EndpointState.DOWN)


def check_address(text: str) -> None:
    """Raises InvalidArgumentError unless it is the address of a replica."""
    try:
        parse_address(text, default_port=DEFAULT_PORT)
    except InvalidArgumentError:
        raise InvalidArgumentError(f"--to expects http://HOST:PORT or HOST:PORT, got '{text}'") from None
