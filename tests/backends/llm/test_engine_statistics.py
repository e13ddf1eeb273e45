"""The engine's numbers against a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.engine_statistics import Histogram, length_boundaries
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.plan import StepPlan
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import FinishReason
from support.fake_runner import EOS, FakeLaunched, FakeRunner, ScriptedRunner

SECOND = 10**9


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5 * SECOND

    def __call__(self) -> int:
        return self.now_ns


def make(runner: FakeRunner, clock: Clock, **options: Any) -> Engine:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 8, **options}
    return Engine(options=EngineOptions(**options), runner=runner, tokenizer=None, clock_ns=clock)


def request(length: int = 6, **params: Any) -> GenerationRequest:
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **params}
    return GenerationRequest(list(range(2, 2 + length)), SamplingParams(**params))


def run(engine: Engine, clock: Clock, seconds: float = 1) -> None:
    """Steps that take so long."""
    while engine.has_work:
        clock.now_ns += int(seconds * SECOND)
        engine.step()


@pytest.mark.parametrize(
    ("longest", "boundaries"),
    [(1, (1,)), (7, (1, 2, 5)), (128, (1, 2, 5, 10, 20, 50, 100)), (200, (1, 2, 5, 10, 20, 50, 100, 200))],
)
def test_boundaries_of_lengths(longest: int, boundaries: tuple[int, ...]) -> None:
    assert length_boundaries(longest) == boundaries


def test_a_histogram_counts_up_to_and_including_a_boundary() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6):
        histogram.observe(value)
    histogram.observe(2, 3)
    assert histogram.counts == [2, 4, 1, 1]
    assert (histogram.count, histogram.total) == (8, 20)


def test_times_of_a_request() -> None:
    clock = Clock()
    engine = make(FakeRunner(), clock)
    late = request()
    late.arrival_ns = 2 * SECOND  # three seconds ago
    engine.add(late)
    run(engine, clock)
    found = engine.statistics
    # Planned a second after it was added, and its first token comes with that step.
    assert found.time_to_first_token_s.total == pytest.approx(4)
    assert found.queue_time_s.total == pytest.approx(4)
    assert found.prefill_time_s.total == pytest.approx(0)
    assert (found.inter_token_latency_s.count, found.inter_token_latency_s.total) == (3, pytest.approx(3))
    assert found.decode_time_s.total == found.inference_time_s.total == pytest.approx(3)
    assert found.time_per_output_token_s.total == pytest.approx(1)
    assert found.e2e_latency_s.total == pytest.approx(7)


class SlowRunner(FakeRunner):
    """Computes a step for two seconds before `launch` returns, as a CPU does."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def launch(self, plan: StepPlan) -> FakeLaunched:
        self._clock.now_ns += 2 * SECOND
        return super().launch(plan)


def test_what_the_first_step_takes_is_no_time_in_the_queue() -> None:
    clock = Clock()
    engine = make(SlowRunner(clock), clock)
    engine.add(request())
    run(engine, clock)
    assert engine.statistics.queue_time_s.total == pytest.approx(1)
    assert engine.statistics.prefill_time_s.total == pytest.approx(2)


def test_a_long_prompt_takes_several_steps() -> None:
    clock = Clock()
    engine = make(FakeRunner(), clock)
    engine.add(request(20))  # chunks of 8, 8 and 4
    run(engine, clock)
    found = engine.statistics
    assert found.prefill_time_s.total == pytest.approx(2)
    assert found.time_to_first_token_s.total == pytest.approx(3)
    assert (found.iteration_tokens.count, found.iteration_tokens.total) == (6, 23)


def test_latencies_between_tokens_are_those_of_each_sequence() -> None:
    clock = Clock()
    engine = make(FakeRunner(), clock, max_num_batched_tokens=16)
    engine.add(request())
    clock.now_ns += SECOND
    engine.step()
    engine.add(request(7))
    run(engine, clock, seconds=2)
    # Three of each, two seconds apart.
    assert (engine.statistics.inter_token_latency_s.count, engine.statistics.inter_token_latency_s.total) == (6, 12)


def test_counters() -> None:
    clock = Clock()
    engine = make(FakeRunner(), clock, max_num_batched_tokens=32)
    for _ in range(2):
        engine.add(request(10, n=2))
        run(engine, clock)
    found = engine.statistics
    assert (found.num_prompt_tokens, found.num_generation_tokens) == (40, 16)
    assert (found.num_prefix_query_tokens, found.num_prefix_hit_tokens) == (40, 24)
    assert found.num_cached_prompt_tokens == 24
    assert (found.request_params_n.count, found.request_params_n.total) == (2, 4)
    assert (found.request_prompt_tokens.count, found.request_prompt_tokens.total) == (4, 40)
    assert (found.request_generation_tokens.total, found.request_params_max_tokens.total) == (16, 16)
    assert (found.request_longest_generation.count, found.request_longest_generation.total) == (2, 8)
    assert found.by_finish_reason == {FinishReason.STOP: 0, FinishReason.LENGTH: 4, FinishReason.ABORT: 0}
    assert found.num_steps == 8


def test_the_longest_choice_of_a_request() -> None:
    clock = Clock()
    engine = make(FakeRunner(eos_token_ids=frozenset(range(0, 50, 7))), clock, max_num_batched_tokens=32)
    asked = request(n=3, temperature=1, seed=3, ignore_eos=False, max_tokens=20)
    engine.add(asked)
    lengths = [0, 0, 0]
    while engine.has_work:
        for output in engine.step():
            lengths[output.choice] = output.num_output_tokens
    assert len(set(lengths)) > 1
    assert (engine.statistics.request_longest_generation.count, engine.statistics.request_longest_generation.total) == (
        1,
        max(lengths),
    )


def test_gauges() -> None:
    clock = Clock()
    engine = make(FakeRunner(num_blocks=11), clock, max_num_seqs=1)
    found = engine.statistics
    first, second = request(), request(7)
    engine.add(first)
    engine.add(second)
    assert (found.num_running, found.num_waiting, found.kv_cache_usage) == (0, 2, 0)
    engine.step()
    assert (found.num_running, found.num_waiting, found.kv_cache_usage) == (1, 1, pytest.approx(0.2))
    engine.abort(first)
    assert (found.num_running, found.num_waiting, found.kv_cache_usage) == (0, 1, 0)
    run(engine, clock)
    assert (found.num_running, found.num_waiting, found.kv_cache_usage) == (0, 0, 0)


def test_reasons() -> None:
    clock = Clock()
    engine = make(ScriptedRunner([5, 6, 7, EOS]), clock)
    asked = [request(ignore_eos=False, max_tokens=9), request(max_tokens=2), request(max_tokens=9)]
    for each in asked:
        engine.add(each)
    engine.step()
    engine.step()
    engine.abort(asked[2])
    run(engine, clock)
    assert engine.statistics.by_finish_reason == {FinishReason.STOP: 1, FinishReason.LENGTH: 1, FinishReason.ABORT: 1}


def test_who_is_aborted_before_its_first_token_has_no_times_of_phases() -> None:
    clock = Clock()
    engine = make(FakeRunner(), clock)
    gone = request()
    engine.add(gone)
    clock.now_ns += SECOND
    engine.abort(gone)
    assert engine.statistics.e2e_latency_s.total == pytest.approx(1)
    assert engine.statistics.queue_time_s.count == engine.statistics.decode_time_s.count == 0
