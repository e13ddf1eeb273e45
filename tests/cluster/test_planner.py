"""What the planner does over time: a simulated cluster applies its actions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from modelserver.cluster.deployment import Pool, Replicas, Rollout
from modelserver.cluster.planner import ActionKind, PoolPlan, Replica, ReplicaState, pause_s, plan

START_S = 5.0
DRAIN_S = 2.0


def pool(version: str = "1", *, rollout: dict[str, Any] | None = None, **replicas: Any) -> Pool:
    """A pool whose demand is followed at once, unless a test says otherwise."""
    counts = {"min": 3, "max": 10, "upscale_delay_s": 0, "downscale_delay_s": 60, "to_zero_after_s": 120, **replicas}
    return Pool(
        "p",
        "/models",
        version=version,
        replicas=Replicas(**counts),
        rollout=Rollout(**(rollout or {})),
        routers=["http://router:8000"],
    )


class Simulation:
    """Servers start in 5 s and drain in 2 s; those of which `fails` says so end when they would have been ready."""

    def __init__(self, deployed: Pool) -> None:
        self.plan = PoolPlan.begin(deployed)
        self.replicas: dict[str, Replica] = {}
        self.now_s = 1000.0
        self.demand: int | None = 0
        self.fails: Callable[[Replica], bool] = lambda replica: False
        self.actions: list[tuple[float, ActionKind]] = []
        self._numbers = itertools.count()

    @property
    def ready(self) -> list[Replica]:
        return [each for each in self.replicas.values() if each.state is ReplicaState.READY]

    @property
    def running(self) -> int:
        return sum(each.state is not ReplicaState.DRAINING for each in self.replicas.values())

    def see(self, name: str, state: ReplicaState, problem: str = "") -> None:
        self.replicas[name] = self.replicas[name].seen(state, self.now_s, problem=problem)

    def turn(self) -> None:
        """One second."""
        self.now_s += 1
        for name, each in list(self.replicas.items()):
            age_s = self.now_s - each.since_s
            if each.state is ReplicaState.PENDING:
                self.see(name, ReplicaState.STARTING)
            elif each.state is ReplicaState.STARTING and age_s >= START_S:
                self.see(name, ReplicaState.FAILED if self.fails(each) else ReplicaState.READY, "no such model")
            elif each.state is ReplicaState.DRAINING and age_s >= DRAIN_S:
                self.see(name, ReplicaState.STOPPED)
            elif each.state is ReplicaState.READY:
                self.see(name, ReplicaState.READY)
        self.plan, actions = plan(self.plan, list(self.replicas.values()), self.demand, self.now_s)
        for action in actions:
            self.actions.append((self.now_s, action.kind))
            if action.kind is ActionKind.START:
                name = f"p-{next(self._numbers):04}"
                self.replicas[name] = Replica(name, action.pool.revision, since_s=self.now_s)
            elif action.kind is ActionKind.RESTART:
                self.see(action.replica, ReplicaState.STARTING)
            elif action.kind is ActionKind.DRAIN:
                self.see(action.replica, ReplicaState.DRAINING)
            else:
                del self.replicas[action.replica]

    def run(self, seconds: int, check: Callable[[], None] = lambda: None) -> Simulation:
        for _ in range(seconds):
            self.turn()
            check()
        return self

    def times(self, kind: ActionKind) -> list[float]:
        return [now_s for now_s, each in self.actions if each is kind]


def settled(**replicas: Any) -> Simulation:
    simulation = Simulation(pool(**replicas)).run(20)
    simulation.actions.clear()
    return simulation


def test_a_pool_starts_and_then_nothing_happens() -> None:
    simulation = Simulation(pool()).run(10)
    assert len(simulation.ready) == 3
    assert simulation.plan.stable == simulation.plan.pool
    simulation.actions.clear()
    assert simulation.run(300).actions == []


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1), (3, 0), (2, 2)])
def test_a_rolling_update_keeps_its_bounds(surge: int, unavailable: int) -> None:
    simulation = settled()
    after = pool("2", rollout={"max_surge": surge, "max_unavailable": unavailable})
    simulation.plan = simulation.plan.deployed(after)

    def check() -> None:
        assert len(simulation.ready) >= 3 - unavailable
        assert simulation.running <= 3 + surge

    simulation.run(60, check)
    assert {each.revision for each in simulation.ready} == {after.revision}
    assert len(simulation.replicas) == 3
    assert simulation.plan.stable == after


def test_servers_that_do_not_start_are_given_up_for_the_previous_ones() -> None:
    simulation = settled()
    good, bad = simulation.plan.pool, pool("2")
    simulation.fails = lambda replica: replica.revision == bad.revision
    simulation.plan = simulation.plan.deployed(bad)
    simulation.run(120, lambda: pytest.fail("lost one") if len(simulation.ready) < 3 else None)
    assert simulation.plan.rejected == "no such model"
    assert {each.revision for each in simulation.replicas.values()} == {good.revision}
    assert len(simulation.times(ActionKind.DRAIN)) == 0
    # Deployed once more, they get another chance.
    simulation.fails = lambda replica: False
    simulation.plan = simulation.plan.deployed(bad)
    assert {each.revision for each in simulation.run(120).replicas.values()} == {bad.revision}
    assert simulation.plan.rejected == ""


def test_first_servers_that_do_not_start_are_tried_ever_more_rarely() -> None:
    simulation = Simulation(pool(min=1))
    simulation.fails = lambda replica: True
    simulation.run(400)
    times = simulation.times(ActionKind.RESTART)
    gaps = [after - before - START_S for before, after in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 3
    assert len(times) < 10
    assert simulation.plan.problem == "no such model"
    simulation.fails = lambda replica: False
    assert len(simulation.run(300).ready) == 1
    assert simulation.plan.problem == ""


def test_a_server_that_crashes_is_restarted_in_place_and_pauses_begin_anew_once_it_is_well() -> None:
    simulation = settled()
    name = simulation.ready[0].name
    for _ in range(4):
        simulation.see(name, ReplicaState.FAILED)
        simulation.run(20)
    times = simulation.times(ActionKind.RESTART)
    assert [after - before for before, after in itertools.pairwise(times)][-1] > 20
    assert len(simulation.ready) == 3
    simulation.run(90)
    simulation.actions.clear()
    simulation.see(name, ReplicaState.FAILED)
    simulation.run(1)
    assert len(simulation.times(ActionKind.RESTART)) == 1
    assert simulation.plan.rejected == ""
    assert [pause_s(number) for number in (1, 2, 3, 100)] == [0, 2, 4, 300]


def test_a_lost_host_is_replaced_at_once_and_a_silent_one_after_a_while() -> None:
    simulation = settled()
    lost, silent, _ = (each.name for each in simulation.ready)
    simulation.see(lost, ReplicaState.LOST)
    simulation.run(1)
    assert len(simulation.times(ActionKind.START)) == 1
    simulation.run(20)
    simulation.see(silent, ReplicaState.UNREACHABLE)
    simulation.run(8)
    assert len(simulation.times(ActionKind.START)) == 1
    simulation.run(20)
    assert len(simulation.times(ActionKind.START)) == 2
    # It comes back, and there is one too many.
    assert len(simulation.ready) == 3
    simulation.see(silent, ReplicaState.READY)
    simulation.run(20)
    assert len(simulation.ready) == len(simulation.replicas) == 3


def test_hosts_that_end_before_their_servers_are_ready_are_not_started_in_a_loop() -> None:
    simulation = Simulation(pool(min=1))
    for _ in range(200):
        simulation.turn()
        for name, each in list(simulation.replicas.items()):
            if each.state is ReplicaState.STARTING:
                simulation.see(name, ReplicaState.LOST)
    assert len(simulation.times(ActionKind.START)) < 12
    assert "lost" in simulation.plan.problem


def test_replicas_follow_the_demand_with_hysteresis() -> None:
    simulation = settled(min=1, upscale_delay_s=5, target_ongoing_requests=2)
    assert len(simulation.ready) == 1
    simulation.demand = 12
    simulation.run(4)
    assert simulation.plan.wanted == 1
    simulation.run(12)
    assert simulation.plan.wanted == len(simulation.ready) == 6
    simulation.demand = 100
    assert len(simulation.run(20).ready) == 10
    # It falls, with a peak every 40 s: the highest of a minute is kept.
    for _ in range(3):
        simulation.demand = 1
        simulation.run(39)
        simulation.demand = 7
        simulation.run(1)
    assert simulation.plan.wanted == 4
    simulation.demand = None
    assert simulation.run(300).plan.wanted == 4


def test_a_pool_goes_to_zero_and_comes_back_for_the_first_request() -> None:
    simulation = settled(min=0, upscale_delay_s=30)
    assert simulation.plan.wanted == 0
    simulation.demand = 7
    simulation.run(1)
    assert simulation.plan.wanted == 4
    simulation.run(10)
    simulation.demand = 0
    simulation.run(65)
    assert len(simulation.ready) == 1
    simulation.run(60)
    assert simulation.replicas == {}
    assert simulation.plan.stable is not None


def test_what_the_operator_holds_is_kept_until_it_is_deployed_again() -> None:
    simulation = settled(min=1)
    simulation.plan = replace(simulation.plan, held=5)
    assert len(simulation.run(300).ready) == 5
    simulation.plan = replace(simulation.plan, held=0)
    assert simulation.run(20).replicas == {}
    simulation.plan = simulation.plan.deployed(simulation.plan.pool)
    assert len(simulation.run(20).ready) == 1


def test_a_cordoned_replica_leaves_when_another_one_is_ready() -> None:
    simulation = settled()
    name = simulation.ready[0].name
    simulation.replicas[name] = replace(simulation.replicas[name], is_cordoned=True)
    simulation.run(20, lambda: pytest.fail("lost one") if len(simulation.ready) < 3 else None)
    assert name not in simulation.replicas
    assert len(simulation.replicas) == 3


def test_a_pool_that_leaves_is_drained_whole() -> None:
    simulation = settled()
    simulation.plan = replace(simulation.plan, is_leaving=True)
    assert simulation.run(5).replicas == {}
    assert len(simulation.times(ActionKind.DRAIN)) == 3


def test_equal_inputs_give_equal_plans() -> None:
    simulation = settled()
    simulation.plan = simulation.plan.deployed(pool("2"))
    replicas = list(simulation.replicas.values())
    first = plan(simulation.plan, replicas, 3, 2000.0)
    assert all(plan(simulation.plan, list(reversed(replicas)), 3, 2000.0) == first for _ in range(3))
