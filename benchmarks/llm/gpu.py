"""The LLM engine on a GPU: `python -m benchmarks.llm --gpu [--report FILE]`, in under 8 minutes.

Random bfloat16 weights in the shapes of real models, nano-vllm's workload (256 requests, prompts and outputs of 100 to
1,024 tokens, seed 0). Beside each figure stands the least time that the memory's measured bandwidth allows: every step
reads the weights, and each token the keys and values before it. transformers' continuous batching runs a part of it.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from modelserver_backends.llm.attention.kv_blocks import KvLayout
from modelserver_backends.llm.checkpoint import HfCheckpoint
from modelserver_backends.llm.engine import Engine
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.runner import load_runner
from modelserver_backends.llm.sampler import Sampler

from benchmarks.llm.measure import host_step_s, percentile, prefix_ttft_s, run_engine
from benchmarks.llm.shapes import SHAPES, random_tensor, tensor_shapes
from benchmarks.llm.workload import Workload

MODELS = ("Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B")
WORKLOAD = Workload(num_requests=256, shortest=100, longest=1024, batch=256)
DEVICE = "cuda"
# Of the decode kernel: rows, tokens of each, and heads of queries, of keys, and how wide each is.
KERNEL_SHAPES = (
    (256, 600, (16, 8, 128)),
    (64, 2000, (32, 8, 128)),
    (8, 8000, (32, 8, 128)),
    (1, 32000, (32, 8, 128)),
)
# Of one request alone.
SINGLE_TOKENS = 256
_PEER_REQUESTS = 64
_ITEM_BYTES = 2


class RandomCheckpoint(HfCheckpoint):
    """A config.json, and tensors that are drawn on the device when they are asked for."""

    def __init__(self, directory: Path, device: str) -> None:
        super().__init__(directory)
        self._shapes = tensor_shapes(json.loads((directory / "config.json").read_text()))
        self._device = device

    @property
    def digest(self) -> bytes:
        """Weights of two loads are never the same, so nothing that is made of them may be kept for the next."""
        return secrets.token_bytes(32)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        return random_tensor(name, self._shapes[name], torch.bfloat16, self._device)

    def names(self) -> list[str]:
        return sorted(self._shapes)

    def module(self, name: str) -> str | None:
        return name if any(each.startswith(f"{name}.") for each in self._shapes) else None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


@contextmanager
def opened(name: str, **options: Any) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(SHAPES[name]))
        chosen = EngineOptions(
            **{
                "device": DEVICE,
                "dtype": "bfloat16",
                "max_model_len": 2304,
                "max_num_seqs": WORKLOAD.batch,
                "max_num_batched_tokens": 16384,
                **options,
            }
        )
        runner = load_runner(RandomCheckpoint(Path(place), chosen.device), chosen, Sampler)
    try:
        yield Engine(options=chosen, runner=runner, tokenizer=None)
    finally:
        runner.close()
        del runner
        torch.cuda.empty_cache()


def timed_s(run: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def copy_bandwidth() -> float:
    """Bytes per second, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / timed_s(lambda: target.copy_(source))


def floor_s(config: dict[str, Any], bandwidth: float) -> float:
    """What the workload takes if nothing but reading weights and the cache takes time, all requests running at once."""
    weights = sum(
        torch.Size(shape).numel()
        for name, shape in tensor_shapes(config).items()
        if config["tie_word_embeddings"] or "embed" not in name
    )
    layout = KvLayout.uniform(
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        dtype=torch.bfloat16,
    )
    kv = layout.block_bytes(1)
    lengths = WORKLOAD.output_lens()
    prompts = [len(prompt) for prompt in WORKLOAD.prompts(1000)]
    reads = sum(length * prompt + length * (length - 1) // 2 for length, prompt in zip(lengths, prompts, strict=True))
    return (max(lengths) * weights * _ITEM_BYTES + reads * kv) / bandwidth


def decode_kernel(bandwidth: float) -> Iterator[str]:
    """How near the decode kernel comes to a copy, by what it must read."""
    from modelserver_backends.llm.attention import triton_kernels

    for rows, length, (heads, kv_heads, width) in KERNEL_SHAPES:
        blocks_each = -(-length // 16)
        shape = (rows * blocks_each + 1, 16, 2, kv_heads, width)
        blocks = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        order = torch.randperm(rows * blocks_each, device=DEVICE) + 1
        tables = order.view(rows, -1).to(torch.int32)
        lens = torch.full((rows,), length, device=DEVICE)
        queries = torch.randn(rows, heads, width, device=DEVICE, dtype=torch.bfloat16)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        splits = max(1, min(32, -(-2 * processors // (rows * kv_heads))))

        def run() -> object:
            return triton_kernels.decode_attention(
                queries, blocks, tables, lens, scale=0.1, num_splits=splits  # noqa: B023 - run at once
            )  # fmt: skip

        took = timed_s(run)
        moved = rows * length * 2 * kv_heads * width * _ITEM_BYTES
        yield (
            f"decode kernel, {rows} sequences of {length}, {heads}/{kv_heads} heads of {width}: "
            f"{took * 1e6:.0f} us, {moved / took / bandwidth:.0%} of a copy"
        )


def measure(name: str, bandwidth: float) -> Iterator[str]:
    config = SHAPES[name]
    prompts, lengths = WORKLOAD.prompts(config["vocab_size"]), WORKLOAD.output_lens()
    started = time.perf_counter()
    with opened(name) as engine:
        loaded = time.perf_counter() - started
        run_engine(engine, WORKLOAD.prompts(config["vocab_size"], seed=2), lengths)  # compiles kernels, captures graphs
        measured = run_engine(engine, prompts, lengths)
        least = floor_s(config, bandwidth)
        yield (
            f"{name}: {measured.tokens_per_s:.0f} tokens/s ({measured.wall_s:.2f} s, {measured.num_steps} steps; "
            f"at least {least:.2f} s: {least / measured.wall_s:.0%} of the roofline), {measured.num_lost} lost; "
            f"loaded in {loaded:.0f} s"
        )
        ttft, itl = (
            [percentile(times, share) * 1e3 for share in (0.5, 0.99)] for times in (measured.ttft_s, measured.itl_s)
        )
        yield (
            f"  TTFT p50 {ttft[0]:.0f} ms, p99 {ttft[1]:.0f} ms; ITL p50 {itl[0]:.1f} ms, p99 {itl[1]:.1f} ms; "
            f"KV use {measured.kv_use:.0%}"
        )
        single = run_engine(engine, prompts[:1], [SINGLE_TOKENS])
        cold, warm = prefix_ttft_s(engine, config["vocab_size"])
        yield (
            f"  one request alone: {single.tokens_per_s:.0f} tokens/s; "
            f"TTFT of 1,000 tokens: {cold * 1e3:.1f} ms new, {warm * 1e3:.1f} ms seen"
        )
    del engine
    torch.cuda.empty_cache()


def measure_peer(name: str) -> str:
    """transformers' continuous batching with a part of the workload."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(**SHAPES[name])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompts = WORKLOAD.prompts(config.vocab_size)[:_PEER_REQUESTS]
    lengths = WORKLOAD.output_lens()[:_PEER_REQUESTS]
    generation = GenerationConfig(max_new_tokens=max(lengths), do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    results = model.generate_batch(inputs=prompts, generation_config=generation)
    took = time.perf_counter() - start
    num_tokens = sum(len(result.generated_tokens) for result in results.values())
    return f"  transformers' continuous batching, {_PEER_REQUESTS} of the requests: {num_tokens / took:.0f} tokens/s"


def main(report: Path | None) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.llm --gpu needs a GPU, and torch finds none")
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if report is not None:
            report.write_text("\n".join(lines) + "\n")

    bandwidth = copy_bandwidth()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies {bandwidth / 1e12:.2f} TB/s")
    for line in decode_kernel(bandwidth):
        say(line)
    for name in MODELS:
        for line in measure(name, bandwidth):
            say(line)
        if name == MODELS[0]:
            say(measure_peer(name))
            torch.cuda.empty_cache()
    with opened(MODELS[0]) as engine:
        host = host_step_s(engine, 32, SHAPES[MODELS[0]]["vocab_size"], "cuda")
        say(f"host time of a step at 32 running: {host * 1e3:.2f} ms")
