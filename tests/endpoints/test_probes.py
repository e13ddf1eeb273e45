"""When endpoints are asked how they are, and what is made of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from support.manual_clock import ManualClock

from modelserver.endpoints.endpoint import Endpoint, EndpointState, Member, Outcome
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.endpoints.probes import Prober, ProbeSchedule, ProbeTimes
from modelserver.errors import UnavailableError


def _asked(schedule: ProbeSchedule, clock: ManualClock, seconds: float, *, sick: str = "") -> list[tuple[float, str]]:
    """The probes of that number of seconds: when, and of which endpoint. Those of `sick` stay without an answer."""
    found = []
    for _ in range(int(seconds * 20)):
        for endpoint in schedule.due(clock.now_ns()):
            found.append((clock.now_ns() / 1e9, endpoint.address))
            schedule.answered(endpoint, is_well=endpoint.address != sick, now_ns=clock.now_ns())
        clock.advance_us(50_000)
    return found


def test_endpoints_in_trouble_are_asked_more_often() -> None:
    clock = ManualClock()
    endpoints = EndpointSet(clock=clock)
    endpoints.update([Member("a"), Member("b")])
    schedule = ProbeSchedule(endpoints, ProbeTimes())
    for endpoint in endpoints.endpoints:
        schedule.plan(endpoint, 0)
    asked = _asked(schedule, clock, 10, sick="b")
    assert [when for when, address in asked if address == "a"] == [0, 5]
    assert len([when for when, address in asked if address == "b"]) == 40
    endpoints.update([Member("a")])
    assert {address for _, address in _asked(schedule, clock, 10)} == {"a"}


def test_an_endpoint_that_is_silent_on_its_requests_is_asked_soon() -> None:
    clock = ManualClock()
    endpoints = EndpointSet(clock=clock)
    endpoints.update([Member("a"), Member("b")])
    schedule = ProbeSchedule(endpoints, ProbeTimes())
    assert schedule.wait_s(0) is None
    one, other = endpoints.endpoints
    endpoints.begin(one)
    assert _asked(schedule, clock, 0.7) == []
    asked = _asked(schedule, clock, 1)
    assert {address for _, address in asked} == {"a"}
    endpoints.finish(one, Outcome.DONE, start_ns=0)
    endpoints.begin(other)
    assert {address for _, address in _asked(schedule, clock, 0.3)} == {"b"}


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - tasks of the tested code make it true
            await asyncio.sleep(0.002)


def _probing(answer: Callable[[Endpoint], Awaitable[EndpointState]], *addresses: str) -> tuple[EndpointSet, Prober]:
    endpoints = EndpointSet(random=Random(1))
    endpoints.update([Member(address) for address in addresses])
    times = ProbeTimes(interval_s=0.01, trouble_s=0.005, silence_s=0.01, timeout_s=0.5)
    return endpoints, Prober(endpoints, answer, times)


def test_an_endpoint_goes_down_drains_and_comes_back() -> None:
    answers: dict[str, EndpointState | UnavailableError] = {"a": EndpointState.READY, "b": EndpointState.STARTING}

    async def answer(endpoint: Endpoint) -> EndpointState:
        found = answers[endpoint.address]
        if isinstance(found, UnavailableError):
            raise found
        return found

    async def run() -> None:
        endpoints, prober = _probing(answer, "a", "b")
        one, other = endpoints.endpoints
        task = asyncio.create_task(prober.run())
        await _until(lambda: one.state is EndpointState.READY and other.state is EndpointState.STARTING)
        assert endpoints.choose() is one
        answers["b"] = EndpointState.READY
        answers["a"] = EndpointState.STARTING
        # It was ready, so it is about to leave.
        await _until(lambda: one.state is EndpointState.DRAINING and other.state is EndpointState.READY)
        answers["a"] = UnavailableError("connection refused")
        await _until(lambda: one.state is EndpointState.DOWN)
        assert one.problem == "connection refused"
        answers["a"] = EndpointState.READY
        await _until(lambda: one.state is EndpointState.READY)
        answers["c"] = UnavailableError("no route")
        endpoints.update([Member("a"), Member("c")])
        await _until(lambda: [each.state for each in endpoints.endpoints][-1] is EndpointState.DOWN)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_one_lost_probe_is_forgiven_and_silence_is_not() -> None:
    calls = 0

    async def answer(_: Endpoint) -> EndpointState:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise UnavailableError("lost")
        if calls > 4:
            raise TimeoutError
        return EndpointState.READY

    async def run() -> None:
        endpoints, prober = _probing(answer, "a")
        states: list[EndpointState] = []
        endpoints.observers.append(lambda endpoint: states.append(endpoint.state))
        task = asyncio.create_task(prober.run())
        await _until(lambda: EndpointState.DOWN in states)
        assert states == [EndpointState.READY, EndpointState.DOWN]
        assert calls == 6
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
