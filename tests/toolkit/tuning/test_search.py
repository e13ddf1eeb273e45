"""The search finds the best setting of machines that we make up, in few trials."""

from collections.abc import Callable

import pytest

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.toolkit.tuning.space import (
    Candidate,
    Score,
    Scores,
    Space,
    SpaceOptions,
    climb,
    everything,
    make_space,
    winner,
)

CONFIG = parse_pbtxt(
    'backend: "onnxruntime" max_batch_size: 64 dynamic_batching { } instance_group { count: 1 kind: KIND_CPU }'
).config
SPACE = make_space(CONFIG, SpaceOptions(), 8)


def run(
    search: Callable, machine: Callable[[Candidate], Score | None], space: Space = SPACE
) -> tuple[Scores, Candidate]:
    scores: Scores = {}
    for candidate in search(space, scores):
        assert candidate not in scores, "nothing is measured twice"
        scores[candidate] = machine(candidate)
    return scores, winner(space.start, scores)


def smooth(candidate: Candidate) -> Score:
    """Four instances of two threads, batches up to 32 and no delay are best."""
    value = 1000.0 - 100 * abs(candidate.num_instances - 4) - 150 * abs((candidate.num_threads or 8) - 2)
    value -= candidate.max_batch_size if candidate.delay_us is not None else 200
    value += {8: 0, 32: 60, 64: 30}[candidate.max_batch_size] * 4 - (candidate.delay_us or 0) / 10
    return Score(True, max(value, 1.0))


def test_climbing_finds_what_everything_finds() -> None:
    all_scores, best = run(everything, smooth)
    few_scores, found = run(climb, smooth)
    assert found == best == Candidate(4, 32, 0, 2)
    assert len(all_scores) == SPACE.size
    assert len(few_scores) < SPACE.size / 4
    assert next(iter(few_scores)) == next(iter(all_scores)) == SPACE.start


def test_chance_is_no_reason_to_leave_the_own_setting() -> None:
    def flat(candidate: Candidate) -> Score:
        return Score(True, 1000 + hash(candidate) % 40)

    assert run(climb, flat)[1] == SPACE.start


def test_the_target_comes_first() -> None:
    def slow_is_fast(candidate: Candidate) -> Score:
        return Score(candidate.num_instances == 1, 100.0 * candidate.num_instances)

    assert run(climb, slow_is_fast)[1].num_instances == 1

    def only_two_are_quick(candidate: Candidate) -> Score:
        return Score(candidate.num_instances == 2, 10.0 if candidate.num_instances == 2 else -50.0)

    assert run(climb, only_two_are_quick)[1].num_instances == 2


def test_what_cannot_be_measured_is_passed_over() -> None:
    def broken(candidate: Candidate) -> Score | None:
        return Score(True, 100.0 * candidate.num_instances) if candidate.num_instances != 8 else None

    assert run(climb, broken)[1].num_instances == 4
    assert run(climb, lambda _: None)[1] == SPACE.start


@pytest.mark.parametrize(
    ("one", "other", "beats"),
    [
        (Score(True, 106), Score(True, 100), True),
        (Score(True, 104), Score(True, 100), False),
        (Score(True, 1), Score(False, -1), True),
        (Score(False, -1), Score(True, 1), False),
        (Score(False, -90), Score(False, -100), True),
        (Score(False, -98), Score(False, -100), False),
        (Score(False, -1), None, True),
    ],
)
def test_when_a_score_beats_another(one: Score, other: Score | None, beats: bool) -> None:
    assert one.beats(other) is beats
