"""The engine over a runner whose tokens are a hash of what its KV memory holds: any mistake changes what comes out."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.engine import Engine, GenerationRequest, SequenceOutput
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import FinishReason
from support.fake_runner import EOS, Collected, FakeRunner, collect, expected_tokens

from modelserver.backend import InvalidArgumentError

EXAMPLES = int(os.environ.get("MODELSERVER_PROPERTY_EXAMPLES", "80"))
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def engine(runner: FakeRunner | None = None, *, clock: Any = None, **options: Any) -> Engine:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, **options}
    given = {} if clock is None else {"clock_ns": clock}
    return Engine(options=EngineOptions(**options), runner=runner or FakeRunner(), tokenizer=None, **given)


def request(
    prompt: list[int] | None = None, *, is_streamed: bool = True, salt: str = "", **params: Any
) -> GenerationRequest:
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 8, **params}
    return GenerationRequest(
        list(PROMPT if prompt is None else prompt), SamplingParams(**params), cache_salt=salt, is_streamed=is_streamed
    )


def run(engine: Engine, *requests: GenerationRequest) -> dict[tuple[GenerationRequest, int], Collected]:
    """Take them on, step until there is no work, and see that no block is lost."""
    for each in requests:
        engine.add(each)
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    assert engine.num_free_blocks == engine.num_usable_blocks
    return collect(outputs)


def run_one(engine: Engine, one: GenerationRequest, choice: int = 0) -> Collected:
    return run(engine, one)[one, choice]


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def is_asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


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


def test_who_does_not_stream_gets_one_output() -> None:
    one = request(max_tokens=5, n=2, is_streamed=False, logprobs=1, prompt_logprobs=0)
    answers = run(engine(), one)
    for choice in range(2):
        assert len(answers[one, choice].outputs) == 1
        assert answers[one, choice].token_ids == expected_tokens(PROMPT, 5, ignore_eos=True)
        assert len(answers[one, choice].last.logprobs or []) == 5
    assert len(answers[one, 0].last.prompt_logprobs or []) == len(PROMPT)
    assert answers[one, 1].last.prompt_logprobs is None


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


def test_a_window_bounds_what_long_sequences_hold(is_asynchronous: bool) -> None:
    """Four sequences that come to 110 tokens over 30 blocks of 4 tokens: their windows are all that they keep."""
    runner = FakeRunner(num_blocks=31, is_asynchronous=is_asynchronous, window=10)
    long = engine(runner)
    requests = [request([number, *PROMPT], max_tokens=99) for number in range(20, 24)]
    answers = run(long, *requests)
    assert long.statistics.num_preemptions == 0
    for each in requests:
        assert answers[each, 0].token_ids == expected_tokens(each.prompt_token_ids, 99, ignore_eos=True, window=10)


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


def test_as_many_tokens_as_the_model_takes(is_asynchronous: bool) -> None:
    runner = FakeRunner(is_asynchronous=is_asynchronous, max_model_len=24)
    answer = run_one(engine(runner), request(max_tokens=None))
    assert len(answer.token_ids) == 14
    assert answer.last.finish_reason is FinishReason.LENGTH


def test_as_many_tokens_as_the_pool_holds(is_asynchronous: bool) -> None:
    runner = FakeRunner(is_asynchronous=is_asynchronous, num_blocks=5)
    answer = run_one(engine(runner), request(max_tokens=None))
    assert len(answer.token_ids) == 6


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


def test_prompt_logprobs_survive_a_preemption() -> None:
    """The prompt is in the middle of its chunks when its blocks are taken."""
    scored = engine(FakeRunner(num_blocks=13), max_num_batched_tokens=8)
    early = [request([number, *PROMPT[:6]], max_tokens=14) for number in (20, 21)]
    late = request(range(2, 30), prompt_logprobs=0, max_tokens=2)
    answer = run(scored, *early, late)[late, 0]
    assert [entry is None for entry in answer.outputs[0].prompt_logprobs or []] == [True] + [False] * 27


def test_abort_frees_at_once_and_says_nothing_more(is_asynchronous: bool) -> None:
    busy = engine(FakeRunner(is_asynchronous=is_asynchronous))
    gone, stays = request(max_tokens=20, n=2), request([3, *PROMPT])
    busy.add(gone)
    busy.add(stays)
    for _ in range(3):
        busy.step()
    free = busy.num_free_blocks
    busy.abort(gone)
    busy.check_integrity()
    assert busy.num_free_blocks > free
    outputs = []
    while busy.has_work:
        outputs += busy.step()
    assert {output.request for output in outputs} == {stays}
    assert busy.num_free_blocks == busy.num_usable_blocks
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
    busy.check_integrity()
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
    failing.check_integrity()
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request([]), "the prompt is empty"),
        (request([3, 50]), "the prompt has token id 50; this model's are 0 to 49"),
        (request([3, -1]), "the prompt has token id -1; this model's are 0 to 49"),
        (request([3] * 64), "the prompt has 64 tokens; this model has room for 64 tokens, prompt and output together"),
        (request([3] * 60, max_tokens=5), "so max_tokens may be 4 with this prompt"),
        (request(logit_bias={50: 1.0}), "parameter 'logit_bias' has token id 50"),
        (request(allowed_token_ids=(1, 77)), "parameter 'allowed_token_ids' has token id 77"),
        (request(logprobs=21), "parameter 'logprobs' must be at most 20"),
        (request(prompt_logprobs=21), "parameter 'prompt_logprobs' must be at most 20"),
        (request(stop=("x",)), "parameter 'stop' needs text, and this model has no tokenizer"),
        (request(structured_outputs={"regex": "a"}), "parameter 'structured_outputs' needs text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_never_work_is_refused(wrong: GenerationRequest, message: str) -> None:
    strict = engine(FakeRunner(num_blocks=17, max_model_len=100))
    with pytest.raises(InvalidArgumentError) as raised:
        strict.add(wrong)
    assert message in raised.value.message
    assert not strict.has_work
    strict.check_integrity()


def test_the_whole_pool_may_be_used() -> None:
    answer = run_one(engine(FakeRunner(num_blocks=17, max_model_len=100)), request([3] * 60, max_tokens=4))
    assert len(answer.token_ids) == 4


class Life:
    """Requests come, leave and are stepped as hypothesis likes."""

    def __init__(self, data: st.DataObject) -> None:
        draw = data.draw
        self.data = data
        block_size = draw(st.sampled_from([1, 2, 4, 8]), "block size")
        self.engine = engine(
            FakeRunner(
                num_blocks=draw(st.integers(48 // block_size + 1, 120 // block_size + 1), "blocks"),
                block_size=block_size,
                is_asynchronous=draw(st.booleans(), "is asynchronous"),
                max_model_len=48,
            ),
            max_num_seqs=draw(st.integers(1, 6), "seqs"),
            max_num_batched_tokens=draw(st.integers(6, 40), "budget"),
            enable_prefix_caching=draw(st.booleans(), "caching"),
            scheduling_policy=draw(st.sampled_from(["fcfs", "priority"]), "policy"),
        )
        self.requests: list[GenerationRequest] = []
        self.outputs: list[SequenceOutput] = []
        self.aborted: set[GenerationRequest] = set()

    def add(self) -> None:
        draw = self.data.draw
        prompt = list(range(2, 2 + draw(st.integers(0, 20)))) + draw(
            st.lists(st.integers(0, 49), min_size=1, max_size=8)
        )
        is_greedy = draw(st.booleans())
        one = request(
            prompt,
            temperature=0 if is_greedy else 1,
            seed=draw(st.integers(0, 9)),
            n=draw(st.sampled_from([1, 1, 2, 3])),
            max_tokens=draw(st.integers(1, 48 - len(prompt))),
            ignore_eos=draw(st.booleans()),
            presence_penalty=draw(st.sampled_from([0, 0, 1])),  # host-bound
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            is_streamed=draw(st.booleans()),
        )
        one.priority = draw(st.integers(0, 3))
        self.requests.append(one)
        self.engine.add(one)

    def abort(self) -> None:
        if self.requests:
            gone = self.data.draw(st.sampled_from(self.requests))
            self.aborted.add(gone)
            self.engine.abort(gone)

    def step(self) -> None:
        self.outputs += self.engine.step()

    def check(self) -> None:
        answers = collect(self.outputs)
        for one in self.requests:
            for choice in range(one.params.n):
                answer = answers.get((one, choice))
                if one in self.aborted and (answer is None or answer.last.finish_reason is None):
                    continue
                assert answer is not None, "a request got no answer"
                assert answer.token_ids == expected_tokens(
                    one.prompt_token_ids,
                    one.params.max_tokens or 0,
                    seed=0 if one.params.is_greedy else (one.params.seed or 0) + choice,
                    ignore_eos=one.params.ignore_eos,
                )
                assert answer.last.finish_reason is not None
                if one.params.prompt_logprobs is not None and choice == 0:
                    lengths = [len(output.prompt_logprobs or []) for output in answer.outputs]
                    assert lengths == [len(one.prompt_token_ids)] + [0] * (len(lengths) - 1)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_random_lives_end_with_every_block_back_and_every_text_as_if_alone(data: st.DataObject) -> None:
    life = Life(data)
    for deed in data.draw(
        st.lists(st.sampled_from(["add", "add", "step", "step", "step", "abort"]), max_size=25), "deeds"
    ):
        getattr(life, deed)()
        life.engine.check_integrity()
    num_left = 2000
    while life.engine.has_work:
        life.step()
        life.engine.check_integrity()
        num_left -= 1
        assert num_left, "it does not come to an end"
    assert life.engine.num_free_blocks == life.engine.num_usable_blocks
    life.check()
