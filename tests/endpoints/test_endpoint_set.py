"""Membership, choice, ejection, pauses and the retry budget, on a clock that the test moves."""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random

import pytest
from support.manual_clock import ManualClock

from modelserver.endpoints.choice import Policy
from modelserver.endpoints.endpoint import Endpoint, EndpointState, Member, Outcome
from modelserver.endpoints.endpoint_set import EjectionRules, EndpointSet
from modelserver.errors import UnavailableError

SECOND_US = 1_000_000


class Pool:
    """Endpoints a, b, c, … on a manual clock."""

    def __init__(self, count: int, *, policy: Policy = Policy.LEAST_OUTSTANDING) -> None:
        self.clock = ManualClock()
        self.set = EndpointSet(policy=policy, rules=EjectionRules(jitter=0), clock=self.clock, random=Random(7))
        self.set.update([Member(chr(ord("a") + index)) for index in range(count)])

    def __getitem__(self, address: str) -> Endpoint:
        return next(each for each in self.set.endpoints if each.address == address)

    def end(self, address: str, outcome: Outcome, times: int = 1, problem: str = "") -> None:
        for _ in range(times):
            self.set.begin(self[address])
            self.set.finish(self[address], outcome, start_ns=self.clock.now_ns(), problem=problem)

    def chosen(self, times: int = 200) -> set[str]:
        return {self.set.choose().address for _ in range(times)}

    def sleep(self, seconds: float) -> None:
        self.clock.advance_us(int(seconds * SECOND_US))


def test_requests_go_where_fewer_are_outstanding() -> None:
    pool = Pool(2)
    for _ in range(3):
        pool.set.begin(pool["a"])
    assert pool.chosen() == {"b"}
    pool.set.report_load(pool["b"], 40)  # others keep it busy
    assert pool.chosen() == {"a"}


def test_a_nonsensical_load_is_forgotten() -> None:
    pool = Pool(2)
    pool.set.report_load(pool["a"], 2**62)
    pool.set.report_load(pool["b"], 40)
    for _ in range(300):
        pool.set.report_load(pool["a"], 0)
    assert pool.set.load == pytest.approx(pool["b"].load, rel=1e-3)


def test_of_equally_loaded_ones_the_faster_gets_more() -> None:
    """One that was slow once, while it started perhaps, is asked again: else it would never be known to be fast."""
    pool = Pool(2)
    for address, seconds in (("a", 0.5), ("b", 0.1)):
        start_ns = pool.clock.now_ns()
        pool.set.begin(pool[address])
        pool.sleep(seconds)
        pool.set.finish(pool[address], Outcome.DONE, start_ns=start_ns)
    counts = Counter(pool.set.choose().address for _ in range(600))
    assert 60 < counts["a"] < 140


def test_round_robin_takes_each_in_turn() -> None:
    pool = Pool(3, policy=Policy.ROUND_ROBIN)
    counts = Counter(pool.set.choose().address for _ in range(30))
    assert counts == {"a": 10, "b": 10, "c": 10}


def test_a_key_stays_with_one_endpoint_and_a_new_one_takes_only_its_share() -> None:
    pool = Pool(9)
    keys = [f"session {number}".encode() for number in range(2000)]
    before = {key: pool.set.choose(key=key).address for key in keys}
    spread = Counter(before.values())
    assert len(spread) == 9
    assert max(spread.values()) < 2 * min(spread.values())
    pool.set.update([*(each.member for each in pool.set.endpoints), Member("z")])
    after = {key: pool.set.choose(key=key).address for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert {after[key] for key in moved} == {"z"}
    assert len(moved) < 2 * len(keys) / 10
    # Another process, which lists them in another order, agrees.
    other = Pool(0)
    other.set.update(reversed([each.member for each in pool.set.endpoints]))
    assert {key: other.set.choose(key=key).address for key in keys} == after


def test_a_key_leaves_an_endpoint_that_has_much_more_than_the_mean() -> None:
    pool = Pool(4)
    first = pool.set.choose(key=b"hot")
    second = pool.set.choose(key=b"hot", excluded=[first])
    taken = Counter[str]()
    for _ in range(100):
        endpoint = pool.set.choose(key=b"hot")
        pool.set.begin(endpoint)
        taken[endpoint.address] += 1
    assert set(taken) == {"a", "b", "c", "d"}
    assert taken.most_common(1)[0][0] in (first.address, second.address)
    assert max(taken.values()) <= 1.25 * 25 + 2


def test_only_ready_endpoints_get_new_work() -> None:
    pool = Pool(0)
    pool.set.update([Member("a"), *(Member(state.value, state) for state in EndpointState)])
    assert pool.chosen() == {"a", "ready"}
    pool.set.update([Member("a", EndpointState.DRAINING), Member("down", EndpointState.DOWN)])
    with pytest.raises(UnavailableError, match="no endpoint is available: a is draining; down is down"):
        pool.set.choose()
    pool.set.update([])
    with pytest.raises(UnavailableError, match="no endpoint is known"):
        pool.set.choose()


def test_an_endpoint_that_leaves_keeps_its_requests_and_one_that_stays_its_counts() -> None:
    pool = Pool(2)
    leaving, staying = pool["a"], pool["b"]
    pool.set.begin(leaving)
    pool.set.begin(staying)
    changed: list[Endpoint] = []
    pool.set.observers.append(changed.append)
    pool.set.update([Member("b"), Member("c")])
    assert {each.address for each in changed} == {"a", "c"}
    assert pool["b"] is staying
    assert not leaving.is_member
    assert leaving.state is EndpointState.DRAINING
    pool.set.finish(leaving, Outcome.DONE, start_ns=0)
    assert pool.set.outstanding == 1


@pytest.mark.parametrize(
    ("outcome", "times"),
    [(Outcome.CONNECT_FAILED, 3), (Outcome.LOST, 3), (Outcome.SERVER_ERROR, 5), (Outcome.TIMED_OUT, 5)],
)
def test_an_endpoint_that_fails_in_a_row_rests_for_longer_each_time(outcome: Outcome, times: int) -> None:
    pool = Pool(2)
    pool.end("a", outcome, times - 1)
    pool.end("a", Outcome.DONE)
    pool.end("a", outcome, times - 1)
    assert "a" in pool.chosen()
    for seconds in (5, 10, 15):
        pool.end("a", outcome, times)
        assert pool.chosen() == {"b"}
        pool.sleep(seconds - 0.1)
        assert pool.chosen() == {"b"}
        pool.sleep(0.2)
        assert "a" in pool.chosen()
    assert pool["a"].num_ejections == 3
    pool.sleep(100)
    pool.end("a", outcome, times)
    pool.sleep(5.1)
    assert "a" in pool.chosen(), "what was long ago does not count"


def test_an_endpoint_most_of_whose_requests_fail_is_ejected() -> None:
    pool = Pool(2)
    for _ in range(8):
        pool.end("a", Outcome.SERVER_ERROR, 2)
        pool.end("a", Outcome.DONE)
    assert pool.chosen() == {"b"}


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_ERROR, Outcome.ABANDONED, Outcome.OVERLOADED])
def test_other_ends_say_nothing_against_an_endpoint(outcome: Outcome) -> None:
    pool = Pool(2)
    pool.end("a", outcome, 50)
    assert pool.chosen() == {"a", "b"}


def test_half_of_the_pool_and_the_last_are_never_ejected() -> None:
    pool = Pool(5)
    for address in "abcde":
        pool.end(address, Outcome.SERVER_ERROR, 20)
    assert len(pool.chosen()) == 3
    alone = Pool(1)
    alone.end("a", Outcome.LOST, 20)
    assert alone.chosen() == {"a"}


def test_when_most_of_the_pool_is_in_trouble_ejections_do_not_count() -> None:
    pool = Pool(4)
    pool.end("a", Outcome.LOST, 3)
    pool.end("b", Outcome.LOST, 3)
    assert pool.chosen() == {"c", "d"}
    pool.set.report_probe(pool["c"], EndpointState.DOWN, "no answer")
    assert pool.chosen() == {"a", "b", "d"}


def test_a_probe_that_succeeds_brings_an_endpoint_back_whose_connections_were_lost() -> None:
    pool = Pool(2)
    pool.end("a", Outcome.CONNECT_FAILED, 3)
    pool.set.report_probe(pool["a"], EndpointState.DOWN, "connection refused")
    pool.sleep(20)
    assert pool.chosen() == {"b"}
    pool.end("b", Outcome.LOST, problem="reset by peer")
    pool.set.report_probe(pool["b"], EndpointState.DOWN)
    with pytest.raises(UnavailableError, match=r"a is down \(connection refused\); b is down"):
        pool.set.choose()
    pool.set.report_probe(pool["a"], EndpointState.READY)
    assert pool.chosen() == {"a"}


def test_an_endpoint_pauses_for_the_time_that_it_told() -> None:
    pool = Pool(2)
    pool.set.pause(pool["a"], 30)
    pool.set.pause(pool["a"], 1)
    assert pool.chosen() == {"b"}
    pool.set.pause(pool["b"], 12)
    with pytest.raises(UnavailableError, match="a asked for a pause of 30 s more") as failed:
        pool.set.choose()
    assert failed.value.retry_after_s == 12
    pool.sleep(12.5)
    assert pool.chosen() == {"b"}
    pool.sleep(20)
    assert pool.chosen() == {"a", "b"}


def test_endpoints_that_were_tried_are_left_out() -> None:
    pool = Pool(3)
    assert pool.set.choose(excluded=[pool["a"], pool["c"]]) is pool["b"]
    pool.end("a", Outcome.LOST, problem="reset")
    with pytest.raises(UnavailableError, match=r"a was tried \(reset\); b was tried"):
        pool.set.choose(excluded=list(pool.set.endpoints))


def test_a_tenth_of_the_requests_and_three_per_second_may_be_retries() -> None:
    pool = Pool(1)
    budget = pool.set.retry_budget
    assert sum(budget.take() for _ in range(100)) == 30, "what an idle pool has saved"
    for _ in range(105):
        budget.deposit()
    assert sum(budget.take() for _ in range(100)) == 10
    pool.sleep(2)
    assert sum(budget.take() for _ in range(100)) == 6


@pytest.mark.parametrize("num_endpoints", [3, 100])
def test_a_slow_endpoint_gets_little_and_no_one_waits_long(num_endpoints: int) -> None:
    """A trace in simulated time: Poisson arrivals, each endpoint serves 10 at once, one of them ten times slower."""
    clock, random = ManualClock(), Random(3)
    endpoints = EndpointSet(clock=clock, random=Random(5))
    endpoints.update([Member(f"e{number}") for number in range(num_endpoints)])
    ends: list[tuple[float, int, Endpoint, int]] = []
    served, highest, now_s = Counter[str](), 0, 0.0
    for number in range(4000):
        now_s += random.expovariate(num_endpoints * 40)
        while ends and ends[0][0] <= now_s:
            end_s, _, endpoint, start_ns = heapq.heappop(ends)
            clock.advance_us(int(end_s * SECOND_US) - clock.now_ns() // 1000)
            endpoints.finish(endpoint, Outcome.DONE, start_ns=start_ns)
        clock.advance_us(int(now_s * SECOND_US) - clock.now_ns() // 1000)
        endpoint = endpoints.choose()
        endpoints.begin(endpoint)
        served[endpoint.address] += 1
        highest = max(highest, endpoint.outstanding)
        seconds = 0.5 if endpoint.address == "e0" else 0.05
        heapq.heappush(ends, (now_s + seconds, number, endpoint, clock.now_ns()))
    assert served["e0"] < 0.5 * 4000 / num_endpoints
    assert highest <= 14
