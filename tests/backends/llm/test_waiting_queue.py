"""Order, and leaving from anywhere, against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.scheduler import WaitingQueue
from modelserver_backends.llm.sequence import Sequence, SequenceStatus
from support.llm_integrity import check_integrity

PARAMS = SamplingParams()


def key(sequence: Sequence) -> tuple[int, int]:
    return (sequence.priority, sequence.arrival)


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "leave"]), st.integers(0, 9)), max_size=60))
def test_the_first_is_the_least_of_those_that_wait(deeds: list[tuple[str, int]]) -> None:
    queue = WaitingQueue(key)
    waiting: list[Sequence] = []
    for number, (deed, value) in enumerate(deeds):
        if deed == "push":
            sequence = Sequence(number, [1], 1, PARAMS, arrival=number, priority=value)
            queue.push(sequence)
            waiting.append(sequence)
        elif deed == "pop" and waiting:
            first = queue.first()
            assert first is not None
            queue.pop()
            waiting.remove(first)
            first.status = SequenceStatus.RUNNING
        elif deed == "leave" and waiting:
            gone = waiting.pop(value % len(waiting))
            gone.status = SequenceStatus.FINISHED
            queue.discard()
        assert len(queue) == len(waiting)
        assert queue.first() is (min(waiting, key=key) if waiting else None)
        assert set(check_integrity(queue)) == set(waiting)


def test_those_that_left_are_not_kept() -> None:
    queue = WaitingQueue(key)
    sequences = [Sequence(number, [1], 1, PARAMS, arrival=number) for number in range(100)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[1:]:
        sequence.status = SequenceStatus.FINISHED
        queue.discard()
    assert queue.first() is sequences[0]
    assert queue.num_kept <= 2
