"""What recognises repeated requests: bounded memories, and the throttle of learning."""

from __future__ import annotations

from modelserver.core.recognition import LearnThrottle, Memory


def test_a_memory_forgets_everything_when_it_is_full() -> None:
    memory = Memory[str, int](2, is_on=True)
    for number, key in enumerate("abc"):
        memory.remember(key, number)
    assert memory.known == {"c": 2}


def test_nothing_is_remembered_or_learned_when_recognition_is_off() -> None:
    memory, throttle = Memory[str, int](2, is_on=False), LearnThrottle(is_on=False)
    memory.remember("a", 1)
    assert not memory.known
    assert not any(throttle.wants() for _ in range(200))


def test_requests_are_learned_rarely_once_many_were_in_vain() -> None:
    throttle = LearnThrottle(is_on=True)
    assert all(throttle.wants() for _ in range(64))
    assert sum(throttle.wants() for _ in range(640)) == 10
    throttle.num_in_vain = 0
    assert throttle.wants()
