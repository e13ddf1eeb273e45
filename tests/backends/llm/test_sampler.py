"""Tokens follow the distribution that vLLM's order of rules gives, whatever the batch and whichever the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from modelserver_backends.llm.draw import draw_columns, draw_on_device, draw_on_host, uniform
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampler_state import Edits, SamplerState
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.sampling import make_sequence, reference_probabilities
from support.tiny_tokenizers import byte_level

EOS = (5, 6)
NUM_DRAWS = 1500

# Every parameter alone, and together with those whose order matters.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 4},
    "top_k_beyond": {"top_k": 1000},
    "top_k_all": {"top_k": -1},
    "top_p": {"top_p": 0.6},
    "top_p_one_token": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "top_k_then_top_p": {"top_k": 5, "top_p": 0.7},
    "min_p_then_top_k_then_top_p": {"min_p": 0.1, "top_k": 6, "top_p": 0.8, "temperature": 1.7},
    "repetition": {"repetition_penalty": 1.8, "output": (4, 4, 7)},
    "repetition_below_one": {"repetition_penalty": 0.6, "output": (4, 4, 7)},
    "frequency": {"frequency_penalty": 0.9, "output": (4, 4, 4, 7)},
    "presence": {"presence_penalty": 1.1, "output": (4, 4, 4, 7)},
    "penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.7,
        "output": (4, 4, 1, 7),
        "temperature": 0.8,
    },
    "logit_bias": {"logit_bias": {3: 4.0, 8: -100.0}},
    "allowed": {"allowed_token_ids": (2, 9, 11)},
    "min_tokens": {"min_tokens": 3, "output": (4, 4), "stop_token_ids": (9,)},
    "min_tokens_reached": {"min_tokens": 2, "output": (4, 4), "stop_token_ids": (9,)},
    "min_tokens_ignore_eos": {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": (9,)},
    "bias_of_penalised": {"logit_bias": {4: 6.0}, "repetition_penalty": 1.5, "output": (4,)},
    "greedy_with_rules": {"temperature": 0.0, "logit_bias": {4: 9.0}, "frequency_penalty": 2.0, "output": (4, 4, 4, 4)},
    "allowed_and_biased": {"allowed_token_ids": (2, 9), "logit_bias": {3: 50.0, 2: 1.0}, "top_k": 3},
}


def _logits(size: int = 12, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 1.5


def _sequence(case: dict[str, Any], seed: int = 0) -> Any:
    fields = dict(case)
    return make_sequence(output=fields.pop("output", ()), seed=seed, **fields)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_follow_the_reference(case: dict[str, Any]) -> None:
    sampler = Sampler(eos_token_ids=EOS)
    logits = _logits()
    expected = reference_probabilities(logits.numpy(), _sequence(case), EOS)
    sequences = [_sequence(case, seed) for seed in range(NUM_DRAWS)]
    sampled = sampler.sample(logits.repeat(NUM_DRAWS, 1), sequences)
    counts = np.bincount([one.token_id for one in sampled], minlength=len(logits))
    assert counts[expected == 0.0].sum() == 0
    possible = expected > 0.0
    chi_square = ((counts - NUM_DRAWS * expected)[possible] ** 2 / (NUM_DRAWS * expected[possible])).sum()
    assert chi_square < 45.0  # at most 11 degrees of freedom: one in 100,000 is above


def _host_and_device(logits: torch.Tensor, params: list[SamplingParams], noise: list[float]) -> tuple[Any, Any]:
    host = [
        int(row.argmax()) if one.is_greedy else draw_on_host(row.numpy(), one, number)
        for row, one, number in zip(logits, params, noise, strict=True)
    ]
    return host, draw_on_device(logits, torch.from_numpy(draw_columns(params, noise))).tolist()


@pytest.mark.parametrize("size", [7, 128, 129, 1000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_both_programs_draw_the_same(size: int, spread: float) -> None:
    num_rows = 300
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(num_rows, size, generator=generator) * spread
    fields = [CASES[name] for name in ("plain", "hot", "greedy", "top_k", "top_p", "min_p", "top_k_then_top_p")]
    fields.append(CASES["min_p_then_top_k_then_top_p"])
    params = [SamplingParams(**fields[row % len(fields)]) for row in range(num_rows)]
    host, device = _host_and_device(logits, params, [uniform(9, row) for row in range(num_rows)])
    # The sums are rounded differently, so a number that falls on the edge of two tokens may give either.
    assert sum(a != b for a, b in zip(host, device, strict=True)) <= 1


@pytest.mark.parametrize("noise", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_extreme_numbers_draw_tokens_that_have_mass(noise: float, fields: dict[str, Any]) -> None:
    logits = torch.full((1, 200), float("-inf"))
    logits[0, 50], logits[0, 120] = 1.0, 1.5
    host, device = _host_and_device(logits, [SamplingParams(**fields)], [noise])
    assert host == device
    assert host[0] in (50, 120)


def test_ties_at_the_edge_are_kept_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for fields in ({"top_k": 2}, {"top_p": 0.55}):
        drawn = {draw_on_host(logits[0].numpy(), SamplingParams(**fields), number / 200) for number in range(200)}
        assert drawn == {0, 1, 2, 3}


def test_a_row_does_not_see_its_batch() -> None:
    sampler = Sampler(eos_token_ids=EOS)
    cases = list(CASES.values())
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(cases), 700, generator=generator)
    together = sampler.sample(logits.clone(), [_sequence(case, seed) for seed, case in enumerate(cases)])
    alone = [sampler.sample(logits[row : row + 1].clone(), [_sequence(case, row)])[0] for row, case in enumerate(cases)]
    backwards = sampler.sample(
        logits.flip(0), [_sequence(case, seed) for seed, case in reversed(list(enumerate(cases)))]
    )
    assert together == alone == backwards[::-1]


def test_rules_change_the_same_bits_on_host_and_device() -> None:
    sequences = [_sequence(case) for case in CASES.values()]
    states = [SamplerState(sequence, frozenset(EOS), None) for sequence in sequences]
    edits = Edits(len(sequences), 700)
    for row, (sequence, state) in enumerate(zip(sequences, states, strict=True)):
        edits.add(row, sequence, state, sequence.num_tokens)
    before = torch.randn(len(sequences), 700, generator=torch.Generator().manual_seed(1))
    host, device = before.clone(), before.clone()
    edits.apply_on_host(host)
    edits.apply_on_device(device)
    assert torch.equal(host.view(torch.int32), device.view(torch.int32))
    changed = [not torch.equal(*rows) for rows in zip(host, before, strict=True)]
    expected = [state.is_edited and name != "min_tokens_reached" for name, state in zip(CASES, states, strict=True)]
    assert changed == expected


def test_seed_and_position_decide() -> None:
    sampler = Sampler()
    logits = torch.zeros(1, 1000)
    tokens = [sampler.sample(logits.clone(), [make_sequence(seed=7)])[0].token_id for _ in range(3)]
    assert len(set(tokens)) == 1
    assert sampler.sample(logits.clone(), [make_sequence(seed=8)])[0].token_id != tokens[0]
    assert sampler.sample(logits.clone(), [make_sequence(seed=7, output=(1,))])[0].token_id != tokens[0]


def test_a_position_is_given_for_sequences_that_are_behind() -> None:
    sampler = Sampler(eos_token_ids=EOS)
    logits = torch.zeros(1, 1000)
    ahead = sampler.sample(logits.clone(), [make_sequence(seed=7)], [5])
    assert ahead == sampler.sample(logits.clone(), [make_sequence(seed=7, output=(0, 0))])
    forbidden = torch.zeros(1, 10)
    forbidden[0, 5] = 9.0
    held, free = (
        sampler.sample(forbidden.clone(), [make_sequence(temperature=0.0, min_tokens=2)], [position])[0].token_id
        for position in (4, 5)
    )
    assert (held, free) == (0, 5)


@pytest.mark.parametrize("written", ["dog", " dog"])
def test_bad_words_are_banned_with_a_space_and_without(written: str) -> None:
    tokenizer = Tokenizer(byte_level())
    word = tokenizer.encode(written, add_special_tokens=False)
    logits = torch.zeros(1, tokenizer.vocab_size)
    logits[0, word[-1]] = 5.0
    sequence = make_sequence(temperature=0.0, bad_words=("dog",), output=(9, *word[:-1]))
    assert Sampler(tokenizer=tokenizer).sample(logits, [sequence])[0].token_id != word[-1]


def test_bad_words_of_several_tokens() -> None:
    tokenizer = Tokenizer(byte_level())
    word = tokenizer.encode("zebra", add_special_tokens=False)
    assert len(word) > 2
    sampler = Sampler(tokenizer=tokenizer)
    logits = torch.zeros(1, tokenizer.vocab_size)
    logits[0, word[-1]] = 5.0
    for written, expected in ((word[:-1], False), (word[1:-1], True), ([], True), ([*word[:-2], 7], True)):
        sequence = make_sequence(temperature=0.0, bad_words=("zebra",), output=written)
        assert (sampler.sample(logits.clone(), [sequence])[0].token_id == word[-1]) is expected


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = _logits(50)
    expected = torch.log_softmax(logits.double(), -1)
    params = {"temperature": 0.5, "logit_bias": {3: 100.0}, "top_k": 1}
    sampled = Sampler().sample(logits.repeat(3, 1), [make_sequence(logprobs=num, **params) for num in (None, 0, 4)])
    assert [one.token_id for one in sampled] == [3, 3, 3]
    assert sampled[0].logprobs is None
    assert sampled[1].logprobs is not None
    assert sampled[1].logprobs.top == ()
    with_top = sampled[2].logprobs
    assert with_top is not None
    assert with_top.logprob == pytest.approx(expected[3].item(), abs=1e-5)
    assert with_top.rank == int((expected > expected[3]).sum()) + 1
    best = expected.topk(4)
    assert [token for token, _ in with_top.top] == best.indices.tolist()
    assert [value for _, value in with_top.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_all_alternatives() -> None:
    sampled = Sampler().sample(_logits().unsqueeze(0), [make_sequence(logprobs=20)])
    assert sampled[0].logprobs is not None
    assert sorted(token for token, _ in sampled[0].logprobs.top) == list(range(12))


def test_prompt_logprobs() -> None:
    logits = torch.stack([_logits(40, seed) for seed in range(300)])
    token_ids = [seed % 40 for seed in range(300)]
    given = Sampler().prompt_logprobs(logits, token_ids, 2)
    expected = torch.log_softmax(logits.double(), -1)
    assert len(given) == 300
    for row, one in enumerate(given):
        assert one.logprob == pytest.approx(expected[row, token_ids[row]].item(), abs=1e-5)
        assert len(one.top) == 2
        assert one.top[0][1] == pytest.approx(expected[row].max().item(), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_type_become_float32(dtype: torch.dtype) -> None:
    logits = _logits(64).to(dtype)
    sampled = Sampler().sample(logits.unsqueeze(0), [make_sequence(temperature=0.0, logprobs=1)])
    assert sampled[0].token_id == int(logits.argmax())


def test_every_token_forbidden_still_gives_a_token() -> None:
    fields: dict[str, Any] = {"allowed_token_ids": (5,), "min_tokens": 1}
    for temperature in (0.0, 1.0):
        sequence = make_sequence(temperature=temperature, **fields)
        token_id = Sampler(eos_token_ids=EOS).sample(torch.zeros(1, 12), [sequence])[0].token_id
        assert 0 <= token_id < 12


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}])
def test_a_row_that_the_network_could_not_compute_harms_no_other(wrong: float, fields: dict[str, Any]) -> None:
    logits = torch.stack([_logits(200), _logits(200)])
    logits[0, 7] = wrong
    broken, whole = Sampler().sample(logits.clone(), [make_sequence(**fields), make_sequence(**fields)])
    assert 0 <= broken.token_id < 200
    assert whole == Sampler().sample(logits[1:].clone(), [make_sequence(**fields)])[0]
    params, noise = [SamplingParams(**fields)] * 2, [0.5, 0.5]
    assert all(
        0 <= token_id < 200 for token_id in draw_on_device(logits, torch.from_numpy(draw_columns(params, noise)))
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e6},
        {"temperature": 1e-5, "top_k": 2**31 - 1},
        {"repetition_penalty": 0.001},
        {"repetition_penalty": 1000, "temperature": 1e-5, "top_p": 1e-300},
        {"repetition_penalty": 0.001, "frequency_penalty": -2, "min_p": 1e-300},
    ],
)
def test_the_ends_of_every_range_can_be_computed(fields: dict[str, Any]) -> None:
    logits = _logits(200) * 6e4  # as large as float16 has them
    sequence = make_sequence(output=(4, 4, 7), **fields)
    with np.errstate(all="raise", under="ignore"):
        sampled = Sampler().sample(logits.unsqueeze(0), [sequence])
    assert 0 <= sampled[0].token_id < 200


def test_tokens_that_the_model_has_not_are_no_trouble() -> None:
    sequence = make_sequence(min_tokens=2, stop_token_ids=(3, 5000), temperature=0.0)
    logits = torch.zeros(1, 12)
    logits[0, 3] = 5.0
    assert Sampler(eos_token_ids=(5, 9000)).sample(logits, [sequence])[0].token_id not in (3, 5)
