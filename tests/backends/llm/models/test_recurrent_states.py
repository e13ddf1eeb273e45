"""Which rows of a step are computed together, where the states of sequences lie, and what they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from modelserver_backends.llm import LLM, SamplingParams
from modelserver_backends.llm.kv_memory import device_memory, reserve_states
from modelserver_backends.llm.models import grouped_mixer
from modelserver_backends.llm.models.recurrent_states import (
    RecurrentStates,
    StateGroup,
    StateKey,
    StateShape,
    group_rows,
)
from modelserver_backends.llm.models.state_cache import GroupCache
from modelserver_backends.llm.options import EngineOptions
from support.generations import generate, loaded_engine, random_prompts
from support.llm_integrity import check_integrity
from support.tiny_checkpoints import reference_tokens

from modelserver.backend import UnavailableError

CPU = torch.device("cpu")
CONV, RECURRENT = StateKey("conv", 0, 0), StateKey("recurrent", 1, 0)
SHAPES = {CONV: StateShape((2, 3), torch.float32), RECURRENT: StateShape((4,), torch.bfloat16)}


def test_decodes_and_prompts_of_about_one_length_go_together() -> None:
    slots, starts, counts = [5, 2, 0, 7, 1, 8, 9, 3], [9, 4, 6, 6, 0, 0, 0, 0], [1, 1, 2, 2, 3, 4, 5, 90]
    assert group_rows(slots, starts, counts, stacks_prompts=True, stacks_chunks=True) == [
        StateGroup(0, (1, 1), (5, 2), is_fresh=False),
        StateGroup(2, (2, 2), (0, 7), is_fresh=False),
        StateGroup(6, (3, 4, 5), (1, 8, 9), is_fresh=True),
        StateGroup(18, (90,), (3,), is_fresh=True),
    ]
    alone = group_rows(slots, starts, counts)
    assert [group.slots for group in alone] == [(5, 2), (0,), (7,), (1,), (8,), (9,), (3,)]
    assert [group.start for group in alone] == [0, 2, 4, 6, 9, 13, 18]


@pytest.mark.parametrize("is_understood", [True, False], ids=["padded", "one by one"])
def test_prompts_of_a_step_are_computed_together_where_that_is_exact(
    is_understood: bool, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that padding leads astray gets prompts one by one, as the trial at load finds."""
    if not is_understood:
        monkeypatch.setattr(StateGroup, "places", property(lambda group: torch.arange(sum(group.lengths))))
    directory, prompts = checkpoint("qwen3_next"), [[7] * length for length in (9, 12, 3, 10, 1, 11)]
    sizes: list[int] = []
    cut = grouped_mixer._flat
    with loaded_engine(directory, max_num_seqs=8) as engine:
        monkeypatch.setattr(
            grouped_mixer, "_flat", lambda output, group: (sizes.append(len(group.slots)), cut(output, group))[1]
        )
        found = [tokens for tokens, _ in generate(engine, prompts, 4)]
    assert found == [reference_tokens(directory, prompt, 4) for prompt in prompts]
    assert max(sizes[: sizes.index(6)]) == (4 if is_understood else 1)


def test_a_sequence_that_begins_finds_nothing_of_the_one_before() -> None:
    states = RecurrentStates(SHAPES, CPU)
    states.allocate(2)
    states.tensor(CONV).fill_(7.0)
    cache = GroupCache(states, StateGroup(0, (2,), (1,), is_fresh=True))
    assert cache.get_conv_state(0) is None
    inputs = cache.update_conv_state(torch.ones(1, 2, 2), 0, conv_kernel_size=3)
    assert inputs.tolist() == [[[0.0, 1.0, 1.0]] * 2]
    assert cache.get_recurrent_state(1) is None
    cache.close()
    assert states.tensor(CONV)[:, 0].tolist() == [[7.0] * 3, [0.0, 1.0, 1.0], [7.0] * 3]


def test_sequences_of_a_stack_each_keep_their_own() -> None:
    states = RecurrentStates(SHAPES, CPU)
    states.allocate(3)
    cache = GroupCache(states, StateGroup(0, (1, 1), (2, 0), is_fresh=False))
    cache.update_recurrent_state(torch.tensor([[2.0] * 4, [5.0] * 4]), 1)
    assert cache.update_conv_state(torch.ones(2, 2, 1), 0).shape == (2, 2, 4)
    cache.close()
    assert states.tensor(RECURRENT)[:, 0].tolist() == [5.0, 0.0, 2.0, 0.0]


def test_memory_is_that_of_all_who_may_run_and_of_an_embedding() -> None:
    states, before = RecurrentStates(SHAPES, CPU), device_memory(CPU).reserved_bytes
    reservation = reserve_states(states, EngineOptions(max_num_seqs=4), device=CPU, what="it")
    assert device_memory(CPU).reserved_bytes - before == 5 * (2 * 3 * 4 + 4 * 2)
    assert states.tensor(CONV).shape == (5, 2, 3)
    reservation.release()
    huge = RecurrentStates({CONV: StateShape((1 << 40,), torch.float32)}, CPU)
    with pytest.raises(UnavailableError, match=r"for the states of max_num_seqs 4 sequences, .* lower max_num_seqs"):
        reserve_states(huge, EngineOptions(max_num_seqs=4), device=CPU, what="it")


def test_all_memory_is_given_back(checkpoint: Callable[[str], Path]) -> None:
    before = device_memory(CPU).reserved_bytes
    with loaded_engine(checkpoint("mamba2"), max_num_seqs=3) as engine:
        assert engine.runner.has_states
        assert device_memory(CPU).reserved_bytes > before
    assert device_memory(CPU).reserved_bytes == before


@pytest.mark.parametrize("family", ["lfm2", "jamba"])
def test_choices_are_those_of_requests_of_their_own(family: str, checkpoint: Callable[[str], Path]) -> None:
    params = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    prompt = random_prompts(1, seed=3)[0] * 2
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with LLM(checkpoint(family), **options) as llm:
        both = llm.generate([prompt], SamplingParams(**params, n=2, seed=5))[0].outputs
        alone = [llm.generate([prompt], SamplingParams(**params, seed=5 + choice))[0].outputs[0] for choice in (0, 1)]
        check_integrity(llm.engine)
    assert [choice.token_ids for choice in both] == [choice.token_ids for choice in alone]


def test_an_embedding_leaves_sequences_alone(checkpoint: Callable[[str], Path]) -> None:
    directory, (prompt, other) = checkpoint("qwen3_next"), random_prompts(2, seed=4)
    with loaded_engine(directory, max_num_seqs=1) as engine:
        first = engine.runner.embed([other])[0]
        assert generate(engine, [prompt], 4)[0][0] == reference_tokens(directory, prompt, 4)
        assert (engine.runner.embed([other])[0] == first).all()


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_without_attention_texts_may_be_of_any_length(family: str, checkpoint: Callable[[str], Path]) -> None:
    with loaded_engine(checkpoint(family), max_num_seqs=1, max_model_len=100_000) as engine:
        assert engine.max_model_len == 100_000
