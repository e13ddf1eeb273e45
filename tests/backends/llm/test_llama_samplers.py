"""llama.cpp's samplers against their definitions, written down one after the other in Python's own numbers."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from modelserver_backends.llm.draw import uniform
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampler_state import SamplerState
from modelserver_backends.llm.samplers import Repetitions, breaker_ids
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.sampling import make_sequence
from support.tiny_tokenizers import byte_level

NUM_DRAWS = 1200
XTC_DRAW = 2

CASES: dict[str, dict[str, Any]] = {
    "typical": {"typical_p": 0.5},
    "typical_hot": {"typical_p": 0.9, "temperature": 2.0},
    "typical_one_token": {"typical_p": 1e-6},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "top_n_sigma_cold": {"top_n_sigma": 0.5, "temperature": 0.5},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    "xtc_at_times": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    "xtc_above_a_half": {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    "dynamic_temperature": {"dynatemp_range": 0.8, "temperature": 1.0},
    "dynamic_temperature_from_nothing": {"dynatemp_range": 5.0, "dynatemp_exponent": 2.0, "temperature": 1.5},
    "all": {
        "top_n_sigma": 2.5,
        "top_k": 9,
        "typical_p": 0.95,
        "top_p": 0.9,
        "min_p": 0.02,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dynatemp_range": 0.3,
        "temperature": 0.8,
    },
}


def _logits(size: int = 12, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 1.5


def _shares(values: dict[int, float]) -> dict[int, float]:
    best = max(values.values())
    weights = {token: math.exp(value - best) for token, value in values.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def _until(shares: dict[int, float], order: list[int], mass: float) -> set[int]:
    """The first tokens of an order that have the mass together."""
    kept: set[int] = set()
    for token in order:
        kept.add(token)
        if sum(shares[other] for other in kept) >= mass:
            break
    return kept


def reference(logits: np.ndarray, params: SamplingParams, is_xtc: bool) -> np.ndarray:
    """The probabilities of all tokens, in llama.cpp's order."""
    values = {token: float(value) for token, value in enumerate(logits)}

    def keep(tokens: Any) -> None:
        for token in set(values) - set(tokens):
            del values[token]

    if params.top_n_sigma > 0:
        mean = sum(values.values()) / len(values)
        sigma = math.sqrt(sum((value - mean) ** 2 for value in values.values()) / len(values))
        least = max(values.values()) - params.top_n_sigma * sigma
        keep([token for token, value in values.items() if value >= least])
    if 0 < params.top_k < len(values):
        keep(sorted(values, key=values.__getitem__, reverse=True)[: params.top_k])
    shares = _shares(values)
    if params.typical_p < 1:
        entropy = -sum(share * math.log(share) for share in shares.values())
        order = sorted(shares, key=lambda token: (abs(-math.log(shares[token]) - entropy), -shares[token]))
        keep(_until(shares, order, params.typical_p))
    shares = _shares(values)
    if params.top_p < 1:
        keep(_until(shares, sorted(shares, key=shares.__getitem__, reverse=True), params.top_p))
    shares = _shares(values)
    if params.min_p > 0:
        keep([token for token in values if shares[token] >= params.min_p * max(shares.values())])
    shares = _shares(values)
    above = [token for token in values if shares[token] >= params.xtc_threshold]
    if is_xtc and len(above) > 1:
        least_probable = min(above, key=shares.__getitem__)
        keep([token for token in values if token not in above or token == least_probable])
    temperature = params.temperature
    if params.dynatemp_range > 0 and len(values) > 1:
        shares = _shares(values)
        certainty = -sum(share * math.log(share) for share in shares.values()) / math.log(len(values))
        low, high = max(0.0, temperature - params.dynatemp_range), temperature + params.dynatemp_range
        temperature = low + (high - low) * certainty**params.dynatemp_exponent
    found = np.zeros(len(logits))
    for token, share in _shares({token: value / temperature for token, value in values.items()}).items():
        found[token] = share
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_follow_the_definition(case: dict[str, Any]) -> None:
    logits, params = _logits(), SamplingParams(**case)
    sequences = [make_sequence(params, seed=seed) for seed in range(NUM_DRAWS)]
    sampled = Sampler().sample(logits.repeat(NUM_DRAWS, 1), sequences)
    for is_xtc in (False, True):
        # The same random number decides on XTC here and there.
        drawn = [
            one.token_id
            for one, sequence in zip(sampled, sequences, strict=True)
            if (uniform(sequence.seed, sequence.num_tokens, XTC_DRAW) < params.xtc_probability) is is_xtc
        ]
        expected = reference(logits.numpy(), params, is_xtc)
        counts = np.bincount(np.array(drawn, dtype=np.int64), minlength=len(logits))
        assert counts[expected == 0.0].sum() == 0
        possible = expected > 0.0
        num = max(1, len(drawn))
        assert ((counts - num * expected)[possible] ** 2 / (num * expected[possible])).sum() < 45.0 or not drawn


def test_a_sequence_gets_the_same_token_in_any_company() -> None:
    rare = make_sequence(SamplingParams(typical_p=0.7, xtc_probability=0.5), seed=5)
    alone = Sampler().sample(_logits()[None].clone(), [rare])[0].token_id
    others = [make_sequence(seed=seed) for seed in range(3)]
    together = make_sequence(SamplingParams(typical_p=0.7, xtc_probability=0.5), seed=5)
    assert Sampler().sample(_logits().repeat(4, 1), [*others, together])[3].token_id == alone


def test_greedy_sequences_take_the_maximum_whatever_the_samplers() -> None:
    params = SamplingParams(temperature=0.0, typical_p=0.1, xtc_probability=1.0, mirostat=2)
    assert Sampler().sample(_logits()[None].clone(), [make_sequence(params)])[0].token_id == int(_logits().argmax())


def test_tokens_that_other_rules_forbid_stay_forbidden() -> None:
    params = SamplingParams(xtc_probability=1.0, allowed_token_ids=(2, 9))
    sequences = [make_sequence(params, seed=seed) for seed in range(50)]
    assert {one.token_id for one in Sampler().sample(_logits().repeat(50, 1), sequences)} <= {2, 9}


def test_nothing_is_kept_for_sequences_without_these_samplers() -> None:
    for params in (SamplingParams(), SamplingParams(top_k=3, top_p=0.5, xtc_threshold=0.3, mirostat_tau=2.0)):
        state = SamplerState(make_sequence(params), frozenset(), None)
        assert (state.truncation, state.repetitions, state.is_edited) == (None, None, False)
        assert state.drawn is params


def mirostat_bounds(params: SamplingParams, offers: list[np.ndarray], chosen: list[int]) -> list[set[int]]:
    """Which tokens may be drawn at each step, by the paper, given what was drawn."""
    bound, found = 2 * params.mirostat_tau, []
    for logits, token in zip(offers, chosen, strict=True):
        shares = _shares({one: float(value) / params.temperature for one, value in enumerate(logits)})
        order = sorted(shares, key=shares.__getitem__, reverse=True)
        if params.mirostat == 2:
            kept = [one for one in order if -math.log2(shares[one]) <= bound] or order[:1]
        else:
            steps = [math.log((rank + 2) / (rank + 1)) for rank in range(min(100, len(order)) - 1)]
            falls = [math.log(shares[order[rank]] / shares[order[rank + 1]]) for rank in range(len(steps))]
            exponent = sum(a * b for a, b in zip(steps, falls, strict=True)) / sum(step**2 for step in steps)
            excess = exponent - 1
            count = (excess * 2**bound / (1 - len(order) ** -excess)) ** (1 / exponent)
            kept = order[: min(len(order), max(1, int(count)))]
        found.append(set(kept))
        total = sum(shares[one] for one in kept)
        bound -= params.mirostat_eta * (-math.log2(shares[token] / total) - params.mirostat_tau)
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_bounds_surprise_by_what_was_drawn(version: int) -> None:
    params = SamplingParams(mirostat=version, mirostat_tau=1.5, mirostat_eta=0.5, temperature=0.9)
    offers = [_logits(40, seed).numpy() for seed in range(12)]
    seen: list[set[int]] = [set() for _ in offers]
    for seed in range(40):
        sequence, sampler = make_sequence(params, seed=seed), Sampler()
        chosen = []
        for logits in offers:
            token = sampler.sample(torch.from_numpy(logits.copy())[None], [sequence])[0].token_id
            sequence.token_ids.append(token)
            chosen.append(token)
        for step, allowed in enumerate(mirostat_bounds(params, offers, chosen)):
            assert chosen[step] in allowed
            seen[step].add(chosen[step])
    # The bound is narrower than the vocabulary, and wide enough for chance.
    assert all(1 <= len(tokens) < 40 for tokens in seen)
    assert any(len(tokens) > 1 for tokens in seen)


def test_mirostat_offers_exactly_the_bound() -> None:
    params = SamplingParams(mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5)
    logits = _logits(30)
    sequence, row = make_sequence(params), logits.clone()
    state = SamplerState(sequence, frozenset(), None)
    assert state.truncation is not None
    state.truncation.apply(row, sequence, sequence.num_tokens)
    (allowed,) = mirostat_bounds(params, [logits.numpy()], [int(logits.argmax())])
    assert set(torch.isfinite(row).nonzero().ravel().tolist()) == allowed


def dry_penalties(token_ids: list[int], params: SamplingParams, breakers: frozenset[int]) -> dict[int, float]:
    """By comparing the end of the text with every place before."""
    window = (
        token_ids if params.dry_penalty_last_n < 0 else token_ids[max(0, len(token_ids) - params.dry_penalty_last_n) :]
    )
    longest: Counter[int] = Counter()
    for end in range(1, len(window)):
        following, length = window[end], 0
        while length < end and window[end - 1 - length] == window[-1 - length] and window[-1 - length] not in breakers:
            length += 1
        if following not in breakers:
            longest[following] = max(longest[following], length)
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in longest.items()
        if length >= params.dry_allowed_length
    }


@pytest.mark.parametrize("last_n", [-1, 7, 1])
def test_repetitions_cost_what_the_definition_says(last_n: int) -> None:
    chance = random.Random(4)
    breakers = frozenset({0})
    for _ in range(30):
        params = SamplingParams(
            dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=chance.randint(1, 3), dry_penalty_last_n=last_n
        )
        text = [chance.choice((0, 1, 2, 3)) for _ in range(chance.randint(1, 20))]
        repetitions = Repetitions(params, breakers)
        for _ in range(15):
            assert repetitions.penalties(text) == pytest.approx(dry_penalties(text, params, breakers))
            text.append(chance.choice((0, 1, 2, 3)))


def test_long_repetitions_cost_a_finite_number() -> None:
    repetitions = Repetitions(SamplingParams(dry_multiplier=5.0, dry_base=4.0), frozenset())
    (lost,) = repetitions.penalties([1, 2] * 2000).items()
    assert lost[0] == 1
    assert 1e29 < np.float32(lost[1]) < np.inf


def test_breakers_are_the_tokens_with_a_text() -> None:
    tokenizer = Tokenizer(byte_level())
    found = breaker_ids(("\n", "b"), tokenizer)
    assert found
    assert all(b"\n" in tokenizer.token_bytes(one) or b"b" in tokenizer.token_bytes(one) for one in found)
    others = set(range(tokenizer.vocab_size)) - found
    assert not any(b"\n" in tokenizer.token_bytes(one) or b"b" in tokenizer.token_bytes(one) for one in others)


def test_a_repetition_is_drawn_no_more() -> None:
    tokenizer = Tokenizer(byte_level())
    a, b = tokenizer.encode("a", add_special_tokens=False)[0], tokenizer.encode("c", add_special_tokens=False)[0]
    logits = torch.zeros(1, tokenizer.vocab_size)
    logits[0, b] = 8.0
    params = SamplingParams(temperature=0.0, dry_multiplier=9.0, dry_allowed_length=1, dry_sequence_breakers=())
    sampler = Sampler(tokenizer=tokenizer)
    free = make_sequence(SamplingParams(temperature=0.0), prompt=(a, b, a))
    held = make_sequence(params, prompt=(a, b, a))
    assert sampler.sample(logits.clone(), [free])[0].token_id == b
    assert sampler.sample(logits.clone(), [held])[0].token_id != b
