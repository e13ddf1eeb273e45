"""Steps by hand-made plans, ahead of what has been read, and embeddings."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.embedding.head import EmbeddingHead
from modelserver_backends.llm.embedding.layout import EmbeddingLayout
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.plan import Chunk, StepPlan
from modelserver_backends.llm.runner import Runner, load_runner
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import Sequence
from support.generations import generate, loaded_engine, random_prompts
from support.tiny_checkpoints import reference_model, reference_tokens

Checkpoints = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def runner(checkpoint: Checkpoints) -> Any:
    options = EngineOptions(device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4, block_size=8)
    with open_checkpoint(checkpoint("llama")) as opened:
        made = load_runner(opened, options, Sampler)
    yield made
    made.close()


def sequence_of(seq_id: int, tokens: list[int], blocks: list[int]) -> Sequence:
    return Sequence(seq_id, list(tokens), len(tokens), GREEDY, slot=seq_id, block_ids=array("q", blocks))


def test_a_plan_of_chunks_and_decodes_in_any_order(runner: Runner, checkpoint: Checkpoints) -> None:
    prompts = random_prompts(2, longest=30, seed=4)
    first, second = sequence_of(1, prompts[0], [3, 9, 4, 1]), sequence_of(2, prompts[1], [8, 2, 7, 5])
    half = len(prompts[0]) // 2
    plan = StepPlan((Chunk(first, 0, half, 0), Chunk(second, 0, len(prompts[1]), 1)))
    sampled = runner.launch(plan).result().sampled
    assert [sampled[0][0].token_id] == reference_tokens(checkpoint("llama"), prompts[1], 1)
    second.token_ids.append(sampled[0][0].token_id)
    plan = StepPlan((Chunk(second, len(prompts[1]), 1, 1), Chunk(first, half, len(prompts[0]) - half, 1)))
    found = [token.token_id for (token,) in runner.launch(plan).result().sampled]
    directory = checkpoint("llama")
    assert found == [reference_tokens(directory, prompts[1], 2)[1], reference_tokens(directory, prompts[0], 1)[0]]


def test_a_chunk_may_give_several_tokens(runner: Runner, checkpoint: Checkpoints) -> None:
    """Its last rows are sampled as if each were the last: what follows drafts is known in one step."""
    directory, prompt = checkpoint("llama"), random_prompts(1, seed=4)[0]
    continued = prompt + reference_tokens(directory, prompt, 4)
    first, second = sequence_of(1, continued[:-1], [3, 9, 4, 1]), sequence_of(2, [5, 6], [8])
    plan = StepPlan((Chunk(first, 0, len(continued) - 1, 4), Chunk(second, 0, 2, 1)))
    several, one = runner.launch(plan).result().sampled
    assert [token.token_id for token in several] == continued[-4:]
    assert [token.token_id for token in one] == reference_tokens(directory, [5, 6], 1)


def test_a_chunk_that_ends_before_its_sequence_gives_no_token(runner: Runner) -> None:
    result = runner.launch(StepPlan((Chunk(sequence_of(1, list(range(9, 20)), [1, 2]), 0, 5, 0),))).result()
    assert (result.sampled, result.prompt_logprobs) == ((), {})


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_steps_may_be_launched_before_the_last_was_read(family: str, checkpoint: Checkpoints) -> None:
    directory, prompts = checkpoint(family), random_prompts(6, seed=2)
    with loaded_engine(directory, block_size=4, max_num_batched_tokens=32, max_num_seqs=4) as engine:
        engine.runner.is_asynchronous = True
        results = generate(engine, prompts, 7, logprobs=None)
    assert [tokens for tokens, _ in results] == [reference_tokens(directory, prompt, 7) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "qwen2_moe", "granite"])
def test_embeddings_are_the_last_hidden_states(family: str, checkpoint: Checkpoints) -> None:
    directory, prompts = checkpoint(family), [*random_prompts(6, seed=5), [9]]
    with loaded_engine(directory) as engine:
        vectors = engine.runner.embed(prompts)
        alone = [engine.runner.embed([prompt])[0] for prompt in prompts]
    np.testing.assert_allclose(vectors, alone, atol=1e-5)
    for prompt, vector in zip(prompts, vectors, strict=True):
        with torch.inference_mode():
            hidden = reference_model(directory).base_model(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vector, hidden[-1].numpy(), atol=1e-4)


def test_embeddings_are_means_where_the_checkpoint_says_so(runner: Runner, checkpoint: Checkpoints) -> None:
    prompt = random_prompts(1, seed=6)[0]
    runner.head = EmbeddingHead(EmbeddingLayout(pooling=("mean",)), device=torch.device("cpu"))
    with torch.inference_mode():
        hidden = reference_model(checkpoint("llama")).model(torch.tensor([prompt])).last_hidden_state[0]
    np.testing.assert_allclose(runner.embed([prompt])[0], hidden.mean(dim=0).numpy(), atol=1e-4)
