"""`python -m benchmarks.llm.kv_cache`: keys and values in 8 bits beside floats, in time, memory and what a model says.

Time is that of the thread's CPU for the attention of one token of each of some sequences, with the shape of Qwen3-0.6B,
in turns, and the median of several; each layer's blocks are met once in a round, as in a network. What a model says is
measured with tiny_chat on docstrings of Python's library, in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import inspect
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from modelserver_backends.llm.attention.choose import make_attention
from modelserver_backends.llm.attention.kv_blocks import KvBlocks, KvLayout
from modelserver_backends.llm.attention.paged import AttentionBatch, AttentionSpec
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.layerwise import windows_of
from modelserver_backends.llm.llm import LLM
from modelserver_backends.llm.plan import TokenLogprobs
from modelserver_backends.llm.sampling_params import SamplingParams

_CODES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_KINDS = (str, bytes, list, dict, set, int, float, argparse.ArgumentParser, statistics.NormalDist, Path)
_LAYERS, _HEADS, _KV_HEADS, _WIDTH, _BLOCK_SIZE = 8, 16, 8, 128, 32


def layout_of(name: str, dtype: torch.dtype) -> KvLayout:
    plain = KvLayout.uniform(num_layers=_LAYERS, num_kv_heads=_KV_HEADS, head_dim=_WIDTH, dtype=dtype)
    codes = _CODES[name]
    return plain if codes is None else plain.coded(codes)


def step_of(layout: KvLayout, dtype: torch.dtype, length: int, num_sequences: int) -> Callable[[], None]:
    """One token of each sequence through all layers. Blocks hold zeros: reading them takes as long."""
    per_sequence = length // _BLOCK_SIZE
    cpu = torch.device("cpu")
    blocks = KvBlocks(layout, num_blocks=1 + num_sequences * per_sequence, block_size=_BLOCK_SIZE, device=cpu)
    for block in range(blocks.num_blocks):
        for piece in blocks.pieces(block):
            piece.zero_()
    spec = AttentionSpec(num_heads=_HEADS, windows=(None,) * _LAYERS, scale=_WIDTH**-0.5)
    attention = make_attention("auto", blocks, spec)
    tables = np.arange(1, 1 + num_sequences * per_sequence).reshape(num_sequences, per_sequence)
    ones, lens = np.ones(num_sequences, dtype=np.int64), np.full(num_sequences, per_sequence * _BLOCK_SIZE)
    slots = tables[:, -1] * _BLOCK_SIZE + _BLOCK_SIZE - 1
    inputs = attention.prepare(AttentionBatch(num_sequences, ones, lens, tables, slots))
    heads = torch.randn(num_sequences, _HEADS + 2 * _KV_HEADS, _WIDTH).to(dtype)

    def step() -> None:
        for layer in range(_LAYERS):
            attention.rope_and_attend(layer, heads, None, inputs)

    return step


def measure_speed(dtype: torch.dtype, length: int, num_sequences: int, rounds: int) -> None:
    steps = {name: step_of(layout_of(name, dtype), dtype, length, num_sequences) for name in _CODES}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            begin = time.thread_time()
            step()
            times[name].append(time.thread_time() - begin)
    for name, found in times.items():
        token_bytes = layout_of(name, dtype).block_bytes(_BLOCK_SIZE) / _BLOCK_SIZE / _LAYERS
        milliseconds = statistics.median(found[1:]) * 1000 / _LAYERS
        print(f"{str(dtype)[6:]:9} {name:5} {num_sequences:4} x {length:6} {token_bytes:7.0f} {milliseconds:9.3f}")


def read(directory: Path, name: str, windows: list[list[int]]) -> list[TokenLogprobs]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with LLM(directory, max_model_len=512, kv_cache_dtype=name, enable_prefix_caching=False) as model:
        outputs = model.generate([window[:511] for window in windows], params)
    return [entry for output in outputs for entry in output.prompt_logprobs or () if entry is not None]


def measure_quality(directory: Path) -> None:
    text = "\n\n".join(inspect.getdoc(each) or "" for kind in _KINDS for each in (kind, *vars(kind).values()))
    with open_checkpoint(directory) as checkpoint:
        windows = windows_of(checkpoint, text)
    floats = read(directory, "auto", windows)
    for name in _CODES:
        entries = read(directory, name, windows)
        perplexity = math.exp(-statistics.fmean(entry.logprob for entry in entries))
        equal = statistics.fmean(one.top[0][0] == other.top[0][0] for one, other in zip(entries, floats, strict=True))
        print(f"{name:5} {len(entries)} tokens: perplexity {perplexity:.3f}, the same next token at {equal:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("model_repository/tiny_chat/1"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure_quality(options.model)
    print("dtype     kept   sequences       bytes a token and layer, ms a layer")
    with torch.inference_mode():
        for length, num_sequences in ((1024, 1), (8192, 1), (32768, 1), (2048, 16)):
            for dtype in (torch.float32, torch.bfloat16):
                measure_speed(dtype, length, num_sequences, options.rounds)


if __name__ == "__main__":
    main()
