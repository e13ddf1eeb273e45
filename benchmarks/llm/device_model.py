"""`python -m benchmarks.llm.device_model`: tokens per second on a device that is not there.

The engine's real scheduler and host path run nano-vllm's workload. The network is a clock: a step takes the time of the
device's roofline, from its weights, keys and values, and arithmetic. The host's part is the CPU time of the engine's
thread on this machine. As on a GPU, a step is launched while the one before runs, so the slower of both sets the pace.

`--reach` is the share of the device's data sheet that kernels get; `roofline` is the rate with that and no host.
Sampling and launches take no time in this model, and no run on a GPU has calibrated it: the figures show what a change
of the host path is worth on a device, and promise no rate.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from modelserver_backends.llm.block_tables import BlockTables
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.plan import SampledToken, StepPlan, StepResult
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.step_inputs import StepInputs

from benchmarks.llm.host_overhead import Computed
from benchmarks.llm.shapes import SHAPES, tensor_shapes
from benchmarks.llm.workload import Workload

BFLOAT16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Device:
    """By its data sheet: bytes per second of memory, dense bfloat16 operations per second, bytes of memory."""

    bandwidth: float
    operations: float
    memory: float


DEVICES = {
    "H200": Device(4.8e12, 989e12, 141e9),
    "H100": Device(3.35e12, 989e12, 80e9),
    "A10": Device(600e9, 125e12, 24e9),
    "L4": Device(300e9, 121e12, 24e9),
}


class Roofline:
    """The least time of a step of a network of that shape on a device."""

    def __init__(self, device: Device, config: Mapping[str, Any], reach: float) -> None:
        """`reach`: the share of the data sheet that kernels get, 0 to 1."""
        sizes = {name: prod(shape) for name, shape in tensor_shapes(config).items()}
        # Of an embedding that is no head only some rows are read.
        self.num_weights = sum(sizes.values()) - (0 if config["tie_word_embeddings"] else sizes["embed_tokens.weight"])
        width, layers = config["head_dim"], config["num_hidden_layers"]
        self.kv_bytes = 2 * layers * config["num_key_value_heads"] * width * BFLOAT16_BYTES
        self._pair_operations = 4 * layers * config["num_attention_heads"] * width
        self._bandwidth = device.bandwidth * reach
        self._operations = device.operations * reach
        self.num_kv_tokens = int((device.memory * 0.9 - sum(sizes.values()) * BFLOAT16_BYTES) / self.kv_bytes)

    def step_s(self, plan: StepPlan) -> float:
        seen = sum(start + num_tokens for _, start, num_tokens, _ in plan.chunks)
        pairs = sum(num_tokens * (start + (num_tokens + 1) / 2) for _, start, num_tokens, _ in plan.chunks)
        num_bytes = self.num_weights * BFLOAT16_BYTES + seen * self.kv_bytes
        operations = 2 * self.num_weights * plan.num_tokens + pairs * self._pair_operations
        return max(num_bytes / self._bandwidth, operations / self._operations)


@dataclass
class ModelledRunner:
    """Steps that take the device's time and give tokens in turn. `steps_s` has the time of each."""

    roofline: Roofline
    num_blocks: int
    vocab_size: int
    block_size: int = 16
    max_model_len: int = 4096
    is_asynchronous: bool = True
    has_states: bool = False
    window: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    steps_s: list[float] = field(default_factory=list)
    tables: BlockTables = field(default_factory=BlockTables)

    def launch(self, plan: StepPlan) -> Computed:
        StepInputs(plan.chunks, self.block_size, tables=self.tables)
        self.steps_s.append(self.roofline.step_s(plan))
        sampled = tuple([(SampledToken(4 + chunk[1] % 1000),) for chunk in plan.chunks if chunk[3]])
        return Computed(StepResult(sampled, {}))


@dataclass(frozen=True, slots=True)
class Simulated:
    """Of a whole workload. `host_ms`: the mean of a step."""

    tokens_per_s: float
    roofline_tokens_per_s: float
    host_ms: float


def simulate(config: Mapping[str, Any], device: Device, workload: Workload, reach: float) -> Simulated:
    """Run the workload through the engine."""
    roofline = Roofline(device, config, reach)
    if roofline.num_kv_tokens < workload.longest * 2:
        raise ValueError("the weights leave no room for a sequence of the workload")
    runner = ModelledRunner(roofline, roofline.num_kv_tokens // 16, config["vocab_size"])
    engine = Engine(
        options=EngineOptions(max_num_seqs=workload.batch, max_num_batched_tokens=16384),
        runner=runner,  # type: ignore[arg-type]  # what of it the engine calls
        tokenizer=None,
    )
    output_lens = workload.output_lens()
    for prompt, num_tokens in zip(workload.prompts(config["vocab_size"]), output_lens, strict=True):
        params = SamplingParams(temperature=0.6, max_tokens=num_tokens, ignore_eos=True)
        engine.add(GenerationRequest(prompt, params, is_streamed=False))
    gc.collect()
    gc.freeze()
    device_free_s = now_s = host_s = 0.0
    while engine.has_work:
        num_launched = len(runner.steps_s)
        began_ns = time.thread_time_ns()
        engine.step()
        spent_s = (time.thread_time_ns() - began_ns) / 1e9
        host_s += spent_s
        # A step is launched, and then the one before is awaited: the host is at most one step ahead of the device.
        launched_s, ended_before_s = now_s + spent_s, device_free_s
        if len(runner.steps_s) > num_launched:
            device_free_s = max(device_free_s, launched_s) + runner.steps_s[-1]
        now_s = max(launched_s, ended_before_s)
    gc.unfreeze()
    total = sum(output_lens)
    num_steps = len(runner.steps_s)
    return Simulated(total / max(now_s, device_free_s), total / sum(runner.steps_s), host_s / num_steps * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["Qwen3-0.6B", "Llama-3.1-8B"], choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), choices=DEVICES, metavar="DEVICE")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--reach", type=float, default=0.8, help="share of the data sheet that kernels get (0.8)")
    arguments = parser.parse_args()
    workload = Workload(arguments.requests, 100, 1024, min(arguments.requests, 256))
    print("| network | device | tokens/s | roofline | share | host ms/step |")
    print("|---|---|--:|--:|--:|--:|")
    for shape in arguments.shapes:
        for name in arguments.devices:
            found = simulate(SHAPES[shape], DEVICES[name], workload, arguments.reach)
            print(
                f"| {shape} | {name} | {found.tokens_per_s:,.0f} | {found.roofline_tokens_per_s:,.0f} "
                f"| {found.tokens_per_s / found.roofline_tokens_per_s:.0%} | {found.host_ms:.2f} |"
            )


if __name__ == "__main__":
    main()
