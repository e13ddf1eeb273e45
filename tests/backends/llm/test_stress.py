"""Clients come, leave and are cut off at random, over a pool that is much too small, on a real network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from modelserver_backends.llm import LLM, AsyncLLM, RequestOutput, SamplingParams
from support.llm_integrity import check_integrity

NUM_CLIENTS = 96
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 80,
    "block_size": 8,
    "max_num_seqs": 12,
}
WORDS = ("the", "model", "of", "a", "server", "answers", "every", "request", "that", "it", "is", "given")
SHARED = " ".join(WORDS[:9])


def draw_params(draw: random.Random) -> SamplingParams:
    """All that makes a sequence special, in any mixture."""
    values: dict[str, Any] = {"max_tokens": draw.randint(1, 32), "seed": draw.randrange(2**40)}
    values["temperature"] = draw.choice([0, 0.7, 1.5])
    if draw.random() < 0.3:
        values["n"] = 2
    if draw.random() < 0.3:
        values |= {"top_k": 20, "top_p": 0.9}
    if draw.random() < 0.3:
        values |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
    if draw.random() < 0.3:
        values["stop"] = ["ee", "the model"]
    if draw.random() < 0.2:
        values |= {"logprobs": 1, "prompt_logprobs": 0}
    if draw.random() < 0.2:
        values["structured_outputs"] = {"regex": "[a-z ]{3,12}"}
    if draw.random() < 0.3:
        values |= {"ignore_eos": True, "min_tokens": values["max_tokens"] // 2}
    return SamplingParams(**values)


def draw_prompt(draw: random.Random) -> str:
    begin = SHARED + " " if draw.random() < 0.6 else ""
    return begin + " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 8)))


async def ask(llm: AsyncLLM, draw: random.Random, prompt: str, params: SamplingParams) -> RequestOutput | None:
    """One client: it comes some time, and leaves after some outputs (None), or stays to the end."""
    await asyncio.sleep(draw.random() * 0.05)
    patience = draw.choice([None, None, None, draw.randint(1, 6)])
    async with aclosing(llm.generate(prompt, params)) as outputs:
        answer = None
        num_outputs = 0
        async for answer in outputs:
            num_outputs += 1
            if num_outputs == patience and not answer.finished:
                return None
    return answer


def facts(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [
        (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, len(choice.logprobs or []))
        for choice in output.outputs
    ]


@pytest.mark.stress
@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    ("seed", "family"),
    [(0, "llama"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, "llama"), (2, "qwen3_next")))],
)
async def test_no_block_is_lost_and_every_text_is_as_if_alone(
    seed: int, family: str, is_asynchronous: bool, checkpoint: Callable[[str], Path]
) -> None:
    draw = random.Random(seed)
    asked = [(draw_prompt(draw), draw_params(draw)) for _ in range(NUM_CLIENTS)]
    directory = checkpoint(family)
    with LLM(directory, **OPTIONS, enable_prefix_caching=False) as llm:
        alone = [facts(llm.generate(prompt, params)[0]) for prompt, params in asked]

    tiny = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 24}
    async with AsyncLLM(directory, **OPTIONS, **tiny) as llm:
        # What a device's runner says: the engine plans a step ahead, with tokens that it has not read.
        llm.engine.runner.is_asynchronous = is_asynchronous
        clients = [asyncio.create_task(ask(llm, random.Random(number), *one)) for number, one in enumerate(asked)]
        for number, client in enumerate(clients):
            if number % 9 == 4:
                asyncio.get_running_loop().call_later(0.02 + number / 500, client.cancel)
        answers = await asyncio.gather(*clients, return_exceptions=True)
        # One that is asked when all have gone finds the engine as it was.
        again = [output async for output in llm.generate(asked[0][0], replace(asked[0][1], n=1))]
    engine = llm.engine
    check_integrity(engine)
    assert engine.statistics.kv_cache_usage == 0
    assert facts(again[-1]) == alone[0][:1]
    assert engine.statistics.num_preemptions > 0
    assert (engine.statistics.num_prefix_hit_tokens > 0) != engine.runner.has_states

    num_survivors = 0
    for answer, expected in zip(answers, alone, strict=True):
        assert answer is None or isinstance(answer, RequestOutput | asyncio.CancelledError)
        if isinstance(answer, RequestOutput):
            assert facts(answer) == expected
            num_survivors += 1
    assert num_survivors > NUM_CLIENTS // 3
