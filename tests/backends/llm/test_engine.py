"""The engine over a runner whose tokens are a hash of what its KV memory holds: any mistake changes what comes out."""

from __future__ import annotations

import pytest
from modelserver_backends.llm.engine import Engine
from modelserver_backends.llm.plan import Chunk, SampledToken, StepPlan, StepResult
from modelserver_backends.llm.sequence import FinishReason, Sequence
from support.fake_engine import PROMPT, engine, request, run, run_one
from support.fake_runner import EOS, FakeRunner, expected_tokens
from support.llm_integrity import check_integrity


def test_nothing_to_do() -> None:
    idle = engine()
    assert not idle.has_work
    assert idle.step() == []


def test_tokens_come_one_by_one(is_asynchronous: bool) -> None:
    one = request(max_tokens=5)
    answer = run_one(engine(FakeRunner(is_asynchronous=is_asynchronous)), one)
    assert answer.token_ids == expected_tokens(PROMPT, 5, ignore_eos=True)
    assert [len(output.token_ids) for output in answer.outputs] == [1] * 5
    assert [output.num_output_tokens for output in answer.outputs] == [1, 2, 3, 4, 5]
    assert [output.finish_reason for output in answer.outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert answer.last.stop_reason is None


def with_drafts(num_drafts: int) -> tuple[Engine, Sequence, StepPlan]:
    """An engine after its first step, and a plan that computes its sequence's last token and so many drafts."""
    ahead, one = engine(FakeRunner(block_size=16)), request(max_tokens=10, min_tokens=2, ignore_eos=False)
    ahead.add(one)
    ahead.step()
    (sequence,) = ahead._by_request[one].running
    start = sequence.num_computed_tokens
    sequence.num_computed_tokens += 1 + num_drafts
    sequence.num_placeholders = 1 + num_drafts
    return ahead, sequence, StepPlan((Chunk(sequence, start, 1 + num_drafts, 1 + num_drafts),))


def result_of(*token_ids: int) -> StepResult:
    return StepResult((tuple(SampledToken(token_id) for token_id in token_ids),), {})


def test_a_step_may_give_several_tokens_of_a_sequence() -> None:
    ahead, sequence, plan = with_drafts(3)
    before = list(sequence.token_ids)
    (output,) = ahead._take_in(plan, result_of(7, 8))
    assert (output.token_ids, output.finish_reason) == ([7, 8], None)
    assert sequence.token_ids == [*before, 7, 8]
    # The last token and the first draft are computed; the other drafts were refused.
    assert (sequence.num_computed_tokens, sequence.num_placeholders) == (len(before) + 1, 0)
    check_integrity(ahead)


def test_what_follows_the_end_in_a_step_is_dropped() -> None:
    ahead, sequence, plan = with_drafts(3)
    before = list(sequence.token_ids)
    (output,) = ahead._take_in(plan, result_of(7, EOS, 9))
    assert output.finish_reason is FinishReason.STOP
    assert sequence.token_ids == [*before, 7, EOS]
    assert ahead.statistics.num_generation_tokens == 3
    assert not ahead.has_work


def test_who_does_not_stream_gets_one_output() -> None:
    one = request(max_tokens=5, n=2, is_streamed=False, logprobs=1, prompt_logprobs=0)
    answers = run(engine(), one)
    for choice in range(2):
        assert len(answers[one, choice].outputs) == 1
        assert answers[one, choice].token_ids == expected_tokens(PROMPT, 5, ignore_eos=True)
        assert len(answers[one, choice].last.logprobs or []) == 5
    assert len(answers[one, 0].last.prompt_logprobs or []) == len(PROMPT)
    assert answers[one, 1].last.prompt_logprobs is None


def test_seeds(is_asynchronous: bool) -> None:
    seeded = engine(FakeRunner(is_asynchronous=is_asynchronous))
    one, same, other = (request(temperature=1, seed=seed) for seed in (5, 5, 6))
    answers = run(seeded, one, same, other)
    assert (
        answers[one, 0].token_ids == answers[same, 0].token_ids == expected_tokens(PROMPT, 8, seed=5, ignore_eos=True)
    )
    assert answers[other, 0].token_ids == expected_tokens(PROMPT, 8, seed=6, ignore_eos=True)


def test_without_a_seed_the_engine_draws_them_from_its_own() -> None:
    def tokens(seed: int) -> list[list[int]]:
        fresh = engine(seed=seed)
        return [run_one(fresh, request(temperature=1)).token_ids for _ in range(2)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(1)[0] != tokens(1)[1]


def test_logprobs_go_with_their_tokens() -> None:
    answer = run_one(engine(), request(logprobs=2, max_tokens=3))
    for output in answer.outputs:
        assert len(output.logprobs or []) == len(output.token_ids) == 1
    sums = [sum(output.logprobs[0].logprob for output in answer.outputs[: index + 1]) for index in range(3)]
    assert [output.cumulative_logprob for output in answer.outputs] == sums
    assert run_one(engine(), request()).last.cumulative_logprob is None


@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_come_once_and_in_the_first_output(budget: int) -> None:
    runner = FakeRunner(num_blocks=10)
    scored = engine(runner, max_num_batched_tokens=budget)
    run(scored, request())
    one = request([*PROMPT, *range(2, 20)], prompt_logprobs=1, max_tokens=4)
    others = [request([number, *PROMPT], max_tokens=20) for number in range(20, 24)]
    answer = run(scored, one, *others)[one, 0]
    first, *rest = answer.outputs
    assert first.num_cached_tokens == 0
    assert [output.prompt_logprobs for output in rest] == [None] * 3
    assert (first.prompt_logprobs or [])[0] is None
    scored = zip(first.prompt_logprobs[1:], one.prompt_token_ids[1:], strict=True)
    positions = [round(-1 - entry.logprob - token / 100) for entry, token in scored]
    assert positions == list(range(1, 28))


def test_abort_frees_at_once_and_says_nothing_more(is_asynchronous: bool) -> None:
    busy = engine(FakeRunner(is_asynchronous=is_asynchronous))
    gone, stays = request(max_tokens=20, n=2), request([3, *PROMPT])
    busy.add(gone)
    busy.add(stays)
    for _ in range(3):
        busy.step()
    usage = busy.statistics.kv_cache_usage
    busy.abort(gone)
    check_integrity(busy)
    assert busy.statistics.kv_cache_usage < usage
    outputs = []
    while busy.has_work:
        outputs += busy.step()
    assert {output.request for output in outputs} == {stays}
    assert busy.statistics.kv_cache_usage == 0
    assert busy.statistics.by_finish_reason[FinishReason.ABORT] == 2


def test_abort_of_what_waits_has_ended_or_never_came() -> None:
    busy = engine(max_num_seqs=1)
    first, waits = request(max_tokens=1), request([3, *PROMPT])
    busy.add(first)
    busy.add(waits)
    busy.abort(waits)
    busy.step()
    for each in (waits, first, request()):
        busy.abort(each)
    check_integrity(busy)
    assert not busy.has_work
    assert busy.statistics.num_waiting == 0


def test_after_an_error_of_the_runner_reset_begins_anew() -> None:
    runner = FakeRunner()
    failing = engine(runner)
    failing.add(request())
    failing.step()
    failing.add(request())
    runner.error = RuntimeError("out of order")
    with pytest.raises(RuntimeError, match="out of order"):
        failing.step()
    failing.reset()
    check_integrity(failing)
    assert not failing.has_work
    runner.error = None
    # What the failed step would have computed is not taken for known.
    answer = run_one(failing, request())
    assert (answer.last.num_cached_tokens, answer.token_ids) == (0, expected_tokens(PROMPT, 8, ignore_eos=True))


def test_priority() -> None:
    ordered = engine(scheduling_policy="priority", max_num_seqs=1)
    requests = [request([number, *PROMPT], max_tokens=2) for number in range(20, 24)]
    for each, priority in zip(requests, (5, 5, 1, 9), strict=True):
        each.priority = priority
        ordered.add(each)
    ended = []
    while ordered.has_work:
        ended += [output.request for output in ordered.step() if output.finish_reason]
    assert [requests.index(each) for each in ended] == [2, 0, 1, 3]
