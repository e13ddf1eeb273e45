"""The budget of large requests: what is taken and given back, and who gives way when it is short."""

from __future__ import annotations

from modelserver.wire.assembly import AssemblyBudget, owner_of

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Holder:
    """A request that is being received."""

    def __init__(self) -> None:
        self.is_given_up = False

    def give_up(self) -> None:
        self.is_given_up = True


def test_a_budget_is_taken_and_given_back() -> None:
    budget = AssemblyBudget(10, Clock())
    first, second = Holder(), Holder()
    assert budget.charge(6, first)
    assert budget.charge(4, second)
    assert budget.num_bytes == 10
    budget.release(first)
    budget.release(first)
    assert budget.num_bytes == 4
    assert budget.charge(6, first)
    assert not second.is_given_up


def test_one_at_a_time_may_be_as_large_as_it_is_and_takes_nothing_from_others() -> None:
    clock = Clock()
    budget = AssemblyBudget(10 * MIB, clock)
    large, small, other = Holder(), Holder(), Holder()
    assert budget.charge(11 * MIB, large, "a")
    assert budget.charge(100 * MIB, large, "a")
    assert budget.num_bytes == 0
    assert budget.charge(9 * MIB, small, "b")
    assert not budget.charge(11 * MIB, other, "c"), "it is not as fast as the one that is exempt"
    assert not any(holder.is_given_up for holder in (large, small))
    budget.release(large)
    assert budget.charge(50 * MIB, other, "c")


def test_a_faster_one_takes_the_place_of_the_one_that_is_exempt() -> None:
    clock = Clock()
    budget = AssemblyBudget(10 * MIB, clock)
    slow, fast = Holder(), Holder()
    assert budget.charge(11 * MIB, slow, "a")
    clock.now_s = 60
    assert budget.charge(12 * MIB, fast, "b")
    assert slow.is_given_up
    budget.release(slow)
    assert budget.charge(100 * MIB, fast, "b")


def test_what_has_stopped_gives_way_first_however_fast_it_began() -> None:
    clock = Clock()
    budget = AssemblyBudget(100 * MIB, clock)
    stopped = [Holder() for _ in range(6)]
    for holder in stopped:
        assert budget.charge(16 * MIB, holder, "a")
    clock.now_s = 300
    fast = [Holder() for _ in range(4)]
    for _ in range(20):
        clock.now_s += 1
        for holder in fast:
            assert budget.charge(MIB, holder, "b")
    assert not any(holder.is_given_up for holder in fast)
    assert sum(holder.is_given_up for holder in stopped) == 5, "no more than it takes"


def test_the_slowest_gives_way_first_whoever_sends_it() -> None:
    clock = Clock()
    budget = AssemblyBudget(100 * MIB, clock)
    paces = {Holder(): 20_000, Holder(): 1_000, Holder(): 50_000}
    for holder in paces:
        assert budget.charge(20 * MIB, holder, f"address {id(holder)}")
    for _ in range(60):
        clock.now_s += 1
        for holder, pace in paces.items():
            assert budget.charge(pace, holder, f"address {id(holder)}")
    slowest = sorted(paces, key=paces.__getitem__)
    fast = Holder()
    assert budget.charge(42 * MIB, fast, "b")
    assert [holder.is_given_up for holder in slowest] == [True, False, False]
    assert budget.charge(20 * MIB, fast, "b")
    assert [holder.is_given_up for holder in slowest] == [True, True, False]


def test_the_first_byte_that_counts_does_not_give_way_to_what_has_stopped() -> None:
    clock = Clock()
    budget = AssemblyBudget(10 * MIB, clock)
    stopped, large, new = Holder(), Holder(), Holder()
    assert budget.charge(10 * MIB, stopped, "a")
    clock.now_s = 20
    assert budget.charge(1, new, "a")
    assert stopped.is_given_up
    assert budget.charge(20 * MIB, large, "a")
    assert not new.is_given_up


def test_among_those_who_are_fast_the_one_with_more_than_its_share_gives_way() -> None:
    """Many requests of one key are not to push out the only one of another."""
    clock = Clock()
    budget = AssemblyBudget(100 * MIB, clock)
    many, one = [Holder() for _ in range(8)], Holder()
    for _ in range(10):
        clock.now_s += 0.5
        for holder in many:
            if not holder.is_given_up:
                budget.charge(2 * MIB, holder, "key many")
        assert budget.charge(MIB, one, "key one"), "it is slower, and within its share"
    assert not one.is_given_up
    assert any(holder.is_given_up for holder in many)


def test_owners_are_keys_or_hosts() -> None:
    assert owner_of("ops", "10.0.0.1:99") == "key ops"
    assert owner_of("", "10.0.0.1:99") == owner_of("", "10.0.0.1:7") != owner_of("", "10.0.0.2:99")
    assert owner_of("", "[2001:db8::1:2]:99") == owner_of("", "[2001:db8::9]:1") != owner_of("", "[2001:db9::9]:1")
    assert owner_of("", "") == ""
    assert owner_of("", "[fe80::1%eth0]:99")
    assert owner_of("127.0.0.1", "10.0.0.1:99") != owner_of("", "127.0.0.1:99"), "no key has an address's share"
