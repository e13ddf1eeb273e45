"""Where sequences end: end-of-sequence, stop tokens, and the least that they have to say."""

from __future__ import annotations

from modelserver_backends.llm.sequence import FinishReason
from support.fake_engine import PROMPT, engine, request, run, run_one
from support.fake_runner import EOS, FakeRunner, expected_tokens


def prompt_with_eos_after(count: int) -> list[int]:
    """A prompt whose continuation has its first end-of-sequence as the `count`-th token."""
    return next(
        prompt
        for prompt in ([2, 3, number // 48 + 2, number % 48 + 2] for number in range(2304))
        if expected_tokens(prompt, 30)[-1] == EOS and len(expected_tokens(prompt, 30)) == count
    )


def test_end_of_sequence(is_asynchronous: bool) -> None:
    prompt = prompt_with_eos_after(6)
    one, other = request(prompt, ignore_eos=False, max_tokens=20), request([5, *prompt], max_tokens=20)
    answers = run(engine(FakeRunner(is_asynchronous=is_asynchronous)), one, other)
    assert answers[one, 0].token_ids == expected_tokens(prompt, 20)
    assert (answers[one, 0].last.finish_reason, answers[one, 0].last.stop_reason) == (FinishReason.STOP, None)
    assert len(answers[other, 0].token_ids) == 20


def test_ignore_eos(is_asynchronous: bool) -> None:
    prompt = prompt_with_eos_after(6)
    answer = run_one(engine(FakeRunner(is_asynchronous=is_asynchronous)), request(prompt, max_tokens=20))
    assert (len(answer.token_ids), answer.token_ids[5], answer.last.finish_reason) == (20, EOS, FinishReason.LENGTH)


def test_min_tokens(is_asynchronous: bool) -> None:
    prompt = prompt_with_eos_after(6)
    one = request(prompt, ignore_eos=False, min_tokens=7, max_tokens=20)
    answer = run_one(engine(FakeRunner(is_asynchronous=is_asynchronous)), one)
    assert answer.token_ids == expected_tokens(prompt, 20, min_tokens=7)
    assert len(answer.token_ids) >= 7


def test_stop_token(is_asynchronous: bool) -> None:
    tokens = expected_tokens(PROMPT, 8, ignore_eos=True)
    assert tokens.index(tokens[5]) == 5
    stopping = engine(FakeRunner(is_asynchronous=is_asynchronous))
    answer = run_one(stopping, request(stop_token_ids=(tokens[5],)))
    assert answer.token_ids == tokens[:6]
    assert (answer.last.finish_reason, answer.last.stop_reason) == (FinishReason.STOP, tokens[5])
    late = run_one(stopping, request(stop_token_ids=(tokens[5],), min_tokens=7))
    assert late.last.finish_reason is FinishReason.LENGTH


def test_end_of_sequence_is_no_stop_token_but_both_may_be_given() -> None:
    prompt = prompt_with_eos_after(6)
    answer = run_one(engine(), request(prompt, ignore_eos=False, stop_token_ids=(EOS,)))
    assert answer.last.stop_reason is None
    ignored = run_one(engine(), request(prompt, ignore_eos=True, stop_token_ids=(EOS,)))
    assert (ignored.last.finish_reason, ignored.last.stop_reason) == (FinishReason.STOP, EOS)
