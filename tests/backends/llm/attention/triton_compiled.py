"""Compiles every kernel for GPUs that are not there, by the launchers' own calls; see test_triton_kernels.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from modelserver_backends.llm import triton_draw
from modelserver_backends.llm.attention import triton_kernels, triton_latent
from modelserver_backends.llm.attention.triton_attention import prefill_lanes
from modelserver_backends.llm.lora.step import RowTiles
from modelserver_backends.llm.lora.triton_lora import LayerSlots
from modelserver_backends.llm.models import triton_gate, triton_linear
from modelserver_backends.llm.models.device_matrix import float_matrix
from modelserver_backends.llm.quantization.quantized_linear import pack_for_device
from support.described_weights import FORMS, described_weight
from support.triton_device import TritonDevice

BFLOAT16 = torch.bfloat16
NUM_PROCESSORS = 132
# Of a thread's values for which there is no register: they are in slow memory instead. All programs but a few of
# float32, which no checkpoint of a large model has, need less.
MOST_STACK_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Those of a family."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_norm: bool = False


QWEN3 = Heads(head_dim=128, num_heads=16, num_kv_heads=8, has_norm=True)
# Heads that need most: Gemma's are wide, and all of Falcon's 71 share one of keys.
LARGE = (
    Heads(head_dim=256, num_heads=8, num_kv_heads=4, window=512, softcap=50.0, has_norm=True),
    Heads(head_dim=192, num_heads=16, num_kv_heads=16),
    Heads(head_dim=64, num_heads=71, num_kv_heads=1),
    Heads(head_dim=64, num_heads=64, num_kv_heads=8, window=128, has_sinks=True),
)


def attention(
    heads: Heads, dtype: torch.dtype, coding: torch.dtype | None = None, splits: Sequence[int] = (4,)
) -> None:
    """`coding`: of keys and values that are kept in 8 bits."""
    lens, slots = torch.tensor([30, 9]), torch.tensor([7, 8, 9])
    tables, tiles = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([0])
    num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    blocks = torch.zeros(3, 16, 2, num_kv_heads, head_dim, dtype=coding or dtype)
    scales = None if coding is None else torch.ones(3, 16, 2, num_kv_heads)
    rotation = (torch.ones(3, 1, head_dim, dtype=dtype), torch.ones(3, 1, head_dim, dtype=dtype))
    norm = (torch.ones(num_heads + num_kv_heads, head_dim, dtype=dtype), 1e-6) if heads.has_norm else None
    joined = torch.zeros(3, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    queries = triton_kernels.rope_and_store(joined, blocks, slots, rotation, scales, norm)
    common = {
        "scale": 0.1,
        "scales": scales,
        "window": heads.window,
        "softcap": heads.softcap,
        "sinks": torch.zeros(num_heads) if heads.has_sinks else None,
    }
    for num_splits in splits:
        triton_kernels.decode_attention(queries[:2], blocks, tables, lens, num_splits=num_splits, **common)
    group = 1 << (num_heads // num_kv_heads - 1).bit_length()
    triton_kernels.prefill_attention(
        queries,
        blocks,
        tables,
        lens,
        num_queries=torch.tensor([3, 0]),
        row_starts=tiles,
        tile_rows=tiles,
        tile_starts=tiles,
        tile_queries=max(1, triton_kernels.rows_of_tile(head_dim, dtype) // group),
        **common,
    )


def other_steps(device: TritonDevice) -> None:
    """Other numbers of sequences and blocks, at other places: no kernel is compiled for them."""
    blocks, queries = torch.zeros(3, 16, 2, 8, 128, dtype=BFLOAT16), torch.zeros(8, 16, 128, dtype=BFLOAT16)
    lens = torch.ones(9, dtype=torch.int64)
    num_programs = []
    for width, num_splits, first in ((4, 4, 0), (1, 16, 1), (16, 3, 2), (5, 32, 1)):
        tables = torch.zeros(9, width, dtype=torch.int32)[first:]
        triton_kernels.decode_attention(queries[:2], blocks, tables, lens[first:], scale=0.1, num_splits=num_splits)
        num_programs.append(len(device.programs))
    # The number of splits to merge, padded to a power of two, is one of six.
    assert num_programs[-1] - num_programs[0] <= 2, num_programs


def latent_attention(shared_bytes: int, dtype: torch.dtype) -> None:
    """Of DeepSeek V3, on one of eight ranks."""
    blocks, queries = torch.zeros(3, 16, 1, 1, 576, dtype=dtype), torch.zeros(2, 16, 576, dtype=dtype)
    tables, lens, output = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([30, 9]), torch.zeros(2, 16 * 512)
    tiles = torch.tensor([0])
    common = {"width": 512, "scale": 0.1, "output": output.to(dtype)}
    triton_latent.decode(queries, blocks, tables, lens, num_splits=32, lanes=16, **common)
    triton_latent.prefill(
        queries,
        blocks,
        tables,
        lens,
        num_queries=torch.tensor([2, 0]),
        row_starts=tiles,
        tile_rows=tiles,
        tile_starts=tiles,
        lanes=prefill_lanes(dtype, shared_bytes),
        **common,
    )


def adapters(device: TritonDevice, max_ranks: Sequence[int]) -> None:
    """Queries, keys and values of Llama 3.1 8B with adapters, in steps of few rows and of many."""
    for max_rank in max_ranks:
        slots = LayerSlots(
            (4096, 1024, 1024), 4096, num_slots=2, max_rank=max_rank, dtype=BFLOAT16, device=torch.device("cpu")
        )
        num_programs = []
        for num_rows, tile_rows in ((8, 16), (17, 16), (256, 64)):
            rows, output = (torch.zeros(num_rows, width, dtype=BFLOAT16) for width in (4096, 6144))
            slots.add(output, rows, RowTiles(torch.zeros(3, 3, dtype=torch.int32), tile_rows))
            num_programs.append(len(device.programs))
        assert num_programs[0] == num_programs[1], "the number of rows compiles nothing"


def linear(forms: Sequence[str], num_rows: int) -> None:
    num_outputs, num_inputs = 4096, 1024
    for form in forms:
        matrix = pack_for_device(described_weight(form, num_outputs, num_inputs), num_processors=NUM_PROCESSORS)
        assert matrix is not None
        triton_linear.multiply(matrix, torch.zeros(num_rows, num_inputs, dtype=BFLOAT16), None, None)
        triton_linear.expand(matrix, slice(0, 64), BFLOAT16)


def experts(dtype: torch.dtype) -> None:
    """Eight, whose tiles are the largest."""
    matrix = float_matrix(torch.zeros(4096, 1024, dtype=dtype), NUM_PROCESSORS)
    for each in (64, 128):
        rows = torch.zeros(8 * each, 1024, dtype=dtype)
        triton_linear.multiply_grouped(matrix, rows, torch.zeros(8, dtype=torch.int64), None)


def others() -> None:
    logits = torch.zeros(2, 151_936)
    columns = torch.ones(6, 2, dtype=torch.float64)
    triton_draw.draw(logits, triton_draw.soften(logits.to(BFLOAT16), columns), columns)
    triton_gate.gate(torch.zeros(2, 6144, dtype=BFLOAT16))
    triton_linear.round_rows(torch.zeros(2, 28672, dtype=BFLOAT16))


def forms(device: TritonDevice) -> None:
    """All forms of weights, of keys and values, and of adapters."""
    for coding in (None, torch.int8, torch.float8_e4m3fn):
        attention(QWEN3, BFLOAT16, coding, splits=(1, 4))
    latent_attention(device.shared_bytes, BFLOAT16)
    adapters(device, (16, 256))
    linear(tuple(FORMS), 1)


def shapes(device: TritonDevice) -> None:
    """What needs most of a GPU."""
    for heads in (QWEN3, *LARGE):
        attention(heads, BFLOAT16)
    attention(QWEN3, BFLOAT16, torch.int8)
    latent_attention(device.shared_bytes, BFLOAT16)
    adapters(device, (64,))
    linear(("k-quant", "e2m1 of 16"), 64)
    experts(BFLOAT16)


def main(capability: int, what: str) -> None:
    device = TritonDevice(capability)
    device.install()
    (forms if what == "forms" else shapes)(device)
    others()
    other_steps(device)
    assert {launch.stream for launch in device.launches} == {device.stream}
    crowded = [(name, size) for name, size in device.programs if size > MOST_STACK_BYTES]
    assert not crowded, f"values of a thread are in slow memory, in bytes: {crowded}"
    if what == "shapes":
        for heads in (QWEN3, LARGE[0]):
            attention(heads, torch.float32)
        latent_attention(device.shared_bytes, torch.float32)
        experts(torch.float32)
    print(*sorted({launch.name for launch in device.launches}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
