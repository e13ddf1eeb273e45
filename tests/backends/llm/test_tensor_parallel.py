"""Two ranks over gloo, the second in a process of its own, compute what one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from modelserver_backends.llm import tensor_parallel
from support.generations import generate, loaded_engine, random_prompts
from support.tiny_checkpoints import reference_tokens

from modelserver.backend import InternalError, InvalidArgumentError, UnsupportedError

PROMPTS = random_prompts(4)


@pytest.mark.parametrize(
    "family",
    [
        "llama_tied_biased",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_moe", "phi3", "gpt2", "deepseek_v3")),
    ],
)
def test_two_ranks_generate_what_transformers_does(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(family)
    with loaded_engine(directory, tensor_parallel_size=2, num_threads=1, block_size=8) as engine:
        results = generate(engine, PROMPTS, 6)
        shared = engine.runner.embed(PROMPTS)
    with loaded_engine(directory) as engine:
        alone = engine.runner.embed(PROMPTS)
    assert [tokens for tokens, _ in results] == [reference_tokens(directory, prompt, 6) for prompt in PROMPTS]
    np.testing.assert_allclose(shared, alone, atol=1e-4)


@pytest.mark.slow
def test_a_size_that_does_not_divide_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="tensor_parallel_size 3 does not divide"),
        loaded_engine(checkpoint("llama"), tensor_parallel_size=3, num_threads=1),
    ):
        pass


@pytest.mark.slow
def test_a_network_that_cannot_be_split_says_so(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedError, match="olmo2"), loaded_engine(checkpoint("olmo2"), tensor_parallel_size=2):
        pass


@pytest.mark.parametrize(
    ("last_words", "statement"),
    [
        ("no room for this rank", "sys.exit('no room for this rank')"),
        pytest.param(
            "a share that cannot be read",
            "module.load_network = lambda *_: sys.exit('a share that cannot be read')",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["before it joins", "while it loads"],
)
def test_a_rank_that_ends_fails_the_load_at_once(
    last_words: str, statement: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = (
        f"import importlib, sys; module = importlib.import_module(sys.argv[1]); {statement}; "
        "module.follow(*map(int, sys.argv[2:]))"
    )
    monkeypatch.setattr(tensor_parallel, "_FOLLOW", follow)
    with (
        pytest.raises(InternalError, match=rf"rank 1 of this LLM ended with code 1; .* wrote: {last_words}"),
        loaded_engine(checkpoint("llama"), tensor_parallel_size=2, num_threads=1),
    ):
        pass


def test_a_rank_that_ends_later_fails_the_step(checkpoint: Callable[[str], Path]) -> None:
    with loaded_engine(checkpoint("llama"), tensor_parallel_size=2, num_threads=1) as engine:
        (follower,) = [each for each in psutil.Process().children() if "follow" in " ".join(each.cmdline())]
        follower.kill()
        with pytest.raises(InternalError, match="rank 1 of this LLM ended with code -9"):
            engine.runner.embed(PROMPTS)
