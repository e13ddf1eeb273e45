"""What test_triton_kernels.py runs under TRITON_INTERPRET=1; on a machine with a GPU it runs there without that too."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from modelserver_backends.llm import draw as draw_module
from modelserver_backends.llm import triton_draw
from modelserver_backends.llm.attention import triton_kernels, triton_latent, twins
from modelserver_backends.llm.attention.chunked import ChunkedAttention
from modelserver_backends.llm.attention.kv_blocks import KvBlocks, KvGroup, KvLayout, encoded, write_pages
from modelserver_backends.llm.attention.paged import AttentionBatch, AttentionSpec, Rotation
from modelserver_backends.llm.attention.sdpa import SdpaAttention
from modelserver_backends.llm.attention.triton_attention import TritonAttention, TritonLatentAttention
from modelserver_backends.llm.block_tables import DeviceTables
from modelserver_backends.llm.captured_decode import CapturedDecode
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.embedding.head import load_head
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.lora import layers as lora_layers
from modelserver_backends.llm.lora.registry import Adapters
from modelserver_backends.llm.lora.step import EMBEDDING_SLOT, RowTiles, tile_table
from modelserver_backends.llm.lora.triton_lora import LayerSlots
from modelserver_backends.llm.lora.uses import AdapterUse
from modelserver_backends.llm.models import mlp, norm, packed_matrix, triton_gate
from modelserver_backends.llm.models.load import LoadedNetwork
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.quantization import quantized_linear
from modelserver_backends.llm.runner import Runner
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.step_context import StepContext
from safetensors.torch import save_file
from support.checkpoints import network_of
from support.tiny_checkpoints import write_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def filled_blocks(num_kv_heads: int, head_dim: int, block_size: int = 8, num_blocks: int = 24) -> torch.Tensor:
    return torch.randn(num_blocks, block_size, 2, num_kv_heads, head_dim, device=DEVICE)


def tables_of(lens: list[int], block_size: int = 8) -> torch.Tensor:
    width = max(1, max(-(-length // block_size) for length in lens))
    return torch.stack([torch.randperm(23)[:width] + 1 for _ in lens]).to(DEVICE)


def rope_and_store() -> None:
    for num_heads, num_kv_heads, head_dim, width in ((4, 2, 16, 16), (6, 2, 24, 24), (3, 1, 16, 12), (2, 2, 8, 0)):
        blocks = filled_blocks(num_kv_heads, head_dim)
        expected_blocks = blocks.clone()
        heads = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim, device=DEVICE)
        slots = torch.tensor([17, 3, -1, 100, 64], device=DEVICE)
        rotation = (torch.randn(5, 1, width, device=DEVICE), torch.randn(5, 1, width, device=DEVICE)) if width else None
        for weights in (None, (torch.randn(num_heads + num_kv_heads, head_dim, device=DEVICE), 1e-6)):
            expected = twins.rope_and_store(heads, expected_blocks, slots, rotation, norm=weights)
            found = triton_kernels.rope_and_store(heads, blocks, slots, rotation, norm=weights)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(blocks, expected_blocks)


def gate() -> None:
    for shape in ((3, 40), (1, 2 * 1500), (0, 8)):
        for dtype in (torch.float32, torch.float16):
            both = torch.randn(shape, device=DEVICE).to(dtype) * 4
            gates, ups = both.chunk(2, dim=-1)
            torch.testing.assert_close(triton_gate.gate(both), torch.nn.functional.silu(gates) * ups)


def decode() -> None:
    shapes = ((4, 2, 16), (7, 1, 24), (2, 2, 64))
    for (num_heads, num_kv_heads, head_dim), num_splits, (window, softcap), has_sinks in itertools.product(
        shapes, (1, 3), ((None, None), (5, None), (5, 4.0)), (False, True)
    ):
        blocks, lens = filled_blocks(num_kv_heads, head_dim), [1, 70, 8, 0, 33]
        tables = tables_of(lens)
        queries = torch.randn(len(lens), num_heads, head_dim, device=DEVICE)
        sinks = torch.randn(num_heads, device=DEVICE) * 3 if has_sinks else None
        common = {"scale": head_dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}
        known = torch.tensor(lens, device=DEVICE)
        expected = twins.decode_attention(queries, blocks, tables, known, **common)
        found = triton_kernels.decode_attention(queries, blocks, tables, known, num_splits=num_splits, **common)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def prefill() -> None:
    for (num_heads, num_kv_heads, head_dim), (window, softcap), has_sinks in itertools.product(
        ((4, 2, 16), (6, 2, 24)), ((None, None), (5, None), (5, 4.0)), (False, True)
    ):
        blocks, counts, lens = filled_blocks(num_kv_heads, head_dim), [3, 20, 9], [3, 20, 70]
        tables = tables_of(lens)
        queries = torch.randn(sum(counts), num_heads, head_dim, device=DEVICE)
        sinks = torch.randn(num_heads, device=DEVICE) * 3 if has_sinks else None
        common = {"scale": head_dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}
        known, added = torch.tensor(lens, device=DEVICE), torch.tensor(counts, device=DEVICE)
        expected = twins.prefill_attention(queries, blocks, tables, known, num_queries=added, **common)
        tiles = [(row, start) for row, count in enumerate(counts) for start in range(0, count, 8)]
        found = triton_kernels.prefill_attention(
            queries,
            blocks,
            tables,
            known,
            num_queries=added,
            row_starts=torch.tensor([0, 3, 23], device=DEVICE),
            tile_rows=torch.tensor([row for row, _ in tiles], device=DEVICE),
            tile_starts=torch.tensor([start for _, start in tiles], device=DEVICE),
            tile_queries=8,
            **common,
        )
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def backend() -> None:
    """A step of prefills, an extension and decodes by both implementations of attention."""
    sinks = (torch.randn(6, device=DEVICE), None)
    spec = AttentionSpec(num_heads=6, windows=(None, 7), scale=0.25, sinks=sinks)
    shape = KvLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    pools = [KvBlocks(shape, num_blocks=24, block_size=8, device=torch.device(DEVICE)) for _ in range(2)]
    reference = SdpaAttention(pools[0], spec)
    for index, layer in enumerate(pools[0].layers):
        layer.normal_()
        pools[1].layers[index].copy_(reference.kept(index).view_as(layer))
    batch = mixed_batch(np.random.default_rng(0).permutation(np.arange(1, 25))[:24].reshape(4, 6) % 24)
    on_kernels = TritonAttention(pools[1], spec, num_processors=8)
    chunked = [ChunkedAttention(one, (None, 16), 8) for one in (reference, on_kernels)]
    angles = torch.randn(27, 1, 16, device=DEVICE)
    for layer, implementations in itertools.product((0, 1), ((reference, on_kernels), chunked)):
        heads = torch.randn(27, 10, 16, device=DEVICE)
        found = [
            one.rope_and_attend(layer, heads.clone(), Rotation(angles.cos(), angles.sin()), one.prepare(batch))
            for one in implementations
        ]
        torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(reference.kept(layer), pools[1].layers[layer].flatten(0, 1))


def codes() -> None:
    """Keys and values in 8 bits: kept as the twins keep them, bit for bit, and read as what they stand for."""
    spec = AttentionSpec(num_heads=6, windows=(None, 7), scale=0.25, sinks=(torch.randn(6, device=DEVICE), None))
    batch = mixed_batch(np.arange(1, 25).reshape(4, 6))
    cells = torch.arange(25 * 2 * 2 * 2 * 8, device=DEVICE)
    for dtype, source in itertools.product((torch.int8, torch.float8_e4m3fn), (torch.float32, torch.float16)):
        layout = KvLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=24, dtype=source).coded(dtype)
        pools = [KvBlocks(layout, num_blocks=25, block_size=8, device=torch.device(DEVICE)) for _ in range(2)]
        write_pages(pools[0].pages, cells, torch.randn(len(cells), 24, device=DEVICE), layout.group)
        reference, kernels = SdpaAttention(pools[0], spec), TritonAttention(pools[1], spec, num_processors=8)
        for layer in (0, 1):
            kept, scales = encoded(reference.kept(layer).unflatten(0, (25, 8)), dtype)
            pools[1].layers[layer].view(torch.uint8).copy_(kept.view(torch.uint8))
            pools[1].scales[layer].copy_(scales[..., 0])
            heads = torch.randn(27, 10, 24, device=DEVICE).to(source)
            heads[3:17] *= torch.logspace(-6, 0, 14, device=DEVICE)[:, None, None].to(source)
            heads[20] = 0
            # In the middle of two codes, whose scale is a power of two.
            heads[21, 6:] = torch.tensor([448.0, *(x * 2.0**-10 for x in range(23))]) * 2.0**-8
            heads[22, 6:] = torch.tensor([127.0, *(x / 2 for x in range(23))]) * 2.0**-6
            found = [
                one.rope_and_attend(layer, heads.clone(), None, one.prepare(batch)) for one in (reference, kernels)
            ]
            tolerance = 3e-5 if source == torch.float32 else 2e-2
            torch.testing.assert_close(found[1], found[0], atol=tolerance, rtol=tolerance)
            expected, expected_scales = pools[1].layers[layer].clone(), pools[1].scales[layer].clone()
            twins.rope_and_store(heads, expected, torch.from_numpy(batch.slots).to(DEVICE), None, expected_scales)
            assert torch.equal(pools[1].layers[layer].view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(pools[1].scales[layer], expected_scales)


def latent() -> None:
    """Keys that contain the values: the kernels and their twins, and a step by both implementations of attention."""
    for num_heads, turned, width, num_splits in ((4, 16, 32, 3), (20, 6, 24, 1), (3, 8, 40, 2)):
        blocks = torch.randn(24, 8, 1, 1, turned + width, device=DEVICE)
        common = {"scale": (turned + width) ** -0.5}
        lens = [1, 70, 8, 0, 33]
        tables, known = tables_of(lens), torch.tensor(lens, device=DEVICE)
        queries = torch.randn(len(lens), num_heads, turned + width, device=DEVICE)
        expected = twins.decode_attention(queries, blocks, tables, known, shared_width=width, **common)
        found = torch.empty_like(expected)
        triton_latent.decode(
            queries, blocks, tables, known, width=width, num_splits=num_splits, lanes=16, output=found, **common
        )
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        group = KvGroup(
            layers=(0,), num_heads=1, key_width=turned + width, value_width=0, shared_width=width, dtype=torch.float32
        )
        spec = AttentionSpec(num_heads=num_heads, windows=(None,), scale=common["scale"])
        pools = [KvBlocks(KvLayout((group,)), num_blocks=25, block_size=8, device=torch.device(DEVICE)) for _ in "ab"]
        reference, kernels = SdpaAttention(pools[0], spec), TritonLatentAttention(pools[1], spec, num_processors=8)
        pools[0].layers[0].normal_()
        pools[1].layers[0].copy_(pools[0].layers[0])
        batch = mixed_batch(np.arange(1, 25).reshape(4, 6))
        angles = torch.randn(27, 1, turned, device=DEVICE)
        heads = torch.randn(27, num_heads + 1, turned + width, device=DEVICE)
        results = [
            one.rope_and_attend(0, heads.clone(), Rotation(angles.cos(), angles.sin()), one.prepare(batch))
            for one in (reference, kernels)
        ]
        torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(pools[0].layers[0], pools[1].layers[0])
    with TemporaryDirectory() as name:
        directory = write_checkpoint(Path(name), "deepseek_v3", values={"first_k_dense_replace": 2})
        assert generated(directory, is_on_kernels=False) == generated(directory, is_on_kernels=True)


def mixed_batch(tables: np.ndarray) -> AttentionBatch:
    """Two decodes, a fresh prompt and a long chunk over blocks of 8."""
    counts, lens = np.array([1, 1, 5, 20]), np.array([30, 9, 5, 41])
    positions = [range(length - count, length) for count, length in zip(counts, lens, strict=True)]
    slots = np.array([tables[row, at // 8] * 8 + at % 8 for row, ats in enumerate(positions) for at in ats])
    return AttentionBatch(2, counts, lens, tables, slots)


def draw() -> None:
    """The tokens of the sorted reference, of rows of all kinds: with ties, without mass, with what overflowed."""
    fields: list[dict[str, float]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.05},
        {"top_k": 900, "top_p": 0.97},
        {"temperature": 0.0},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.01},
        {"top_p": 1e-6},
        {"top_k": 2**31 - 1, "temperature": 0.01},
    ]
    for size, spread in itertools.product((7, 1000, 5003), (0.01, 1.0, 6.0)):
        num_rows = 3 * len(fields)
        logits = torch.randn(num_rows, size, device=DEVICE) * spread
        logits[::2] = (logits[::2] * 2).round() / 2  # many equal ones
        logits[9, 3:] = float("-inf")
        logits[10], logits[11, 2], logits[12, 5] = float("-inf"), float("nan"), float("inf")
        params = [SamplingParams(**fields[row % len(fields)]) for row in range(num_rows)]
        noise = draw_module.uniforms([size] * num_rows, range(num_rows))
        noise[:2] = 0.0, 1.0 - 2.0**-53
        columns = torch.from_numpy(draw_module.draw_columns(params, noise)).to(DEVICE)
        weights = torch.softmax(logits / columns[0, :, None].float(), dim=-1)
        expected = draw_module.draw_by_sorting(logits, weights, columns)
        is_told = torch.arange(num_rows, device=DEVICE) != 11  # a NaN has no place among others
        assert torch.equal(triton_draw.draw(logits, weights, columns)[is_told], expected[is_told])
        is_drawn = columns[5] == 0
        found = triton_draw.soften(logits, columns)
        torch.testing.assert_close(found[is_drawn], weights[is_drawn], atol=1e-9, rtol=1e-5, equal_nan=True)
        half = triton_draw.soften(logits.half(), columns)
        assert torch.equal(half[0], triton_draw.soften(logits.half()[:1].float(), columns[:, :1])[0])


_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "slice",
        "split",
        "split_with_sizes",
        "select",
        "t",
        "transpose",
        "unsqueeze",
        "squeeze",
        "expand",
        "detach",
        "alias",
        "unbind",
        "permute",
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "_reshape_alias",
    ]
)


class Launches(TorchDispatchMode):
    """Counts what would be kernels on a GPU: operations of torch that are no views, and kernels of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._run = GridExecutor.__call__
        self._normalised = norm.RmsNorm._normalised

    def __enter__(self) -> Launches:
        def launch(kernel: GridExecutor, *args: object, **kwargs: object) -> None:
            self.names.append(kernel.fn.__name__)
            with _disable_current_modes():
                self._run(kernel, *args, **kwargs)

        def normalised(own: norm.RmsNorm, values: torch.Tensor) -> torch.Tensor:
            self.names.append("rms_norm")  # one kernel there, some steps on a CPU
            with _disable_current_modes():
                return self._normalised(own, values)

        GridExecutor.__call__, norm.RmsNorm._normalised = launch, normalised
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        GridExecutor.__call__, norm.RmsNorm._normalised = self._run, self._normalised
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        is_alias = isinstance(result, torch.Tensor) and not func._schema.is_mutable
        given = [leaf.untyped_storage().data_ptr() for leaf in args if isinstance(leaf, torch.Tensor)]
        if name not in _VIEWS and not (is_alias and result.untyped_storage().data_ptr() in given):
            self.names.append(name)
        return result


# Of a layer, in a step of decodes and in one with prompts as well; docs/llm.md has the same table.
LAYERS: dict[str, tuple[dict[str, Any], int, int]] = {
    "qwen3": ({}, 9, 10),
    "llama": ({}, 9, 10),
    "qwen3_moe": ({}, 27, 28),
    "deepseek_v3": ({"first_k_dense_replace": 4}, 23, 24),
}


def launches() -> None:
    """Of a layer of each kind of network, by what a layer more launches."""
    for module in (mlp, quantized_linear, packed_matrix):
        module.device_processors = lambda _device: 4
    found = {}
    for family, (values, *_) in LAYERS.items():
        kinds = [network_launches(family, values, num_layers) for num_layers in (1, 2)]
        found[family] = tuple(len(two) - len(one) for one, two in zip(*kinds, strict=True))
        print(family, [Counter(two) - Counter(one) for one, two in zip(*kinds, strict=True)])  # what an error shows
    assert found == {family: tuple(counts) for family, (_, *counts) in LAYERS.items()}


def network_launches(family: str, values: dict[str, Any], num_layers: int) -> list[list[str]]:
    """Names of all kernels of a network, for decodes and for a step with prompts."""
    with TemporaryDirectory() as name:
        sizes = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers, **values}
        directory = write_checkpoint(Path(name), family, values=sizes)
        loaded = network_of(directory, EngineOptions(device=DEVICE, max_model_len=64, block_size=8, dtype="float32"))
    assert loaded.is_capturable
    blocks = KvBlocks(loaded.kv_layout, num_blocks=25, block_size=8, device=loaded.device)
    kind = TritonLatentAttention if loaded.kv_layout.group.shared_width else TritonAttention
    attention = kind(blocks, loaded.attention, num_processors=1)
    found = []
    tables = np.arange(1, 25).reshape(4, 6)
    for batch in (decode_batch(tables), mixed_batch(tables)):
        rows = torch.arange(len(batch.slots), device=DEVICE)
        context = StepContext(positions=rows, attention=attention, inputs=attention.prepare(batch))
        with Launches() as seen, torch.inference_mode():
            loaded.network(rows, context)
        found.append(seen.names)
    return found


def decode_batch(tables: np.ndarray) -> AttentionBatch:
    lens = np.array([30, 9, 5, 41])
    slots = np.array([tables[row, (length - 1) // 8] * 8 + (length - 1) % 8 for row, length in enumerate(lens)])
    return AttentionBatch(4, np.ones(4, dtype=np.int64), lens, tables, slots)


def captured() -> None:
    """A whole network on the kernels, its decodes replayed from static inputs, samples what it samples on SDPA."""
    with TemporaryDirectory() as name:
        directory = write_checkpoint(Path(name), "qwen3")
        assert generated(directory, is_on_kernels=False) == generated(directory, is_on_kernels=True)


def mixture() -> None:
    """The same of a mixture of experts, in floats and in 4 bits, whose weights are multiplied by kernels as well."""
    with TemporaryDirectory() as name:
        directory = write_checkpoint(Path(name), "qwen3_moe")
        for quantization in (None, "int4"):
            found = []
            for num_processors in (None, 4):
                for module in (quantized_linear, packed_matrix):
                    module.device_processors = lambda _device, found=num_processors: found
                is_on_kernels = num_processors is not None
                found.append(generated(directory, is_on_kernels=is_on_kernels, quantization=quantization, max_tokens=3))
            assert found[0] == found[1]


def adapters() -> None:
    """A layer of three parts with slots of unlike ranks, of which some are empty; runs longer than a tile, and rows
    that have none. Slots are filled anew, and a row gives the same bits in other company.
    """
    widths, num_inputs, dtypes = (300, 40, 7), 1100, (torch.float32, torch.float16)
    for dtype, max_rank in itertools.product(dtypes, (5, 80)):
        tolerance = 1e-3 if dtype is torch.float32 else 2e-2
        slots = LayerSlots(widths, num_inputs, num_slots=4, max_rank=max_rank, dtype=dtype, device=torch.device(DEVICE))
        kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for slot, part, rank in ((0, 0, 1), (1, 0, max_rank), (1, 2, 3), (3, 1, max_rank), (1, 0, 4), (0, 0, 0)):
            slots.clear(slot, part)
            kept.pop((slot, part), None)
            if rank:
                down, up = torch.randn(rank, num_inputs) / 32, torch.randn(widths[part], rank)
                kept[slot, part] = slots.place(slot, part, down.to(dtype), up.to(dtype))
                assert torch.equal(kept[slot, part][1].cpu(), up.to(dtype))
        for num_tile_rows, runs, bounds in ((16, (-1, 0, 2, EMBEDDING_SLOT), (0, 2, 40, 41, 45)), (64, (0,), (3, 90))):
            table = torch.from_numpy(tile_table(runs, bounds, num_tile_rows)).to(DEVICE)
            rows = torch.randn(bounds[-1], num_inputs + 3, device=DEVICE).to(dtype)[:, 3:]
            output = torch.randn(bounds[-1], sum(widths), device=DEVICE).to(dtype)
            expected = output.to(torch.float32, copy=True)
            for run, slot in enumerate(runs):
                places = slice(bounds[run], bounds[run + 1])
                for part, first in enumerate((0, 300, 340)):
                    if slot != -1 and (slot + 1 if slot >= 0 else 0, part) in kept:
                        down, up = kept[slot + 1 if slot >= 0 else 0, part]
                        narrow = (rows[places].float() @ down.float().T).to(dtype).float()
                        expected[places, first : first + widths[part]] += narrow @ up.float().T
            found = output.clone()
            slots.add(found, rows, RowTiles(table, num_tile_rows))
            torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
            alone = output[bounds[-2] :].clone()
            table = torch.from_numpy(tile_table(runs[-1:], (0, len(alone)), num_tile_rows)).to(DEVICE)
            slots.add(alone, rows[bounds[-2] :], RowTiles(table, num_tile_rows))
            assert torch.equal(alone, found[bounds[-2] :])


def adapted() -> None:
    """Two adapters and the base in one batch: graphs and kernels give what torch gives of each alone."""
    with TemporaryDirectory() as name:
        directory = write_checkpoint(Path(name) / "base", "qwen3")
        places = []
        for seed, modules in enumerate((("q_proj", "v_proj", "down_proj"), ("o_proj", "up_proj"))):
            place = Path(name) / f"a{seed}"
            place.mkdir()
            (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
            tensors = {}
            with open_checkpoint(directory) as checkpoint:
                for stored in checkpoint.names():
                    if stored.removesuffix(".weight").endswith(modules):
                        outputs, inputs = checkpoint.shape(stored)
                        module = f"base_model.model.model.{stored.removesuffix('.weight')}"
                        tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs) * 0.25
                        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4) * 0.25
            save_file(tensors, place / "adapter_model.safetensors")
            places.append((f"a{seed}", str(place)))
        uses = ["a1", None, "a0"]
        together = generated(directory, is_on_kernels=True, adapters=places, uses=uses)
        assert together == generated(directory, is_on_kernels=False, adapters=places, uses=uses)
        assert together != generated(directory, is_on_kernels=True)


def generated(
    directory: Path,
    *,
    is_on_kernels: bool,
    quantization: str | None = None,
    max_tokens: int = 5,
    adapters: Sequence[tuple[str, str]] = (),
    uses: Sequence[str | None] = (None, None, None),
) -> list[list[int]]:
    options = EngineOptions(
        device=DEVICE,
        max_model_len=64,
        max_num_seqs=4,
        block_size=8,
        dtype="float32",
        quantization=quantization,
        lora_modules=tuple(adapters),
    )
    lora_layers.device_processors = lambda _device: 4 if is_on_kernels else None
    loaded = network_of(directory, options)
    if loaded.adapted is not None:
        assert loaded.adapted.allocate() is is_on_kernels
    blocks = KvBlocks(loaded.kv_layout, num_blocks=25, block_size=8, device=loaded.device)
    kind = TritonLatentAttention if loaded.kv_layout.group.shared_width else TritonAttention
    attention = kind(blocks, loaded.attention, num_processors=4)
    for module in (draw_module, mlp):
        module.device_processors = lambda _device: 4 if is_on_kernels else None
    assert loaded.is_capturable or not is_on_kernels
    tables = DeviceTables(4, 8, loaded.device)
    runner = Runner(
        loaded,
        sampler=Sampler(),
        head=load_head(open_checkpoint(directory), options, default="last", device=loaded.device),
        blocks=blocks,
        attention=attention if is_on_kernels else SdpaAttention(blocks, loaded.attention),
        tables=tables if is_on_kernels else None,
        captured=make_captured(loaded, attention, tables) if is_on_kernels else None,
        is_asynchronous=is_on_kernels,
    )
    known = Adapters.of(runner.target, options) if adapters else None
    engine = Engine(options=options, runner=runner, tokenizer=None, adapters=known)
    requests = [
        GenerationRequest(
            prompt_token_ids=list(range(9, 9 + length)),
            params=SamplingParams(temperature=temperature, top_p=top_p, seed=1, max_tokens=max_tokens, ignore_eos=True),
            adapters=() if use is None else (AdapterUse(use),),
        )
        for (length, temperature, top_p), use in zip(((11, 0.0, 1.0), (3, 0.7, 1.0), (17, 1.0, 0.9)), uses, strict=True)
    ]
    for request in requests:
        engine.add(request)
    tokens: dict[GenerationRequest, list[int]] = {request: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request] += output.token_ids
    return list(tokens.values())


class Replayed:
    """Where there are no CUDA graphs: a replay computes again, into the same memory."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute
        self.output = compute()

    def replay(self) -> None:
        self.output.copy_(self._compute())


def make_captured(loaded: LoadedNetwork, attention: TritonAttention, tables: DeviceTables) -> CapturedDecode:
    return CapturedDecode(
        loaded.network,
        attention,
        device=loaded.device,
        max_num_seqs=4,
        tables=tables,
        num_adapters=0 if loaded.adapted is None else loaded.adapted.num_slots - 1,
        capture=Replayed,
    )


CASES = {
    "adapters": adapters,
    "adapted": adapted,
    "captured": captured,
    "mixture": mixture,
    "rope_and_store": rope_and_store,
    "decode": decode,
    "prefill": prefill,
    "backend": backend,
    "codes": codes,
    "latent": latent,
    "draw": draw,
    "gate": gate,
    "launches": launches,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    CASES[sys.argv[1]]()
