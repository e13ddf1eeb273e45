"""The LLM engine: its kernels against their twins and against the memory's bandwidth, and what it generates."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu.steps import DEVICE, IS_REHEARSAL, graphs_in_rehearsal, require, require_device, sized, so_far, takes

TESTS = Path(__file__).parents[1]
# Outputs and inputs of a layer whose weights do not stay in a cache.
SHAPE = sized((16384, 8192), (256, 256))
FORMS = (
    "w4",
    "w4 zeros",
    "k-quant",
    "e2m1 of 16",
    "e2m1 of 32",
    "iq4 of 32",
    "six bits",
    "int8 of outputs",
    "float8 of blocks",
)


def cases_of(path: str) -> dict[str, Callable[[], None]]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, TESTS / path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases: dict[str, Callable[[], None]] = module.CASES
    return cases


@contextmanager
def own_processors() -> Iterator[None]:
    """Cases say how many processors a device has; what is measured after them needs the truth."""
    kept = {
        module: module.device_processors
        for name, module in list(sys.modules.items())
        if name.startswith("modelserver_backends.llm") and hasattr(module, "device_processors")
    }
    try:
        yield
    finally:
        for module, function in kept.items():
            module.device_processors = function


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    import torch

    repeats = sized(repeats, 1)
    for _ in range(sized(3, 1)):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def bytes_per_second() -> float:
    """Read from the memory and written to it, by a copy."""
    import torch

    source = torch.empty(sized(1 << 30, 1 << 16), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def packed(form: str, num_outputs: int, num_inputs: int) -> Any:
    import torch
    from modelserver_backends.llm.kernels import device_processors
    from modelserver_backends.llm.quantization.quantized_linear import pack_for_device
    from support.described_weights import described_weight

    device = torch.device(DEVICE, 0)
    weight = described_weight(form, num_outputs, num_inputs).to(device)
    matrix = pack_for_device(weight, device_processors(device) or 1)
    assert matrix is not None, form
    return matrix


@takes(60, worth=32)
def step_attention_kernels_equal_their_twins() -> dict[str, Any]:
    return _run_cases("backends/llm/attention/triton_cases.py")


@takes(60, worth=20)
def step_linear_kernels_equal_their_twins() -> dict[str, Any]:
    return _run_cases("backends/llm/models/triton_linear_cases.py")


def _run_cases(path: str) -> dict[str, Any]:
    """All of them, even after one that fails."""
    require_device()
    require("triton", "transformers")
    wrong: dict[str, str] = {}
    names = []
    for name, case in cases_of(path).items():
        names.append(name)
        try:
            with own_processors():
                case()
        except Exception as error:  # the others are to be known as well
            wrong[name] = f"{type(error).__name__}: {error}"[:500]
        so_far({"cases": names, "wrong": wrong})
    assert not wrong, wrong
    return {"cases": names}


@takes(90, worth=54)
def step_text_is_the_same_with_graphs_without_and_on_sdpa() -> dict[str, Any]:
    require_device()
    require("transformers", *sized(("triton",), ()))
    from support.generations import generate, loaded_engine, random_prompts
    from support.tiny_checkpoints import reference_tokens, write_checkpoint

    found: dict[str, Any] = {}
    for family in ("qwen3", "qwen3_moe"):
        with TemporaryDirectory() as place:
            directory = write_checkpoint(Path(place), family)
            prompts = random_prompts(3, longest=30, seed=4)
            expected = [reference_tokens(directory, prompt, 12) for prompt in prompts]
            ways: dict[str, dict[str, Any]] = {
                "graphs": {},
                "graphs when they are needed": {"capture_at_load": False},
                "eager": {"enforce_eager": True},
                "sdpa in pieces": {"attention_backend": "sdpa"},
                "sdpa, eager": {"attention_backend": "sdpa", "enforce_eager": True},
            }
            for way, options in ways.items():
                began = time.perf_counter()
                # Without kernels, mixtures of experts have no graphs.
                is_eager = "enforce_eager" in options or family == sized("", "qwen3_moe")
                graphs = nullcontext() if is_eager else graphs_in_rehearsal()
                with graphs, loaded_engine(directory, device=DEVICE, **options) as engine:
                    loaded_s = time.perf_counter() - began
                    texts = [tokens for tokens, _ in (generate(engine, [prompt], 12)[0] for prompt in prompts)]
                assert texts == expected, (family, way, texts, expected)
                found[f"{family}, {way}"] = f"loaded in {loaded_s:.1f} s"
                so_far(found)
    return found


@takes(60, worth=18)
def step_guesses_in_captured_mixed_steps_leave_the_text_as_it_is() -> dict[str, Any]:
    """A trained layer guesses three tokens ahead; every other text gets the right ones in place of its own. Prompts in
    chunks and the checks of guesses share steps, which are graphs in pieces.
    """
    require_device()
    require("transformers", *sized(("triton",), ()))
    from modelserver_backends.llm.speculation.config import SpeculativeConfig
    from support.generations import generate, loaded_engine, random_prompts
    from support.tiny_predictions import write_predicting

    prompts, num_tokens = random_prompts(6, longest=40, seed=7), sized(48, 16)
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=3, disable_by_batch_size=64)
    options: dict[str, Any] = {"device": DEVICE, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    with TemporaryDirectory() as place:
        directory = write_predicting(Path(place) / "checkpoint", "mimo")
        with loaded_engine(directory, enforce_eager=True, **options) as engine:
            expected = [tokens for tokens, _ in generate(engine, prompts, num_tokens)]
        known = {tuple(prompt): tokens for prompt, tokens in zip(prompts[::2], expected[::2], strict=True)}
        with graphs_in_rehearsal(), loaded_engine(directory, speculative_config=config, **options) as engine:
            speculator = engine._speculator
            assert speculator is not None, "nothing guesses"
            propose = speculator._proposer.propose

            def propose_some_right(wanted: Any) -> None:
                propose(wanted)
                for sequence, num_drafts in wanted:
                    count = sequence.num_output_tokens
                    right = known.get(tuple(sequence.token_ids[: len(sequence.token_ids) - count]))
                    if right is not None:
                        sequence.drafts = right[count : count + num_drafts]

            speculator._proposer.propose = propose_some_right
            texts = [tokens for tokens, _ in generate(engine, prompts, num_tokens)]
            statistics = engine.statistics.speculation
    assert texts == expected, (texts, expected)
    assert statistics is not None, "nothing was guessed"
    assert 0 < statistics.num_accepted_tokens < statistics.num_draft_tokens, "guesses are to be right and wrong"
    return {"guessed": statistics.num_draft_tokens, "right": statistics.num_accepted_tokens}


@takes(45, worth=18)
def step_launches_do_not_wait_for_the_step_before() -> dict[str, Any]:
    """Decodes at full batch: how long `launch` takes of the host, how long the step takes of the device, whether the
    step before was still running when `launch` returned, and how much of the time the host waits for tokens.
    """
    require_device()
    require("benchmarks", *sized(("triton",), ()))
    import torch

    measured = benchmark()
    launch_s: list[float] = []
    wait_s: list[float] = []
    were_running: list[bool] = []
    spans: list[tuple[Any, Any]] = []
    with graphs_in_rehearsal(), measured.opened("Qwen3-0.6B") as engine:
        launch = engine.runner.launch

        def timed_launch(plan: Any) -> Any:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            began_s = time.perf_counter()
            launched = launch(plan)
            launch_s.append(time.perf_counter() - began_s)
            last.record()
            if spans:
                were_running.append(not spans[-1][1].query())
            spans.append((first, last))
            result = launched.result

            def timed_result() -> Any:
                began_s = time.perf_counter()
                try:
                    return result()
                finally:
                    wait_s.append(time.perf_counter() - began_s)

            launched.result = timed_result
            return launched

        num_requests, num_tokens = sized((256, 128), (4, 8))
        prompts = [
            [10 + (index * 13 + place) % 1000 for place in range(sized(200, 9))] for index in range(num_requests)
        ]
        measured.run_engine(engine, prompts, [num_tokens] * num_requests)  # compiles, captures
        engine.reset()
        engine.runner.launch = timed_launch
        whole = measured.run_engine(engine, prompts, [num_tokens] * num_requests)
        del engine.runner.launch
        torch.cuda.synchronize()
        is_ahead = engine.runner.is_asynchronous
    # The first steps are prompts; the last ones have none to come after them.
    part = slice(len(spans) // 4, -2)
    device_s = [first.elapsed_time(last) / 1e3 for first, last in spans][part]
    host_s = launch_s[part]
    share = sum(were_running[part]) / max(1, len(were_running[part]))
    found = {
        "launch": f"{_median(host_s) * 1e6:.0f} us of the host, p99 {measured.percentile(host_s, 0.99) * 1e6:.0f} us",
        "step": f"{_median(device_s) * 1e6:.0f} us of the device",
        "returned while the step before ran": f"{share:.0%} of {len(host_s)} launches",
        "host waits": f"{sum(wait_s) / whole.wall_s:.0%} of the time",
        "speed": f"{whole.tokens_per_s:.0f} tokens/s",
    }
    if not IS_REHEARSAL:
        assert is_ahead, "the engine does not launch steps ahead"
        assert share > 0.5, found
    return found


@takes(30, worth=8)
def step_prompts_beside_decodes_are_launched_in_pieces() -> dict[str, Any]:
    """The same text with graphs in pieces and eager, of prompts in chunks; how many launches a step of 32 decodes and a
    chunk takes in each way, and how long.
    """
    require_device()
    require("benchmarks", "transformers", *sized(("triton",), ()))
    from support.generations import generate, loaded_engine, random_prompts
    from support.tiny_checkpoints import write_checkpoint

    ways = {"in pieces": {}, "eager": {"enforce_eager": True}}
    texts: dict[str, Any] = {}
    with TemporaryDirectory() as place:
        directory = write_checkpoint(Path(place), "qwen3")
        for way, options in ways.items():
            with loaded_engine(
                directory, device=DEVICE, max_num_batched_tokens=24, max_num_seqs=4, **options
            ) as engine:
                texts[way] = [tokens for tokens, _ in generate(engine, random_prompts(6, longest=40, seed=3), 12)]
    assert texts["in pieces"] == texts["eager"], texts
    measured, found, counts = benchmark(), {}, {}
    for way, options in ways.items():
        with measured.opened("Qwen3-0.6B", **options) as engine:
            plan = _mixed_plan(engine.runner.block_size)
            took = seconds(lambda: engine.runner.launch(plan).result())  # noqa: B023 - run at once
            counts[way] = _num_launches(lambda: engine.runner.launch(plan).result())  # noqa: B023
        found[way] = f"{counts[way]} launches, {took * 1e6:.0f} us a step"
    if not IS_REHEARSAL:
        assert 0 < counts["in pieces"] < 0.7 * counts["eager"], found
    return found


def _mixed_plan(block_size: int) -> Any:
    """The same keys and values are written each time that it is launched."""
    from array import array

    from modelserver_backends.llm.plan import Chunk, StepPlan
    from modelserver_backends.llm.sampling_params import SamplingParams
    from modelserver_backends.llm.sequence import Sequence

    num_decodes, length, num_queries = sized((32, 200, 96), (2, 9, 5))
    num_blocks = -(-length // block_size)
    chunks = []
    for number in range(num_decodes + 1):
        blocks = array("q", range(1 + number * num_blocks, 1 + (number + 1) * num_blocks))
        tokens = [10 + (number + place) % 1000 for place in range(length)]
        sequence = Sequence(number, tokens, length, SamplingParams(temperature=0.0), slot=number, block_ids=blocks)
        count = 1 if number < num_decodes else num_queries
        chunks.append(Chunk(sequence, length - count, count, 1))
    return StepPlan(tuple(chunks))


def _num_launches(run: Callable[[], object]) -> int:
    """Of kernels and graphs, as the driver is called. None in a rehearsal."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *sized((ProfilerActivity.CUDA,), ())]
    with profile(activities=activities) as profiled:
        run()
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
    return sum(each.count for each in profiled.key_averages() if each.key.startswith(names))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def benchmark() -> Any:
    """The benchmark of the engine on a GPU; in a rehearsal its device and its sizes are small."""
    from benchmarks.llm import gpu as measured

    if IS_REHEARSAL:
        from benchmarks.llm import shapes
        from benchmarks.llm.workload import Workload

        measured.DEVICE = DEVICE
        measured.WORKLOAD = Workload(num_requests=3, shortest=5, longest=12, batch=4)
        measured.KERNEL_SHAPES = ((2, 40, (4, 2, 16)),)
        measured.SINGLE_TOKENS = 4
        small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 2048}
        for name in measured.MODELS:
            shapes.SHAPES[name] = {**shapes.SHAPES[name], **small}
    return measured


@takes(20, worth=8)
def step_the_decode_kernel_reaches_the_bandwidth() -> dict[str, Any]:
    require_device()
    require("triton", "benchmarks")
    measured = benchmark()
    return {"decode kernel": list(measured.decode_kernel(bytes_per_second()))}


@takes(75, worth=60)
def step_the_engine_on_the_shapes_of_qwen3() -> dict[str, Any]:
    """nano-vllm's workload, beside the least time that the bandwidth allows."""
    return _workload("Qwen3-0.6B")


@takes(90, worth=50)
def step_the_engine_on_the_shapes_of_llama_8b() -> dict[str, Any]:
    return _workload("Llama-3.1-8B")


def _workload(name: str) -> dict[str, Any]:
    require_device()
    require("benchmarks", *sized(("triton",), ()))
    bandwidth = bytes_per_second()
    lines: list[str] = []
    with graphs_in_rehearsal():
        for line in benchmark().measure(name, bandwidth):
            lines.append(line)
            so_far({"engine": lines})
    return {"engine": lines}


@takes(60, worth=8)
def step_few_rows_by_weights_in_few_bits_reach_the_bandwidth() -> dict[str, Any]:
    """Beside each time, how much of a copy's bandwidth the reading of the weights is, and bfloat16's time by cuBLAS."""
    require_device()
    require("triton")
    import torch
    from modelserver_backends.llm.models.device_linear import DeviceLinear

    bandwidth = bytes_per_second()
    found: dict[str, Any] = {"copy": f"{bandwidth / 1e12:.2f} TB/s"}
    outputs, inputs = SHAPE
    dense = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16)
    rows = {
        count: torch.randn(count, inputs, device=DEVICE, dtype=torch.bfloat16) for count in sized((1, 16, 64), (1, 16))
    }
    plain = {count: seconds(lambda: torch.nn.functional.linear(x, dense)) for count, x in rows.items()}  # noqa: B023
    for form in FORMS:
        linear = DeviceLinear(packed(form, outputs, inputs), None)
        for count, x in rows.items():
            took = seconds(lambda: linear(x, None))  # noqa: B023 - run at once
            share = linear.num_bytes / took / bandwidth
            found[f"{form}, {count} rows"] = (
                f"{took * 1e6:.0f} us, {share:.0%} of a copy, {plain[count] / took:.2f}x of bfloat16"
            )
            so_far(found)
    found |= _tinygemm(rows, bandwidth)
    return found


def _tinygemm(rows: dict[int, Any], bandwidth: float) -> dict[str, str]:
    """torch's own product by 4 bits, whose scales are bfloat16."""
    import torch

    outputs, inputs = SHAPE
    codes = torch.randint(0, 255, (outputs, inputs // 2), device=DEVICE, dtype=torch.uint8)
    try:
        weights = torch._convert_weight_to_int4pack(codes, 8)
        scales = torch.rand(inputs // 128, outputs, 2, device=DEVICE, dtype=torch.bfloat16)
        return {
            f"tinygemm, {count} rows": f"{took * 1e6:.0f} us, {codes.nbytes / took / bandwidth:.0%} of a copy"
            for count, x in rows.items()
            for took in [seconds(lambda: torch._weight_int4pack_mm(x, weights, 128, scales))]  # noqa: B023
        }
    except RuntimeError as error:
        return {"tinygemm": f"not here: {error}"[:200]}


@takes(30, worth=5)
def step_many_rows_by_weights_in_few_bits() -> dict[str, Any]:
    """By a dequantized copy, and in 8 bits; how many operations per second that is."""
    require_device()
    require("triton")
    import torch
    from modelserver_backends.llm.models.device_linear import DeviceLinear

    outputs, inputs = SHAPE
    rows = torch.randn(sized(2048, 80), inputs, device=DEVICE, dtype=torch.bfloat16)
    dense = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16)
    operations = 2 * rows.shape[0] * outputs * inputs
    plain = seconds(lambda: torch.nn.functional.linear(rows, dense), 5)
    found = {"bfloat16": f"{operations / plain / 1e12:.0f} TFLOP/s"}
    ways = (("w4", None), ("int8 of outputs", torch.int8), ("float8 of outputs", torch.float8_e4m3fn))
    for form, activations in ways:
        linear = DeviceLinear(packed(form, outputs, inputs), None, activations)
        took = seconds(lambda: linear(rows, None), 5)  # noqa: B023 - run at once
        found[f"{form}, rows in {activations}"] = f"{operations / took / 1e12:.0f} T/s, {plain / took:.2f}x of bfloat16"
    return found


@takes(30, worth=5)
def step_experts_in_one_product() -> dict[str, Any]:
    """The shapes of Qwen3-30B-A3B: 128 experts, of which each row has 8."""
    require_device()
    require("triton")
    import torch
    from modelserver_backends.llm.models.device_linear import DeviceExperts
    from modelserver_backends.llm.models.device_matrix import float_matrix

    experts, outputs, inputs = sized((128, 1536, 2048), (16, 128, 128))
    bandwidth = bytes_per_second()
    dense = torch.randn(experts * outputs, inputs, device=DEVICE, dtype=torch.bfloat16)
    found = {}
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    matrices = {"bfloat16": float_matrix(dense, processors), "w4": packed("w4", experts * outputs, inputs)}
    for name, matrix in matrices.items():
        grouped = DeviceExperts(matrix, None)
        for tokens in sized((1, 32, 256, 4096), (1, 4)):
            chosen = torch.stack([torch.randperm(experts)[:8] for _ in range(tokens)]).flatten()
            counts = chosen.bincount(minlength=experts).to(DEVICE)
            rows = torch.randn(tokens * 8, inputs, device=DEVICE, dtype=torch.bfloat16)
            took = seconds(lambda: grouped(rows, counts, None), 10)  # noqa: B023 - run at once
            read = grouped.num_bytes * int((counts > 0).sum()) / experts
            speed = 2 * rows.numel() * outputs / took / 1e12
            found[f"{name}, {tokens} tokens"] = (
                f"{took * 1e6:.0f} us, {read / took / bandwidth:.0%} of a copy, {speed:.0f} TFLOP/s"
            )
            so_far(found)
    return found


@takes(20, worth=4)
def step_adapters_beside_the_layer_that_they_add_to() -> dict[str, Any]:
    """Queries, keys and values of Llama 3.1 8B with eight adapters of rank 16: the kernels, the same by torch for each
    adapter, and the layer itself.
    """
    require_device()
    require("triton")
    import torch
    from modelserver_backends.llm.lora.step import RowTiles, tile_table
    from modelserver_backends.llm.lora.triton_lora import LayerSlots

    device, inputs, widths, num_adapters, rank = (
        torch.device(DEVICE, 0),
        *sized((4096, (4096, 1024, 1024)), (128, (128, 64, 64))),
        8,
        16,
    )
    common = {"dtype": torch.bfloat16, "device": device}
    slots = LayerSlots(widths, inputs, num_slots=num_adapters + 1, max_rank=rank, **common)
    weight = torch.randn(sum(widths), inputs, **common)
    placed = {
        (slot, part): slots.place(slot + 1, part, torch.randn(rank, inputs), torch.randn(width, rank))
        for slot in range(num_adapters)
        for part, width in enumerate(widths)
    }
    found = {}
    for num_rows in sized((8, 64, 2048), (8, 72)):
        each = num_rows // num_adapters
        bounds = list(range(0, num_rows + 1, each))
        tile_rows = 64 if num_rows > 64 else 16
        tiles = RowTiles(torch.from_numpy(tile_table(range(num_adapters), bounds, tile_rows)).to(device), tile_rows)
        rows = torch.randn(num_rows, inputs, **common)
        output = torch.zeros(num_rows, sum(widths), **common)

        def one_by_one(rows: Any = rows, output: Any = output, each: int = each) -> None:
            for (slot, part), (down, up) in placed.items():
                own, first = slice(slot * each, (slot + 1) * each), sum(widths[:part])
                output[own, first : first + widths[part]].addmm_(rows[own] @ down.t(), up.t())

        base = seconds(lambda: torch.nn.functional.linear(rows, weight))  # noqa: B023 - run at once
        added = seconds(lambda: slots.add(output, rows, tiles))  # noqa: B023
        by_torch = seconds(one_by_one)
        found[f"{num_rows} rows"] = (
            f"{added * 1e6:.0f} us, by torch {by_torch * 1e6:.0f} us, the layer itself {base * 1e6:.0f} us"
        )
    return found
