"""What one engine does with a workload, and what transformers does with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.step_context import StepContext

from benchmarks.llm.workload import Workload


@dataclass(frozen=True)
class Measured:
    """Times in seconds; `kv_use` is the greatest share of the pool that was taken."""

    tokens_per_s: float
    ttft_s: list[float]
    itl_s: list[float]
    kv_use: float
    num_steps: int
    wall_s: float
    num_lost: int


def run_engine(engine: Engine, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> Measured:
    """All requests arrive at once; each is streamed."""
    start_ns = time.monotonic_ns()
    requests = [
        GenerationRequest(
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
            arrival_ns=start_ns,
        )
        for prompt, length in zip(prompts, output_lens, strict=True)
    ]
    for request in requests:
        engine.add(request)
    last: dict[int, float] = {}
    counts = dict.fromkeys(map(id, requests), 0)
    ttft: list[float] = []
    itl: list[float] = []
    kv_use, steps = 0.0, 0
    start = time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        steps += 1
        kv_use = max(kv_use, engine.statistics.kv_cache_usage)
        for output in outputs:
            key = id(output.request)
            counts[key] += len(output.token_ids)
            if key in last:
                itl.append(now - last[key])
            else:
                ttft.append(now - start)
            last[key] = now
    wall = time.perf_counter() - start
    lost = sum(counts[id(request)] != length for request, length in zip(requests, output_lens, strict=True))
    return Measured(sum(output_lens) / wall, ttft, itl, kv_use, steps, wall, lost)


def run_transformers(directory: Path, workload: Workload, vocab_size: int, dtype: torch.dtype) -> float:
    """Output tokens per second of generate() in static batches, each padded to its longest prompt and output."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts, lengths = workload.prompts(vocab_size), workload.output_lens()

    def generate(start: int, most: int) -> None:
        batch = prompts[start : start + workload.batch]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False)

    generate(0, 2)  # what the first call does once
    start = time.perf_counter()
    for first in range(0, workload.num_requests, workload.batch):
        generate(first, max(lengths[first : first + workload.batch]))
    return sum(lengths) / (time.perf_counter() - start)


class NoNetwork:
    """Computes nothing: what a step then takes is what the host does."""

    def __init__(self, vocab_size: int, device: str) -> None:
        self._logits = torch.zeros(256, vocab_size, device=device)
        self._hidden = torch.zeros(16384, 1, device=device)

    def __call__(self, input_ids: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return self._hidden[: input_ids.shape[0]]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: hidden.shape[0]]


def host_step_s(engine: Engine, batch: int, vocab_size: int, device: str = "cpu") -> float:
    """The median time of a step of `batch` decodes without its network."""
    runner: Any = engine.runner
    network, runner._network = runner._network, NoNetwork(vocab_size, device)
    captured, runner._captured = runner._captured, None
    try:
        for row in range(batch):
            params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
            engine.add(GenerationRequest(prompt_token_ids=[11 + row] * 64, params=params))
        times = []
        while engine.has_work:
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
    finally:
        runner._network, runner._captured = network, captured
    return statistics.median(times)


def prefix_ttft_s(engine: Engine, vocab_size: int, length: int = 1000) -> tuple[float, float]:
    """Time to the first token of a prompt of `length` tokens: when it is new, and when it has been seen (medians)."""
    new, seen = [], []
    for trial in range(3):
        shared = [10 + (trial * 7919 + index * 31) % (vocab_size - 10) for index in range(length)]
        for times, ending in ((new, 11), (seen, 12), (seen, 13)):
            measured = run_engine(engine, [[*shared, ending]], [1])
            times.append(measured.ttft_s[0])
    return statistics.median(new), statistics.median(seen)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
