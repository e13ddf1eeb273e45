"""Drafts change no text: whatever is guessed, each token is what its step alone would have drawn."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from modelserver_backends.llm import LLM, RequestOutput, SamplingParams
from modelserver_backends.llm.engine_statistics import measure
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.sequence import Sequence as Generated
from modelserver_backends.llm.speculation.config import SpeculativeConfig, read_speculative_config
from modelserver_backends.llm.speculation.draft_model import DraftModel
from modelserver_backends.llm.speculation.lookup import NgramProposer, SuffixProposer, TokenIndex
from modelserver_backends.llm.speculation.prediction import Prediction
from modelserver_backends.llm.speculation.speculator import Gain, Pace, Speculator
from modelserver_backends.llm.speculation.trained import TrainedProposer
from support.fake_engine import engine, request, run
from support.fake_runner import FakeRunner, expected_tokens
from support.gguf_models import write_gguf
from support.llm_integrity import check_integrity
from support.stateful_families import STATEFUL_FAMILIES
from support.tiny_checkpoints import write_checkpoint
from support.tiny_eagle import Reference, write_eagle
from support.tiny_predictions import LayerReference, write_eagle1, write_hybrid, write_predicting

from modelserver.errors import InvalidArgumentError, ServerError, UnsupportedError

NUM_TOKENS = 24
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "name": {"enum": ["left", "right"]}}}
SCHEMA |= {"required": ["ok", "name"], "additionalProperties": False}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "ends": {"temperature": 0, "ignore_eos": False},
    "temperature": {"temperature": 1.3},
    "truncated": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "log-probabilities": {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 1},
    "greedy log-probabilities": {"temperature": 0, "logprobs": 2},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.5},
    "logit bias": {"logit_bias": {5: 4.0, 9: -8.0}, "temperature": 0.8},
    "allowed": {"allowed_token_ids": list(range(20, 60))},
    "bad words": {"bad_words": ["e", "th"], "temperature": 0},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(3, 40)), "temperature": 0.7},
    "stop strings": {"stop": ["a", "e "], "temperature": 1.1},
    "mirostat": {"mirostat": 2, "mirostat_tau": 4.0},
    "mirostat 1": {"mirostat": 1},
    "DRY": {"dry_multiplier": 0.9, "dry_allowed_length": 1, "temperature": 0},
    "XTC": {"xtc_probability": 0.6, "xtc_threshold": 0.02},
    "other samplers": {"typical_p": 0.8, "dynatemp_range": 0.5, "top_n_sigma": 1.5},
    "regex": {"structured_outputs": {"regex": "[a-d]{4}-[a-d]{4}-(yes|no) it is"}},
    "choice": {"structured_outputs": {"choice": ["the first of them", "the first and last"]}, "temperature": 0},
    "json": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}, "top_p": 0.8},
    "choices": {"n": 3},
}
PROMPTS = ["the cat and the dog and the cat and the", "a b c a b c a b c", "one"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


def asked() -> tuple[list[str], list[SamplingParams]]:
    usual = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    cases = [SamplingParams(**{**usual, "seed": 7, **case}) for case in CASES.values()]
    return [prompt for _ in cases for prompt in PROMPTS], [case for case in cases for _ in PROMPTS]


def still() -> int:
    """A clock by which nothing takes time, so that drafts always pay."""
    return 0


def opened(directory: Path, **options: Any) -> LLM:
    chosen = {"device": "cpu", "dtype": "float32", "max_model_len": 96, "block_size": 8, "max_num_seqs": 16}
    llm = LLM(directory, **{**chosen, **options})
    if llm.engine._speculator is not None:
        llm.engine._speculator._clock_ns = still
    return llm


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[RequestOutput]:
    """Without speculation."""
    with opened(directory) as llm:
        return llm.generate(*asked())


class Oracle:
    """Knows what will come, from the same answers without speculation, and is wrong now and then."""

    def __init__(self, answers: Sequence[RequestOutput], share_wrong: float) -> None:
        self._texts = {
            (tuple(answer.prompt_token_ids), params, choice.index): choice.token_ids
            for answer, params in zip(answers, map(repr, asked()[1]), strict=True)
            for choice in answer.outputs
        }
        self._draw = random.Random(3)
        self._share_wrong = share_wrong

    def propose(self, wanted: Sequence[tuple[Generated, int]]) -> None:
        for sequence, num_drafts in wanted:
            start = sequence.num_prompt_tokens
            plain = {
                (prompt, choice): text
                for (prompt, params, choice), text in self._texts.items()
                if text[: sequence.num_output_tokens] == sequence.output_token_ids
            }
            known = plain.get((tuple(sequence.token_ids[:start]), sequence.choice), [])
            right = known[sequence.num_output_tokens :][:num_drafts] or [5]
            sequence.drafts = [
                self._draw.randrange(60) if self._draw.random() < self._share_wrong else token for token in right
            ]

    def end(self, sequence: Generated) -> None:
        pass

    def close(self) -> None:
        pass


def facts(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs]


def assert_same(answers: Sequence[RequestOutput], alone: Sequence[RequestOutput]) -> None:
    names = [name for name in CASES for _ in PROMPTS]
    for name, answer, expected in zip(names, answers, alone, strict=True):
        assert facts(answer) == facts(expected), name
        for choice, same in zip(answer.outputs, expected.outputs, strict=True):
            assert (choice.logprobs is None) == (same.logprobs is None), name
            for entry, other in zip(choice.logprobs or (), same.logprobs or (), strict=True):
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4), name
                assert [token for token, _ in entry.top] == [token for token, _ in other.top], name


@pytest.mark.parametrize(
    ("options", "share_wrong"),
    [
        ({}, 0.2),
        ({"num_gpu_blocks_override": 22, "max_num_batched_tokens": 24}, 0.1),
        ({"is_asynchronous": True}, 0.2),
    ],
    ids=["plain", "tiny pool", "asynchronous"],
)
def test_every_sampler_gives_the_same_text(
    directory: Path, alone: list[RequestOutput], options: dict[str, Any], share_wrong: float
) -> None:
    is_asynchronous = options.pop("is_asynchronous", False)
    with opened(directory, speculative_config=NGRAM, **options) as llm:
        engine = llm.engine
        engine.runner.is_asynchronous = is_asynchronous
        config = engine.options.speculative_config
        assert config is not None
        engine._speculator = Speculator(config, Oracle(alone, share_wrong), most_sequences=64, clock_ns=still)
        answers = llm.generate(*asked())
        statistics = engine._speculator.statistics
        check_integrity(engine)
        assert engine.statistics.kv_cache_usage == 0
        assert (engine.statistics.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert_same(answers, alone)
    assert statistics.num_accepted_tokens > 300
    assert statistics.num_draft_tokens > statistics.num_accepted_tokens
    assert sum(statistics.accepted_by_place) == statistics.num_accepted_tokens


@pytest.mark.parametrize("is_good", [True, False], ids=["good", "bad"])
def test_a_draft_model_changes_no_text(
    directory: Path, alone: list[RequestOutput], is_good: bool, tmp_path: Path
) -> None:
    """The best one is the model itself; a bad one has other weights, and a pool of few blocks for its prompts."""
    draft = (
        directory if is_good else write_checkpoint(tmp_path, "llama", seed=9, values={"max_position_embeddings": 40})
    )
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, "disable_by_batch_size": 16}
    with opened(directory, speculative_config=config, max_num_batched_tokens=32) as llm:
        prompts, params = asked()
        prompts, params = prompts[::3], params[::3]
        answers = llm.generate(prompts, params)
        statistics = llm.engine.statistics.speculation
        assert statistics is not None
        share = statistics.num_accepted_tokens / statistics.num_draft_tokens
        assert llm.engine._speculator is not None
        drafter = llm.engine._speculator._proposer
        assert isinstance(drafter, DraftModel)
        assert drafter._kv.pool.usage == 0
        check_integrity(drafter._kv, [])
    assert [facts(answer) for answer in answers] == [facts(answer) for answer in alone[::3]]
    assert share > 0.4 if is_good else share < 0.4


def test_a_draft_model_must_write_the_same_tokens(directory: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama")
    path = other / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    first, second = sorted(vocabulary, key=lambda token: vocabulary[token])[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(document))
    with pytest.raises(UnsupportedError, match="its tokenizer differs"):
        opened(directory, speculative_config={"model": str(other)})
    with pytest.raises(InvalidArgumentError, match="no directory and no GGUF file"):
        opened(directory, speculative_config={"model": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    "options",
    [{}, {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 24}, {"is_asynchronous": True}],
    ids=["plain", "tiny pool", "asynchronous"],
)
def test_a_trained_head_changes_no_text(
    directory: Path, alone: list[RequestOutput], tmp_path: Path, options: dict[str, Any]
) -> None:
    is_asynchronous = options.pop("is_asynchronous", False)
    place = write_eagle(directory, tmp_path / "head")
    config = {"method": "eagle3", "model": str(place), "disable_by_batch_size": 64}
    with opened(directory, speculative_config=config, **options) as llm:
        llm.engine.runner.is_asynchronous = is_asynchronous
        answers = llm.generate(*asked())
        check_integrity(llm.engine)
        statistics = llm.engine.statistics.speculation
        assert statistics is not None
        assert statistics.num_draft_tokens > 200
        assert llm.engine._speculator is not None
        head = llm.engine._speculator._proposer
        assert isinstance(head, TrainedProposer)
        assert not head._texts
    assert_same(answers, alone)


def test_the_checkpoints_own_layer_changes_no_text(tmp_path: Path) -> None:
    """Of latent attention, in a tiny pool."""
    place = write_predicting(tmp_path / "checkpoint", "deepseek_v3")
    with opened(place) as llm:
        expected = llm.generate(*asked())
    config = {"method": "deepseek_mtp", "num_speculative_tokens": 3, "disable_by_batch_size": 64}
    with opened(place, speculative_config=config, num_gpu_blocks_override=22, max_num_batched_tokens=24) as llm:
        answers = llm.generate(*asked())
        check_integrity(llm.engine)
        statistics = llm.engine.statistics.speculation
        assert statistics is not None
        assert statistics.num_draft_tokens > 200
        assert llm.engine._speculator is not None
        head = llm.engine._speculator._proposer
        assert isinstance(head, TrainedProposer)
        assert not head._texts
    assert_same(answers, expected)


@pytest.mark.parametrize("kind", ["eagle3", "glm4_moe"])
def test_the_first_rank_guesses_for_all(directory: Path, tmp_path: Path, kind: str) -> None:
    """The layer is whole there, and every rank checks its drafts."""
    place, config, _ = trained(kind, directory, tmp_path)
    prompts = [list(range(5, 45)), [7, 7, 7]]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    drafts = []
    for ranks in (1, 2):
        chosen = {**config, "num_speculative_tokens": 3}
        with opened(place, speculative_config=chosen, tensor_parallel_size=ranks, num_threads=1) as llm:
            answers = llm.generate(prompts, params)
            statistics = llm.engine.statistics.speculation
            assert statistics is not None
            drafts.append((statistics.num_draft_tokens, statistics.num_accepted_tokens))
    with opened(place) as llm:
        expected = llm.generate(prompts, params)
    assert [facts(answer) for answer in answers] == [facts(answer) for answer in expected]
    assert drafts[0] == drafts[1]
    assert drafts[1][0] > 10


def test_states_that_wait_for_drafts_keep_no_whole_steps() -> None:
    """Where drafts do not pay for a while, a text decodes on beside the prompts of others."""
    head = TrainedProposer(None, most_sequences=4)  # type: ignore[arg-type]  # nothing is drafted
    text, prompt = (Generated(number, [5], 1, SamplingParams()) for number in range(2))
    for step in range(3000):
        head.take([text, prompt], [step, 0], [1, 64], torch.zeros(65, 8))
        waiting = head._texts[text.seq_id]._pending
        if step % 500 == 499:
            assert min(step, 500) <= sum(map(len, waiting)) <= 1024
            assert sum(each.untyped_storage().nbytes() for each in waiting) <= 1024 * 8 * 4
    assert head._texts[prompt.seq_id].num_pending == 64


def test_a_checkpoint_without_such_a_layer_is_refused(directory: Path, tmp_path: Path) -> None:
    bare = write_checkpoint(tmp_path / "bare", "glm4_moe_lite")
    foreign = write_checkpoint(tmp_path / "foreign", "granite")
    for place, told in (
        (directory, "has no layer for"),
        (bare, r"layers\.2\.eh_proj"),
        (foreign, r"no layer .*mtp\.fc.* transformers' network"),
    ):
        with pytest.raises(UnsupportedError, match=told):
            opened(place, speculative_config={"method": "mtp"})
    with pytest.raises(InvalidArgumentError, match="the model's own checkpoint"):
        opened(directory, speculative_config={"method": "mtp", "model": str(directory)})


def trained(kind: str, directory: Path, scratch: Path) -> tuple[Path, dict[str, Any], Reference | LayerReference]:
    """A model, what its speculation is configured by, and a reference of what is guessed."""
    if kind == "eagle3":
        place = write_eagle(directory, scratch / "head")
        return directory, {"method": kind, "model": str(place)}, Reference(directory, place)
    if kind == "eagle":
        place = write_eagle1(directory, scratch / "head")
        return directory, {"method": kind, "model": str(place)}, LayerReference(directory, scratch, head=place)
    family = kind.removesuffix(".gguf")
    write = write_hybrid if family in STATEFUL_FAMILIES else write_predicting
    place = write(scratch / "checkpoint", family)
    served = place if family == kind else write_gguf(place, scratch / "model.gguf")
    return served, {"method": f"{family}_mtp"}, LayerReference(place, scratch)


@pytest.mark.parametrize(
    "kind",
    ["eagle", "eagle3", "deepseek_v3", "glm4_moe", "glm4_moe.gguf", "glm4_moe_lite", "mimo", "qwen3_next", "qwen3_5"],
)
def test_a_trained_layer_guesses_what_transformers_does(directory: Path, tmp_path: Path, kind: str) -> None:
    """Behind texts whose drafts were right and wrong, and of prompts in chunks, as computed without any cache."""
    place, config, reference = trained(kind, directory, tmp_path)
    config |= {"num_speculative_tokens": 3, "disable_by_batch_size": 16}
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 16}
    with opened(place, speculative_config=config, **options) as llm:
        assert llm.engine._speculator is not None
        head = llm.engine._speculator._proposer
        assert isinstance(head, TrainedProposer)
        told: list[tuple[list[int], list[int]]] = []
        propose = head.propose

        def recorded(wanted: Sequence[tuple[Generated, int]]) -> None:
            propose(wanted)
            told.extend((list(sequence.token_ids), list(sequence.drafts)) for sequence, _ in wanted)

        head.propose = recorded  # type: ignore[method-assign]
        prompts = [list(range(5, 45)), list(range(60, 70)), [7, 7, 7]]
        llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))
    assert len(told) > 6
    assert all(drafts == reference.guesses(token_ids, len(drafts)) for token_ids, drafts in told)
    assert max(len(drafts) for _, drafts in told) > 1


def test_a_trained_head_keeps_nothing_of_many_texts(
    directory: Path, alone: list[RequestOutput], tmp_path: Path
) -> None:
    """With more sequences than get drafts no states are kept; it begins anew with those that are left."""
    place = write_eagle(directory, tmp_path / "head")
    config = {"method": "eagle3", "model": str(place), "disable_by_batch_size": 2}
    prompts = PROMPTS * 2
    params = [SamplingParams(max_tokens=4 if each else NUM_TOKENS, temperature=0, ignore_eos=True) for each in range(6)]
    with opened(directory, speculative_config=config, enable_prefix_caching=False) as llm:
        assert llm.engine._speculator is not None
        head = llm.engine._speculator._proposer
        assert isinstance(head, TrainedProposer)
        take, most = head.take, []

        def watched(*step: Any) -> None:
            take(*step)
            most.append(len(head._texts))

        llm.engine.runner.tap((0, 1, 2), watched)
        answers = llm.generate(prompts, params)
        statistics = llm.engine.statistics.speculation
    with opened(directory) as llm:
        expected = llm.generate(prompts, params)
    assert max(most) <= 2
    assert statistics is not None
    assert statistics.num_draft_tokens > 0
    assert [facts(answer) for answer in answers] == [facts(answer) for answer in expected]


def test_a_head_of_another_model_is_refused(directory: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "llama", values={"hidden_size": 64, "head_dim": 16})
    for name, place, told in (
        ("other", write_eagle(other, tmp_path / "a"), "made for another model"),
        ("layers", write_eagle(directory, tmp_path / "b", layers=(0, 1, 99)), "this model has"),
        ("switch", write_eagle(directory, tmp_path / "c", norm_before_fc=True), "norm_before_fc"),
        ("nowhere", tmp_path / "nowhere", "there is no directory"),
    ):
        config = {"method": "eagle3", "model": str(place)}
        with pytest.raises((UnsupportedError, InvalidArgumentError), match=told):
            opened(directory, speculative_config=config)
        assert name
    with pytest.raises(InvalidArgumentError, match="directory of a head"):
        opened(directory, speculative_config={"method": "eagle3"})


def test_drafts_that_do_not_pay_are_left_out() -> None:
    gain = Gain()
    for _ in range(4):
        gain.observe(1, 1.0, 1.0, has_drafts=False)
    for _ in range(40):  # 1.5 tokens in 1.3 steps
        assert gain.is_expected()
        gain.observe(1, 1.3, 1.5, has_drafts=True)
    drafted = 0
    for _ in range(2000):
        if gain.is_expected():
            drafted += 1
            gain.observe(1, 1.3, 1.0, has_drafts=True)
        else:
            gain.observe(1, 1.0, 1.0, has_drafts=False)
    assert 8 < drafted < 100


class Noise:
    """Drafts tokens at random, so that few of them are right."""

    def __init__(self) -> None:
        self._draw = random.Random(5)

    def propose(self, wanted: Sequence[tuple[Generated, int]]) -> None:
        for sequence, num_drafts in wanted:
            sequence.drafts = [self._draw.randrange(3) for _ in range(num_drafts)]

    def end(self, sequence: Generated) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("most_sequences", [3, 8])  # of 3, drafts begin when the others have ended
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_any_drafts_over_any_pool(
    num_blocks: int, window: int | None, most_sequences: int, is_asynchronous: bool
) -> None:
    """The runner's tokens are a hash of what its KV memory holds: a wrong slot would change them."""
    runner = FakeRunner(num_blocks=num_blocks, vocab_size=3, is_asynchronous=is_asynchronous, window=window)
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    guessing = engine(runner, speculative_config=config)
    guessing._speculator = speculator = Speculator(config, Noise(), most_sequences=most_sequences, clock_ns=still)
    lengths = [10 + 5 * number for number in range(6)]
    asked = [
        request([number % 3, *([2] * number)], max_tokens=length, seed=number, logprobs=0)
        for number, length in enumerate(lengths)
    ]
    answers = run(guessing, *asked)
    for each, length in zip(asked, lengths, strict=True):
        answer = answers[each, 0]
        expected = expected_tokens(each.prompt_token_ids, length, vocab_size=3, ignore_eos=True, window=window)
        assert answer.token_ids == expected
        assert sum(len(output.logprobs or ()) for output in answer.outputs) == length
    assert 0 < speculator.statistics.num_accepted_tokens < speculator.statistics.num_draft_tokens
    assert guessing.statistics.num_generation_tokens == sum(lengths)


def test_a_cancelled_sequence_leaves_nothing() -> None:
    guessing = engine(FakeRunner(vocab_size=3), clock=still, speculative_config=SpeculativeConfig(**NGRAM))
    gone, stays = request([1, 2] * 3, max_tokens=40), request([1, 2, 1, 2, 1], max_tokens=20)
    guessing.add(gone)
    guessing.add(stays)
    for _ in range(4):
        guessing.step()
    guessing.abort(gone)
    check_integrity(guessing)
    while guessing.has_work:
        guessing.step()
        check_integrity(guessing)
    assert guessing.statistics.kv_cache_usage == 0


def test_many_sequences_get_no_drafts() -> None:
    guessing = engine(
        FakeRunner(vocab_size=2), clock=still, speculative_config=SpeculativeConfig(**NGRAM, disable_by_batch_size=1)
    )
    run(guessing, request([1, 0], max_tokens=20), request([0, 1], max_tokens=20))
    statistics = guessing.statistics.speculation
    assert statistics is not None
    assert statistics.num_draft_tokens == 0
    run(guessing, request([1] * 9, max_tokens=40))
    assert statistics.num_draft_tokens > 0


def test_states_go_back_to_the_last_draft_that_was_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hybrid, with preemptions, and chunks beside sequences with drafts."""
    few = ("greedy", "truncated", "penalties", "json")
    monkeypatch.setattr(sys.modules[__name__], "CASES", {name: CASES[name] for name in few})
    place, options = write_checkpoint(tmp_path / "checkpoint", "qwen3_next"), {"num_gpu_blocks_override": 16}
    with opened(place) as llm:
        expected = llm.generate(*asked())
    config = {**NGRAM, "disable_by_batch_size": 16}
    with opened(place, speculative_config=config, max_num_batched_tokens=24, **options) as llm:
        engine = llm.engine
        config_read = engine.options.speculative_config
        assert config_read is not None
        states = engine.runner._states
        assert states is not None
        assert len(states._spare) == config_read.most_drafts(16, is_gpu=False) == 18
        engine._speculator = Speculator(config_read, Oracle(expected, 0.2), most_sequences=16, clock_ns=still)
        answers = llm.generate(*asked())
        statistics = engine._speculator.statistics
        check_integrity(engine)
        assert engine.statistics.num_preemptions > 0
        assert sorted(states._places + states._spare) == [*range(16), *range(17, 35)]
    assert_same(answers, expected)
    assert statistics.num_accepted_tokens > 40
    assert statistics.num_draft_tokens > statistics.num_accepted_tokens


def test_texts_that_repeat_themselves_take_fewer_steps(directory: Path) -> None:
    looping = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logit_bias={7: 100.0})
    numbers = {}
    for config in (None, NGRAM, {"method": "suffix"}):
        with opened(directory, speculative_config=config) as llm:
            (answer,) = llm.generate([[9, 8]], [looping])
            assert answer.outputs[0].token_ids == [7] * 64
            numbers[config and config["method"]] = llm.engine.statistics.num_steps
    assert numbers[None] == 64
    assert numbers["ngram"] < 20
    assert numbers["suffix"] < 32


def test_what_a_grammar_forces_is_drafted(directory: Path) -> None:
    """Text that can only go on in one way is guessed without a look at other texts."""
    literal = "a text of many words that is known from the beginning"
    for wanted in ({"regex": literal}, {"choice": [literal + " on", literal + " off"]}):
        params = SamplingParams(temperature=0, max_tokens=90, structured_outputs=wanted)
        with opened(directory, speculative_config=NGRAM, max_model_len=128) as llm:
            (answer,) = llm.generate(["x"], [params])
            assert answer.outputs[0].text.startswith(literal)
            statistics = llm.engine.statistics
        assert statistics.speculation is not None
        assert statistics.speculation.num_accepted_tokens > 0


def test_what_a_client_predicts_is_drafted(is_asynchronous: bool) -> None:
    """By an engine that speculates nothing else. The answer differs from the prediction in one place."""
    guessing = engine(FakeRunner(num_blocks=64, vocab_size=40, is_asynchronous=is_asynchronous), clock=still)
    answer = expected_tokens([3, 4, 5], 60, vocab_size=40, ignore_eos=True)
    predicted, alone = request([3, 4, 5], max_tokens=60), request([9], max_tokens=20)
    predicted.prediction = [*answer[:30], 41, 42, *answer[31:]]
    found = run(guessing, alone, predicted)
    assert found[predicted, 0].token_ids == answer
    assert found[alone, 0].token_ids == expected_tokens([9], 20, vocab_size=40, ignore_eos=True)
    assert guessing.statistics.num_steps < 45
    accepted, rejected = found[predicted, 0].last.predicted or (0, 0)
    assert accepted > 35
    assert 0 < rejected < 20
    assert found[alone, 0].last.predicted is None
    wrong = request([3, 4, 5], max_tokens=60)
    wrong.prediction = [0, 1]
    assert run(guessing, wrong)[wrong, 0].last.predicted == (0, 0)


def test_an_answer_leaves_its_prediction_and_returns() -> None:
    prediction = Prediction([1, 2, 3, 4, 5, 1, 2, 6, 7, 8])
    token_ids = [50, 1]
    drafts = []
    for token in (2, 3, 9, 5, 1, 9, 9, 9, 6, 7, 30, 1, 2):  # 9 instead of 4; three for 2; a second beginning
        drafts.append(prediction.propose(token_ids, num_prompt_tokens=1, num_drafts=2))
        token_ids.append(token)
    assert drafts == [[2, 3], [3, 4], [4, 5], [], [1, 2], [2, 6], [], [], [], [], [8], [], []]
    assert prediction.propose(token_ids, num_prompt_tokens=1, num_drafts=2) == [3, 4]


def test_measurements(directory: Path) -> None:
    guessing = engine(FakeRunner(vocab_size=2), clock=still, speculative_config=SpeculativeConfig(**NGRAM))
    run(guessing, request([1] * 9, max_tokens=40))
    found = {(one.name, *(one.labels or {}).values()): one.value for one in measure(guessing.statistics)}
    statistics = guessing.statistics.speculation
    assert statistics is not None
    assert found["vllm:spec_decode_num_drafts",] == statistics.num_drafts > 0
    assert found["vllm:spec_decode_num_draft_tokens",] == statistics.num_draft_tokens
    assert found["vllm:spec_decode_num_accepted_tokens",] == statistics.num_accepted_tokens
    by_place = [found["vllm:spec_decode_num_accepted_tokens_per_pos", str(place)] for place in range(5)]
    assert sum(by_place) == statistics.num_accepted_tokens
    assert not any("spec_decode" in one.name for one in measure(engine().statistics))


def test_an_index_finds_the_longest_and_latest_match() -> None:
    draw = random.Random(1)
    text: list[int] = []
    index = TokenIndex(text, 2)
    for _ in range(200):
        text.append(draw.randrange(4))
        index.update()
        found = index.find(text, 6)
        lengths = {}
        for end in range(2, len(text)):
            length = 0
            while length < min(6, end) and text[end - 1 - length] == text[-1 - length]:
                length += 1
            if length >= 2:
                lengths[end] = length
        longest = max(lengths.values(), default=0)
        expected = [end for end in sorted(lengths, reverse=True)[:32] if lengths[end] == longest]
        if expected:  # only the latest places are looked at
            assert [match.end for match in found] == expected
        assert all(match.length == lengths[match.end] for match in found)


def generated(token_ids: list[int], num_prompt_tokens: int, cache_salt: str = "") -> Generated:
    return Generated(1, token_ids, num_prompt_tokens, SamplingParams(), cache_salt=cache_salt)


def test_ngrams_are_looked_up_in_the_text() -> None:
    proposer = NgramProposer(SpeculativeConfig(method="ngram", num_speculative_tokens=4))
    sequence = generated([1, 2, 3, 4, 5, 6, 9, 2, 3], 7)
    proposer.propose([(sequence, 3)])
    assert sequence.drafts == [4, 5, 6]
    sequence.token_ids += [8, 7]
    proposer.propose([(sequence, 3)])
    assert sequence.drafts == []
    repeating = generated([5, 6, 5, 6], 1)
    proposer.propose([(repeating, 5)])
    assert repeating.drafts == [5, 6, 5, 6, 5]


def test_suffixes_are_looked_up_in_past_answers() -> None:
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=8, max_cached_requests=4)
    proposer = SuffixProposer(config)
    for last in (40, 40, 50):
        proposer.end(generated([1, 2, 30, 31, 32, last], 2))
    sequence = generated([7, 30, 31], 1)
    proposer.propose([(sequence, 8)])
    assert sequence.drafts == [32, 40]  # twice as many as match, and no more than two tokens match
    salted = generated([7, 30, 31], 1, cache_salt="other")
    proposer.propose([(salted, 8)])
    assert salted.drafts == []
    for number in range(5):
        proposer.end(generated([100 + number, 101, 102], 1))
    proposer.propose([(sequence, 8)])
    assert sequence.drafts == []  # forgotten


def test_wrong_guesses_make_the_next_ones_rare() -> None:
    pace = Pace(2, 8)
    asked = 0
    for _ in range(300):
        num_drafts = pace.next()
        if num_drafts:
            asked += 1
            pace.observe(num_drafts, 0)
    assert asked <= 10
    while not (num_drafts := pace.next()):
        pass
    pace.observe(num_drafts, num_drafts)
    assert [pace.next(), pace.next()] == [4, 4]
    pace.observe(4, 4)
    assert pace.next() == 8
    pace.observe(8, 2)
    assert pace.next() == 3


def test_options_have_vllms_names() -> None:
    text = json.dumps({"method": "suffix", "suffix_decoding_max_tree_depth": 12, "disable_padded_drafter_batch": True})
    options = EngineOptions.from_parameters({"speculative_config": text})
    assert options.speculative_config == SpeculativeConfig(method="suffix", num_speculative_tokens=8, max_tree_depth=12)
    ngram = read_speculative_config("c", {"model": "[ngram]", "prompt_lookup_max": 3, "num_speculative_tokens": 2})
    assert ngram == SpeculativeConfig(
        method="ngram", num_speculative_tokens=2, prompt_lookup_min=3, prompt_lookup_max=3
    )
    for nothing in (None, "", {}, "{}"):
        assert read_speculative_config("c", nothing) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "'c' must be an object"),
        ({"num_speculative_tokens": 4}, "'c.method' must be one of ngram, suffix"),
        ({"method": "guess"}, "'c.method' must be one of"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "'c.num_speculative_tokens' must be from 1 to 64"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "at most prompt_lookup_max"),
        ({"method": "ngram", "num_speculative_token": 4}, "did you mean 'c.num_speculative_tokens'"),
        ({"method": "medusa"}, "medusa is not supported: heads of this kind"),
    ],
)
def test_what_is_wrong_is_named(config: Any, message: str) -> None:
    with pytest.raises(ServerError, match=message) as refused:
        read_speculative_config("c", config)
    assert isinstance(refused.value, UnsupportedError if "medusa" in message else InvalidArgumentError)
