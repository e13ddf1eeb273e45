"""The endpoints of one pool: which ones belong to it, which are healthy, which gets the next request, and how many
requests may be retried.

Pure decisions over an injected clock and random source; on one thread. Sources (`membership.py`) and probes
(`probes.py`) tell it what they find, and callers how each request ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from modelserver.core.clock import Clock, SystemClock
from modelserver.endpoints.choice import Candidates, Policy, load_bound
from modelserver.endpoints.endpoint import Endpoint, EndpointState, Member, Outcome
from modelserver.errors import UnavailableError

# Of the moving average of latencies: the share of the newest.
LATENCY_SHARE = 0.2
# Of the moving average of what others send to an endpoint: the same.
EXCESS_SHARE = 0.25
# What an endpoint may say that it has in hand: beside a nonsensical number a sum of floats would lose all others.
MAX_IN_HAND = 1_000_000
MAX_DESCRIBED = 5
NO_END_NS = 2**63
_CONNECTION_FAILURES = frozenset({Outcome.CONNECT_FAILED, Outcome.LOST})
_SERVER_FAILURES = frozenset({Outcome.TIMED_OUT, Outcome.SERVER_ERROR})


@dataclass(frozen=True, slots=True)
class EjectionRules:
    """When an endpoint that fails gets no work for a while, and for how long.

    It is ejected after that number of consecutive failures of one kind, or when more than half of the requests of a
    window failed. The time grows with each ejection that follows soon, and varies by `jitter`. At most half of the
    endpoints are ejected at once, and never the last.
    """

    connection_failures: int = 3
    server_failures: int = 5
    window_s: float = 10.0
    window_requests: int = 20
    base_s: float = 5.0
    max_s: float = 60.0
    jitter: float = 0.2


class EndpointSet:
    """Membership, health and choice. Observers are called with each endpoint that came, went or changed its state."""

    def __init__(
        self,
        *,
        policy: Policy = Policy.LEAST_OUTSTANDING,
        rules: EjectionRules | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        self.policy = policy
        self.rules = rules or EjectionRules()
        self.clock = clock or SystemClock()
        self.retry_budget = RetryBudget(self.clock)
        self.observers: list[Callable[[Endpoint], None]] = []
        # Called with the next request, and then no more: it ends the sleep of whoever watches an idle pool.
        self.on_request: Callable[[], None] | None = None
        # The requests that have no outcome yet, those to former members included.
        self.outstanding = 0
        # What members said to have in hand beyond our own requests, of all of them.
        self._excess = 0.0
        self._random = random or Random()  # noqa: S311 - it spreads load
        self._members: dict[str, Endpoint] = {}
        self._candidates = Candidates(())
        self._candidates_until_ns = 0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def can_serve(self) -> bool:
        """Whether an endpoint is in a state to get work, be it ejected or not."""
        return any(each.state in (EndpointState.READY, EndpointState.DEGRADED) for each in self._members.values())

    @property
    def endpoints(self) -> Collection[Endpoint]:
        """The members, whatever their state."""
        return self._members.values()

    # Membership

    def update(self, members: Iterable[Member]) -> None:
        """Take `members` in place of the present ones. Those that stay keep their counts and their health."""
        now_ns = self.clock.now_ns()
        former, self._members = self._members, {}
        changed = []
        for member in members:
            endpoint = former.pop(member.address, None)
            if endpoint is None:
                endpoint = self._members.get(member.address)
            if endpoint is None:
                endpoint = Endpoint(member, now_ns)
                changed.append(endpoint)
            elif endpoint.member != member:
                endpoint.member = member
                changed.append(endpoint)
            self._members[member.address] = endpoint
        for endpoint in former.values():
            endpoint.is_member = False
            self._excess -= endpoint.excess
            endpoint.excess = 0.0
        changed += former.values()
        if changed:
            self._report(changed)

    # Choice

    def candidates(self, excluded: Collection[Endpoint] = ()) -> Sequence[Endpoint]:
        """The endpoints that may get a request now."""
        now_ns = self.clock.now_ns()
        found = self._candidates if now_ns < self._candidates_until_ns else self._refresh(now_ns)
        return [each for each in found.endpoints if each not in excluded] if excluded else found.endpoints

    @property
    def load(self) -> float:
        """Requests that the members have in hand: ours, and what is known of others'."""
        return self.outstanding + self._excess

    @property
    def load_bound(self) -> float:
        """The load beyond which an endpoint is passed over although a key prefers it."""
        return load_bound(self.load, len(self._candidates.endpoints))

    def choose(
        self, *, key: bytes | None = None, excluded: Collection[Endpoint] = (), is_bounded: bool = True
    ) -> Endpoint:
        """The endpoint for a request, which does not count as outstanding before `begin`.

        With a `key`, requests of equal keys go to one endpoint, if `is_bounded` as long as its load allows. `excluded`
        are those that were tried already. Raises UnavailableError, with the reason of each endpoint, if none is left.
        """
        now_ns = self.clock.now_ns()
        candidates = self._candidates
        if now_ns >= self._candidates_until_ns:
            candidates = self._refresh(now_ns)
        if excluded:
            left = [each for each in candidates.endpoints if each not in excluded]
            if len(left) < len(candidates.endpoints):
                candidates = Candidates(left)
        if not candidates.endpoints:
            raise self._none_left(now_ns)
        if key is not None:
            return candidates.by_key(key, total_load=self.load if is_bounded else None)
        if self.policy is Policy.ROUND_ROBIN:
            self._turn += 1
            return candidates.endpoints[self._turn % len(candidates.endpoints)]
        return candidates.least_loaded(self._random)

    def _refresh(self, now_ns: int) -> Candidates:
        """Find the endpoints that may get work, and until when they are the same if nothing else happens."""
        ready, degraded, num_serving, until_ns = [], [], 0, NO_END_NS
        for endpoint in self._members.values():
            state = endpoint.state
            if state is EndpointState.READY:
                ready.append(endpoint)
            elif state is EndpointState.DEGRADED:
                degraded.append(endpoint)
            num_serving += state in (EndpointState.READY, EndpointState.DOWN)
            for end_ns in (endpoint.paused_until_ns, endpoint.ejected_until_ns):
                if now_ns < end_ns < until_ns:
                    until_ns = end_ns
        if not ready:
            # A model that fails everywhere must not take the others with it.
            ready, num_serving = degraded, num_serving + len(degraded)
        well = [each for each in ready if each.ejected_until_ns <= now_ns]
        if 2 * len(well) < num_serving:
            # Most of the pool is in trouble: rather try the ejected ones than overload the few.
            well = ready
        chosen = [each for each in well if each.paused_until_ns <= now_ns]
        self._candidates = Candidates(chosen)
        self._candidates_until_ns = until_ns
        return self._candidates

    def _none_left(self, now_ns: int) -> UnavailableError:
        members = list(self._members.values())
        if not members:
            return UnavailableError("no endpoint is known")
        reasons = "; ".join(each.describe(now_ns) for each in members[:MAX_DESCRIBED])
        more = f"; and {len(members) - MAX_DESCRIBED} more" if len(members) > MAX_DESCRIBED else ""
        error = UnavailableError(f"no endpoint is available: {reasons}{more}")
        pauses = [each.paused_until_ns - now_ns for each in members if each.paused_until_ns > now_ns]
        if pauses:
            error.retry_after_s = min(pauses) / 1e9
        return error

    # Requests and their outcomes

    def begin(self, endpoint: Endpoint) -> None:
        """A request, or a new attempt of one, goes to `endpoint`. `finish` must follow."""
        if self.on_request is not None:
            wake, self.on_request = self.on_request, None
            wake()
        endpoint.outstanding += 1
        self.outstanding += 1

    def finish(self, endpoint: Endpoint, outcome: Outcome, *, start_ns: int, problem: str = "") -> None:
        """The request that went to `endpoint` at `start_ns` has ended; `problem` says how it failed."""
        endpoint.outstanding -= 1
        self.outstanding -= 1
        endpoint.outcomes[outcome] += 1
        now_ns = self.clock.now_ns()
        if outcome is Outcome.DONE or outcome is Outcome.CLIENT_ERROR:
            latency_s = (now_ns - start_ns) / 1e9
            known_s = endpoint.latency_s
            endpoint.latency_s = known_s + LATENCY_SHARE * (latency_s - known_s) if known_s else latency_s
            endpoint.last_answer_ns = now_ns
            endpoint.window_done += 1
            if endpoint.connection_failures or endpoint.server_failures:
                endpoint.connection_failures = endpoint.server_failures = 0
            return
        if outcome is Outcome.ABANDONED:
            return
        endpoint.problem = problem
        if outcome in _CONNECTION_FAILURES:
            endpoint.connection_failures += 1
            self._judge(endpoint, now_ns)
        elif outcome in _SERVER_FAILURES:
            endpoint.server_failures += 1
            self._judge(endpoint, now_ns)

    def pause(self, endpoint: Endpoint, seconds: float) -> None:
        """Give `endpoint` no new work for the time that it told (Retry-After)."""
        endpoint.paused_until_ns = max(endpoint.paused_until_ns, self.clock.now_ns() + int(seconds * 1e9))
        self._candidates_until_ns = 0

    def report_load(self, endpoint: Endpoint, in_hand: int) -> None:
        """Correct the load of `endpoint` by the number of requests that it says it has in hand.

        What others send counts by a moving average: all who hear of one idle endpoint at once would turn to it.
        """
        if endpoint.is_member:
            found = max(0, min(in_hand, MAX_IN_HAND) - endpoint.outstanding)
            change = EXCESS_SHARE * (found - endpoint.excess)
            endpoint.excess += change
            self._excess += change

    def report_probe(self, endpoint: Endpoint, found: EndpointState, problem: str = "") -> None:
        """Note what a probe found. One that finds the endpoint READY ends an ejection for lost connections."""
        if found is EndpointState.READY:
            endpoint.last_answer_ns = self.clock.now_ns()
            if endpoint.connection_failures:
                endpoint.connection_failures = 0
                endpoint.ejected_until_ns = 0
                self._candidates_until_ns = 0
        else:
            endpoint.problem = problem
        if endpoint.probed is not found:
            endpoint.probed = found
            self._report([endpoint])

    # Ejection

    def _judge(self, endpoint: Endpoint, now_ns: int) -> None:
        """Eject an endpoint that has just failed, if it fails too often."""
        rules = self.rules
        if now_ns - endpoint.window_start_ns > rules.window_s * 1e9:
            endpoint.window_start_ns = now_ns
            endpoint.window_done = endpoint.window_failed = 0
        endpoint.window_failed += 1
        num_requests = endpoint.window_done + endpoint.window_failed
        if (
            endpoint.connection_failures >= rules.connection_failures
            or endpoint.server_failures >= rules.server_failures
            or (num_requests >= rules.window_requests and 2 * endpoint.window_failed > num_requests)
        ) and self._may_eject(endpoint, now_ns):
            self._eject(endpoint, now_ns)

    def _may_eject(self, endpoint: Endpoint, now_ns: int) -> bool:
        """Whether it is not ejected yet, and no more than half of the pool would be."""
        if endpoint.ejected_until_ns > now_ns or not endpoint.is_member:
            return False
        num_ejected = sum(each.ejected_until_ns > now_ns for each in self._members.values())
        return 2 * (num_ejected + 1) <= len(self._members)

    def _eject(self, endpoint: Endpoint, now_ns: int) -> None:
        rules = self.rules
        is_soon = now_ns - endpoint.ejected_until_ns <= rules.max_s * 1e9 and endpoint.recent_ejections
        endpoint.recent_ejections = endpoint.recent_ejections + 1 if is_soon else 1
        endpoint.num_ejections += 1
        seconds = min(rules.base_s * endpoint.recent_ejections, rules.max_s)
        seconds *= 1 + rules.jitter * (2 * self._random.random() - 1)
        endpoint.ejected_until_ns = now_ns + int(seconds * 1e9)
        endpoint.server_failures = 0
        self._report([endpoint])

    def _report(self, changed: Collection[Endpoint]) -> None:
        self._candidates_until_ns = 0
        for observer in self.observers:
            for endpoint in changed:
                observer(endpoint)


SHARE = 0.1
PER_S = 3.0
# What an idle pool saves up.
MAX_SAVED = 30.0


class RetryBudget:
    """A tenth of the requests, and three per second, may be retries. On one thread."""

    __slots__ = ("_clock", "_filled_ns", "_saved")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._saved = MAX_SAVED
        self._filled_ns = clock.now_ns()

    def deposit(self) -> None:
        """A request was sent for the first time."""
        if self._saved < MAX_SAVED:
            self._saved += SHARE

    def take(self) -> bool:
        """Whether one more retry is allowed; it is paid for then."""
        now_ns = self._clock.now_ns()
        self._saved = min(MAX_SAVED, self._saved + PER_S * (now_ns - self._filled_ns) / 1e9)
        self._filled_ns = now_ns
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
