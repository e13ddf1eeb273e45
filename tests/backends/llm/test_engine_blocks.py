"""Blocks, chunks, windows, preemptions and the prefix cache never change tokens."""

from __future__ import annotations

import pytest
from support.fake_engine import PROMPT, engine, request, run, run_one
from support.fake_runner import FakeRunner, expected_tokens


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("budget", [8, 11, 64])
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_neither_blocks_nor_chunks_nor_the_cache_change_tokens(
    block_size: int, budget: int, is_caching: bool, window: int | None, is_asynchronous: bool
) -> None:
    runner = FakeRunner(
        num_blocks=1 + 512 // block_size, block_size=block_size, is_asynchronous=is_asynchronous, window=window
    )
    many = engine(runner, max_num_batched_tokens=budget, enable_prefix_caching=is_caching)
    requests = [request(PROMPT[:3] + list(range(2, 2 + length)), max_tokens=9) for length in (1, 30, 7, 30, 12, 3)]
    answers = run(many, *requests)
    for each in requests:
        expected = expected_tokens(each.prompt_token_ids, 9, ignore_eos=True, window=window)
        assert answers[each, 0].token_ids == expected


@pytest.mark.parametrize(("window", "num_blocks"), [(None, 10), (17, 9)])
def test_preempted_sequences_give_the_same_tokens(window: int | None, num_blocks: int, is_asynchronous: bool) -> None:
    tiny = engine(FakeRunner(num_blocks=num_blocks, is_asynchronous=is_asynchronous, window=window))
    requests = [request([number, *PROMPT], max_tokens=20) for number in range(20, 26)]
    answers = run(tiny, *requests)
    assert tiny.statistics.num_preemptions > 4
    for each in requests:
        expected = expected_tokens(each.prompt_token_ids, 20, ignore_eos=True, window=window)
        assert answers[each, 0].token_ids == expected


def test_states_stay_with_their_sequences(is_asynchronous: bool) -> None:
    """Through chunks, preemptions and ends: a slot that another had begins anew, and no prefix is found."""
    tiny = engine(
        FakeRunner(num_blocks=10, is_asynchronous=is_asynchronous, has_states=True), max_num_batched_tokens=11
    )
    requests = [request([*PROMPT, number], max_tokens=3 + 4 * (number % 6)) for number in range(20, 32)]
    answers = run(tiny, *requests)
    assert tiny.statistics.num_preemptions > 4
    assert tiny.statistics.num_prefix_query_tokens == 0
    for each in requests:
        expected = expected_tokens(each.prompt_token_ids, each.params.max_tokens, ignore_eos=True)
        assert answers[each, 0].token_ids == expected


def test_a_window_bounds_what_long_sequences_hold(is_asynchronous: bool) -> None:
    """Four sequences that come to 110 tokens over 30 blocks of 4 tokens: their windows are all that they keep."""
    runner = FakeRunner(num_blocks=31, is_asynchronous=is_asynchronous, window=10)
    long = engine(runner)
    requests = [request([number, *PROMPT], max_tokens=99) for number in range(20, 24)]
    answers = run(long, *requests)
    assert long.statistics.num_preemptions == 0
    for each in requests:
        assert answers[each, 0].token_ids == expected_tokens(each.prompt_token_ids, 99, ignore_eos=True, window=10)


def test_with_a_window_prompts_may_be_longer_than_the_pool(is_asynchronous: bool) -> None:
    """Prompts of 90 tokens and more over 9 blocks of 4: a window of 10 and a chunk of 16 take 7, so they go in turn."""
    small = engine(FakeRunner(num_blocks=10, is_asynchronous=is_asynchronous, window=10))
    assert small.max_model_len == 256
    requests = [request([number, *range(2, 49), *range(2, 44)], max_tokens=60) for number in range(3)]
    answers = run(small, *requests)
    for each in requests:
        assert answers[each, 0].token_ids == expected_tokens(each.prompt_token_ids, 60, ignore_eos=True, window=10)


def test_the_next_turn_needs_the_window_of_the_last_alone(is_asynchronous: bool) -> None:
    runner = FakeRunner(num_blocks=12, is_asynchronous=is_asynchronous, window=6)
    chat = engine(runner)
    first = run_one(chat, request(max_tokens=21))
    turn = [*PROMPT, *first.token_ids, 3, 4, 5]
    second = run_one(chat, request(turn))
    assert second.last.num_cached_tokens == 28
    assert second.token_ids == expected_tokens(turn, 8, ignore_eos=True, window=6)


def test_preemption_is_logged_seldom(caplog: pytest.LogCaptureFixture) -> None:
    tiny = engine(FakeRunner(num_blocks=10))
    run(tiny, *(request([number, *PROMPT], max_tokens=20) for number in range(20, 26)))
    logged = [record for record in caplog.records if "out of KV blocks" in record.message]
    assert 0 < len(logged) <= tiny.statistics.num_preemptions.bit_length()


def test_the_prefix_cache_counts_tokens() -> None:
    runner = FakeRunner()
    shared = engine(runner)
    first = run_one(shared, request())
    assert (first.last.num_cached_tokens, runner.num_computed) == (0, len(PROMPT) + 7)
    again = run_one(shared, request())
    assert again.token_ids == first.token_ids
    assert again.last.num_cached_tokens == 8  # two blocks of 4; the last two tokens are computed
    statistics = shared.statistics
    assert (statistics.num_prefix_query_tokens, statistics.num_prefix_hit_tokens) == (20, 8)
    assert statistics.num_cached_prompt_tokens == 8
    assert runner.num_computed == 2 * (len(PROMPT) + 7) - 8


def test_the_next_turn_finds_prompt_and_answer(is_asynchronous: bool) -> None:
    chat = engine(FakeRunner(is_asynchronous=is_asynchronous))
    first = run_one(chat, request(max_tokens=11))
    turn = [*PROMPT, *first.token_ids, 3, 4, 5]
    second = run_one(chat, request(turn))
    # 20 of the 21 tokens before are computed, and make five blocks.
    assert second.last.num_cached_tokens == 20
    assert second.token_ids == expected_tokens(turn, 8, ignore_eos=True)


def test_salts_keep_prefixes_apart() -> None:
    salted = engine()
    assert [run_one(salted, request(salt=salt)).last.num_cached_tokens for salt in ("a", "b", "a", "")] == [0, 0, 8, 0]


def test_without_prefix_caching_nothing_is_found() -> None:
    forgetful = engine(enable_prefix_caching=False)
    assert [run_one(forgetful, request()).last.num_cached_tokens for _ in range(2)] == [0, 0]
    assert forgetful.statistics.num_prefix_query_tokens == 0


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 9, 30])
def test_choices_share_one_prefill(is_caching: bool, length: int, is_asynchronous: bool) -> None:
    runner = FakeRunner(is_asynchronous=is_asynchronous, num_blocks=64)
    chooser = engine(runner, enable_prefix_caching=is_caching)
    prompt = list(range(2, 2 + length))
    one = request(prompt, n=3, temperature=1, seed=5, max_tokens=2)
    answers = run(chooser, one)
    for choice in range(3):
        assert answers[one, choice].token_ids == expected_tokens(prompt, 2, seed=5 + choice, ignore_eos=True)
    last_block = (length - 1) % 4 + 1
    assert runner.num_computed == length + 2 * last_block + 3


def test_prompt_logprobs_survive_a_preemption() -> None:
    """The prompt is in the middle of its chunks when its blocks are taken."""
    scored = engine(FakeRunner(num_blocks=13), max_num_batched_tokens=8)
    early = [request([number, *PROMPT[:6]], max_tokens=14) for number in (20, 21)]
    late = request(range(2, 30), prompt_logprobs=0, max_tokens=2)
    answer = run(scored, *early, late)[late, 0]
    assert [entry is None for entry in answer.outputs[0].prompt_logprobs or []] == [True] + [False] * 27
