"""`python -m benchmarks.llm.device_model`: tokens per second on a device that is not there.

The engine's real scheduler and host path run nano-vllm's workload. The network is a clock: a step takes the time of the
device's roofline, from its weights, keys and values, and arithmetic. The host's part is the CPU time of the engine's
thread on this machine. As on a GPU, a step is launched while the one before runs, so the slower of both sets the pace.

`--reach` is the share of the device's data sheet that kernels get; `roofline` is the rate with that alone: no host, no
sampling, no launches. A step takes besides

- of the device what sampling reads and writes: the bytes of `SAMPLING_BYTES` for each logit;
- of the device `--gap-us` between two kernels, in a graph or not: 1 us, as is reported of dependent kernels of a graph
  on an H100, which we have not measured;
- of the host, beside the CPU time that is measured, `--launch-us` for each launch by torch or Triton, and twice that
  for a graph: 5 us, the usual price of an operation of torch on a fast CPU.

No run on a GPU has calibrated this: the figures show what a change is worth on a device, and promise no rate.
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
from modelserver_backends.llm.captured_pieces import MOST_TOKENS
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.plan import SampledToken, StepPlan, StepResult
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.step_inputs import StepInputs

from benchmarks.llm.host_overhead import Computed
from benchmarks.llm.shapes import SHAPES, tensor_shapes
from benchmarks.llm.workload import Workload

BFLOAT16_BYTES = 2
# Of a logit, where a row is drawn without top_k and top_p: the head writes it (2), two passes of softmax read it (4),
# and the weights are written (4) and read three times (12).
SAMPLING_BYTES = 22
# Kernels of a layer, counted in Triton's interpreter (`launches` in tests/backends/llm/attention/triton_cases.py), of
# which attention has some; with prompts one more. Around the layers: embedding, cosines, sines, norm, head, sampling.
LAYER_KERNELS, ATTENTION_KERNELS, OTHER_KERNELS = 9, 2, 10
# Launches around the graph of decodes: the copy, changes of tables, tokens that are not read, their copy to the host.
STEP_LAUNCHES = 10


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
        self.num_layers, self._vocab_size = config["num_hidden_layers"], config["vocab_size"]
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

    def sampling_s(self, plan: StepPlan) -> float:
        """What draws read and write besides."""
        num_rows = sum(num_sampled for *_, num_sampled in plan.chunks)
        return num_rows * self._vocab_size * SAMPLING_BYTES / self._bandwidth


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the host for a launch, and of the device between two kernels."""

    launch_s: float
    gap_s: float

    def of_step(self, plan: StepPlan, num_layers: int) -> tuple[float, float]:
        """Of the host and of the device."""
        has_prompts = plan.num_tokens > len(plan.chunks)
        per_layer = LAYER_KERNELS + has_prompts
        num_kernels = num_layers * per_layer + OTHER_KERNELS
        if not has_prompts:
            num_launches = 2
        elif plan.num_tokens <= MOST_TOKENS:  # in pieces
            num_launches = 2 * (num_layers + 1) + num_layers * (ATTENTION_KERNELS + 1) + OTHER_KERNELS
        else:
            num_launches = num_kernels
        return (num_launches + STEP_LAUNCHES) * self.launch_s, num_kernels * self.gap_s


@dataclass
class ModelledRunner:
    """Steps that take the device's time and give tokens in turn. `least_s` has the roofline's time of each, `steps_s`
    that of the device, `launches_s` that of the host for its launches."""

    roofline: Roofline
    costs: Costs
    num_blocks: int
    vocab_size: int
    block_size: int = 16
    max_model_len: int = 4096
    is_asynchronous: bool = True
    has_states: bool = False
    window: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    least_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    launches_s: list[float] = field(default_factory=list)
    tables: BlockTables = field(default_factory=BlockTables)

    def launch(self, plan: StepPlan) -> Computed:
        StepInputs(plan.chunks, self.block_size, tables=self.tables)
        launches_s, gaps_s = self.costs.of_step(plan, self.roofline.num_layers)
        self.launches_s.append(launches_s)
        self.least_s.append(self.roofline.step_s(plan))
        self.steps_s.append(self.least_s[-1] + self.roofline.sampling_s(plan) + gaps_s)
        sampled = tuple([(SampledToken(4 + chunk[1] % 1000),) for chunk in plan.chunks if chunk[3]])
        return Computed(StepResult(sampled, {}))


@dataclass(frozen=True, slots=True)
class Simulated:
    """Of a whole workload. `device_tokens_per_s`: with sampling and gaps, without a host. `host_ms`: the mean of a
    step, with launches."""

    tokens_per_s: float
    device_tokens_per_s: float
    roofline_tokens_per_s: float
    host_ms: float


def simulate(config: Mapping[str, Any], device: Device, workload: Workload, reach: float, costs: Costs) -> Simulated:
    """Run the workload through the engine."""
    roofline = Roofline(device, config, reach)
    if roofline.num_kv_tokens < workload.longest * 2:
        raise ValueError("the weights leave no room for a sequence of the workload")
    runner = ModelledRunner(roofline, costs, roofline.num_kv_tokens // 16, config["vocab_size"])
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
        if len(runner.steps_s) > num_launched:
            spent_s += runner.launches_s[-1]
        host_s += spent_s
        # A step is launched, and then the one before is awaited: the host is at most one step ahead of the device.
        launched_s, ended_before_s = now_s + spent_s, device_free_s
        if len(runner.steps_s) > num_launched:
            device_free_s = max(device_free_s, launched_s) + runner.steps_s[-1]
        now_s = max(launched_s, ended_before_s)
    gc.unfreeze()
    total = sum(output_lens)
    num_steps = len(runner.steps_s)
    return Simulated(
        total / max(now_s, device_free_s),
        total / sum(runner.steps_s),
        total / sum(runner.least_s),
        host_s / num_steps * 1e3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["Qwen3-0.6B", "Llama-3.1-8B"], choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), choices=DEVICES, metavar="DEVICE")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--reach", type=float, default=0.8, help="share of the data sheet that kernels get (0.8)")
    parser.add_argument("--launch-us", type=float, default=5.0, help="of the host for a launch (5)")
    parser.add_argument("--gap-us", type=float, default=1.0, help="of the device between two kernels (1)")
    arguments = parser.parse_args()
    costs = Costs(arguments.launch_us * 1e-6, arguments.gap_us * 1e-6)
    workload = Workload(arguments.requests, 100, 1024, min(arguments.requests, 256))
    print("| network | device | tokens/s | device alone | roofline | share | host ms/step |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for shape in arguments.shapes:
        for name in arguments.devices:
            found = simulate(SHAPES[shape], DEVICES[name], workload, arguments.reach, costs)
            print(
                f"| {shape} | {name} | {found.tokens_per_s:,.0f} | {found.device_tokens_per_s:,.0f} "
                f"| {found.roofline_tokens_per_s:,.0f} "
                f"| {found.tokens_per_s / found.roofline_tokens_per_s:.0%} | {found.host_ms:.2f} |"
            )


if __name__ == "__main__":
    main()
