"""What models on one device leave to each other; the sums hold whatever is given back, in whatever order."""

from __future__ import annotations

import random

import pytest

from modelserver.backend import DeviceMemory, Reservation, UnavailableError, device_memory


def test_what_is_promised_but_not_allocated_is_not_free() -> None:
    memory = DeviceMemory(is_lazy=False)
    first = memory.reserve(700, available=1000, least=700, what="first")
    with pytest.raises(UnavailableError, match="second needs 400 bytes for weights, and 300 are left: wait"):
        memory.reserve(400, available=1000, least=400, what="second", purpose=" for weights", advice="wait")
    first.settle()  # now the device itself says that 300 are free
    assert memory.reserve(400, available=300, least=100, what="second").num_bytes == 300


def test_devices_have_one_budget_each() -> None:
    assert device_memory("cuda:7") is device_memory("cuda:7")
    assert device_memory("cuda:7") is not device_memory("cuda:6")


@pytest.mark.parametrize("is_lazy", [True, False])
def test_sums_hold_in_any_order(is_lazy: bool) -> None:
    rng = random.Random(1)
    memory = DeviceMemory(is_lazy=is_lazy)
    held: list[Reservation] = []
    for _ in range(500):
        if held and rng.random() < 0.5:
            one = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.5:
                one.settle()
            one.release()
            one.settle()
            one.release()
        else:
            held.append(memory.reserve(rng.randint(0, 100), available=None, least=0, what="it"))
        assert memory.reserved_bytes == sum(one.num_bytes for one in held)
    for one in held:
        one.release()
    assert memory.reserve(10, available=10, least=10, what="the last").num_bytes == 10
