"""Compiles every kernel for GPUs that are not there, by the launchers' own calls; see test_triton_kernels.py."""

from __future__ import annotations

import sys

import torch
from modelserver_backends.llm import triton_draw
from modelserver_backends.llm.attention import triton_kernels, triton_latent
from modelserver_backends.llm.lora.step import RowTiles
from modelserver_backends.llm.lora.triton_lora import LayerSlots
from modelserver_backends.llm.models import triton_gate, triton_linear
from modelserver_backends.llm.quantization.device_packing import pack_for_device
from support.described_weights import FORMS, described_weight
from support.triton_device import TritonDevice

BFLOAT16 = torch.bfloat16


def attention() -> None:
    """Of Qwen3: a norm of queries and keys, groups of two heads; with keys and values as they come, and in 8 bits."""
    lens, slots = torch.tensor([30, 9]), torch.tensor([7, 8, 9])
    tables, tiles = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([0])
    rotation = (torch.ones(3, 1, 128, dtype=BFLOAT16), torch.ones(3, 1, 128, dtype=BFLOAT16))
    for coding in (BFLOAT16, torch.int8, torch.float8_e4m3fn):
        blocks = torch.zeros(3, 16, 2, 8, 128, dtype=coding)
        scales = None if coding is BFLOAT16 else torch.ones(3, 16, 2, 8)
        heads = torch.zeros(3, 32, 128, dtype=BFLOAT16)
        norm = (torch.ones(24, 128, dtype=BFLOAT16), 1e-6)
        queries = triton_kernels.rope_and_store(heads, blocks, slots, rotation, scales, norm)
        common = {"scale": 0.1, "scales": scales}
        for num_splits in (1, 4):
            triton_kernels.decode_attention(queries[:2], blocks, tables, lens, num_splits=num_splits, **common)
        triton_kernels.prefill_attention(
            queries,
            blocks,
            tables,
            lens,
            num_queries=torch.tensor([3, 0]),
            row_starts=tiles,
            tile_rows=tiles,
            tile_starts=tiles,
            tile_queries=64,
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
        num_programs.append(device.num_programs)
    # The number of splits to merge, padded to a power of two, is one of six.
    assert num_programs[-1] - num_programs[0] <= 2, num_programs


def latent_attention() -> None:
    """Of DeepSeek V3, on one of eight ranks."""
    blocks, queries = torch.zeros(3, 16, 1, 1, 576, dtype=BFLOAT16), torch.zeros(2, 16, 576, dtype=BFLOAT16)
    tables, lens, output = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([30, 9]), torch.zeros(2, 16 * 512)
    tiles = torch.tensor([0])
    common = {"width": 512, "scale": 0.1, "output": output.to(BFLOAT16)}
    triton_latent.decode(queries, blocks, tables, lens, num_splits=4, lanes=16, **common)
    triton_latent.prefill(
        queries,
        blocks,
        tables,
        lens,
        num_queries=torch.tensor([2, 0]),
        row_starts=tiles,
        tile_rows=tiles,
        tile_starts=tiles,
        lanes=64,
        **common,
    )


def adapters(device: TritonDevice) -> None:
    """Queries, keys and values of Llama 3.1 8B with adapters of ranks 16 and 256, in steps of few rows and of many."""
    for max_rank in (16, 256):
        slots = LayerSlots(
            (4096, 1024, 1024), 4096, num_slots=2, max_rank=max_rank, dtype=BFLOAT16, device=torch.device("cpu")
        )
        num_programs = []
        for num_rows, tile_rows in ((8, 16), (17, 16), (256, 64)):
            rows, output = (torch.zeros(num_rows, width, dtype=BFLOAT16) for width in (4096, 6144))
            slots.add(output, rows, RowTiles(torch.zeros(3, 3, dtype=torch.int32), tile_rows))
            num_programs.append(device.num_programs)
        assert num_programs[0] == num_programs[1], "the number of rows compiles nothing"


def others() -> None:
    logits = torch.zeros(2, 151_936)
    triton_draw.draw(logits, logits, torch.ones(6, 2, dtype=torch.float64))
    triton_gate.gate(torch.zeros(2, 6144, dtype=BFLOAT16))
    rows = torch.zeros(2, 1024, dtype=BFLOAT16)
    for form in FORMS:
        matrix = pack_for_device(described_weight(form, 64, 1024), num_processors=132)
        assert matrix is not None
        triton_linear.multiply(matrix, rows, None, None)
        triton_linear.expand(matrix, slice(0, 64), BFLOAT16)
    triton_linear.round_rows(rows)


if __name__ == "__main__":
    device = TritonDevice(int(sys.argv[1]))
    device.install()
    for compiled in (attention, latent_attention, others):
        compiled()
    adapters(device)
    other_steps(device)
    assert {launch.stream for launch in device.launches} == {device.stream}
    print(*sorted({launch.name for launch in device.launches}))
