"""Active health checks: asks endpoints in turn how they are, and those in trouble more often."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from modelserver.endpoints.endpoint import Endpoint, EndpointState
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.errors import ServerError

# Returns READY, DEGRADED, STARTING (it answers, and takes no work), or raises a ServerError when there is no answer.
Probe = Callable[[Endpoint], Awaitable[EndpointState]]

MAX_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """Endpoints are asked each `interval_s`, and each `trouble_s` while they are not READY or did not answer.

    One that has requests in hand and has answered none of them for `silence_s` is asked then. Two probes without an
    answer in a row make an endpoint DOWN, so that one in a network that swallows everything is DOWN after
    `silence_s + 2 * timeout_s + trouble_s` at the latest.
    """

    interval_s: float = 5.0
    trouble_s: float = 0.25
    silence_s: float = 0.75
    timeout_s: float = 1.0


class ProbeSchedule:
    """Which endpoints are to be asked when. Pure: it is told the time."""

    def __init__(self, endpoints: EndpointSet, times: ProbeTimes) -> None:
        self._endpoints = endpoints
        self._times = times
        # The newest plan of each endpoint; entries of the heap that differ from it are void.
        self._due_ns: dict[Endpoint, int] = {}
        self._heap: list[tuple[int, int, Endpoint]] = []
        self._asked: set[Endpoint] = set()
        self._count = 0

    def plan(self, endpoint: Endpoint, due_ns: int) -> None:
        """Ask `endpoint` at `due_ns`, in place of an earlier plan."""
        self._count += 1
        self._due_ns[endpoint] = due_ns
        heapq.heappush(self._heap, (due_ns, self._count, endpoint))

    def due(self, now_ns: int) -> list[Endpoint]:
        """The endpoints to ask now; `answered` must follow for each."""
        found: list[Endpoint] = []
        while self._heap and self._heap[0][0] <= now_ns:
            due_ns, _, endpoint = heapq.heappop(self._heap)
            if self._due_ns.get(endpoint) == due_ns:
                self._take(endpoint, found)
        if self._endpoints.outstanding:
            silent_ns = now_ns - int(self._times.silence_s * 1e9)
            for endpoint in self._endpoints.endpoints:
                if endpoint.outstanding and endpoint.last_answer_ns <= silent_ns:
                    self._take(endpoint, found)
        return found

    def _take(self, endpoint: Endpoint, found: list[Endpoint]) -> None:
        if endpoint in self._asked:
            return
        self._due_ns.pop(endpoint, None)
        if endpoint.is_member:
            self._asked.add(endpoint)
            found.append(endpoint)

    def answered(self, endpoint: Endpoint, *, is_well: bool, now_ns: int) -> None:
        """Plan the next probe of an endpoint that was asked."""
        self._asked.discard(endpoint)
        if endpoint.is_member:
            self.plan(endpoint, now_ns + int((self._times.interval_s if is_well else self._times.trouble_s) * 1e9))

    def wait_s(self, now_ns: int) -> float | None:
        """How long to sleep before the next look at an idle pool; None while there is nothing to look at."""
        return max(0.0, (self._heap[0][0] - now_ns) / 1e9) if self._heap else None


class Prober:
    """Asks the endpoints of a set with one task for the schedule, and one for each probe in progress."""

    def __init__(self, endpoints: EndpointSet, probe: Probe, times: ProbeTimes | None = None) -> None:
        self._endpoints = endpoints
        self._probe = probe
        self._times = times or ProbeTimes()
        self._schedule = ProbeSchedule(endpoints, self._times)
        self._silent: dict[Endpoint, str] = {}
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self._probes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Probe until cancelled."""
        clock = self._endpoints.clock
        for endpoint in self._endpoints.endpoints:
            self._schedule.plan(endpoint, clock.now_ns())
        self._endpoints.observers.append(self._changed)
        self._endpoints.on_request = self._wake.set
        try:
            while True:
                for endpoint in self._schedule.due(clock.now_ns()):
                    task = asyncio.create_task(self._ask(endpoint))
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)
                await self._sleep(clock.now_ns())
        finally:
            self._endpoints.observers.remove(self._changed)
            self._endpoints.on_request = None
            for task in self._probes:
                task.cancel()

    async def _sleep(self, now_ns: int) -> None:
        """Until the next look. A busy pool is looked at a few times a second, and requests wake nothing."""
        if self._endpoints.on_request is None:
            # There was a request since the last look, so that there may be one now.
            await asyncio.sleep(self._times.silence_s / 3)
            if not self._endpoints.outstanding:
                self._endpoints.on_request = self._wake.set
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._schedule.wait_s(now_ns)):
                    await self._wake.wait()
        self._wake.clear()

    def _changed(self, endpoint: Endpoint) -> None:
        """Ask new members, and those that were ejected, at once."""
        if endpoint.is_member and endpoint.probed in (None, EndpointState.READY, EndpointState.DEGRADED):
            self._schedule.plan(endpoint, self._endpoints.clock.now_ns())
            self._wake.set()

    async def _ask(self, endpoint: Endpoint) -> None:
        problem = ""
        state = EndpointState.DOWN
        try:
            async with self._room, asyncio.timeout(self._times.timeout_s):
                state = await self._probe(endpoint)
        except TimeoutError:
            problem = f"no answer to a probe within {self._times.timeout_s:g} s"
        except ServerError as error:
            problem = error.message
        if state is EndpointState.DOWN:
            is_second = endpoint in self._silent
            self._silent[endpoint] = problem
            if is_second:
                self._endpoints.report_probe(endpoint, EndpointState.DOWN, problem)
        else:
            self._silent.pop(endpoint, None)
            has_served = endpoint.probed not in (None, EndpointState.STARTING, EndpointState.DOWN)
            if state is EndpointState.STARTING and has_served:
                state = EndpointState.DRAINING
            self._endpoints.report_probe(endpoint, state)
        if not endpoint.is_member:
            self._silent.pop(endpoint, None)
        is_well = endpoint.probed in (EndpointState.READY, EndpointState.DEGRADED) and endpoint not in self._silent
        self._schedule.answered(endpoint, is_well=is_well, now_ns=self._endpoints.clock.now_ns())
        self._wake.set()
