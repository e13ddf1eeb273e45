"""Greedy generation by our engine, to be compared with transformers'."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.lora.registry import Adapters
from modelserver_backends.llm.lora.uses import AdapterUse
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.runner import load_runner
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampling_params import SamplingParams
from support.tiny_checkpoints import VOCAB_SIZE


@contextmanager
def loaded_engine(directory: Path, **options: Any):
    """An engine without text over a checkpoint, in float32 on the CPU unless said otherwise."""
    chosen = EngineOptions(**{"device": "cpu", "dtype": "float32", "max_model_len": 128, **options})
    with open_checkpoint(directory) as checkpoint:
        runner = load_runner(checkpoint, chosen, Sampler)
    engine = Engine(options=chosen, runner=runner, tokenizer=None, adapters=Adapters.of(runner.target, chosen))
    try:
        yield engine
    finally:
        engine.close()


def loaded_adapters(directory: Path, places: Mapping[str, Path], **options: Any):
    """The same with adapters."""
    return loaded_engine(directory, lora_modules=tuple((name, str(place)) for name, place in places.items()), **options)


def random_prompts(count: int, *, longest: int = 60, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, VOCAB_SIZE) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    adapter: str | Sequence[str | None] | None = None,
    **params: Any,
) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities for each prompt; all run at once, greedily, beyond end-of-sequence.

    `adapter`: the name of one for all, or of one for each.
    """
    values = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0, **params}
    names = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else adapter
    requests = [
        GenerationRequest(
            prompt_token_ids=list(prompt),
            params=SamplingParams(**values),
            adapters=() if name is None else (AdapterUse(name),),
        )
        for prompt, name in zip(prompts, names, strict=True)
    ]
    results: dict[GenerationRequest, tuple[list[int], list[float]]] = {}
    for request in requests:
        results[request] = ([], [])
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens, logprobs = results[output.request]
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or ()]
    return [results[request] for request in requests]
