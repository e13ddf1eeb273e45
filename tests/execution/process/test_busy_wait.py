"""How long a waiter stays awake, by what it has seen."""

from __future__ import annotations

import itertools

import pytest

from modelserver.execution.process.channel import BusyWait


class Machine:
    """Its clock goes on while the waiter lets others run."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.others_ns = 1_000  # that others take when they are let

    def let_go(self) -> None:
        self.now_ns += self.others_ns


@pytest.fixture
def machine() -> Machine:
    return Machine()


def waiter(machine: Machine, budget_us: int = 100, num_cores: int = 2) -> BusyWait:
    return BusyWait(budget_us, num_cores=num_cores, now_ns=lambda: machine.now_ns, let_go=machine.let_go)


def num_looks_in_vain(wait: BusyWait) -> int:
    """How often the waiter looks before it sleeps."""
    if not wait.begin():
        return 0
    num_looks = 1
    while wait.go_on():
        num_looks += 1
    wait.end(has_come=False)
    return num_looks


def test_it_looks_until_the_time_is_spent(machine: Machine) -> None:
    assert num_looks_in_vain(waiter(machine)) == 100


@pytest.mark.parametrize(("budget_us", "num_cores"), [(0, 2), (100, 1)])
def test_without_time_or_a_core_to_spare_it_sleeps_at_once(machine: Machine, budget_us: int, num_cores: int) -> None:
    assert not waiter(machine, budget_us, num_cores).begin()


def test_it_sleeps_once_somebody_else_wants_the_core(machine: Machine) -> None:
    machine.others_ns = 30_000
    assert num_looks_in_vain(waiter(machine)) == 1


def test_in_vain_it_tries_ever_more_rarely(machine: Machine) -> None:
    wait = waiter(machine)
    tries = [number for number in range(2_000) if num_looks_in_vain(wait)]
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(tries)]
    assert pauses[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256]


def test_what_came_makes_up_for_what_was_in_vain(machine: Machine) -> None:
    wait = waiter(machine)
    for _ in range(3):
        while not num_looks_in_vain(wait):
            continue
    while not wait.begin():
        continue
    wait.end(has_come=True)
    assert wait.begin(), "the next wait is one awake"
    wait.end(has_come=False)
    assert [wait.begin() for _ in range(2)] == [False, True]
